"""Replay of what was really generated: a prompt that repeats a reply as text is made of the very tokens that were
generated, so that the cache has it to the last token.

A text has many tokenisations, and a model does not always write the one that the tokenizer makes of its reply. The
store remembers, by a prompt's text, which of its stretches were generated and what was generated after it. Here that is
verified byte for byte before it is used: what does not spell exactly the text that stands there is cut off, or
forgotten. A template that strips thoughts or writes tool calls in its own way ends the stretch where it does so.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..frames.store import Remember, Stretch
from ..frames.worker import Generate
from ..lora import Space
from ..prefix.blocks import from_le, text_digest, text_tail, to_le
from .store import Store

_PATIENCE = 0.25  # seconds that the store may take to say what was generated
_MOST_BYTES = 8 << 20  # of a text that is looked up

logger = logging.getLogger(__name__)


class Vocabulary(Protocol):
    """What is needed of a model."""

    def tokenize(self, text: str, *, add_bos: bool = True, parse_special: bool = True) -> list[int]: ...

    def piece(self, token: int, special: bool = False) -> bytes: ...

    def pieces(self, tokens: Iterable[int]) -> list[bytes]: ...


@dataclass(frozen=True)
class Worded:
    """A prompt as text, and which of it was generated. `replayed`: tokens of `stretches`."""

    data: bytes
    tokens: list[int]
    stretches: tuple[Stretch, ...] = field(default=())

    @property
    def replayed(self) -> int:
        return sum(len(stretch.tokens) // 4 for stretch in self.stretches)


def is_repeating(generate: Generate) -> bool:
    """May the prompt repeat what was generated here?"""
    if generate.messages is None:
        return isinstance(generate.prompt, str) and generate.suffix is None
    return any(message.role == "assistant" for message in generate.messages)


class Replay:
    """Makes tokens of prompts' texts. Any thread; never an error of the request because of the memo.

    `counters` gets: replay_tokens, replay_refused (rows that did not spell the text).
    """

    def __init__(
        self,
        model: Vocabulary,
        store: Store,
        namespace: Callable[[Space], bytes | None],
        opened: Callable[[Space], bytes | None],
        counters: defaultdict[str, float],
    ) -> None:
        """`namespace`: the key for a request's salt and adapters, None while it is not known. `opened`: the same, never
        waiting."""
        self._model, self._store, self._counters = model, store, counters
        self._namespace, self._opened = namespace, opened

    def words(self, text: str, space: Space, *, repeating: bool) -> Worded:
        """The tokens of a prompt. `repeating`: it may repeat what was generated."""
        data = text.encode("utf-8", "surrogatepass")
        found = self._recall(data, space) if repeating and len(data) <= _MOST_BYTES else None
        if found is not None:
            self._counters["replay_tokens"] += found.replayed
            return found
        return Worded(data, self._model.tokenize(text))

    def beginning(self, whole: Worded, text: str) -> list[int]:
        """The tokens of a text that a prompt begins with, made in the same way."""
        data = text.encode("utf-8", "surrogatepass")
        stretches = [stretch for stretch in whole.stretches if stretch.end <= len(data)]
        tokens = self._compose(data, stretches) if stretches and whole.data.startswith(data) else None
        return tokens if tokens is not None else self._model.tokenize(text)

    def remember(self, prompt: Worded, space: Space, generated: Sequence[int]) -> None:
        """A reply has ended. Does not wait."""
        namespace = self._opened(space)
        if namespace is None or not generated or len(prompt.data) > _MOST_BYTES:
            return
        digest, tail = text_digest(namespace, prompt.data), text_tail(prompt.data)
        self._store.remember(
            Remember(namespace, digest, len(prompt.data), tail, list(prompt.stretches), to_le(generated))
        )

    # -------------------------------------------------------------------------------------------------- internals

    def _recall(self, data: bytes, space: Space) -> Worded | None:
        """None where nothing is remembered that is of use."""
        namespace = self._namespace(space)
        if namespace is None or not self._store.connected:
            return None
        row = self._store.recall(namespace, data, _PATIENCE)
        if row is None or not 0 < row.length <= len(data):
            return None
        tokens = None
        stretches = list(row.stretches)
        if self._spell(stretches, data, row.length):
            best = max((self._matching(from_le(reply), data, row.length) for reply in row.replies), key=len, default=[])
            if best:
                end = row.length + sum(map(len, self._model.pieces(best)))
                stretches.append(Stretch(row.length, end, to_le(best)))
            if not stretches:
                return None
            tokens = self._compose(data, stretches)
        if tokens is None:
            logger.info("what was generated for a prompt does not spell its text: it is forgotten")
            self._counters["replay_refused"] += 1
            digest = text_digest(namespace, data[: row.length])
            self._store.remember(Remember(namespace, digest, row.length, text_tail(data[: row.length]), [], b""))
            return None
        return Worded(data, tokens, tuple(stretches))

    def _spell(self, stretches: Sequence[Stretch], data: bytes, length: int) -> bool:
        """Do stretches lie in order in the first `length` bytes, and do their tokens make exactly what stands there?"""
        at = 0
        for stretch in stretches:
            if not at <= stretch.start < stretch.end <= length or len(stretch.tokens) % 4:
                return False
            spelt = b"".join(self._model.pieces(from_le(stretch.tokens)))
            if spelt != data[stretch.start : stretch.end]:
                return False
            at = stretch.end
        return True

    def _matching(self, reply: list[int], data: bytes, start: int) -> list[int]:
        """The first tokens of a reply that stand in `data` from `start` on, to where no word is cut."""
        ends = [start]
        for token in reply:
            piece = self._model.piece(token, True)
            if not data.startswith(piece, ends[-1]):
                break
            ends.append(ends[-1] + len(piece))
        count = len(ends) - 1
        whole = count == len(reply)
        while count and (_is_continued(data, ends[count]) if whole else _is_within_word(data, ends[count])):
            count, whole = count - 1, False
        return reply[:count] if ends[count] > start else []

    def _compose(self, data: bytes, stretches: Sequence[Stretch]) -> list[int] | None:
        """Stretches, and what stands between them as the tokenizer makes it; None if it would add something to it."""
        tokens: list[int] = []
        at = 0
        for stretch in stretches:
            between = self._between(data[at : stretch.start], first=at == 0)
            if between is None:
                return None
            tokens += between
            tokens += from_le(stretch.tokens)
            at = stretch.end
        rest = self._between(data[at:], first=at == 0)
        return tokens + rest if rest is not None else None

    def _between(self, data: bytes, *, first: bool) -> list[int] | None:
        if not data and not first:
            return []
        try:
            text = data.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:  # a stretch ends within a character
            return None
        tokens = self._model.tokenize(text, add_bos=first)
        # Some tokenizers put a blank before a text, which does not belong into the middle of one.
        if not first and (not tokens or not data.startswith(self._model.piece(tokens[0], True))):
            return None
        return tokens


def _is_continued(data: bytes, at: int) -> bool:
    """Does the character before `at` go on there?"""
    return at < len(data) and data[at] & 0xC0 == 0x80


def _is_within_word(data: bytes, at: int) -> bool:
    """Would the text be cut within a word, so that what follows had tokens that nobody would write?"""
    return 0 < at < len(data) and _is_wordy(data[at - 1]) and _is_wordy(data[at])


def _is_wordy(byte: int) -> bool:
    return byte >= 0x80 or chr(byte).isalnum() or byte == 0x5F
