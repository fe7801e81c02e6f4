"""Which edges of a path are superfluous, once a new one was stored at its end.

An edge may be as large as a thousand tokens' span, and a growing chat leaves one at every turn's end, though only the
last few are ever gone on from. What is kept: those of the beginning that prompts share, of branches, those that were
used more than once, and the last ones. Where a window needs the edges of several nodes, these stay together.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from itertools import islice
from typing import NamedTuple

from .blocks import BLOCK_TOKENS
from .resuming import edge_of
from .tree import NodeTable, Placed, shorter

KEPT = 4
"""Edges at the end of a path that stay: two turns, of a prompt and a reply each."""

_LASTING = frozenset({"system", "branch"})
_USES = 2
_CHILDREN = 64  # of a node that are looked at for a fork


class _Held(NamedTuple):
    """An edge and the node that it belongs to."""

    owner: Placed
    edge: Placed
    block: int  # of the block of the path that its node is, or is the beginning of


def superfluous(
    tables: Sequence[NodeTable],
    place: Callable[[bytes], Placed | None],
    edge: Placed,
    window: int,
    uses: Callable[[Placed], int],
    pinned: Container[bytes] = (),
) -> list[Placed]:
    """What may go now that `edge` is there: edges, and tails that were there for theirs alone.

    `place` finds a node by its key; `uses` tells how often an edge was gone on from; `pinned`: keys of edges that stay.
    """
    owner = place(edge.parent)
    path = [owner] if owner is not None else []
    while path and (above := place(path[-1].parent)) is not None:
        path.append(above)
    path.reverse()
    held = _held(tables, path)
    points = [item for item in held if item.edge.record.kind != "window"]
    points.sort(key=lambda item: item.owner.end)
    kept = [
        item
        for number, item in enumerate(points)
        if number >= len(points) - KEPT or item.edge.record.kind in _LASTING or uses(item.edge) >= _USES
    ]
    ends = [item.owner.end for item in kept]
    staying = {item.edge.tree_key for item in kept}
    gone: list[Placed] = []
    for item in held:
        if item.edge.tree_key in staying or item.edge.record.key in pinned:
            continue
        if window and any(item.owner.record.start < end and item.owner.end > end - window for end in ends):
            continue
        if window and _forks(tables, path, item.block, window):
            continue  # of use for another branch
        is_tail = item.owner.length < BLOCK_TOKENS and not any(
            child.tree_key != item.edge.tree_key
            for table in tables
            for child in islice(table.children(item.owner.record.key), 2)
        )
        gone.append(item.owner if is_tail else item.edge)
    return gone


def _held(tables: Sequence[NodeTable], path: list[Placed]) -> list[_Held]:
    found: dict[bytes, _Held] = {}
    for index, node in enumerate(path):
        tails = [tail for table in tables for tail in shorter(table, node.tree_key) if tail.record.holds_edge]
        for owner in (*tails, node):
            edge = edge_of(tables, owner.record.key)
            if edge is not None:
                found.setdefault(edge.tree_key, _Held(owner, edge, index))
    return list(found.values())


def _forks(tables: Sequence[NodeTable], path: list[Placed], index: int, window: int) -> bool:
    """Whether another way leaves the path within a window behind the block `index`."""
    last = min(len(path) - 1, index + 1 + -(-window // BLOCK_TOKENS))
    for node, following in zip(path[index:last], path[index + 1 : last + 1], strict=True):
        for table in tables:
            for child in islice(table.children(node.record.key), _CHILDREN):
                if not child.is_edge and not following.tree_key.startswith(child.tree_key):
                    return True
    return False
