"""Replies that must have a form: grammars compiled by llguidance, and their masks on the logits.

A grammar from a client is first compiled in a throw-away process (`probing.py`). Compiling belongs to one thread that
is not the engine's; a `Mask` belongs to the engine's thread. A token is checked before it is taken.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from ..chat.forcing import text as literal
from ..errors import RequestError
from .bindings import Model
from .compiling import Probe
from .context import Context
from .limits import parser_limits
from .sampling import Sampler

MAX_GRAMMAR = 1 << 19
"""Characters of a grammar in llguidance's form, schemas included."""

_OPTIONS = '%llguidance {"no_forcing": true}\n'
"""Nothing is done with text that can only go on in one way, and finding it can take a second for each token."""

_KEPT = 64  # compiled grammars: apps send the same few again and again
_EXCERPT = re.compile(r"\n *\d+ \|")  # of the grammar, which the client did not write
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[([^\]]*)\]")


class Mask:
    """Where one reply stands in its grammar."""

    def __init__(self, matcher: LLMatcher, eog: npt.NDArray[np.int64], eos: int, n_vocab: int) -> None:
        """`eog`: ids of all tokens that end a reply, of which llguidance knows `eos`."""
        self._matcher, self._eog, self._eos = matcher, eog, eos
        self._n_vocab = n_vocab
        self.ended = False

    def copy(self) -> Mask:
        """One that goes its own way from here."""
        return Mask(self._matcher.deep_copy(), self._eog, self._eos, self._n_vocab)

    def sample(self, sampler: Sampler, context: Context, index: int, generated: int) -> int:
        """As `Sampler.sample`, among the tokens that may come next. Raises RequestError: there are none."""
        allowed = self._allowed()
        logits = context.logits_view(index)
        np.putmask(logits, ~allowed, -np.inf)
        token = sampler.sample(context, index, generated)
        if not allowed[token]:  # a bias, a penalty or rounding left nothing of what is allowed
            token = int(np.argmax(logits))
            if not allowed[token]:
                token = int(np.flatnonzero(allowed)[0])
        if token in self._eog:
            self.ended = True
        elif not self._matcher.consume_token(token):
            raise self._failure()
        else:
            self.ended = self._matcher.is_stopped()
        return token

    def _allowed(self) -> npt.NDArray[np.bool_]:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise self._failure()
        allowed = np.unpackbits(bits, count=min(self._n_vocab, 8 * len(bits)), bitorder="little").view(np.bool_)
        if allowed[self._eos]:
            allowed[self._eog] = True
        if not allowed.any():
            raise self._failure()
        return allowed

    def _failure(self) -> RequestError:
        return RequestError(
            "The reply cannot go on: its grammar or schema became too complex here, or allows nothing.",
            code="grammar_failed",
        )


class Constraints:
    """Grammars of one model."""

    def __init__(self, model: Model, probe: Probe) -> None:
        self._model, self._probe = model, probe
        self._kept: OrderedDict[str, Mask] = OrderedDict()
        self._eog = np.array(sorted(model.eog), np.int64)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """Takes some tenths of a second; only models that are asked for a form pay it."""
        return make_tokenizer(self._model)

    def mark(self, marker: str) -> str:
        """The expression for a text that may be a control token."""
        token = self.control_token(marker)
        return literal(marker) if token is None else f"<[{token}]>"

    def control_token(self, marker: str) -> int | None:
        """The control token that a text is, if it is one."""
        token = self.token(marker)
        return token if token is not None and self._model.is_control(token) else None

    def token(self, text: str) -> int | None:
        """The one token that a text is, if it is one."""
        tokens = self._model.tokenize(text, add_bos=False, parse_special=True)
        return tokens[0] if len(tokens) == 1 else None

    def compile(self, grammar: str, param: str) -> Mask:
        """A mask at the grammar's start. `param`: the field to blame. Raises RequestError: it cannot be used."""
        return self.compiled(grammar, param).copy()

    def compiled(self, grammar: str, param: str) -> Mask:
        """As `compile`, the one that is kept: it is there to be copied."""
        mask = self._kept.get(grammar)
        if mask is None:
            matcher = self._compile(grammar, param)
            mask = Mask(matcher, self._eog, self._tokenizer.eos_token, self._model.n_vocab)
            self._kept[grammar] = mask
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(grammar)
        return mask

    def check(self, grammar: str) -> None:
        """Raises RequestError if it cannot be used. Nothing is kept."""
        self._compile(grammar, "")

    def _compile(self, grammar: str, param: str) -> LLMatcher:
        grammar = _OPTIONS + grammar
        check_size(grammar, param)
        try:
            wrong = self._probe.check(grammar)
        except RequestError as error:
            error.param = param
            raise
        if wrong:
            raise _refusal(wrong, param)
        matcher = LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0, limits=parser_limits())
        if matcher.is_error():
            raise _refusal(matcher.get_error(), param)
        # The first mask is the most work, so it is made here; copies know what was found.
        if not any(matcher.compute_bitmask()) or matcher.is_error():
            raise _refusal(matcher.get_error(), param)
        return matcher


def check_size(text: str, param: str) -> None:
    """Raises RequestError for what is too large as it came, before it is looked at. `param`: the field to blame."""
    if len(text) > MAX_GRAMMAR:
        raise RequestError(
            f"The grammar or schema is too large: {len(text)} of {MAX_GRAMMAR} characters.",
            param=param,
            code="grammar_too_complex",
        )


def _refusal(reason: str, param: str) -> RequestError:
    what = "grammar" if param == "grammar" else "JSON schema"
    code = "bad_grammar" if what == "grammar" else "unsupported_schema"
    reason = _EXCERPT.split(reason)[0].rpartition("failed to compile JSON schema: ")[2]
    if reason.startswith("oneOf constraints"):
        reason = "of a `oneOf` several schemas may fit the same text, which cannot be forbidden: use `anyOf`"
    keys = _UNIMPLEMENTED.search(reason)
    if keys is not None:
        names = ", ".join(f"`{name}`" for name in re.findall(r'"([^"]+)"', keys[1]))
        reason = f"it uses {names}, which cannot be enforced while a reply is written: leave it out"
    reason = " ".join(reason.split())[:300].rstrip(".")
    if not reason or "<non-verbose" in reason:
        reason = "it allows no text at all"
    return RequestError(f"The {what} cannot be used: {reason}.", param=param, code=code)


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    def __init__(self, model: Model, eos: int) -> None:
        self._model = model
        self.eos_token_id = eos
        self.bos_token_id = model.bos if model.bos >= 0 else None
        self.special_token_ids = [token for token in range(model.n_vocab) if model.is_control(token)]
        special = frozenset(self.special_token_ids)
        self.tokens = [
            model.piece(token, special=True) or f"<{token}>".encode() if token in special else model.piece(token)
            for token in range(model.n_vocab)
        ]

    def __call__(self, text: Any) -> list[int]:
        data = text if isinstance(text, str) else bytes(text).decode(errors="surrogateescape")
        return self._model.tokenize(data, add_bos=False, parse_special=False)


def make_tokenizer(model: Model) -> LLTokenizer:
    """The model's vocabulary as llguidance takes it."""
    from llguidance import TokenizerWrapper

    eos = model.eos if model.eos >= 0 else min(model.eog)
    return LLTokenizer(TokenizerWrapper(_Vocabulary(model, eos)), n_vocab=model.n_vocab)
