"""The prefix cache: what all parts of it share, and what its clients ask of it.

Knows no sockets and no processes. Thread-safe: any thread may call it, but the methods marked *writer* belong to one
thread, the only one that changes the disk. The lock is never held while the disk is written or a payload is read, so
that a request does not wait for either; nor while a look-up walks the tree on disk.

A node's life: `Session.reserve` gives room, the worker fills it, `Session.commit` publishes it (hot at once) and queues
it; `write` stores it (warm too); it leaves RAM when room is needed, and comes back with `load`; it leaves the disk when
the budget is full. Whatever goes wrong with a disk is counted and makes the cache smaller, never an error.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..frames.store import NewNode
from .arena import Arena, pages
from .blocks import Namespace
from .codec import Decoder
from .committing import Committing
from .disk import FEW, Disk, DiskFullError, DiskTroubleError, Touch
from .disk_file import is_corruption
from .hot import Extent, HotNode, HotTier
from .loading import BlockLostError, Lease, Loading
from .matching import Matching
from .pins import Pins
from .policy import Evicted, Policy
from .rates import ReadRate
from .recent import Recent
from .registry import Registry
from .removals import ROW_BYTES, Removals, Why
from .replies import Replies
from .runs import Layouts
from .session import Committed, Session
from .shares import Account
from .tree import NodeTable, Placed, Record
from .usage import Usage
from .warm_table import WarmTable
from .write_behind import WriteBehind
from .write_queue import WriteQueue

MAX_TOUCHES = 20_000
"""Nodes whose last use is remembered until it is written; more are forgotten, oldest first."""

_KEPT_REMOVALS = 4096  # over a restart

__all__ = ["BlockLostError", "Cache", "Counters", "Lease"]

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Counters:
    """Sums since the store's start, as `stats` shows them."""

    lookups: int = 0
    hits: int = 0
    tokens_matched_hot: int = 0
    tokens_matched_warm: int = 0
    saved_nodes: int = 0  # published
    saved_bytes: int = 0
    written_nodes: int = 0
    written_bytes: int = 0  # to disk, as stored
    known_nodes: int = 0  # committed again, or covered by a longer one
    refused_nodes: int = 0  # committed without a parent or not as they should be
    dropped_nodes: int = 0  # not written: the queue or the budget was full
    spared_nodes: int = 0  # of those: as much was written in a day as may be
    over_share: int = 0  # of those: their model or API key had its share of the budget
    evicted_hot: int = 0
    evicted_warm: int = 0
    superseded: int = 0
    thinned: int = 0  # edges that were superfluous
    purged: int = 0
    damaged: int = 0
    lost: int = 0  # blocks of a plan that could not be had
    no_room: int = 0  # blocks for which there was no hot room
    errors: int = 0  # of the disk
    loaded_nodes: int = 0
    loaded_bytes: int = 0  # of state
    restore_seconds: float = 0.0  # of reader threads


