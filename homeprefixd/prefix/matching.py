"""Look-ups: how far a prompt is known, which nodes are leased for it, and how much of RAM they may take at a time.

Works on the state of `cache.py`. The tree on disk is walked without its lock.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from ..frames.store import PlanNode
from .arena import pages
from .blocks import TokensBE, edges_of, swap
from .disk import Disk
from .hot import HotNode, run_of
from .loading import Lease
from .resuming import Found, find
from .tree import LockedTable, NodeTable

if TYPE_CHECKING:
    from .cache import Cache
    from .session import Session

_LEAST_WINDOW = 2  # nodes: where there is not so much for a match, its nodes come one by one, when it has its turn
_WHOLE = 0.75  # of what RAM may be used: a match that takes more is streamed

log = logging.getLogger(__name__)


class Matching:
    """Look-ups of a cache. `disk` is None where there is none."""

    def __init__(self, cache: Cache, disk: Disk | None) -> None:
        self._cache = cache
        self._disk = disk

    def lookup(
        self, namespace: bytes, tokens: bytes, limit: int, exact: bool, session: Session | None, load: bool
    ) -> Lease:
        """See `Cache.lookup`."""
        cache = self._cache
        wanted = TokensBE(swap(tokens[: max(0, limit) * 4]))
        state = self._state()
        found = self._match_unlocked(namespace, wanted, limit, exact) if self._disk is not None else None
        lease = Lease([], [])
        now = cache.wall()
        with cache.lock:
            if found is None or state != self._state():  # what was read meanwhile is in the page cache now
                found = self._match(namespace, wanted, limit, exact)
            lease.known = found.known
            if load:
                lease.window, lease.claim = self._window(found)
            ahead = 0
            for node, use in found.steps:
                hot = cache.hot.by_key.get(node.record.key)
                record = hot.node.record if hot else node.record
                offset, run = -1, (0, 1, 0)
                ahead += record.size
                # of a streamed one what comes later is not kept yet, but where it would be lost
                if load and hot is not None and (not lease.window or ahead <= lease.window or not hot.warm):
                    cache.hot.lease(hot)
                    lease.held[len(lease.plan)] = hot
                    offset, run = hot.offset, run_of(hot)
                if load:
                    cache.touch(record, hot, now)
                tier: Literal["hot", "warm"] = "hot" if hot else "warm"
                lease.places.append(node.tree_key)
                count = 0 if node.is_edge else node.length
                planned = (record.key, record.start, count, use, tier, record.size, record.grid, offset, node.is_edge)
                lease.plan.append(PlanNode(*planned, *run))
            if load:
                self._count_lookup(lease)
                if session is not None:
                    session.leases.add(lease)
        return lease

    def _window(self, found: Found) -> tuple[int, int]:
        """Bytes of a match that are kept in RAM at a time; 0 where it can be kept whole, or is there already.

        Also `Lease.claim`. A part of what others leave free stays free, so that each goes on, if slowly.
        """
        missing = total = idle = 0
        for node, _use in found.steps:
            size = pages(node.record.size)
            total += size
            hot = self._cache.hot.by_key.get(node.record.key)
            missing += hot is None
            idle += size if hot is not None and not hot.leases else 0
        claimed = self._claimed()
        free = max(0, self._cache.arena.allowance - claimed)
        if not missing and idle <= free:  # else those that came before could not get what they claim
            return 0, 0
        least = _LEAST_WINDOW * max(pages(node.record.size) for node, _use in found.steps)
        if total <= free * _WHOLE and (free - total >= least or not claimed):
            return 0, total
        window = free // 2
        return (window, window) if window >= least else (1, 1)  # what is left is for those whose turn it is

    def _claimed(self) -> int:
        """Bytes of RAM that matches hold, or may come to hold."""
        claims, held = 0, set[HotNode]()
        for lease in self._leases():
            claims += lease.claim
            if not lease.claim:
                held.update(lease.held.values())
        return claims + sum(pages(hot.size) for hot in held)

    def _leases(self) -> Iterator[Lease]:
        return (lease for session in self._cache.sessions for lease in session.leases if not lease.released)

    def others_hold(self, lease: Lease) -> bool:
        """See `Cache.others_hold`."""
        return any(other.held or other.coming for other in self._leases() if other is not lease)

    def taken(self, lease: Lease, count: int) -> None:
        """See `Cache.taken`."""
        with self._cache.lock:
            if not lease.streamed or lease.released:
                return
            lease.wanted = True
            for index in [index for index in lease.held if index < count]:
                self._cache.hot.release(lease.held.pop(index))
            lease.progress = max(lease.progress, count)

    def _state(self) -> tuple[int, int]:
        """Differs from an earlier one if nodes have left either tier since."""
        return self._cache.removals, self._cache.hot.departures

    def _match_unlocked(self, namespace: bytes, wanted: TokensBE, limit: int, exact: bool) -> Found | None:
        """A match without holding the lock while the disk is read: on a cold disk that takes tens of milliseconds.

        It is right if no node has left a tier meanwhile (`_state`): one that moved from RAM to disk after the disk's
        transaction began is still in RAM then.
        """
        if self._disk is None:
            return None
        try:
            with self._disk.table(self._cache.hidden) as warm:
                return self._find(
                    [LockedTable(self._cache.hot.table, self._cache.lock), warm], namespace, wanted, limit, exact
                )
        except Exception as error:
            log.debug("looking up failed, it is tried again: %s", error)
            return None

    def _match(self, namespace: bytes, wanted: TokensBE, limit: int, exact: bool) -> Found:
        try:
            with self._cache.view() as (tables, _warm):
                return self._find(tables, namespace, wanted, limit, exact)
        except Exception as error:
            self._cache.trouble("looking up", error)
            return self._find([self._cache.hot.table], namespace, wanted, limit, exact)

    def _find(self, tables: Sequence[NodeTable], namespace: bytes, wanted: TokensBE, limit: int, exact: bool) -> Found:
        edges = edges_of(self._cache.namespaces.get(namespace, {}))
        window = edges.window if edges is not None else None
        return find(tables, namespace, wanted, limit=limit, exact=exact, window=window)

    def _count_lookup(self, lease: Lease) -> None:
        self._cache.counters.lookups += 1
        self._cache.counters.hits += bool(lease.plan)
        for node in lease.plan:
            if node.tier == "hot":
                self._cache.counters.tokens_matched_hot += node.use
            else:
                self._cache.counters.tokens_matched_warm += node.use
