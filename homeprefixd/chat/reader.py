"""Reads a text while it is still being written: the ground on which `reply.py` parses a reply.

Every method that has to look ahead is a generator: it yields where it needs more of the text, and returns what it
found. Nothing depends on how the text is cut into pieces. Knows nothing of models or of calls.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence

from .values import finite_scalar

Wait = Generator[None, None, None]
Answer = Generator[None, None, bool]
Sink = Callable[[str], None]

_NOT_SPACE = re.compile(r"\S")
_STRUCTURE = re.compile(r'["{}\[\]]')
_STRING_END = re.compile(r'["\\]')
_SCALAR_END = re.compile(r"[\s,\]}<;`]")
_WORD = re.compile(r"[^\s,:]+")
_HALF = re.compile(r"\\u[dD](?:([89abAB])|[c-fC-F])[0-9a-fA-F]{2}")
_ESCAPE = 6  # characters
_LONGEST_WORD = 512
"""Characters outside of texts in JSON that are waited for, to see whether they are a number."""


class Reader:
    """A text that grows at its end and is taken from its beginning."""

    def __init__(self, drops_half_markers: Callable[[], bool] = lambda: False) -> None:
        """`drops_half_markers`: whether a beginning of a marker that is waited for, with which the text ends, is what
        `max_tokens` has left of it, and no text.
        """
        self.drops_half_markers = drops_half_markers
        self._text = ""  # what was written, of which the first `_at` characters are taken
        self._at = 0
        self._places: dict[str, int] = {}  # of markers, where they were seen last; the text's length: nowhere
        self.final = False  # nothing more will be written
        self.taken = 0  # characters in all
        self._record: list[str] | None = None

    # ------------------------------------------------------------------------------------------ taking

    def add(self, text: str) -> None:
        """More was written."""
        self._text, self._at = self._text[self._at :] + text, 0
        self._places.clear()

    def put_back(self, text: str) -> None:
        """It was just taken, and is to be read again. Not while it is remembered what is taken."""
        self._at -= len(text)
        self.taken -= len(text)

    def take(self, count: int) -> str:
        """The next `count` characters, which are there."""
        text = self._text[self._at : self._at + count]
        self._at += count
        self.taken += count
        if self._record is not None:
            self._record.append(text)
        return text

    @property
    def _left(self) -> int:
        """Characters that are there and not taken."""
        return len(self._text) - self._at

    def _rest(self, sink: Sink) -> None:
        """Pass on all that is there."""
        if self._left:
            sink(self.take(self._left))

    def record(self) -> None:
        """Remember what is taken from now on."""
        self._record = []

    def recorded(self) -> str:
        """What was taken since `record`; no longer remembered."""
        text, self._record = "".join(self._record or ()), None
        return text

    # ------------------------------------------------------------------------------------------ looking ahead

    def space(self) -> Generator[None, None, str]:
        """Take white space, as far as it goes."""
        taken: list[str] = []
        while True:
            found = _NOT_SPACE.search(self._text, self._at)
            taken.append(self.take(self._left if found is None else found.start() - self._at))
            if found is not None or self.final:
                return "".join(taken)
            yield

    def peek(self) -> Generator[None, None, str]:
        """The next character, which is not taken; "" at the end."""
        while not self._left and not self.final:
            yield
        return self._text[self._at : self._at + 1]

    def starts(self, options: Sequence[str]) -> Generator[None, None, str]:
        """That one of `options` with which the text goes on, not taken; "" if it is none of them."""
        longest = max(map(len, options))
        while True:
            for option in options:
                if self._text.startswith(option, self._at):
                    return option
            begin = self._text[self._at : self._at + longest]
            if self.final or not any(option.startswith(begin) for option in options):
                return ""
            yield

    def until(self, markers: Sequence[str], sink: Sink) -> Generator[None, None, str]:
        """Pass on what stands before the first of `markers`, take and return that; "" at the end of the text."""
        while True:
            at, marker = min((self._place(marker), marker) for marker in markers) if markers else (len(self._text), "")
            if at < len(self._text):
                if at > self._at:
                    sink(self.take(at - self._at))
                self.take(len(marker))
                return marker
            keep = self._beginning_of(markers) if not self.final or self.drops_half_markers() else 0
            if self._left > keep:
                sink(self.take(self._left - keep))
            if self.final:
                self.take(self._left)
                return ""
            yield

    def _place(self, marker: str) -> int:
        """Of its next occurrence; the text's length if there is none. A text that is there is read once for it."""
        place = self._places.get(marker, -1)
        if place < self._at:
            found = self._text.find(marker, self._at)
            place = self._places[marker] = len(self._text) if found < 0 else found
        return place

    def _beginning_of(self, markers: Sequence[str]) -> int:
        """How many characters at the end may begin one of `markers`."""
        longest = 0
        for marker in markers:
            for size in range(min(len(marker) - 1, self._left), longest, -1):
                if marker.startswith(self._text[-size:]):
                    longest = size
                    break
        return longest

    # ------------------------------------------------------------------------------------------ JSON

    def json_value(self, sink: Sink) -> Answer:
        """Pass on one JSON value as it is written. False: none begins here (nothing is taken), or the text ended."""
        first = yield from self.peek()
        if first == '"':
            return (yield from self._string(sink))
        if first and first in "{[":
            return (yield from self._nested(sink))
        if first and (first in "-tfn" or first.isdigit()):
            return (yield from self._scalar(sink))
        return False

    def _string(self, sink: Sink) -> Answer:
        sink(self.take(1))
        while True:
            found = _STRING_END.search(self._text, self._at)
            if found is None:
                self._rest(sink)
            elif found[0] == '"':
                sink(self.take(found.end() - self._at))
                return True
            else:
                if found.start() > self._at:
                    sink(self.take(found.start() - self._at))
                escape = self._escape()
                if escape is not None:
                    count, written = escape
                    self.take(count)
                    sink(written)
                    continue
            if self.final:
                self._rest(sink)
                return False
            yield

    def _escape(self) -> tuple[int, str] | None:
        """The length of the escape that begins here, and what is passed on for it, which is never half a character.
        None: not all of it is there."""
        begin = self._text[self._at : self._at + 2 * _ESCAPE]
        if len(begin) < 2 or (begin[1] == "u" and len(begin) < _ESCAPE and not self.final):
            return None
        half = _HALF.match(begin)
        if half is None:
            return 2, begin[:2]
        if half[1] is not None:  # the first half of a character
            if (
                begin[_ESCAPE:].startswith("\\u"[: len(begin) - _ESCAPE])
                and len(begin) < 2 * _ESCAPE
                and not self.final
            ):
                return None
            other = _HALF.match(begin, _ESCAPE)
            if other is not None and other[1] is None:
                return 2 * _ESCAPE, begin
        return _ESCAPE, "\\ufffd"

    def _nested(self, sink: Sink) -> Answer:
        """An object or a list. Numbers that JSON does not have, which some models write, are passed on as null."""
        depth = 0
        while True:
            found = _STRUCTURE.search(self._text, self._at)
            if found is None:
                keep = 0 if self.final else self._unfinished_word()
                if self._left > keep:
                    sink(_finite(self.take(self._left - keep)))
                if self.final:
                    return False
                yield
                continue
            if found.start() > self._at:
                sink(_finite(self.take(found.start() - self._at)))
            if found[0] == '"':
                if not (yield from self._string(sink)):
                    return False
                continue
            sink(self.take(1))
            depth += 1 if found[0] in "{[" else -1
            if depth <= 0:
                return True

    def _unfinished_word(self) -> int:
        """How many characters at the end may be the beginning of a number."""
        end = self._text[max(self._at, len(self._text) - _LONGEST_WORD) :]
        words = list(_WORD.finditer(end))
        return len(words[-1][0]) if words and words[-1].end() == len(end) and len(words[-1][0]) < _LONGEST_WORD else 0

    def _scalar(self, sink: Sink) -> Answer:
        while True:
            found = _SCALAR_END.search(self._text, self._at)
            if found is not None or self.final:
                sink(self.take(self._left if found is None else found.start() - self._at))
                return True
            yield


def _finite(text: str) -> str:
    """What stands between texts and brackets in JSON, with numbers that are none as null."""
    return _WORD.sub(lambda word: finite_scalar(word[0]), text)
