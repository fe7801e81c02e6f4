"""The jinja2 environment that chat templates are rendered in: what they expect, and no more than they need.

Templates come with a model's file, so they are code from a stranger. jinja2's sandbox keeps them away from Python's
internals; this one also refuses single operations whose result would be huge (`'x' * 10**10`), since those neither
pass through the stream of output nor can be interrupted. Knows nothing of messages or of models.
"""

from __future__ import annotations

import functools
import json
import re
import types
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_NUMBER = 1_000_000
"""Largest whole number that may be passed to a filter or a method (widths, counts)."""

_MAX_BITS = 4096  # of an integer result
_WIDE_FORMAT = re.compile(r"\d{5}|%[^a-zA-Z%]*\*|\{[^{}]*:[^{}]*\{")


class TemplateRaisedError(TemplateError):
    """The template called `raise_exception`; the message is meant for the user."""


class GenerationExtension(Extension):
    """`{% generation %}...{% endgeneration %}`, which marks replies for training; here its body is all there is."""

    tags = {"generation"}  # noqa: RUF012 (as the base class has it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Generator(CodeGenerator):
    """Sends `a ~ b` through the environment, like the intercepted operators."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 (jinja2's name)
        self.write("environment.join_texts((")
        for argument in node.nodes:
            self.visit(argument, frame)
            self.write(", ")
        self.write("))")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers has it: neither sorted nor escaped for HTML, unlike jinja2's own."""
    if isinstance(indent, int) and indent > 64:
        raise SecurityError(f"tojson(indent={indent}) is more than 64")
    if isinstance(value, types.GeneratorType):  # what `map` and `select` make
        value = list(value)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise TemplateRaisedError(str(message))


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Options, filters and globals of chat templates. `max_text`: characters of the largest text, items of the
    longest list. `now` is the clock of `strftime_now`. Thread-safe once made.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    code_generator_class = _Generator

    def __init__(self, max_text: int, now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[LoopControlExtension, GenerationExtension],
            optimized=False,  # nothing is computed while compiling, where no time limit holds
            cache_size=0,
        )
        self._max_text = max_text
        self.globals.pop("lipsum", None)
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: now().strftime(form)
        self.filters["tojson"] = _tojson
        checks: dict[str, Callable[..., None]] = {
            "center": self._check_nothing,
            "batch": self._check_nothing,
            "slice": self._check_nothing,
            "indent": self._check_indent,
            "replace": self._check_replace,
            "format": self._check_format,
        }
        for name, check in checks.items():
            self.filters[name] = self._bounded(self.filters[name], check)

    # ------------------------------------------------------------------------------------------ operators

    def concat(self, pieces: Iterable[str]) -> str:
        """`"".join`, bounded: compiled templates, macros and blocks call it to join what they wrote."""
        found = list(pieces)
        self._limit(sum(map(len, found)))
        return "".join(found)

    def join_texts(self, values: Iterable[object]) -> str:
        """What `a ~ b` means: every value as text, joined."""
        return self.concat(map(str, values))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Do `left operator right` if the result's size is within bounds."""
        if operator == "+":
            if isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
                self._limit(len(left) + len(right))
        elif operator == "*":
            if isinstance(left, int) and isinstance(right, int):
                self._limit_bits(left.bit_length() + right.bit_length())
            else:
                for count, value in ((left, right), (right, left)):
                    if isinstance(count, int) and isinstance(value, str | bytes | list | tuple):
                        self._limit(count * len(value))
        elif operator == "**":
            if isinstance(left, int) and isinstance(right, int):
                self._limit_bits(left.bit_length() * max(right, 0))
        elif isinstance(left, str | bytes):
            self._check_format(left if isinstance(left, str) else left.decode("latin-1"), right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 (jinja2's names)
        """Call a function or method from the template."""
        if isinstance(__obj, types.BuiltinMethodType):
            __self._limit_numbers(args, kwargs)
            owner, name = __obj.__self__, __obj.__name__
            if isinstance(owner, str | bytes):
                if name == "replace":
                    __self._check_replace(owner, *args)
                elif name == "expandtabs":
                    __self._limit(len(owner) * max([8, *args, *kwargs.values()]))
                elif name == "join":
                    args = (list(args[0]), *args[1:])
                    __self._limit(sum(len(text) + len(owner) for text in args[0]))
                elif name == "translate":
                    raise SecurityError("translate() is not available to templates")
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Bound `'...'.format()` too: jinja2 hands out its own wrapper for it."""
        wrapper = super().wrap_str_format(value)
        if wrapper is None:
            return None
        text: str = value.__self__
        inner = wrapper

        def bounded(*args: Any, **kwargs: Any) -> str:
            self._check_format(text, args, kwargs)
            return inner(*args, **kwargs)

        return bounded

    # ------------------------------------------------------------------------------------------ bounds

    def _bounded(self, original: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
        leading = 1 if hasattr(original, "jinja_pass_arg") else 0  # a context that jinja2 passes first

        @functools.wraps(original)  # keeps jinja2's mark
        def filtered(*args: Any, **kwargs: Any) -> Any:
            self._limit_numbers(args[leading + 1 :], kwargs)
            check(*args[leading:], **kwargs)
            return original(*args, **kwargs)

        return filtered

    def _limit(self, size: int) -> None:
        if size > self._max_text:
            raise SecurityError(f"the template makes a value of size {size}, more than {self._max_text}")

    def _limit_bits(self, bits: int) -> None:
        if bits > _MAX_BITS:
            raise SecurityError("the template computes with huge numbers")

    def _limit_numbers(self, args: Iterable[Any], kwargs: dict[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, int) and abs(value) > MAX_NUMBER:
                raise SecurityError(f"the template passes {value}, more than {MAX_NUMBER}")

    def _check_nothing(self, *args: Any, **kwargs: Any) -> None:
        """The bound on numbers is enough."""

    def _check_indent(self, text: str, width: int | str = 4, *_: Any, **__: Any) -> None:
        self._limit(len(text) + (text.count("\n") + 1) * (len(width) if isinstance(width, str) else width))

    def _check_replace(self, text: Any, old: Any = "", new: Any = "", *_: Any, **__: Any) -> None:
        # An exact count: cutting some replaced text short would change what a template means.
        if isinstance(text, str | bytes) and isinstance(old, type(text)) and isinstance(new, type(text)):
            self._limit(len(text) + text.count(old) * max(0, len(new) - len(old)))  # type: ignore[arg-type]

    def _check_format(self, text: str, *args: Any, **kwargs: Any) -> None:
        if _WIDE_FORMAT.search(text):
            raise SecurityError("the template formats with a width that is huge or not written out")

        def longest(value: Any) -> int:
            if isinstance(value, str | bytes):
                return len(value)
            if isinstance(value, dict):
                value = value.values()
            elif not isinstance(value, list | tuple):
                return 0
            return max(map(longest, value), default=0)

        self._limit(len(text) + (text.count("%") + text.count("{")) * longest([args, kwargs]))
