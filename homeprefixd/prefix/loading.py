"""Blocks from disk to RAM: the reader threads' side of the cache, and what happens to a damaged one.

What somebody waits for lies alone: to put it into a run takes longer than it saves the worker (measured: 0.6 and 0.3 ms
a block). What is loaded ahead of all requests lies in runs.
Works on the state of `cache.py`, under its lock; never holds the lock while a payload is read.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ..frames.store import PlanNode
from .blocks import KEY_BYTES
from .codec import DamagedError, Decoder
from .disk import Disk, MissingError
from .hot import Extent, HotNode
from .runs import longest_run
from .tree import BLOCK_BYTES, Placed, Record

if TYPE_CHECKING:
    from .cache import Cache

log = logging.getLogger(__name__)


class BlockLostError(Exception):
    """A block of a plan cannot be had, nor those after it. The message is the reason."""


class NoRoomYetError(BlockLostError):
    """There will be room when those before it have been taken (`Cache.taken`)."""


class Target(NamedTuple):
    """Where a block is to lie: alone in an extent, or in a run of `parts`."""

    extent: Extent
    part: int = 0
    parts: int = 1


@dataclass(slots=True, eq=False)
class Lease:
    """A match whose nodes are kept until it is released. `plan[i].offset` is -1 for those that `Cache.load` brings.

    One that RAM cannot hold whole is `streamed`: its nodes come in order, at most `window` bytes ahead of those that
    were taken already, which need not be kept any more.
    """

    plan: list[PlanNode]
    places: list[bytes]  # tree keys
    held: dict[int, HotNode] = field(default_factory=dict)  # by index
    released: bool = False
    known: int = 0  # leading tokens that are known, whether they can be resumed or not
    window: int = 0  # 0: not streamed
    wanted: bool = False  # its nodes are being taken: it has had its turn
    claim: int = 0  # bytes of RAM that it may come to hold at a time; 0: all of it is there
    coming: set[int] = field(default_factory=set)  # indices that are being loaded
    progress: int = 0  # nodes that were taken

    @property
    def streamed(self) -> bool:
        return self.window > 0

    def ahead(self, index: int) -> list[int]:
        """Which nodes will be taken before `index` has to be there: an edge is taken together with its node."""
        needed = index - 1 if self.plan[index].edge else index
        return [i for i in (*self.held, *self.coming) if i < needed]

    def must_wait(self, index: int, size: int) -> bool:
        """Whether node `index` would be too far ahead: others before it are on their way, and fill the window.

        A window that is less than a node gives one at a time, once they are wanted. Nor may it take the room of one
        before it that is still to come.
        """
        ahead = self.ahead(index)
        if not self.wanted and size > self.window:
            return True
        if any(i not in self.held and i not in self.coming for i in range(self.progress, index)):
            return True
        return bool(ahead) and sum(self.plan[i].size for i in ahead) + size > self.window


class Loading:
    """Loads of a cache. `disk` is None where there is none: then nothing can be loaded."""

    def __init__(self, cache: Cache, disk: Disk | None) -> None:
        self._cache = cache
        self._disk = disk

    def load(self, lease: Lease, index: int, decoder: Decoder) -> HotNode:
        """See `Cache.load`."""
        cache = self._cache
        key, size = lease.plan[index].key, lease.plan[index].size
        with cache.lock:
            while key in cache.loading and key not in cache.hot.by_key and not lease.released:
                cache.loaded.wait()
            if lease.released:
                raise BlockLostError("released")
            if index in lease.held:
                return lease.held[index]
            if lease.streamed and lease.must_wait(index, size):
                raise NoRoomYetError("those before it are not taken")
            hot = cache.hot.by_key.get(key)
            if hot is not None and hot.size == size:
                return self._hold(lease, index, hot)
            extent = cache.hot.allocate(size) if self._disk is not None and hot is None else None
            if extent is None:
                if (lease.streamed and lease.ahead(index)) or (hot is None and cache.others_hold(lease)):
                    raise NoRoomYetError("those before it, or other requests, fill what room there is")
                cache.counters.no_room += 1
                cache.counters.lost += 1
                raise BlockLostError("no room in the hot tier" if hot is None else "replaced")
            cache.loading[key] = extent
            lease.coming.add(index)
            removals = cache.removals
        target = Target(extent)
        with self._bring(lease.places[index], key, target, size, removals, decoder) as (record, reason):
            lease.coming.discard(index)
            if record is None:
                cache.counters.lost += 1
                raise BlockLostError(reason)
            hot = self._publish(lease.places[index], record, target)
            if hot is None or lease.released:
                raise BlockLostError("released" if lease.released else "replaced")
            return self._hold(lease, index, hot)

    def preload(self, nodes: Sequence[Placed], decoder: Decoder) -> int:
        """See `Cache.preload`."""
        cache = self._cache
        with cache.lock:
            known = [n.record.key in cache.hot.by_key or n.record.key in cache.loading for n in nodes]
            if known[0]:
                return known.index(False) if False in known else len(known)
            count = known.index(True) if True in known else len(known)
            count = min(count, longest_run(nodes[0].record.size, cache.arena.allowance))
            layout = cache.layouts.get(nodes[0].record.namespace)
            if layout is None or any(node.record.size != layout.size(1) for node in nodes[:count]):
                count = 1
            size = layout.size(count) if layout is not None and count > 1 else nodes[0].record.size
            offset = cache.arena.allocate(size)
            if offset is None:
                return 0
            extent = Extent(offset, size, count)
            cache.loading.update((node.record.key, extent) for node in nodes[:count])
            removals = cache.removals
        loaded = 0
        for part, (place, record) in enumerate(nodes[:count]):
            target = Target(extent, part, count)
            with self._bring(place, record.key, target, record.size, removals, decoder) as (found, _reason):
                loaded += found is not None and self._publish(place, found, target) is not None
        return count if loaded == count else 0

    @contextmanager
    def _bring(
        self, place: bytes, key: bytes, target: Target, size: int, removals: int, decoder: Decoder
    ) -> Iterator[tuple[Record | None, str]]:
        """Read a block that was noted in `loading` at `removals`; its record, or why not, under the cache's lock.

        The load's hold on `target` ends with it.
        """
        cache, extent = self._cache, target.extent
        record: Record | None = None
        try:
            reason = "no memory for it"
            if self._disk is not None and cache.arena.populate(extent.offset, extent.size):
                record, reason = self._fill(place, target, size, decoder)
        except Exception as error:  # whatever it is: others wait for this load to end
            cache.trouble("loading a block", error)
            reason = f"cannot be read: {error}"
        with cache.lock:
            del cache.loading[key]
            cache.loaded.notify_all()
            if record is not None and self._is_gone(key, place, removals):
                record, reason = None, "removed"
            try:
                yield record, reason
            finally:
                cache.hot.leave(extent)

    def _is_gone(self, key: bytes, place: bytes, removals: int) -> bool:
        """Whether a block has left the disk, or shall, since `removals` was the cache's count of that."""
        cache = self._cache
        if key in cache.hidden or removals == cache.removals:
            return key in cache.hidden
        try:
            return not cache.is_stored(place)
        except Exception as error:
            cache.trouble("looking for a block", error)
            return True

    def _fill(self, place: bytes, target: Target, size: int, decoder: Decoder) -> tuple[Record | None, str]:
        """Read a block to where it is to lie."""
        cache, extent = self._cache, target.extent
        memory = cache.arena.view(extent.offset, extent.size)
        if target.parts == 1:
            record, reason = self._read(place, memory, decoder)
            if record is not None and len(place) == KEY_BYTES + BLOCK_BYTES:
                with cache.lock:
                    cache.layouts.learn(record.namespace, memory)
            return record, reason
        state = decoder.scratch(size)
        record, reason = self._read(place, state, decoder)
        layout = cache.layouts.get(record.namespace) if record is not None else None
        if layout is not None:
            layout.put(state, memory, target.part, target.parts)
        return record, reason

    def read(self, place: bytes, out: memoryview, decoder: Decoder) -> None:
        """See `Cache.read`."""
        record, reason = self._read(place, out, decoder)
        if record is None:
            raise BlockLostError(reason)

    def _read(self, place: bytes, out: memoryview, decoder: Decoder) -> tuple[Record | None, str]:
        cache, size = self._cache, len(out)
        if self._disk is None:
            return None, "evicted"
        begin = time.perf_counter()
        try:
            record = self._disk.load(place, out, decoder)
        except MissingError:
            return None, "evicted"
        except DamagedError as error:
            self.damaged(place, str(error))
            return None, f"damaged: {error}"
        except Exception as error:
            cache.trouble("reading a block", error)
            return None, f"cannot be read: {error}"
        with cache.lock:
            cache.counters.loaded_nodes += 1
            cache.counters.loaded_bytes += size
            seconds = time.perf_counter() - begin
            cache.counters.restore_seconds += seconds
            cache.read_rate.add(size, seconds)
        return record, ""

    def _publish(self, place: bytes, record: Record, target: Target) -> HotNode | None:
        cache = self._cache
        hot = cache.hot.by_key.get(record.key)
        if hot is not None:  # computed again and committed meanwhile
            return hot if hot.size == record.size else None
        for touch in cache.unseen(record):
            record.last_use = touch.last_use
            record.hits += touch.hits
        hot = HotNode(Placed(place, record), target.extent, True, target.part, target.parts)
        cache.hot.insert(hot)
        return hot

    def _hold(self, lease: Lease, index: int, hot: HotNode) -> HotNode:
        self._cache.hot.lease(hot)
        lease.held[index] = hot
        return hot

    def damaged(self, place: bytes, reason: str) -> list[bytes]:
        """See `Cache.damaged`."""
        cache = self._cache
        with cache.view() as (_tables, warm):
            record = warm.get(place) if warm is not None else None
            if warm is None or record is None:
                return []
            gone: list[bytes] = [record.key, *(node.record.key for node in warm.subtree(record.key))]
            log.error("a stored block is damaged (%s); it and what follows it will be computed again", reason)
            cache.counters.damaged += 1
            cache.removals_seen.add(gone, "damaged")
            cache.hide(gone)
            cache.repairs.append(record.key)
            cache.forget_hot_subtree(record.key)
        cache.wake()
        return gone

    def refused(self, namespace: bytes, key: bytes, reason: str) -> int:
        """See `Cache.refused`."""
        cache, decoder = self._cache, Decoder()
        with cache.view() as (_tables, warm):
            hot = cache.hot.by_key.get(key)
            node = hot.node if hot is not None else warm.place(key) if warm is not None else None
            if node is None or node.record.namespace != namespace:
                return 0
            is_stored = warm is not None and warm.get(node.tree_key) is not None
        if not is_stored:
            return self._forget_refused(key, reason)
        state = memoryview(bytearray(node.record.size))
        record, _reason = self._read(node.tree_key, state, decoder)
        if record is None:
            return 0  # it is damaged, which was noted, or gone
        with cache.lock:
            hot = cache.hot.by_key.get(key)
            if hot is not None and cache.state(hot, decoder.scratch) != state:
                log.error("a block in memory is not what is on disk (%s); it is read again", reason)
                cache.counters.damaged += 1
                cache.forget_hot(hot)
                return 1
        return len(self.damaged(node.tree_key, f"it is what was written, but no state of its model: {reason}"))

    def _forget_refused(self, key: bytes, reason: str) -> int:
        """A node that is in RAM only, and all below it."""
        cache = self._cache
        with cache.lock:
            hot = cache.hot.by_key.get(key)
            if hot is None:
                return 0
            gone = [key, *(below.key for below in cache.hot.subtree(key))]
            log.error("a block is no state of its model (%s); it and what follows it will be computed again", reason)
            cache.counters.damaged += 1
            cache.removals_seen.add(gone, "damaged")
            cache.forget_hot_subtree(key)
        return len(gone)
