"""Which edges of a path are superfluous, once a new one was stored at its end.

An edge may be as large as a thousand tokens' span, and a growing chat leaves one at every turn's end, though only the
last few are ever gone on from. What is kept: those of the beginning that prompts share, of branches, those that were
used more than once, and the last ones. Where a window needs the edges of several nodes, these stay together.

Templates strip thoughts and write calls anew, so the next turn of a chat often leaves the way of the reply as it was
generated. Once the chat has gone on for as many edges as stay, nobody comes back to that one.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from itertools import islice, pairwise
from typing import NamedTuple

from .blocks import BLOCK_TOKENS
from .resuming import edge_of
from .tree import NodeTable, Placed, shorter

KEPT = 4
"""Edges at the end of a path that stay: two turns, of a prompt and a reply each."""

_LASTING = frozenset({"system", "branch"})
_USES = 2
_CHILDREN = 64  # of a node that are looked at for a fork
_OF_A_REPLY = frozenset({"reply", "window"})
_DEEP = 64  # nodes of a way that leaves the path that are looked at
_LONG = 256  # nodes at the end of a path that are looked at for such ways


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
    if len(points) >= KEPT:
        for reply in _left(tables, path, points[-KEPT].owner.end):
            edges = [item for item in reply if item.edge.record.key not in pinned]
            if len(edges) == len(reply) and all(uses(item.edge) < _USES for item in edges):
                gone += [_goes(tables, item) for item in edges]
    dead = {placed.tree_key for placed in gone}
    for item in held:
        if item.edge.tree_key in staying or item.edge.record.key in pinned:
            continue
        if window and any(item.owner.record.start < end and item.owner.end > end - window for end in ends):
            continue
        if window and _forks(tables, path, item.block, window, dead):
            continue  # of use for another branch
        gone.append(_goes(tables, item))
    return gone


def _goes(tables: Sequence[NodeTable], item: _Held) -> Placed:
    """An edge, or its node with it where that is a tail which nothing else hangs on."""
    is_tail = item.owner.length < BLOCK_TOKENS and not any(
        child.tree_key != item.edge.tree_key
        for table in tables
        for child in islice(table.children(item.owner.record.key), 2)
    )
    return item.owner if is_tail else item.edge


def _held(tables: Sequence[NodeTable], path: list[Placed]) -> list[_Held]:
    found: dict[bytes, _Held] = {}
    for index, node in enumerate(path):
        tails = [tail for table in tables for tail in shorter(table, node.tree_key) if tail.record.holds_edge]
        for owner in (*tails, node):
            edge = edge_of(tables, owner.record.key)
            if edge is not None:
                found.setdefault(edge.tree_key, _Held(owner, edge, index))
    return list(found.values())


def _forks(tables: Sequence[NodeTable], path: list[Placed], index: int, window: int, dead: Container[bytes]) -> bool:
    """Whether another way leaves the path within a window behind the block `index`, and can be gone on from there.

    `dead`: tree keys of edges, or of the nodes that have them, which do not count any more.
    """
    last = min(len(path) - 1, index + 1 + -(-window // BLOCK_TOKENS))
    for node, following in zip(path[index:last], path[index + 1 : last + 1], strict=True):
        for child in _aside(tables, node, following):
            held = _below(tables, child)
            if held is None or any(_goes(tables, item).tree_key not in dead for item in held):
                return True
    return False


def _left(tables: Sequence[NodeTable], path: list[Placed], until: int) -> Iterator[list[_Held]]:
    """Edges of each reply that leaves the path before the position `until`, and from which no prompt goes on."""
    for node, following in pairwise(path[-_LONG:]):
        if following.end > until:
            return
        ways = {child.tree_key: _of_a_reply(tables, child) for child in _aside(tables, node, following)}
        living = [key for key, held in ways.items() if held is None]
        for key, held in ways.items():
            if held and not any(other.startswith(key) for other in living):  # else a tail that a prompt goes on from
                yield held


def _of_a_reply(tables: Sequence[NodeTable], top: Placed) -> list[_Held] | None:
    """The edges of a node and of all below it; None if not all of them are of replies."""
    held = _below(tables, top) if top.record.kind == "reply" else None
    return held if held is not None and all(item.edge.record.kind in _OF_A_REPLY for item in held) else None


def _aside(tables: Sequence[NodeTable], node: Placed, following: Placed) -> Iterator[Placed]:
    """Children of `node` that leave the path on which `following` comes next."""
    for table in tables:
        for child in islice(table.children(node.record.key), _CHILDREN):
            if not child.is_edge and not following.tree_key.startswith(child.tree_key):
                yield child


def _below(tables: Sequence[NodeTable], top: Placed) -> list[_Held] | None:
    """Edges of a node and of all below it; None where there are too many to look at."""
    found: list[_Held] = []
    waiting, seen = [top], set[bytes]()
    while waiting:
        node = waiting.pop()
        if node.tree_key in seen:  # in RAM and on disk
            continue
        seen.add(node.tree_key)
        if len(seen) > _DEEP:
            return None
        for table in tables:
            for child in islice(table.children(node.record.key), _CHILDREN):
                if child.is_edge:
                    found.append(_Held(node, child, 0))
                else:
                    waiting.append(child)
    return list({item.edge.tree_key: item for item in found}.values())
