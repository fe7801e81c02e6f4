"""Which edges of a path are superfluous, once a new one was stored at its end.

An edge may be as large as a thousand tokens' span, and a growing chat leaves one at every turn's end, though only the
last few are ever gone on from. What is kept: those of the beginning that prompts share, of branches, those that were
used more than once, and the last ones. Where a window needs the edges of several nodes, these stay together.

Templates strip thoughts and write calls anew, so the next turn of a chat often leaves the way of the reply as it was
generated (`left_replies.py`). Once the chat has gone on for two turns, nobody comes back to that one.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from itertools import islice
from typing import NamedTuple

from .blocks import BLOCK_TOKENS
from .left_replies import Turn, left_reply
from .resuming import edge_of
from .tree import NodeTable, Placed, shorter
from .ways import TooManyError, Ways

KEPT = 4
"""Edges at the end of a path that stay: two turns, of a prompt and a reply each."""

_LASTING = frozenset({"system", "branch"})
_USES = 2
_OF_A_REPLY = frozenset({"reply", "window"})
_LONG = 512  # nodes at the end of a path that are looked at: 3 ms of them


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
    stays: Callable[[bytes], bool] = lambda key: False,
) -> list[Placed]:
    """What may go now that `edge` is there: edges, and tails that were there for theirs alone.

    `place` finds a node by its key; `uses` tells how often an edge was gone on from; `stays`: whether the edge with
    this key stays whatever it is worth, as one that is pinned or in use. Takes a few milliseconds at most.
    """
    owner = place(edge.parent)
    path = [owner] if owner is not None else []
    while path and len(path) < _LONG and (above := place(path[-1].parent)) is not None:
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
    ways = Ways(tables)
    left = _left(ways, path, held, points, edge)
    if any(stays(item.edge.record.key) or uses(item.edge) >= _USES for item in left):
        left = []  # what is gone on from needs them all
    gone = [_goes(tables, item) for item in left]
    dead = {placed.tree_key for placed in gone}
    for item in held:
        if item.edge.tree_key in staying or stays(item.edge.record.key):
            continue
        if window and any(item.owner.record.start < end and item.owner.end > end - window for end in ends):
            continue
        if window and _forks(ways, path, item.block, window, dead):
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


def _forks(ways: Ways, path: list[Placed], index: int, window: int, dead: Container[bytes]) -> bool:
    """Whether another way leaves the path within a window behind the block `index`, and can be gone on from there.

    `dead`: tree keys of edges, or of the nodes that have them, which do not count any more.
    """
    last = min(len(path) - 1, index + 1 + -(-window // BLOCK_TOKENS))
    try:
        for node, following in zip(path[index:last], path[index + 1 : last + 1], strict=True):
            for child in ways.aside(node, following):
                if any(_goes(ways.tables, item).tree_key not in dead for item in _below(ways, child)):
                    return True
    except TooManyError:
        return True
    return False


def _left(ways: Ways, path: list[Placed], held: list[_Held], points: list[_Held], edge: Placed) -> list[_Held]:
    """Edges of the reply that the turn before the last one left, once `edge` is there, where a prompt ends."""
    prompts = [item for item in points if item.edge.record.kind == "prompt"]
    if len(prompts) < 2 or prompts[-1].edge.tree_key != edge.tree_key:
        return []
    asked = prompts[-2]
    end = asked.owner.end
    before = [item.owner.end for item in points if item.edge.record.kind in ("prompt", "system")]
    begin = max((point for point in before if point < end), default=0)
    generated = (node.end for node in (*path, *(item.owner for item in held)) if node.record.kind == "reply")
    own = max((at for at in generated if at <= end), default=0)
    reply_end = min(item.owner.end for item in points if item.owner.end > begin)
    nodes = left_reply(ways, path, Turn(begin, own, reply_end, end, asked.edge.record.created))
    edges = [_Held(node, child, 0) for node in nodes for child in ways.children(node.record.key) if child.is_edge]
    return edges if all(item.edge.record.kind in _OF_A_REPLY for item in edges) else []


def _below(ways: Ways, top: Placed) -> list[_Held]:
    """Edges of a node and of all below it. Raises TooManyError."""
    nodes = {node.tree_key: node for way in ways.ends(top) for node in way}
    return [
        _Held(node, child, 0) for node in nodes.values() for child in ways.children(node.record.key) if child.is_edge
    ]
