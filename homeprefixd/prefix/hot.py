"""The hot tier: nodes whose state lies ready in the arena, each in an extent of its own or as a part of a run.

Index, leases and eviction in RAM. Not thread-safe: `cache.py` calls it under its lock.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from .arena import Arena, pages
from .policy import Candidates, Policy, Rank, overdue
from .tree import MemoryTable, Placed


@dataclass(slots=True, eq=False)
class Extent:
    """Bytes of the arena. `holders`: nodes, loads and clients to whom it belongs; it is freed with the last."""

    offset: int
    size: int
    holders: int = 0


@dataclass(slots=True, eq=False)
class HotNode:
    """A node in the arena."""

    node: Placed
    extent: Extent
    warm: bool  # it is on disk too
    part: int = 0  # of a run of `parts` in its extent
    parts: int = 1
    leases: int = 0  # who reads its slot: lookups, and the writer
    queued: bool = False  # it waits to be written
    children: int = 0  # of it that are hot
    indexed: bool = field(default=True)  # False: it was dropped, and is freed with its last lease
    offered: bool = field(default=False)  # see policy.Candidates

    @property
    def key(self) -> bytes:
        return self.node.record.key

    @property
    def size(self) -> int:
        return self.node.record.size

    @property
    def offset(self) -> int:
        """Of its extent, which it may share."""
        return self.extent.offset


def run_of(hot: HotNode) -> tuple[int, int, int]:
    """Its part, the parts of its run, and the run's bytes; (0, 1, 0) if it lies alone."""
    return (hot.part, hot.parts, hot.extent.size) if hot.parts > 1 else (0, 1, 0)


