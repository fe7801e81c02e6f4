"""How far a pin reaches: what of its path is stored, and from where on it can be gone on from.

Reads tables of nodes, one tier's or both tiers'; knows neither. `place_of` finds a node of theirs by its key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from .blocks import BLOCK_TOKENS, KEY_BYTES
from .resuming import edge_of
from .tree import NodeTable, Placed, shorter

PlaceOf = Callable[[bytes], Placed | None]


class PinRow(msgspec.Struct, array_like=True, frozen=True):
    """What is stored of a pin, under its place. A field may be added at the end."""

    namespace: bytes
    start: int  # position of the first token of its place
    label: str
    created: float  # Unix time, s
    expires: float  # Unix time, s; 0: never
    path: bytes = (
        b""  # keys of the nodes above its place, from the prompt's start; rows of before have none, or the last
    )
    asked: bytes = b""  # `blocks.text_digest` of the prompt that it was made for, which may go on behind its place
    own: int = 0  # tokens from which that prompt could be gone on, which computes one token at least; 0: not known
    tails: bytes = b""  # keys of nodes shorter than a block, on the path, from which could be gone on


class Point(NamedTuple):
    """From where can be gone on: a node, and the edges that this needs, in order; none where states have none."""

    node: Placed
    end: int  # tokens from the prompt's start that are pinned; the node may have more
    edges: list[Placed]


def end_of(place: bytes, row: PinRow) -> int:
    """Tokens from the prompt's start to a pin's end."""
    return row.start + (len(place) - KEY_BYTES) // 4


def keys_of(joined: bytes) -> list[bytes]:
    return [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]


def holder(tables: Sequence[NodeTable], place: bytes) -> Placed | None:
    """The node that holds a place's tokens: the one that stands there, or the first longer one."""
    exact = _exact(tables, place)
    if exact is not None:
        return exact
    for table in tables:
        after = table.at_or_after(place)
        if after is not None and after.tree_key.startswith(place):
            return after
    return None


def last(tables: Sequence[NodeTable], place_of: PlaceOf, place: bytes, row: PinRow) -> Placed | None:
    """The last node of a pin's path that is there; None if there is none."""
    node = holder(tables, place)
    return node if node is not None and node.record.start == row.start else _last_above(place_of, place, row)


def points(
    tables: Sequence[NodeTable], place_of: PlaceOf, place: bytes, row: PinRow, window: int | None
) -> Iterator[Point]:
    """From where on a pin's path can be gone on, the last first. `window`: as of `resuming.find`.

    Of what was stored on the path since it was pinned, nodes that are shorter than a block are not found.
    """
    if window is None:
        node = last(tables, place_of, place, row)
        if node is not None:
            yield Point(node, min(end_of(place, row), node.end), [])
        return
    found = (_exact(tables, place), *map(place_of, keys_of(row.tails)))
    tails = sorted((node for node in found if node is not None), key=lambda node: node.end)
    block = _last_above(place_of, place, row)
    while tails or block is not None:
        if block is None or (tails and tails[-1].end > block.end):
            node = tails.pop()
        else:
            node, block = block, place_of(block.parent)
        edges = _edges(tables, place_of, node, window)
        if edges is not None:
            yield Point(node, node.end, edges)


def held(tables: Sequence[NodeTable], place_of: PlaceOf, place: bytes, row: PinRow, window: int | None) -> list[Point]:
    """The last point of a pin, and before it the last one for its own prompt, where that is another one."""
    found: list[Point] = []
    for point in points(tables, place_of, place, row, window):
        if not found or point.end <= row.own:
            found.insert(0, point)
        if found[0].end <= row.own or not row.own:
            break
    return found


def kept(points: Sequence[Point], row: PinRow) -> int:
    """Of `held`: tokens from which any prompt could be gone on that could when it was pinned, its own one included."""
    if not points:
        return 0
    own = points[0].end if points[0].end <= row.own else 0
    return points[-1].end if own == row.own or points[-1].end <= row.own else own


def tails(tables: Sequence[NodeTable], way: Sequence[bytes]) -> bytes:
    """For `PinRow.tails`; `way`: tree keys of a path's nodes."""
    found = {
        node.record.key: None
        for tree_key in way
        for table in tables
        for node in shorter(table, tree_key)
        if node.record.holds_edge and node.length < BLOCK_TOKENS
    }
    return b"".join(found)


def _exact(tables: Sequence[NodeTable], place: bytes) -> Placed | None:
    for table in tables:
        record = table.get(place)
        if record is not None:
            return Placed(place, record)
    return None


def _last_above(place_of: PlaceOf, place: bytes, row: PinRow) -> Placed | None:
    """The last node above a pin's place that is there."""
    path = row.path or place[:KEY_BYTES]
    found, low, high = None, 0, len(path) // KEY_BYTES
    while low < high:  # a node is there only where its parent is
        middle = (low + high) // 2
        node = place_of(path[middle * KEY_BYTES : (middle + 1) * KEY_BYTES])
        if node is not None:
            found, low = node, middle + 1
        else:
            high = middle
    return found


def _edges(tables: Sequence[NodeTable], place_of: PlaceOf, node: Placed, window: int) -> list[Placed] | None:
    """Those that going on from a node's end needs, in order; None if one is missing."""
    found: list[Placed] = []
    at: Placed | None = node
    while at is not None and (at is node or at.end > node.end - window):
        edge = edge_of(tables, at.record.key)
        if edge is None or edge.record.start != at.end:
            return None
        found.append(edge)
        at = place_of(at.parent)
    return found[::-1]
