"""The positions of a prompt from which later requests may go on, for models whose state can be resumed only there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..chat.boundaries import Boundary
from ..prefix.blocks import common_tokens, to_le

_APART = 8
"""Tokens between two points at least: fewer are computed sooner than an edge is read."""


def points_of(
    tokens: Sequence[int], boundaries: Sequence[Boundary], tokenize: Callable[[str], list[int]]
) -> tuple[tuple[int, str], ...]:
    """Positions and kinds, in order, all before the last token: a request evaluates one at least.

    A boundary's text may end within a token of the whole: then the point is before that one. `tokenize` as the prompt
    was.
    """
    last = len(tokens) - 1
    whole = to_le(tokens)
    found: dict[int, str] = {}
    for boundary in boundaries:
        found.setdefault(min(last, common_tokens(to_le(tokenize(boundary.text)), whole)), boundary.kind)
    if "prompt" not in found.values():
        found.setdefault(last, "prompt")
    points: list[tuple[int, str]] = []
    for position, kind in sorted(found.items()):
        if position >= _APART and (not points or position - points[-1][0] >= _APART):
            points.append((position, kind))
    return tuple(points)
