"""Reads a tool call that is a JSON object, while it is still being written."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from .reader import Reader, Sink, Wait
from .values import is_object, json_text, json_value

_NAMES = frozenset({"name", "tool_name"})
_CALL_KEYS = _NAMES | {"arguments", "parameters", "function", "type", "id", "tool_call", "tool_call_id"}
_DEEPEST = 2  # objects within each other: `{"type": "function", "function": {...}}` has one in one


class MalformedError(Exception):
    """What began like a call is none, or goes on like none."""


class CallObject:
    """A call as a JSON object whose keys come in any order: `{"name": ..., "arguments": ...}`.

    It begins with its arguments, or at its end: until then it may turn out to be none.
    """

    def __init__(self, reader: Reader, known: Callable[[str], bool], begin: Callable[[str], Sink]) -> None:
        self._reader, self._known, self._begin = reader, known, begin
        self._name: str | None = None
        self._early: str | None = None  # arguments that wait for the object's end
        self._sent = False

    def read(self) -> Wait:
        """Raises MalformedError."""
        yield from self._members(1)
        if self._name is None:
            raise MalformedError
        if not self._sent:
            self._begin(self._name)(self._early or "{}")

    def _members(self, depth: int) -> Wait:
        reader = self._reader
        reader.take(1)
        while True:
            yield from reader.space()
            first = yield from reader.peek()
            if first in ("}", ","):
                reader.take(1)
                if first == "}":
                    return
                continue
            if first != '"':
                raise MalformedError
            key = yield from self._collected()
            yield from reader.space()
            if (yield from reader.peek()) != ":" or key not in _CALL_KEYS:
                raise MalformedError
            reader.take(1)
            yield from reader.space()
            yield from self._member(key, depth)

    def _member(self, key: str, depth: int) -> Wait:
        first = yield from self._reader.peek()
        if key in ("function", "tool_call") and first == "{" and depth < _DEEPEST:
            yield from self._members(depth + 1)
        elif key in _NAMES or (key == "function" and first == '"'):
            name = yield from self._collected()
            if self._name is not None or not isinstance(name, str) or not self._known(name):
                raise MalformedError
            self._name = name
        elif key in ("arguments", "parameters"):
            yield from self._arguments(first)
        else:
            yield from self._collected()

    def _arguments(self, first: str) -> Wait:
        if self._sent or self._early is not None:
            raise MalformedError
        if first == "{" and self._name is not None:
            self._sent = True
            if not (yield from self._reader.json_value(self._begin(self._name))):
                raise MalformedError
            return
        parts: list[str] = []
        if first == "{":
            if not (yield from self._reader.json_value(parts.append)):
                raise MalformedError
            text: Any = "".join(parts)
        else:
            text = yield from self._collected()
        if text in (None, ""):
            return
        if not isinstance(text, str) or not is_object(text):
            raise MalformedError
        # In a string it is JSON within JSON, whose own escapes nobody has looked at yet.
        self._early = text if first == "{" else json_text(json_value(text))

    def _collected(self) -> Generator[None, None, Any]:
        parts: list[str] = []
        if not (yield from self._reader.json_value(parts.append)):
            raise MalformedError
        try:
            return json_value("".join(parts))
        except (ValueError, RecursionError) as error:
            raise MalformedError from error