class Cache:
    """`disk` is None where the warm tier is off; `warm_reason` says why. `write_queue` in bytes, `tail_delay` in s.

    `daily_writes` in bytes, 0 for no bound. `wake` is called, from any thread, when the writer has something to do;
    `corrupted` when the file itself is found damaged.
    """

    def __init__(
        self,
        arena: Arena,
        disk: Disk | None,
        *,
        policy: Policy,
        write_queue: int,
        tail_delay: float,
        daily_writes: int = 0,
        warm_reason: str = "",
        wake: Callable[[], None] = lambda: None,
        corrupted: Callable[[Exception], None] = lambda _error: None,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.arena = arena
        self.disk = disk
        self.lock = threading.RLock()
        self.counters = Counters()
        self.hot = HotTier(arena, policy, now=clock, wall=wall, on_evict=self._evicted)
        self.queue = WriteQueue(write_queue, tail_delay)
        self.touched: dict[bytes, Touch] = {}
        self.touching: dict[bytes, Touch] = {}  # of those, what is being written: who reads a record may not see it yet
        self.evicted = Evicted()
        self.daily_writes = daily_writes
        self.removals_seen = Removals(wall=wall)
        if disk is not None:
            try:
                self.removals_seen.unpack(disk.removals())
            except Exception as error:
                log.warning("what was evicted before cannot be read: %s", error)
        self.replies = Replies(disk, limit=disk.limit if disk is not None else 0, wall=wall, clock=clock, wake=wake)
        self.registry = Registry(disk, self.lock)
        self.namespaces = self.registry.namespaces
        self.layouts = Layouts(self.namespaces)
        self.warm_state = "ok" if disk else "off"
        self.warm_reason = warm_reason
        self.loaded = threading.Condition(self.lock)
        """Notified when a load ends."""
        self.wake = wake
        self.freed: Callable[[], None] = lambda: None
        """Called, from any thread, when there may be room in RAM for loads that wait for it."""
        self._corrupted = corrupted
        self.wall = wall
        self.clock = clock
        self.sessions: set[Session] = set()
        self.loading: dict[bytes, Extent] = {}  # node's key -> where it will lie
        self.writing: list[HotNode] = []
        self.hidden: set[bytes] = set()  # nodes on disk that are about to be removed
        self.repairs: list[bytes] = []  # of those, the damaged ones; all below these are hidden too
        self.removals = 0  # grows whenever nodes leave the disk, or begin or cease to be hidden
        self.deadline: float | None = None
        """By `clock`: when the writer must be done, because the process ends."""
        self.usage = Usage()
        self.recent = Recent()
        self.read_rate = ReadRate()
        self.pins = Pins(self, disk, wall)
        self._matching = Matching(self, disk)
        self._loading = Loading(self, disk)
        self._committing = Committing(self, disk)
        self._behind = WriteBehind(self, disk, daily_writes) if disk is not None and not disk.read_only else None

    # -------------------------------------------------------------------------------------------- any thread

    def session(self) -> Session:
        """What one client holds; close it when the client is gone."""
        session = Session(self)
        with self.lock:
            self.sessions.add(session)
        return session

    @contextmanager
    def view(self) -> Iterator[tuple[list[NodeTable], WarmTable | None]]:
        """Both tiers as tables, hot first, and the warm one again. Holds the lock: for moments only."""
        with self.lock:
            if self.disk is None:
                yield [self.hot.table], None
                return
            with self.disk.table(self.hidden) as warm:
                yield [self.hot.table, warm], warm

    def hide(self, keys: Iterable[bytes]) -> None:
        """Nodes on disk are as good as gone from now on."""
        self.hidden.update(keys)
        self.removals += 1

    def show(self, keys: Iterable[bytes]) -> None:
        """They are hidden no longer: they are gone, or stay after all."""
        self.hidden.difference_update(keys)
        self.removals += 1

    def open_namespace(self, description: Mapping[str, Any]) -> tuple[Namespace, list[str]]:
        """Register a description. Returns its key and how stored ones of the same model content differ from it."""
        opened = self.registry.open_namespace(description)
        self.usage.opened(opened[0], description)
        self.wake()
        return opened

    def lookup(
        self, namespace: bytes, tokens: bytes, *, limit: int, exact: bool, load: bool, session: Session | None = None
    ) -> Lease:
        """How far are `tokens` (u32 LE) known? With `load`, the nodes are leased to `session` until `release`."""
        return self._matching.lookup(namespace, tokens, limit, exact, session, load)

    def taken(self, lease: Lease, count: int) -> None:
        """Of a streamed match the first `count` nodes were imported: they need not be kept any more."""
        self._matching.taken(lease, count)

    def others_hold(self, lease: Lease) -> bool:
        """Whether another match keeps nodes in RAM, which will be free once it is released. With the lock held."""
        return self._matching.others_hold(lease)

    def touch(self, record: Record, hot: HotNode | None, now: float) -> None:
        """A node was used. With the lock held."""
        if hot is not None:
            record.last_use = max(now, record.last_use)
            record.hits += 1
        if hot is None or hot.warm:
            before = self.touched.pop(record.key, Touch(0.0, 0))
            self.touched[record.key] = Touch(now, before.hits + 1)
            if len(self.touched) > MAX_TOUCHES:
                del self.touched[next(iter(self.touched))]

    def unseen(self, record: Record) -> list[Touch]:
        """Uses that the record of a node on disk does not show yet, the last one last. With the lock held."""
        found = (self.touching.get(record.key), self.touched.get(record.key))
        return [touch for touch in found if touch is not None and touch.last_use > record.last_use]

    def load(self, lease: Lease, index: int, decoder: Decoder) -> HotNode:
        """Make node `index` of a plan ready and lease it. Raises BlockLostError.

        Reads from the disk: for reader threads. `decoder` is the calling thread's own.
        """
        return self._loading.load(lease, index, decoder)

    def read(self, place: bytes, out: memoryview, decoder: Decoder) -> None:
        """A stored node's state, of its exact size, past RAM: for those who look at each block once.

        Reads from the disk: for a thread of its own. Raises BlockLostError.
        """
        self._loading.read(place, out, decoder)

    def state(self, hot: HotNode, scratch: Callable[[int], memoryview]) -> memoryview:
        """A leased node's state by itself: in place, or taken out of its run to what `scratch(bytes)` gives."""
        memory = self.arena.view(hot.extent.offset, hot.extent.size)
        if hot.parts == 1:
            return memory
        layout, out = self.layouts.get(hot.node.record.namespace), scratch(hot.size)
        if layout is None:
            raise BlockLostError("its run cannot be taken apart")
        layout.take(memory, hot.part, 1, hot.parts, out)
        return out

    def preload(self, nodes: Sequence[Placed], decoder: Decoder) -> int:
        """Bring stored nodes into RAM that nobody has asked for; nothing is evicted. Whole blocks that follow each
        other, at most `runs.RUN`, or one. Returns how many of the first are there now; 0: there is no more room.

        Reads from the disk: for a thread of its own. `decoder` is the calling thread's own.
        """
        return self._loading.preload(nodes, decoder)

    def release(self, lease: Lease) -> None:
        """End a lease; again does nothing."""
        with self.lock:
            if lease.released:
                return
            lease.released = True
            for hot in lease.held.values():
                self.hot.release(hot)
            lease.held.clear()
            self.loaded.notify_all()

    def file_hash(self, identity: bytes) -> str:
        """SHA-256 that was remembered for a file; "" if none was."""
        try:
            return self.registry.file_hash(identity)
        except Exception as error:
            self.trouble("looking up a file's hash", error)
            return ""

    def remember_file_hash(self, identity: bytes, sha256: str) -> None:
        """Remember a file's SHA-256, on disk soon."""
        self.registry.remember_file_hash(identity, sha256)
        self.wake()

    # ---------------------------------------------------------------------------------------------- committing

    def commit(self, session: Session, namespace: bytes, nodes: Sequence[NewNode], owner: str = "") -> Committed:
        """Publish slots that `session` reserved and filled; see `Session.commit`."""
        return self._committing.commit(session, namespace, nodes, owner)

    def written(self) -> None:
        """See `Committing.written`."""
        self._committing.written()
        self.freed()  # what is being written may not go

    def forget_hot(self, hot: HotNode) -> None:
        self.queue.remove(hot)
        self.hot.drop(hot)

    def _evicted(self, hot: HotNode) -> None:
        self.counters.evicted_hot += 1
        if not hot.warm:
            self.evicted.add(hot.key, hot.node.record.hits)
            self.removals_seen.add((hot.key,), self._why_unwritten(hot))
            self.pins.left_memory(hot.node)
        if hot.queued or self.queue.lacks_room_for(hot):
            self.counters.dropped_nodes += 1
        self.queue.remove(hot)

    def _why_unwritten(self, hot: HotNode) -> Why:
        """Why a node that leaves RAM is not on disk."""
        if self.disk is None:
            return "no_disk"
        if self.warm_state == "ok":
            return "unwritten" if hot.queued else "daily_writes" if self.spares_disk else "budget"
        return "disk_full" if self.warm_state == "full" else "disk_error"

    def room_for_blocks(self) -> str:
        """What bounds that which is kept on disk, for people."""
        return self.disk.bound_text() if self.disk is not None else "memory"

    @property
    def spares_disk(self) -> bool:
        """Whether as much was written today as may be."""
        return self._behind is not None and self._behind.day_is_over

    # -------------------------------------------------------------------------------------------------- writer

    def write(self, *, everything: bool = False) -> float | None:
        """*Writer.* Store what is due (`everything`: all that waits). Never raises for a disk's sake.

        Returns the seconds after which it wants to be called again; None if it waits for nothing.
        """
        return self._behind.write(everything=everything) if self._behind is not None else None

    def write_path(self, path: Sequence[HotNode], keep: frozenset[bytes] = frozenset()) -> None:
        """*Writer.* Store nodes of a path, parents first, before what waits: as many as fit. Never raises.

        `keep`: keys of nodes that do not go for them.
        """
        if self._behind is not None:
            self._behind.write_path(path, keep)

    def requeue(self, most: int | None = None) -> None:
        """*Writer.* There may be room now for what was refused: what of it would be written waits again.

        `most`: bytes of state, about, where only so much room was made.
        """
        if self._behind is not None:
            self._behind.requeue(most)

    def unpinned(self, most: int | None = None) -> None:
        """*Writer.* What pins kept may go: shares that they were in the way of are met, and what was refused is tried.

        `most`: as of `requeue`.
        """
        if self._behind is not None:
            self._behind.unpinned(most)

    def resize(self, limit: int) -> int:
        """*Writer.* Have another budget of disk from now on, in bytes; the store shrinks to it in steps.

        Returns what it is: at most what the file was opened for.
        """
        if self.disk is None or self._behind is None:
            return 0
        self.disk.limit = max(1 << 20, min(limit, self.disk.most))
        self._behind.shrink()
        self.requeue()  # there may be room now for what is in RAM only
        self.wake()
        return self.disk.limit

    def bound_writes(self, daily_writes: int) -> None:
        """*Writer.* Bytes that may be written to the disk in a day from now on; 0: no bound."""
        self.daily_writes = daily_writes
        if self._behind is not None:
            self._behind.bound_writes(daily_writes)

    def set_shares(self, models: Mapping[str, int], keys: Mapping[str, int]) -> None:
        """*Writer.* What models and API keys may take of the budget of disk, in percent."""
        if self._behind is not None:
            self._behind.set_shares(models, keys)
            self.requeue()
            self.wake()

    def accounts(self) -> list[Account]:
        """Models and API keys that have a share of the budget of disk."""
        return self._behind.accounts() if self._behind is not None else []

    def left_disk(self, keys: Sequence[bytes], *, drop: bool, hidden_before: bool = False) -> None:
        """Nodes are not on disk any more. `drop`: nor shall those copies of them stay that are in RAM.

        `hidden_before`: they went from RAM when they were hidden; what is being written was computed since, and stays.
        """
        self.removals += bool(keys)
        for key in keys:
            self.touched.pop(key, None)
            hot = self.hot.by_key.get(key)
            if hot is None:
                for below in self.hot.subtree(key):  # it was their way from the root
                    self.forget_hot(below)
            elif drop and (hot.warm or (hot in self.writing and not hidden_before)):
                self.forget_hot_subtree(key)
            else:
                hot.warm = False
                hot.node.record.stored = 0
                self.hot.offer(hot)

    def forget_hot_subtree(self, key: bytes) -> None:
        for hot in self.hot.subtree(key):
            self.forget_hot(hot)
        hot_self = self.hot.by_key.get(key)
        if hot_self is not None:
            self.forget_hot(hot_self)

    def is_stored(self, place: bytes) -> bool:
        if self.disk is None:
            return False
        with self.disk.table(self.hidden) as table:
            return table.get(place) is not None

    def removed_by_hand(self) -> None:
        """*Writer.* There is more room on the disk: what was refused for want of it may be tried again."""
        if self._behind is not None:
            self._behind.try_again()
            self.requeue()
            self.wake()

    # ---------------------------------------------------------------------------------------------------- faults

    def damaged(self, place: bytes, reason: str) -> list[bytes]:
        """A node's payload is not what was written: it and all below it are gone. Returns their keys; [] if none is
        there.

        They are `hidden` until the writer has removed them from the disk.
        """
        return self._loading.damaged(place, reason)

    def repair(self) -> None:
        """*Writer.* What is damaged leaves the disk now. Raises DiskFullError, DiskTroubleError."""
        if self._behind is not None:
            self._behind.repair()

    def refused(self, namespace: bytes, key: bytes, reason: str) -> int:
        """A worker cannot import a node's state. One that is what was written is as good as damaged, see `damaged`; if
        only its copy in RAM is not, that goes. Returns how many are gone. Reads from the disk."""
        return self._loading.refused(namespace, key, reason)

    def discard(self, nodes: Mapping[bytes, bytes], gone: list[bytes]) -> None:
        """*Writer.* Remove nodes whose records cannot be used, and all below them; keys of what went are added to
        `gone`, also where it stops half-way.

        `nodes`: tree key -> key by its tokens. Raises DiskFullError, DiskTroubleError.
        """
        if self.disk is None or not nodes:
            return
        below: dict[bytes, Placed] = {}
        with self.view() as (_tables, warm):
            for key in nodes.values():
                if warm is not None:
                    below |= {node.tree_key: node for node in warm.subtree(key) if node.tree_key not in nodes}
                self.forget_hot_subtree(key)
            going = [*(node.record.key for node in below.values()), *nodes.values()]
            self.counters.damaged += len(nodes)
            self.hide(going)
        try:
            rest = list(below.values())
            for at in range(0, len(rest), FEW):
                self.disk.remove(rest[at : at + FEW])
                gone += going[at : min(at + FEW, len(rest))]
            self.disk.discard(nodes)
            gone += nodes.values()
        finally:
            with self.lock:
                self.removals_seen.add(gone, "damaged")
                self.show(going)
                self.left_disk(gone, drop=True)

    def trouble(self, what: str, error: Exception) -> None:
        with self.lock:
            self.counters.errors += 1
        log.warning("%s failed: %s", what, error)
        self.judge(error)

    def judge(self, error: Exception) -> None:
        """Say so if an error means that the file is damaged, or gone."""
        if is_corruption(error):
            self._corrupted(error)

    def close(self) -> int:
        """*Writer.* Write what waits, until `deadline`, and close the disk; returns the nodes that were not written.

        No other thread may use the cache any more.
        """
        self.write(everything=True)
        if self.disk is not None:
            if not self.disk.read_only and not self.out_of_time():
                self._keep_removals(self.disk)
            self.disk.close()
        return len(self.queue)

    def _keep_removals(self, disk: Disk) -> None:
        try:
            disk.put_removals(self.removals_seen.pack(min(_KEPT_REMOVALS, disk.limit // 64 // ROW_BYTES)))
        except (DiskFullError, DiskTroubleError) as error:
            log.info("what was evicted is forgotten: %s", error)

    def out_of_time(self) -> bool:
        """Whether the writer must come to an end now."""
        return self.deadline is not None and self.clock() >= self.deadline

    def check_integrity(self) -> None:
        """Raises ValueError if leases, bytes and index do not agree. Cheap enough for an idle moment."""
        with self.lock:
            self.arena.check()
            self.hot.check()
            self.queue.check()
            holders = Counter(self.hot.extents())
            holders.update(extent for session in self.sessions for extent in session.reserved.values())
            holders.update(self.loading.values())
            if sum(pages(extent.size) for extent in holders) != self.arena.used:
                raise ValueError(f"{self.arena.used} bytes of slots are in use, not by nodes, writers or loads")
            for extent, count in holders.items():
                if extent.holders != count:
                    raise ValueError(f"a slot at {extent.offset} has {extent.holders} holders, not {count}")
            leases = sum(len(lease.held) for session in self.sessions for lease in session.leases)
            counted = sum(hot.leases for hot in (*self.hot.by_key.values(), *self.hot.detached))
            if counted != leases + len(self.writing):
                raise ValueError(f"{counted} leases are counted, {leases} and {len(self.writing)} are held")
            with self.view() as (_tables, warm):
                for hot in self.hot.by_key.values():
                    parent = hot.node.parent
                    above = parent in self.namespaces or parent in self.hot.by_key
                    if not above and (warm is None or warm.place(parent) is None):
                        raise ValueError(f"hot node {hot.key.hex()} has no parent")
                    if hot.warm and warm is not None and hot.key not in self.hidden and warm.place(hot.key) is None:
                        raise ValueError(f"hot node {hot.key.hex()} is not on disk, as it should be")
