"""What a node is worth: who goes first when a tier is full.

Knows figures of nodes, not tiers: the hot tier keeps the ranks in RAM (`Candidates`), the warm tier as the sort order
of a table (`order_key`).
"""

from __future__ import annotations

import heapq
import itertools
import struct
from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

_ORDER = struct.Struct(">dI")

T = TypeVar("T")


class Rank(NamedTuple):
    """Smaller goes first."""

    worth: float  # at least 0
    depth: int  # of equal ones the deeper goes first, so that a path goes from its leaf; minus the end in tokens


class Policy(Protocol):
    """Ranks nodes. Whatever the ranks, tiers let leaves go before their parents."""

    def rank(self, *, last_use: float, end: int, size: int, cost: float, hits: int) -> Rank:
        """`last_use` in Unix seconds, `end` in tokens from the prompt's start, `size` in bytes, `cost` in seconds."""
        ...


class LeastRecentlyUsed:
    """The node whose last use is longest ago goes first."""

    def rank(self, *, last_use: float, end: int, size: int, cost: float, hits: int) -> Rank:
        return Rank(max(0.0, last_use), -end)


def order_key(rank: Rank) -> bytes:
    """12 bytes that sort as the ranks do."""
    return _ORDER.pack(rank.worth, 0xFFFFFFFF + rank.depth)


class Candidates(Generic[T]):
    """What may be evicted, cheapest first. `offer` and `pop` cost O(log n).

    An item is offered whenever it may have become evictable or its rank has changed, and never taken back: `pop` asks
    for its present rank, and skips those that have none.
    """

    def __init__(self, rank: Callable[[T], Rank | None]) -> None:
        """`rank`: of an item now; None if it must not be evicted (it is offered again when it may be)."""
        self._rank = rank
        self._heap: list[tuple[Rank, int, T]] = []
        self._count = itertools.count()

    def __len__(self) -> int:
        """Offers that wait, stale ones included."""
        return len(self._heap)

    def offer(self, item: T) -> None:
        rank = self._rank(item)
        if rank is not None:
            heapq.heappush(self._heap, (rank, next(self._count), item))

    def pop(self) -> T | None:
        """The evictable item with the lowest rank; None if there is none. Its other offers stay, and become stale."""
        while self._heap:
            offered, _number, item = heapq.heappop(self._heap)
            rank = self._rank(item)
            if rank == offered:
                return item
            if rank is not None:
                heapq.heappush(self._heap, (rank, next(self._count), item))
        return None

    def shrink(self, items: int) -> None:
        """Forget stale offers once they are most of the heap; `items` is how many can be evictable at all."""
        if len(self._heap) > 64 + 4 * items:
            newest = {id(entry[2]): entry[2] for entry in self._heap}
            self._heap.clear()
            for item in newest.values():
                self.offer(item)
