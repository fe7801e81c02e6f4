"""What a request asks of its reply beyond text, made ready before it is queued: its form, and how it is split.

Belongs to the threads of `intake.py`; a constraint is compiled here, so only those that may wait for it call `reply`
with one that is not known.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import string
import threading
import time
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import msgspec

from ..chat.forcing import answer_grammar, calls_grammar, forced_functions, tool_functions
from ..chat.layout import Layout
from ..chat.reply import ReplyParser
from ..errors import RequestError
from ..frames.worker import Constraint, Generate
from .bindings import Model
from .blaming import REFUSED, Blame
from .constraint import MAX_GRAMMAR, Constraints, Mask, check_size
from .emission import Reply
from .gbnf import translate
from .known_forms import KnownForms

_ID_LETTERS = string.ascii_letters + string.digits
_NO_GRAMMAR = frozenset(
    {
        "gemma", "lfm", "olmo", "kimi", "functionary", "function_tag", "command_r", "seed", "minimax", "minicpm",
        "gigachat", "apertus", "solar", "minimax_m3",
    }
)  # fmt: skip
"""Layouts in which calls that must be made are JSON: no grammar writes them."""


def is_constrained(generate: Generate) -> bool:
    """Must a grammar be compiled for it?"""
    return generate.constraint is not None or generate.tool_choice not in ("auto", "none")


def _callable(generate: Generate) -> list[dict[str, Any]]:
    """Those of its tools that may be called, with what the template did not see of them."""
    found = []
    for tool in generate.tools or []:
        function = tool.get("function", {})
        if generate.allowed_tools is None or function.get("name") in generate.allowed_tools:
            is_strict = function.get("name") in generate.strict_tools
            found.append({**tool, "function": {**function, "strict": True}} if is_strict else tool)
    return found


def _parameters(functions: dict[str, dict[str, Any]]) -> str:
    """All their schemas as one text."""
    return json.dumps([function.get("parameters") for function in functions.values()], ensure_ascii=False)


@contextlib.contextmanager
def _blamed(param: str) -> Iterator[None]:
    """A refusal that names no field means this one."""
    try:
        yield
    except RequestError as error:
        error.param = error.param or param
        raise


class Shaper:
    """Makes `Reply` objects for one model, whose chat template speaks of `layout`."""

    def __init__(self, model: Model, layout: Layout, constraints: Constraints) -> None:
        self._model, self._layout, self._constraints = model, layout, constraints
        self._blame = Blame(constraints)
        self._known = KnownForms()
        self._compiling = threading.Lock()  # what compiles belongs to one thread at a time

    @cached_property
    def _shown(self) -> frozenset[int]:
        """Control tokens that mark thoughts and calls."""
        tokens = (self._constraints.control_token(marker) for marker in self._layout.markers)
        return frozenset(token for token in tokens if token is not None)

    def form(self, generate: Generate, prompt: str) -> bytes:
        """What its mask is made of, as a digest; b"" if it has none. `prompt`: as for `reply`."""
        if not is_constrained(generate):
            return b""
        made_of = (
            generate.messages is None,
            self._is_opened(generate, prompt),
            generate.constraint,
            generate.tool_choice,
            generate.parallel_tool_calls,
            generate.tools,
            generate.allowed_tools,
            generate.strict_tools,
        )
        return hashlib.sha256(msgspec.msgpack.encode(made_of)).digest()

    def is_known(self, form: bytes) -> bool:
        """Was it compiled or refused before? Then `reply` takes no time."""
        return form in self._known

    def _is_opened(self, generate: Generate, prompt: str) -> bool:
        """Does the prompt end within the thoughts?"""
        thoughts = self._layout.thoughts if generate.messages is not None else None
        return thoughts is not None and prompt.rstrip().endswith(thoughts[0].strip())

    def reply(self, generate: Generate, prompt: str) -> Reply | None:
        """None where text is all that is wanted. `prompt`: as text, "" where it was given as tokens.

        Raises RequestError, UnavailableError.
        """
        if generate.messages is None:
            mask = self._mask(generate, None, prompt)
            if mask is None and generate.logprobs < 0:
                return None
            return Reply(self._model, mask, None, frozenset(), generate.logprobs)
        layout = self._layout
        calls = bool(generate.tools) and generate.tool_choice != "none"
        callable_tools = _callable(generate)
        if generate.tool_choice not in ("auto", "none") and layout.calls in _NO_GRAMMAR:
            layout = Layout("generic", layout.thoughts)
        mask = self._mask(generate, layout, prompt)
        parser = None
        if calls or layout.thoughts is not None or layout.calls in ("harmony", "functionary"):
            parser = ReplyParser(
                layout,
                tools=tool_functions(callable_tools),
                only=generate.allowed_tools is not None,
                opened=self._is_opened(generate, prompt),
                calls=calls,
                parallel=generate.parallel_tool_calls and not generate.tool_choice.startswith("="),
                new_id=self._new_id,
            )
        if mask is None and parser is None and generate.logprobs < 0:
            return None
        return Reply(self._model, mask, parser, self._shown if parser is not None else frozenset(), generate.logprobs)

    def _new_id(self) -> str:
        """Mistral's templates take only nine letters and digits."""
        if self._layout.calls.startswith("mistral"):
            return "".join(secrets.choice(_ID_LETTERS) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"

    def _mask(self, generate: Generate, layout: Layout | None, prompt: str) -> Mask | None:
        if not is_constrained(generate):
            return None
        form = self.form(generate, prompt)
        known = self._known.get(form)
        if known is None:
            with self._compiling:
                began = time.monotonic()
                try:
                    known = self._compiled(generate, layout, self._is_opened(generate, prompt))
                except RequestError as error:
                    self._known.add(form, error, time.monotonic() - began)
                    raise
                self._known.add(form, known, time.monotonic() - began)
            return known.copy()
        if isinstance(known, RequestError):
            raise known
        return known

    def _compiled(self, generate: Generate, layout: Layout | None, opened: bool) -> Mask:
        """A mask to be copied. Raises RequestError."""
        mark = self._constraints.mark
        if generate.tool_choice not in ("auto", "none"):
            if layout is None:
                raise RequestError("`tool_choice` needs `messages`.", param="tool_choice")
            functions = forced_functions(_callable(generate), generate.tool_choice)
            single = generate.tool_choice.startswith("=") or not generate.parallel_tool_calls
            check_size(_parameters(functions), "tools")
            with _blamed("tools"):
                return self._calls_mask(layout, functions, single, opened)
        if generate.constraint is None:
            raise RuntimeError("a constrained request without a constraint")
        functions = tool_functions(_callable(generate)) if generate.tool_choice == "auto" else {}
        if layout is not None and layout.calls in _NO_GRAMMAR:
            functions = {}
        constraint = generate.constraint
        param = "grammar" if constraint.kind == "grammar" else constraint.param
        check_size(constraint.text, param)
        if len(_parameters(functions)) > MAX_GRAMMAR:
            functions = {}  # nobody insists on a call

        def mask(callable_functions: dict[str, dict[str, Any]]) -> Mask:
            with _blamed(param):
                grammar = answer_grammar(
                    constraint,
                    layout,
                    opened,
                    mark,
                    lambda text: translate(text, self._constraints.token),
                    callable_functions,
                )
                return self._constraints.compiled(grammar, param)

        try:
            return mask(functions)
        except RequestError as error:
            if not functions:
                raise self._named(error, constraint) from error
        try:
            alone = mask({})  # a tool's parameters may be what cannot be expressed, and nobody insists on a call
        except RequestError as error:
            raise self._named(error, constraint) from error
        with contextlib.suppress(RequestError):
            return mask(self._blame.loosened(functions))
        return alone

    def _named(self, error: RequestError, constraint: Constraint) -> RequestError:
        """With the keyword to blame."""
        if constraint.kind != "json_schema" or error.code != REFUSED:
            return error
        return self._blame.named(error, json.loads(constraint.text))

    def _calls_mask(self, layout: Layout, functions: dict[str, dict[str, Any]], single: bool, opened: bool) -> Mask:
        """Of calls that must be made. What of a function cannot be enforced is left out, unless it is strict."""

        def mask(functions: dict[str, dict[str, Any]]) -> Mask:
            grammar = calls_grammar(layout, functions, single, opened, self._constraints.mark)
            return self._constraints.compiled(grammar, "tools")

        try:
            return mask(functions)
        except RequestError as error:
            if error.code != REFUSED:
                raise
        looser = self._blame.loosened(functions)
        try:
            return mask(looser)
        except RequestError as error:
            raise self._blame.named_in(error, looser) from error
