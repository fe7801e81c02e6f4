"""Reads a tool call that is a JSON object, while it is still being written."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from typing import Any

from .reader import Reader, Sink, Wait

_NAMES = frozenset({"name", "tool_name"})
_CALL_KEYS = _NAMES | {"arguments", "parameters", "function", "type", "id", "tool_call", "tool_call_id"}


class MalformedError(Exception):
    """What began like a call is none."""


class CallObject:
    """A call as a JSON object whose keys come in any order: `{"name": ..., "arguments": ...}`."""

    def __init__(self, reader: Reader, known: Callable[[str], bool], begin: Callable[[str], Sink]) -> None:
        self._reader, self._known, self._begin = reader, known, begin
        self._sink: Sink | None = None
        self._early = ""  # arguments that came before the name
        self._sent = False

    def read(self) -> Wait:
        """Raises MalformedError."""
        yield from self._members()
        if self._sink is None:
            raise MalformedError
        if not self._sent:
            self._sink("{}")

    def _members(self) -> Wait:
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
            yield from self._member(key)

    def _member(self, key: str) -> Wait:
        reader = self._reader
        first = yield from reader.peek()
        if key in ("function", "tool_call") and first == "{":
            yield from self._members()
        elif key in _NAMES or (key == "function" and first == '"'):
            name = yield from self._collected()
            if not isinstance(name, str) or not self._known(name):
                raise MalformedError
            self._sink = self._begin(name)
            if self._early:
                self._send(self._early)
        elif key in ("arguments", "parameters"):
            if first == '"':  # JSON within a string
                self._send((yield from self._collected()))
            elif first != "{":
                if (yield from self._collected()) is not None:
                    raise MalformedError
            elif self._sink is None:
                parts: list[str] = []
                if not (yield from reader.json_value(parts.append)):
                    raise MalformedError
                self._early = "".join(parts)
            else:
                self._sent = True
                if not (yield from reader.json_value(self._sink)):
                    raise MalformedError
        else:
            yield from self._collected()

    def _send(self, arguments: str) -> None:
        if self._sink is None:
            self._early = arguments
        else:
            self._sent = True
            self._sink(arguments)

    def _collected(self) -> Generator[None, None, Any]:
        parts: list[str] = []
        if not (yield from self._reader.json_value(parts.append)):
            raise MalformedError
        try:
            return json.loads("".join(parts))
        except (ValueError, RecursionError) as error:
            raise MalformedError from error
