"""Ways that leave a path: what stands beside it in the tree, looked at within bounds.

Those who look hold the cache's lock, and beside a path may stand thousands of nodes: of any number of chats that begin
alike. So each time only so many are looked at, and whoever wants more goes without an answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from .tree import NodeTable, Placed

_LOOKS = 200  # nodes that are looked at, 2 ms of them
_CHILDREN = 64  # of a node in one table


class TooManyError(Exception):
    """As much was looked at as may be."""


class Ways:
    """Of tables that do not change meanwhile."""

    def __init__(self, tables: Sequence[NodeTable]) -> None:
        self.tables = tables
        self._left = _LOOKS
        self._known: dict[bytes, list[Placed]] = {}

    def children(self, key: bytes) -> list[Placed]:
        """Of a node, edges among them, each once. Raises TooManyError."""
        found = self._known.get(key)
        if found is None:
            placed: dict[bytes, Placed] = {}
            for table in self.tables:
                for child in islice(table.children(key), min(_CHILDREN, max(0, self._left) + 1)):
                    self._left -= 1
                    placed.setdefault(child.tree_key, child)
            self._left -= 1
            if self._left < 0:
                raise TooManyError
            found = self._known[key] = list(placed.values())
        return found

    def aside(self, node: Placed, following: Placed) -> list[Placed]:
        """Children of `node` that leave the path on which `following` comes next. Raises TooManyError."""
        return [
            child
            for child in self.children(node.record.key)
            if not child.is_edge and not following.tree_key.startswith(child.tree_key)
        ]

    def ends(self, top: Placed) -> Iterator[list[Placed]]:
        """The way from `top` to each end below it. Raises TooManyError."""
        waiting = [[top]]
        while waiting:
            way = waiting.pop()
            onwards = [child for child in self.children(way[-1].record.key) if not child.is_edge]
            waiting += [[*way, child] for child in onwards]
            if not onwards:
                yield way