class HotTier:
    """`on_evict` is told of every node that goes because its room was needed."""

    def __init__(
        self,
        arena: Arena,
        policy: Policy,
        *,
        now: Callable[[], float],
        wall: Callable[[], float],
        on_evict: Callable[[HotNode], None],
    ) -> None:
        """`now`: the clock of the arena, `wall`: that of the nodes' last use."""
        self.arena = arena
        self.table = MemoryTable()
        self.by_key: dict[bytes, HotNode] = {}
        self.detached: set[HotNode] = set()
        """Dropped, but still leased."""
        self.keep_queued = True
        """Whether a node that waits to be written is kept; False while the disk does not take any."""
        self.departures = 0
        """Grows whenever a node leaves."""
        self._policy = policy
        self._now = now
        self._wall = wall
        self._on_evict = on_evict
        self._candidates: Candidates[HotNode] = Candidates(self._rank, wall)

    def __len__(self) -> int:
        return len(self.by_key)

    def hold(self, extent: Extent) -> None:
        extent.holders += 1

    def leave(self, extent: Extent) -> None:
        """One holder less."""
        extent.holders -= 1
        if not extent.holders:
            self.arena.free(extent.offset, extent.size, self._now())

    def insert(self, hot: HotNode) -> None:
        """Publish a node whose slot is filled."""
        self.hold(hot.extent)
        self.table.put(hot.node.tree_key, hot.node.record)
        self.by_key[hot.key] = hot
        hot.children = sum(1 for _child in self.table.children(hot.key))
        parent = self.by_key.get(hot.node.parent)
        if parent is not None:
            parent.children += 1
        self.offer(hot)

    def drop(self, hot: HotNode) -> None:
        """Take a node out of the index; its slot is freed now, or with its last lease."""
        self.table.remove(hot.node.tree_key)
        del self.by_key[hot.key]
        hot.indexed = False
        self.departures += 1
        parent = self.by_key.get(hot.node.parent)
        if parent is not None:
            parent.children -= 1
            self.offer(parent)
        if hot.leases:
            self.detached.add(hot)
        else:
            self.leave(hot.extent)

    def subtree(self, key: bytes) -> list[HotNode]:
        """Hot nodes below `key` (a node's or a namespace), reached through hot ones; children before parents."""
        found: list[HotNode] = []
        waiting = [key]
        while waiting:
            children = [self.by_key[child.record.key] for child in self.table.children(waiting.pop())]
            found += children
            waiting += [child.key for child in children]
        return found[::-1]

    def lease(self, hot: HotNode) -> None:
        hot.leases += 1

    def release(self, hot: HotNode) -> None:
        """End one lease."""
        hot.leases -= 1
        if hot.leases == 0 and not hot.indexed:
            self.detached.discard(hot)
            self.leave(hot.extent)
        self.offer(hot)

    def offer(self, hot: HotNode) -> None:
        """To be called when a node may have become evictable."""
        self._candidates.offer(hot)
        self._candidates.shrink(len(self.by_key))

    def set_keep_queued(self, keep: bool) -> None:
        if self.keep_queued and not keep:
            self.keep_queued = False
            for hot in self.by_key.values():
                if hot.queued:
                    self._candidates.offer(hot)
        self.keep_queued = keep

    def allocate(self, size: int, *, settled: float = 0.0, most: int | None = None, keep: bytes = b"") -> Extent | None:
        """`size` bytes with one holder, the caller, evicting what must go; None if there is no room for them.

        Ends of paths go first, then what lies before an end that must stay, as where one path fills all there is; at
        last what is not on disk yet, but not what was used in the last `settled` seconds. `most`: bytes that may go:
        where what is free lies scattered, much would have to go until a large piece of it lies together. `keep`: key of
        a node that stays if it is in RAM only.
        """
        if not 0 < size <= self.arena.allowance:
            return None
        gone = 0
        possible: bool | None = None
        while (offset := self.arena.allocate(size)) is None:
            if most is not None and gone >= most:
                return None
            victim = self._end(keep) or self._inner()
            if victim is None:
                possible = possible if possible is not None else self._can_have(size)
                victim = self._unwritten(settled, keep) if possible else None
            if victim is None:
                return None
            gone += victim.size
            self._on_evict(victim)
            self.drop(victim)
        return Extent(offset, size, 1)

    def _can_have(self, size: int) -> bool:
        """Whether there would be room for `size` bytes if all went that nobody uses: else nothing shall go in vain."""
        used = {hot.extent.offset for hot in self.by_key.values() if hot.leases}
        unused = {hot.extent.offset: hot.extent.size for hot in self.by_key.values() if hot.extent.offset not in used}
        return self.arena.used - sum(map(pages, unused.values())) + pages(size) <= self.arena.allowance

    def evict(self) -> bool:
        """Let the node go that is worth least; False if none may: they are leased, or wait to be written."""
        victim = self._candidates.pop() or self._inner()
        if victim is None:
            return False
        self._on_evict(victim)
        self.drop(victim)
        return True

    def _end(self, keep: bytes) -> HotNode | None:
        """The end of a path that is to go next."""
        victim = self._candidates.pop()
        if victim is None or victim.key != keep or victim.warm:
            return victim
        other = self._candidates.pop()
        self.offer(victim)
        return other

    def _inner(self) -> HotNode | None:
        """The node to go when all ends are in use or wait to be written: the deepest before them that is on disk."""
        free = [hot for hot in self.by_key.values() if hot.warm and not (hot.leases or hot.queued)]
        above = {hot.node.parent for hot in free}
        return self._most_overdue(hot for hot in free if hot.key not in above)

    def _unwritten(self, settled: float, keep: bytes) -> HotNode | None:
        """The node to go when only those that wait to be written are left: better they than a request that waits."""
        before = self._wall() - settled
        return self._most_overdue(
            hot
            for hot in self.by_key.values()
            if not (hot.leases or hot.children) and hot.node.record.last_use <= before and hot.key != keep
        )

    def overdue(self, hot: HotNode) -> float:
        """See `policy.overdue`: the higher, the less it is worth."""
        return overdue(self._rank_of(hot), self._wall())

    def _most_overdue(self, among: Iterable[HotNode]) -> HotNode | None:
        now = self._wall()
        return max(among, key=lambda hot: overdue(self._rank_of(hot), now), default=None)

    def _rank(self, hot: HotNode) -> Rank | None:
        if not hot.indexed or hot.leases or hot.children or (hot.queued and self.keep_queued):
            return None
        return self._rank_of(hot)

    def _rank_of(self, hot: HotNode) -> Rank:
        record = hot.node.record
        return self._policy.rank(
            last_use=record.last_use, end=hot.node.end, size=record.size, cost=hot.node.mean_cost, hits=record.hits
        )

    def extents(self) -> dict[Extent, int]:
        """Those of all nodes, and how many nodes each has."""
        return Counter(hot.extent for hot in (*self.by_key.values(), *self.detached))

    def check(self) -> None:
        """Raises ValueError if index, leases and counts do not agree."""
        if len(self.table) != len(self.by_key):
            raise ValueError(f"{len(self.table)} places for {len(self.by_key)} hot nodes")
        for key, hot in self.by_key.items():
            if hot.key != key or self.table.get(hot.node.tree_key) is not hot.node.record or not hot.indexed:
                raise ValueError(f"hot node {key.hex()} is not where it should be")
            if hot.leases < 0 or hot.children != sum(1 for _child in self.table.children(key)):
                raise ValueError(f"hot node {key.hex()}: {hot.leases} leases, {hot.children} children")
        for hot in self.detached:
            if hot.leases <= 0 or hot.indexed:
                raise ValueError(f"dropped node {hot.key.hex()} has {hot.leases} leases")
        ends = sorted((extent.offset, extent.offset + pages(extent.size)) for extent in self.extents())
        for (_start, end), (start, _end) in itertools.pairwise(ends):
            if start < end:
                raise ValueError(f"slots overlap at {start}")
