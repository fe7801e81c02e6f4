"""Reads a text while it is still being written: the ground on which `reply.py` parses a reply.

Every method that has to look ahead is a generator: it yields where it needs more of the text, and returns what it
found. Nothing depends on how the text is cut into pieces. Knows nothing of models or of calls.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence

Wait = Generator[None, None, None]
Sink = Callable[[str], None]

_NOT_SPACE = re.compile(r"\S")
_STRUCTURE = re.compile(r'["{}\[\]]')
_STRING_END = re.compile(r'["\\]')
_SCALAR_END = re.compile(r"[\s,\]}<;`]")


class Reader:
    """A text that grows at its end and is taken from its beginning."""

    def __init__(self) -> None:
        self.buffer = ""  # what was written and not taken
        self.final = False  # nothing more will be written
        self._record: list[str] | None = None

    # ------------------------------------------------------------------------------------------ taking

    def take(self, count: int) -> str:
        """The next `count` characters, which are there."""
        text, self.buffer = self.buffer[:count], self.buffer[count:]
        if self._record is not None:
            self._record.append(text)
        return text

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
        taken = ""
        while True:
            found = _NOT_SPACE.search(self.buffer)
            taken += self.take(len(self.buffer) if found is None else found.start())
            if found is not None or self.final:
                return taken
            yield

    def peek(self) -> Generator[None, None, str]:
        """The next character, which is not taken; "" at the end."""
        while not self.buffer and not self.final:
            yield
        return self.buffer[:1]

    def starts(self, options: Sequence[str]) -> Generator[None, None, str]:
        """That one of `options` with which the text goes on, not taken; "" if it is none of them."""
        while True:
            for option in options:
                if self.buffer.startswith(option):
                    return option
            if self.final or not any(option.startswith(self.buffer) for option in options):
                return ""
            yield

    def until(self, markers: Sequence[str], sink: Sink) -> Generator[None, None, str]:
        """Pass on what stands before the first of `markers`, take and return that; "" at the end of the text."""
        while True:
            found = [(at, marker) for marker in markers if (at := self.buffer.find(marker)) >= 0]
            if found:
                at, marker = min(found)
                if at:
                    sink(self.take(at))
                self.take(len(marker))
                return marker
            keep = 0 if self.final else self._beginning_of(markers)
            if len(self.buffer) > keep:
                sink(self.take(len(self.buffer) - keep))
            if self.final:
                return ""
            yield

    def _beginning_of(self, markers: Sequence[str]) -> int:
        """How many characters at the end may begin one of `markers`."""
        longest = 0
        for marker in markers:
            for size in range(min(len(marker) - 1, len(self.buffer)), longest, -1):
                if marker.startswith(self.buffer[-size:]):
                    longest = size
                    break
        return longest

    # ------------------------------------------------------------------------------------------ JSON

    def json_value(self, sink: Sink) -> Generator[None, None, bool]:
        """Pass on one JSON value as it is written. False: none begins here (nothing is taken), or the text ended."""
        first = yield from self.peek()
        if first == '"':
            return (yield from self._string(sink))
        if first and first in "{[":
            return (yield from self._nested(sink))
        if first and (first in "-tfn" or first.isdigit()):
            return (yield from self._scalar(sink))
        return False

    def _string(self, sink: Sink) -> Generator[None, None, bool]:
        sink(self.take(1))
        while True:
            found = _STRING_END.search(self.buffer)
            if found is None:
                if self.buffer:
                    sink(self.take(len(self.buffer)))
            elif found[0] == '"':
                sink(self.take(found.end()))
                return True
            elif found.end() < len(self.buffer):  # an escape, which must not be cut after its backslash
                sink(self.take(found.end() + 1))
                continue
            if self.final:
                if self.buffer:
                    sink(self.take(len(self.buffer)))
                return False
            yield

    def _nested(self, sink: Sink) -> Generator[None, None, bool]:
        depth = 0
        while True:
            found = _STRUCTURE.search(self.buffer)
            if found is None:
                if self.buffer:
                    sink(self.take(len(self.buffer)))
                if self.final:
                    return False
                yield
            elif found[0] == '"':
                if found.start():
                    sink(self.take(found.start()))
                if not (yield from self._string(sink)):
                    return False
            else:
                sink(self.take(found.end()))
                depth += 1 if found[0] in "{[" else -1
                if depth <= 0:
                    return True

    def _scalar(self, sink: Sink) -> Generator[None, None, bool]:
        while True:
            found = _SCALAR_END.search(self.buffer)
            if found is not None or self.final:
                sink(self.take(len(self.buffer) if found is None else found.start()))
                return True
            yield
