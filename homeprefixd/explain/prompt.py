"""A prompt as it is explained: its text, the chat it was made from, and which part of the text is what.

Pure. A template may write messages as it likes, so parts are found by their contents.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..chat.stable import leading
from ..frames.worker import Message

_PROBE = 120  # characters by which a message is looked for where the whole is not found
_TOOL_HEAD = 300  # characters before a tool's name within which its JSON begins


@dataclass(frozen=True)
class Part:
    """[start, end) of the text."""

    start: int
    end: int
    kind: str  # template, system, tool, message, prompt
    name: str
    index: int = -1  # of the message or tool


@dataclass(frozen=True)
class Prompt:
    """`messages` None: it was sent as text. `reply`: what was generated after it, as far as it is known. `moved`: a
    rule has moved lines into its last user message.
    """

    text: str
    messages: Sequence[Message] | None = None
    tools: Sequence[dict[str, Any]] = field(default=())
    reply: str = ""
    moved: bool = False

    @property
    def system(self) -> list[str]:
        """Texts of the leading system messages, of which rules take lines out."""
        messages = self.messages or ()
        return [message.content for message in messages[: leading(messages)] if message.content]

    def leads(self, part: Part) -> bool:
        """Is it one of these?"""
        return part.kind == "system" and part.index < leading(self.messages or ())

    @cached_property
    def parts(self) -> list[Part]:
        """All of the text, in order, without holes."""
        if self.messages is None:
            return [Part(0, len(self.text), "prompt", "the prompt")]
        found = sorted([*self._tools(), *self._messages()], key=lambda part: part.start)
        parts: list[Part] = []
        at = 0
        for part in found:
            start = max(part.start, at)
            if part.end <= start:
                continue
            if start > at:
                parts.append(Part(at, start, "template", "the template"))
            parts.append(Part(start, part.end, part.kind, part.name, part.index))
            at = part.end
        if at < len(self.text):
            parts.append(Part(at, len(self.text), "template", "the template"))
        return parts

    def part_at(self, place: int) -> Part:
        """The part that holds a position, or begins or ends there rather than the template around it."""
        best: Part | None = None
        for part in self.parts:
            if part.start <= place < part.end or (place == part.end and part.kind != "template"):
                if part.kind != "template":
                    return part
                best = best or part
        return best or (self.parts[-1] if self.parts else Part(0, 0, "prompt", "the prompt"))

    def message_behind(self, place: int) -> str:
        """Name of the assistant's message that a position in the template's own text belongs to, or ""."""
        last = max((part.index for part in self.parts if part.end <= place and part.kind != "tool"), default=-1)
        messages = self.messages or ()
        found = (i for i in range(last + 1, len(messages)) if messages[i].role == "assistant")
        index = next(found, last if 0 <= last < len(messages) and messages[last].role == "assistant" else -1)
        return name_of(messages[index], index) if index >= 0 else ""

    def _messages(self) -> Iterator[Part]:
        at = 0
        for index, message in enumerate(self.messages or ()):
            kind = "system" if message.role == "system" else "message"
            name = name_of(message, index)
            found = self._content(message.content or "", at)
            if found is not None:
                at = found[1]
                yield Part(*found, kind, name, index)
            for start, end in self._calls(message, at, index):
                at = end
                yield Part(start, end, kind, name, index)

    def _content(self, content: str, at: int) -> tuple[int, int] | None:
        """Where a message's text stands, with the blanks at its ends where the template leaves them."""
        plain = content.strip()
        if not plain:
            return None
        start = self.text.find(plain, at)
        end = start + len(plain)
        if start < 0 and len(plain) > _PROBE:  # the template has changed it somewhere
            start = self.text.find(plain[:_PROBE], at)
            return (start, start + _PROBE) if start >= 0 else None
        if start < 0:
            return None
        blanks = content[content.rindex(plain[-1]) + 1 :]
        return start, end + len(blanks) if self.text.startswith(blanks, end) else end

    def _calls(self, message: Message, at: int, index: int) -> Iterator[tuple[int, int]]:
        """Where the tool calls of a message stand: the JSON, or the line, that names the function."""
        limit: int | None = None
        for call in message.tool_calls or ():
            name = tool_name(call)
            if limit is None:
                limit = self._next_content(at, index)
            place = self.text.find(name, at, limit) if name else -1
            if place < 0:
                continue
            start, end = self._json_around(place, at)
            at = end = max(at, min(end, limit))
            yield min(start, end), end

    def _next_content(self, at: int, index: int) -> int:
        """Where the text of a later message begins."""
        for message in (self.messages or ())[index + 1 :]:
            content = (message.content or "").strip()
            if content:
                start = self.text.find(content[:_PROBE], at)
                return start if start >= 0 else len(self.text)
        return len(self.text)

    def _tools(self) -> Iterator[Part]:
        at = 0
        for index, tool in enumerate(self.tools):
            name = tool_name(tool)
            place = self.text.find(f'"{name}"', at) if name else -1
            if place < 0:
                continue
            start, end = self._json_around(place, at)
            at = end
            yield Part(start, end, "tool", f"the tool {name}", index)

    def _json_around(self, place: int, least: int) -> tuple[int, int]:
        """The outermost JSON object not before `least` that holds `place`, else its line."""
        begin = max(least, place - _TOOL_HEAD)
        start = self.text.find("{", begin, place)
        while start >= 0:
            try:
                _value, end = json.JSONDecoder().raw_decode(self.text, start)
            except (ValueError, RecursionError):
                end = start
            if end > place:
                return start, end
            start = self.text.find("{", start + 1, place)
        line = self.text.find("\n", place)
        return max(least, self.text.rfind("\n", begin, place) + 1), line if line >= 0 else len(self.text)


def name_of(message: Message, index: int) -> str:
    return "the system message" if message.role == "system" else f"message {index + 1} ({message.role})"


def tool_name(tool: dict[str, Any]) -> str:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else tool.get("name")
    return name if isinstance(name, str) else ""


def common_length(a: str, b: str) -> int:
    """Leading characters that two texts share."""
    least, most = 0, min(len(a), len(b))
    if a[:most] == b[:most]:
        return most
    while most - least > 1:
        middle = (least + most) // 2
        if a[least:middle] == b[least:middle]:
            least = middle
        else:
            most = middle
    return least
