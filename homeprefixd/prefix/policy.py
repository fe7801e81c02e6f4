"""What a node is worth: who goes first when a tier is full.

A node is worth the seconds of prefill that it saves for each byte it takes, as often as it is used. How often that
will be is guessed from how often it was used and how long ago: a node may lie unused for a time that is proportional
to its worth, and grows nearly threefold with each use. So a tier of any size, at any load, keeps what was used twice
about three times as long as what was used once; prompts that nobody sends again pass through without taking the place
of those. The factor was chosen by replaying a trace (`homeprefixd simulate`), whole and in halves: 2 is worse in both,
4 is better in the halves and worse where nearly everything fits.

Knows figures of nodes, not tiers: the hot tier keeps the ranks of its leaves in RAM (`Candidates`), the warm tier as
the sort order of a table (`order_key`). A rank does not change while its node is not used, and a use moves it back
only; so nothing is written, or sorted, because time goes by. Time is wall-clock time, which survives a restart.
"""

from __future__ import annotations

import heapq
import itertools
import math
import struct
from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

_ORDER = struct.Struct(">BdI")
_WORDS = struct.Struct("<4I")

LEVELS = 128
"""Two steps up, and a node may lie unused twice as long."""

_MIDDLE = 48  # level of a node that saves a second per MiB and was not used again
_USE_LEVELS = 3  # that a use is worth
_MOST_USES = 10  # that count
_MOMENT = 1.0  # s; of nodes that are about as new, the one that is worth least goes


_SHARES: list[float] = [2.0 ** (-level / 2) for level in range(LEVELS)]


class Rank(NamedTuple):
    """Of one level the smaller goes first; of several levels see `overdue`."""

    level: int
    last_use: float  # Unix time, s, at least 0
    depth: int  # of equal ones the deeper goes first, so that a path goes from its leaf; minus the end in tokens


def overdue(rank: Rank, now: float) -> float:
    """How long a node lies unused, in units of how long it may: of the first ones of all levels, the highest goes."""
    return (max(0.0, now - rank.last_use) + _MOMENT) * _SHARES[rank.level]


class Policy(Protocol):
    """Ranks nodes. Whatever the ranks, tiers let leaves go before their parents."""

    def rank(self, *, last_use: float, end: int, size: int, cost: float, hits: int) -> Rank:
        """`last_use` in Unix seconds, `end` in tokens from the prompt's start, `size` in bytes.

        `cost`: seconds of prefill that the node saves, by the mean of its whole prefix (`Placed.mean_cost`).
        """
        ...


class LeastRecentlyUsed:
    """The node whose last use is longest ago goes first."""

    def rank(self, *, last_use: float, end: int, size: int, cost: float, hits: int) -> Rank:
        return Rank(0, max(0.0, last_use), -end)


class Worth:
    """Seconds saved per byte, times 2.8 for each use, against the time since the last one."""

    def rank(self, *, last_use: float, end: int, size: int, cost: float, hits: int) -> Rank:
        per_mib = cost * 1048576 / size if size > 0 else 0.0
        level = _MIDDLE + _USE_LEVELS * min(hits, _MOST_USES)
        if 0 < per_mib < math.inf:
            level += round(2 * math.log2(per_mib))
        return Rank(min(max(level, 0), LEVELS - 1), max(0.0, last_use), -end)


def order_key(rank: Rank) -> bytes:
    """13 bytes; those of one level begin with the same byte and sort as their ranks do."""
    return _ORDER.pack(rank.level, rank.last_use, 0xFFFFFFFF + rank.depth)


def rank_of(order_key: bytes) -> Rank:
    """The inverse; what follows the key is ignored."""
    level, last_use, depth = _ORDER.unpack_from(order_key)
    return Rank(level, last_use, depth - 0xFFFFFFFF)


ORDER_BYTES = _ORDER.size
LAST_USE_END = 9
"""Bytes [1, LAST_USE_END) of a key are its last use, and sort as it does."""


