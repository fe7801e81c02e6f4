"""Matching where states have edges: how far tokens are known, and the deepest node from which can be gone on.

A state can be resumed only at the end of a node, and only if the edges of the nodes that cover the last `window`
positions are there (of the last node alone, for a recurrent state).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .blocks import BLOCK_TOKENS, EDGE, TokensBE
from .tree import BLOCK_BYTES, NodeTable, Placed, Step, match, shorter


class Found(NamedTuple):
    """A match."""

    steps: list[Step]  # the way; an edge follows its node, and has a `use` of 0
    known: int  # leading tokens that are known, whether they can be resumed or not


def find(
    tables: Sequence[NodeTable], namespace: bytes, tokens: TokensBE, *, limit: int, exact: bool, window: int | None
) -> Found:
    """`window` None: states have no edges. Else see the module; otherwise as `tree.match`."""
    steps = match(tables, namespace, tokens, limit=limit, exact=exact)
    known = sum(step.use for step in steps)
    if window is None:
        return Found(steps, known)
    tokens = TokensBE(tokens[: max(0, limit) * 4])
    blocks = [step for step in steps if step.use == step.node.length == BLOCK_TOKENS]
    edges = _Edges(tables, exact)
    for depth in range(len(blocks), -1, -1):
        way = blocks[:depth]
        parent = way[-1].node.record.key if way else namespace
        at = depth * BLOCK_BYTES
        for tail in _tails(tables, parent + tokens[at : at + BLOCK_BYTES]):
            fits = tail.record.start == depth * BLOCK_TOKENS and (tail.record.grid or not exact)
            resumable = edges.added([*way, Step(tail, tail.length)], window) if fits else None
            if resumable is not None:
                return Found(resumable, max(known, tail.end))
        resumable = edges.added(way, window) if way else None
        if resumable is not None:
            return Found(resumable, known)
    return Found([], known)


def edge_of(tables: Sequence[NodeTable], key: bytes, *, exact: bool = False) -> Placed | None:
    """The edge of the node `key`."""
    place = key + EDGE
    for table in tables:
        record = table.get(place)
        if record is not None and (record.grid or not exact):
            return Placed(place, record)
    return None


def _tails(tables: Sequence[NodeTable], wanted: bytes) -> Iterator[Placed]:
    """Nodes shorter than a block that hold an edge and whose tokens begin those of `wanted`; longest first."""
    found: dict[bytes, Placed] = {}
    for table in tables:
        record = table.get(wanted)
        here = [Placed(wanted, record)] if record is not None else []
        for node in (*here, *shorter(table, wanted)):
            if node.record.holds_edge and node.length < BLOCK_TOKENS:
                found.setdefault(node.tree_key, node)
    yield from sorted(found.values(), key=lambda node: -node.length)


class _Edges:
    """Edges that were looked up."""

    def __init__(self, tables: Sequence[NodeTable], exact: bool) -> None:
        self._tables = tables
        self._exact = exact
        self._known: dict[bytes, Placed | None] = {}

    def added(self, way: list[Step], window: int) -> list[Step] | None:
        """`way` with the edges that resuming at its end needs; None if one is missing."""
        end = way[-1].node.end
        edges: dict[int, Placed] = {}
        for index in range(len(way) - 1, -1, -1):
            if index < len(way) - 1 and way[index].node.end <= end - window:
                break
            edge = self._of(way[index].node.record.key)
            if edge is None or edge.record.start != way[index].node.end:
                return None
            edges[index] = edge
        steps: list[Step] = []
        for index, step in enumerate(way):
            steps.append(step)
            if index in edges:
                steps.append(Step(edges[index], 0))
        return steps

    def _of(self, key: bytes) -> Placed | None:
        if key not in self._known:
            self._known[key] = edge_of(self._tables, key, exact=self._exact)
        return self._known[key]
