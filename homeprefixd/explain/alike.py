"""How much two prompts have in common behind the place where they differ: what a fixed order would have reused.

Pure functions on two prompts, or their texts, and the position of the first character that differs.
"""

from __future__ import annotations

import re
from collections import Counter

from .prompt import Prompt, common_length

_WINDOW = 16_384  # characters behind the difference that are compared
_SEGMENT = re.compile(r"[^\n,.;{}<>|]+")
_LIKE = 0.5  # share of what an app says from which another prompt is one like it


def alike_behind(a: str, b: str) -> int:
    """Characters of `b` that `a` has too, wherever they stand: a bound on what a fixed order would have reused."""
    end = common_length(a[: -_WINDOW - 1 : -1], b[: -_WINDOW - 1 : -1])
    return max(end, round(_share(a, b) * len(b)))


def _share(a: str, b: str) -> float:
    """Of the pieces of sentences in `b`, how many `a` has too, by their lengths."""
    known = Counter(_SEGMENT.findall(a[:_WINDOW]))
    pieces = _SEGMENT.findall(b[:_WINDOW])
    same = sum(len(piece) * min(count, known.get(piece, 0)) for piece, count in Counter(pieces).items())
    return same / (sum(map(len, pieces)) or 1)


def own_alike(before: Prompt, after: Prompt, place: int) -> int:
    """A bound on what two prompts with tools have in common from `place` on. What a template says of tools, and the
    JSON around them, is the same for all apps: it counts where most of what the apps say does, else that alone.
    """
    common = {part.name for part in before.parts if part.kind == "tool"}
    old, new = (
        "\n".join(
            prompt.text[max(place, part.start) : part.end]
            for part in prompt.parts
            if part.end > place and part.kind != "template" and (part.kind != "tool" or part.name in common)
        )
        for prompt in (before, after)
    )
    others = sum(
        part.end - part.start
        for part in after.parts
        if part.start >= place and part.kind == "tool" and part.name not in common
    )
    alike = round(_share(f"{old}\n{before.reply}", new) * len(new))
    return len(after.text) - place if alike >= _LIKE * (len(new) + others) else alike


def until_again(a: str, b: str, place: int, old: str | None, new: str | None) -> int:
    """Up to where `b` has what `a` has, behind the values or the lines that differ: so much would be reused without."""
    ends = [(line_at(a, place)[1], line_at(b, place)[1])]
    if old is not None and new is not None:
        ends.append((start_of(old, a, place) + len(old), start_of(new, b, place) + len(new)))
    found = ((y, common_length(a[x:], b[y:])) for x, y in ends if min(x, y) >= place)
    return max((y + same for y, same in found if same), default=0)


def line_at(text: str, place: int) -> tuple[int, int]:
    """Of the line that holds `place`."""
    start = text.rfind("\n", 0, place) + 1
    end = text.find("\n", place)
    return start, end if end >= 0 else len(text)


def start_of(value: str, text: str, place: int) -> int:
    """Where a value begins that holds `place`; `place` where it is no piece of the text there."""
    start = text.find(value, max(0, place - len(value)), place + len(value)) if value else -1
    return start if 0 <= start <= place else place