class Candidate(Protocol):
    """What `Candidates` ranks. `offered` is its own: whether it waits there."""

    offered: bool


T = TypeVar("T", bound=Candidate)


class Candidates(Generic[T]):
    """What may be evicted, the most overdue first. `offer` and `pop` cost O(log n), and most offers nothing.

    An item is offered whenever it may have become evictable, and never taken back: `pop` asks for its present rank,
    and skips those that have none. A rank may only grow while its item waits.
    """

    def __init__(self, rank: Callable[[T], Rank | None], now: Callable[[], float]) -> None:
        """`rank`: of an item now; None if it must not be evicted (it is offered again when it may be).

        `now`: Unix time, s.
        """
        self._rank = rank
        self._now = now
        self._levels: dict[int, list[tuple[float, int, int, T]]] = {}  # heaps: last use, depth, number, item
        self._size = 0
        self._count = itertools.count()

    def __len__(self) -> int:
        """Items that wait, those included that are not evictable any more."""
        return self._size

    def offer(self, item: T) -> None:
        if item.offered:
            return  # found later than its rank says, if at all
        rank = self._rank(item)
        if rank is not None:
            self._push(rank, item)

    def pop(self) -> T | None:
        """The evictable item that is most overdue; None if there is none."""
        now = self._now()
        best: Rank | None = None
        for level in list(self._levels):
            head = self._head(level)
            if head is not None and (best is None or overdue(head, now) > overdue(best, now)):
                best = head
        if best is None:
            return None
        return self._pop(self._levels[best.level])

    def shrink(self, items: int) -> None:
        """Forget those that are not evictable, once they are most; `items` is how many can be evictable at all."""
        if self._size > 64 + 2 * items:
            heaps, self._levels, self._size = self._levels, {}, 0
            for entry in itertools.chain(*heaps.values()):
                entry[3].offered = False
                self.offer(entry[3])

    def _pop(self, heap: list[tuple[float, int, int, T]]) -> T:
        item = heapq.heappop(heap)[3]
        item.offered = False
        self._size -= 1
        return item

    def _push(self, rank: Rank, item: T) -> None:
        item.offered = True
        self._size += 1
        entry = (rank.last_use, rank.depth, next(self._count), item)
        heapq.heappush(self._levels.setdefault(rank.level, []), entry)

    def _head(self, level: int) -> Rank | None:
        """The rank of a level's first item, once those before it that have another by now are put right."""
        heap = self._levels[level]
        while heap:
            last_use, depth, _number, item = heap[0]
            offered = Rank(level, last_use, depth)
            rank = self._rank(item)
            if rank == offered:
                return rank
            self._pop(heap)
            if rank is not None:
                self._push(rank, item)
        del self._levels[level]
        return None


class Evicted:
    """Remembers how often nodes were used that are gone, so that one that comes back is not taken for new.

    A count-min sketch: 512 KiB whatever is evicted. Keys are hashes, so their own bytes choose the cells. When it has
    taken in as many nodes as it tells apart well, everything in it counts half as much.
    """

    _ROWS = 4
    _CELLS = 1 << 17

    def __init__(self) -> None:
        self._cells = [bytearray(self._CELLS) for _row in range(self._ROWS)]
        self._added = 0

    def add(self, key: bytes, hits: int) -> None:
        """A node was evicted after so many uses."""
        uses = min(hits + 1, 255)
        for row, cell in enumerate(self._at(key)):
            if self._cells[row][cell] < uses:
                self._cells[row][cell] = uses
        self._added += 1
        if self._added > self._CELLS:
            self._added //= 2
            for number, cells in enumerate(self._cells):
                self._cells[number] = cells.translate(_HALVES)

    def hits(self, key: bytes) -> int:
        """Uses of a node before it was evicted, its first computation included; 0 if it is not known."""
        return min(self._cells[row][cell] for row, cell in enumerate(self._at(key)))

    def _at(self, key: bytes) -> list[int]:
        return [word % self._CELLS for word in _WORDS.unpack_from(key)]


_HALVES = bytes(value // 2 for value in range(256))
