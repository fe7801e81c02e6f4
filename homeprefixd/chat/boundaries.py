"""Where in a chat's prompt other prompts may part from it: after system and tools, and after the last messages.

A boundary counts only where what is rendered of the messages before it is the beginning of the whole prompt: templates
move tools, merge messages and strip thoughts, so this is looked at, not known. Bounded in number and time, and what
goes wrong only costs a boundary.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from ..errors import HomeprefixdError
from ..frames.worker import Message
from .prompt import PromptBuilder

_LAST = 3  # messages at whose ends boundaries are looked for
_SECONDS = 0.2  # after which no further one is looked for
_LEADING = frozenset({"system", "developer"})
_AS_IT_IS = {"add_generation_prompt": False, "continue_final_message": False}
_OTHERS = ("§", "¤")  # beginnings of messages; nobody's begins with both


class Boundary(NamedTuple):
    """`text` is the beginning of the prompt up to here. `kind`: system, turn, prompt."""

    text: str
    kind: str


def boundaries(
    prompts: PromptBuilder,
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
    kwargs: dict[str, Any],
    whole: str,
) -> list[Boundary]:
    """In order; `whole` is the prompt of all messages, and no boundary."""
    until = time.monotonic() + _SECONDS
    found: list[Boundary] = []
    begin = next((i for i, message in enumerate(messages) if message.role not in _LEADING), len(messages))

    def rendered(some: list[Message]) -> str:
        if time.monotonic() > until:
            return ""
        try:
            return prompts.render(some, tools, {**kwargs, **_AS_IT_IS})
        except HomeprefixdError:
            return ""

    if begin < len(messages) and (begin or tools):
        first = messages[begin].content or ""
        other = next(text for text in _OTHERS if not first.startswith(text))
        shared = _common(rendered([*messages[:begin], Message("user", other)]), whole)
        if shared:
            found.append(Boundary(shared, "system"))
    for count in range(len(messages), max(begin, len(messages) - _LAST), -1):
        text = rendered(messages[:count])
        if text and text != whole and whole.startswith(text):
            found.append(Boundary(text, "prompt" if count == len(messages) else "turn"))
    return sorted(found, key=lambda boundary: len(boundary.text))


def _common(a: str, b: str) -> str:
    """What both begin with."""
    low, high = 0, min(len(a), len(b)) + 1  # invariant: `low` characters are equal, `high` are not
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return a[:low]
