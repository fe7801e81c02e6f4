"""The prefix cache: match, load, save, move between tiers, leases, purge.

Knows no sockets and no processes. Thread-safe: any thread may call it, but the methods marked *writer* belong to one
thread, the only one that changes the disk. The lock is never held while the disk is written or a payload is read, so
that a request does not wait for either.

A node's life: `Session.reserve` gives room, the worker fills it, `Session.commit` publishes it (hot at once) and queues
it; `write` stores it (warm too); it leaves RAM when room is needed, and comes back with `load`; it leaves the disk when
the budget is full. Whatever goes wrong with a disk is counted and makes the cache smaller, never an error.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from ..frames import NewNode, PlanNode
from .arena import Arena, pages
from .blocks import BLOCK_TOKENS, Namespace, TokensBE, block_key, namespace_of, swap
from .codec import DamagedError, Decoder
from .disk import BudgetError, Disk, DiskFullError, DiskTroubleError, MissingError, Pending, Touch, WarmTable
from .hot import HotNode, HotTier
from .policy import Policy
from .tree import NodeTable, Placed, Record, is_covered, match, shorter
from .write_queue import WriteQueue

MAX_TOUCHES = 20_000
"""Nodes whose last use is remembered until it is written; more are forgotten, oldest first."""

_TOUCHES_AT_ONCE = 2_000
_TOUCH_SECONDS = 60.0
_BACKOFF = (2.0, 60.0)  # seconds until a failed write is tried again: first, at most
_FULL_SECONDS = 600.0  # that the store does not grow after the disk was full
_REMEMBERED_HASHES = 1_000

log = logging.getLogger(__name__)


class BlockLostError(Exception):
    """A block of a plan cannot be had, nor those after it. The message is the reason."""


@dataclass(slots=True, eq=False)
class Lease:
    """A match whose nodes are kept until it is released. `plan[i].offset` is -1 for those that `Cache.load` brings."""

    plan: list[PlanNode]
    places: list[bytes]  # tree keys
    held: dict[int, HotNode] = field(default_factory=dict)  # by index
    released: bool = False


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
    evicted_hot: int = 0
    evicted_warm: int = 0
    superseded: int = 0
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

    `wake` is called, from any thread, when there is something for the writer to do.
    """

    def __init__(
        self,
        arena: Arena,
        disk: Disk | None,
        *,
        policy: Policy,
        write_queue: int,
        tail_delay: float,
        warm_reason: str = "",
        wake: Callable[[], None] = lambda: None,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.arena = arena
        self.disk = disk
        self.lock = threading.RLock()
        self.counters = Counters()
        self.hot = HotTier(arena, policy, now=clock, on_evict=self._evicted)
        self.queue = WriteQueue(write_queue, tail_delay)
        self.touched: dict[bytes, Touch] = {}
        self.namespaces: dict[bytes, dict[str, Any]] = dict(disk.namespaces) if disk else {}
        self.warm_state = "ok" if disk else "off"
        self.warm_reason = warm_reason
        self._loaded = threading.Condition(self.lock)
        self._wake = wake
        self._wall = wall
        self._clock = clock
        self._sessions: set[Session] = set()
        self._loading: dict[bytes, int] = {}  # node's key -> bytes
        self._writing: list[HotNode] = []
        self._hidden: set[bytes] = set()  # nodes on disk that are about to be removed
        self._evicting: set[bytes] = set()  # of them, those whose room is needed
        self._repairs: list[bytes] = []  # of them, those whose payload is damaged; all below these are hidden too
        self._removals = 0  # grows whenever nodes leave the disk
        self._new_namespaces: dict[bytes, dict[str, Any]] = {}
        self._new_hashes: dict[bytes, str] = {}
        self._hashes: dict[bytes, str] = {}
        self._retry_at = 0.0
        self._backoff = _BACKOFF[0]
        self._held_until = 0.0
        self._touches_written = clock()

    # -------------------------------------------------------------------------------------------- any thread

    def session(self) -> Session:
        """What one client holds; close it when the client is gone."""
        session = Session(self)
        with self.lock:
            self._sessions.add(session)
        return session

    @contextmanager
    def view(self) -> Iterator[tuple[list[NodeTable], WarmTable | None]]:
        """Both tiers as tables, hot first, and the warm one again. Holds the lock: for moments only."""
        with self.lock:
            if self.disk is None:
                yield [self.hot.table], None
                return
            with self.disk.table(self._hidden) as warm:
                yield [self.hot.table, warm], warm

    def open_namespace(self, description: Mapping[str, Any]) -> tuple[Namespace, list[str]]:
        """Register a description. Returns its key and how stored ones of the same model content differ from it."""
        namespace = namespace_of(description)
        with self.lock:
            if namespace not in self.namespaces:
                self.namespaces[namespace] = dict(description)
                self._new_namespaces[namespace] = dict(description)
            stored = self.disk.sums.nodes if self.disk else {}
            others = [d for key, d in self.namespaces.items() if key != namespace and key.hex() in stored]
        self._wake()
        return namespace, _differences(description, others)

    def lookup(
        self, namespace: bytes, tokens: bytes, *, limit: int, exact: bool, load: bool, session: Session | None = None
    ) -> Lease:
        """How far are `tokens` (u32 LE) known? With `load`, the nodes are leased to `session` until `release`."""
        found = self._match(namespace, tokens, limit, exact)
        lease = Lease([], [])
        now = self._wall()
        with self.lock:
            for node, use in found:
                hot = self.hot.by_key.get(node.record.key)
                if hot is None and node.record.stored == 0:
                    break  # it left RAM since, and is nowhere else
                record = hot.node.record if hot else node.record
                offset = -1
                if load and hot is not None:
                    self.hot.lease(hot)
                    lease.held[len(lease.plan)] = hot
                    offset = hot.offset
                if load:
                    self._touch(record, hot, now)
                tier: Literal["hot", "warm"] = "hot" if hot else "warm"
                lease.places.append(node.tree_key)
                lease.plan.append(
                    PlanNode(record.key, record.start, node.length, use, tier, record.size, record.grid, offset)
                )
            if load:
                self._count_lookup(lease)
                if session is not None:
                    session.leases.add(lease)
        return lease

    def _match(self, namespace: bytes, tokens: bytes, limit: int, exact: bool) -> list[tuple[Placed, int]]:
        wanted = TokensBE(swap(tokens[: max(0, limit) * 4]))
        try:
            with self.view() as (tables, _warm):
                return [(step.node, step.use) for step in match(tables, namespace, wanted, limit=limit, exact=exact)]
        except Exception as error:
            self._trouble("looking up", error)
            with self.lock:
                steps = match([self.hot.table], namespace, wanted, limit=limit, exact=exact)
                return [(step.node, step.use) for step in steps]

    def _count_lookup(self, lease: Lease) -> None:
        self.counters.lookups += 1
        self.counters.hits += bool(lease.plan)
        for node in lease.plan:
            if node.tier == "hot":
                self.counters.tokens_matched_hot += node.use
            else:
                self.counters.tokens_matched_warm += node.use

    def _touch(self, record: Record, hot: HotNode | None, now: float) -> None:
        if hot is not None:
            record.last_use = max(now, record.last_use)
            record.hits += 1
        if hot is None or hot.warm:
            before = self.touched.pop(record.key, Touch(0.0, 0))
            self.touched[record.key] = Touch(now, before.hits + 1)
            if len(self.touched) > MAX_TOUCHES:
                del self.touched[next(iter(self.touched))]

    def load(self, lease: Lease, index: int, decoder: Decoder) -> int:
        """Make node `index` of a plan ready and lease it; returns its offset. Raises BlockLostError.

        Reads from the disk: for reader threads. `decoder` is the calling thread's own.
        """
        key, size = lease.plan[index].key, lease.plan[index].size
        with self.lock:
            while key in self._loading and key not in self.hot.by_key and not lease.released:
                self._loaded.wait()
            if lease.released:
                raise BlockLostError("released")
            if index in lease.held:
                return lease.held[index].offset
            hot = self.hot.by_key.get(key)
            if hot is not None and hot.size == size:
                return self._hold(lease, index, hot)
            offset = self.hot.allocate(size) if self.disk is not None and hot is None else None
            if offset is None:
                self.counters.no_room += 1
                self.counters.lost += 1
                raise BlockLostError("no room in the hot tier" if hot is None else "replaced")
            self._loading[key] = size
            removals = self._removals
        place = lease.places[index]
        record, reason = self._read(place, offset, size, decoder)
        with self.lock:
            del self._loading[key]
            self._loaded.notify_all()
            if record is not None and removals != self._removals and not self._is_stored(place):
                record, reason = None, "removed"
            if record is None:
                self.arena.free(offset, size, self._clock())
                self.counters.lost += 1
                raise BlockLostError(reason)
            hot = self._publish_loaded(place, record, offset)
            if hot is None or lease.released:
                raise BlockLostError("released" if lease.released else "replaced")
            return self._hold(lease, index, hot)

    def _read(self, place: bytes, offset: int, size: int, decoder: Decoder) -> tuple[Record | None, str]:
        if self.disk is None or not self.arena.populate(offset, size):
            return None, "no memory for it"
        begin = time.perf_counter()
        try:
            record = self.disk.load(place, self.arena.view(offset, size), decoder)
        except MissingError:
            return None, "evicted"
        except DamagedError as error:
            self._damage(place, str(error))
            return None, f"damaged: {error}"
        except Exception as error:
            self._trouble("reading a block", error)
            return None, f"cannot be read: {error}"
        with self.lock:
            self.counters.loaded_nodes += 1
            self.counters.loaded_bytes += size
            self.counters.restore_seconds += time.perf_counter() - begin
        return record, ""

    def _publish_loaded(self, place: bytes, record: Record, offset: int) -> HotNode | None:
        hot = self.hot.by_key.get(record.key)
        if hot is not None:  # computed again and committed meanwhile
            self.arena.free(offset, record.size, self._clock())
            return hot if hot.size == record.size else None
        touch = self.touched.get(record.key)
        if touch is not None and touch.last_use > record.last_use:
            record.last_use = touch.last_use
            record.hits += touch.hits
        hot = HotNode(Placed(place, record), offset, warm=True)
        self.hot.insert(hot)
        return hot

    def _hold(self, lease: Lease, index: int, hot: HotNode) -> int:
        self.hot.lease(hot)
        lease.held[index] = hot
        return hot.offset

    def release(self, lease: Lease) -> None:
        """End a lease; again does nothing."""
        with self.lock:
            if lease.released:
                return
            lease.released = True
            for hot in lease.held.values():
                self.hot.release(hot)
            lease.held.clear()
            self._loaded.notify_all()

    def file_hash(self, identity: bytes) -> str:
        """SHA-256 that was remembered for a file; "" if none was."""
        with self.lock:
            known = self._hashes.get(identity)
        if known is not None or self.disk is None:
            return known or ""
        try:
            return self.disk.file_hash(identity)
        except Exception as error:
            self._trouble("looking up a file's hash", error)
            return ""

    def remember_file_hash(self, identity: bytes, sha256: str) -> None:
        """Remember a file's SHA-256, on disk soon."""
        with self.lock:
            self._hashes[identity] = sha256
            if len(self._hashes) > _REMEMBERED_HASHES:
                del self._hashes[next(iter(self._hashes))]
            if self.disk is not None:
                self._new_hashes[identity] = sha256
        self._wake()

    # ---------------------------------------------------------------------------------------------- committing

    def _commit(self, session: Session, namespace: bytes, nodes: Sequence[NewNode]) -> None:
        with self.view() as (tables, warm):
            now = self._wall()
            for new in nodes:
                room = session.reserved.pop(new.offset, None)
                if room is None:
                    self.counters.refused_nodes += 1
                    continue
                node = self._admit(namespace, new, room, tables, warm, now)
                if node is None:
                    self.arena.free(new.offset, room, self._clock())
                    continue
                self.arena.shrink(new.offset, room, new.size, self._clock())
                self._publish(node, new.offset, warm)
        self._wake()

    def _admit(
        self, namespace: bytes, new: NewNode, room: int, tables: list[NodeTable], warm: WarmTable | None, now: float
    ) -> Placed | None:
        """The node to publish; None if it is known, covered by a longer one, or not as it should be."""
        count = len(new.tokens) // 4
        sound = len(new.tokens) % 4 == 0 and 0 < count <= BLOCK_TOKENS and 0 < new.size <= room
        if not sound or not self._parent_fits(namespace, new, warm):
            self.counters.refused_nodes += 1
            return None
        key = block_key(new.parent, new.tokens)
        place = new.parent + swap(new.tokens)
        for table in tables:
            known = table.get(place)
            if known is not None:
                if known.grid or not new.grid:
                    self._touch(known, self.hot.by_key.get(key), now)
                    self.counters.known_nodes += 1
                    return None
                break
        if count < BLOCK_TOKENS and any(is_covered(table, place) for table in tables):
            self.counters.known_nodes += 1
            return None
        preview = new.preview[:160]
        record = Record(key, namespace, new.start, new.size, 0, new.grid, new.kind, new.cost, now, now, 0, preview)
        return Placed(place, record)

    def _parent_fits(self, namespace: bytes, new: NewNode, warm: WarmTable | None) -> bool:
        """Whether the node's parent is known, and ends as a whole block where the node starts."""
        if namespace not in self.namespaces:
            return False
        if new.parent == namespace:
            return new.start == 0
        hot = self.hot.by_key.get(new.parent)
        parent = hot.node if hot else warm.place(new.parent) if warm else None
        return (
            parent is not None
            and parent.record.namespace == namespace
            and parent.length == BLOCK_TOKENS
            and parent.end == new.start
        )

    def _publish(self, node: Placed, offset: int, warm: WarmTable | None) -> None:
        old = self.hot.by_key.get(node.record.key)
        if old is not None:
            self.forget_hot(old)
        for short in list(shorter(self.hot.table, node.tree_key)):
            hot = self.hot.by_key[short.record.key]
            if hot.children == 0 and not (hot.warm and warm is not None and warm.has_children(hot.key)):
                self.forget_hot(hot)
                self.counters.superseded += not hot.warm  # else it is counted when it leaves the disk
        hot = HotNode(node, offset, warm=False)
        self.counters.saved_nodes += 1
        self.counters.saved_bytes += node.record.size
        given_up: list[HotNode] = []
        if self.disk is not None:
            given_up = self.queue.add(hot, self._clock())
            self.counters.dropped_nodes += len(given_up)
        self.hot.insert(hot)
        for other in given_up:
            if other is not hot:
                self.hot.offer(other)

    def forget_hot(self, hot: HotNode) -> None:
        self.queue.remove(hot)
        self.hot.drop(hot)

    def _evicted(self, hot: HotNode) -> None:
        self.counters.evicted_hot += 1
        if hot.queued:
            self.counters.dropped_nodes += 1
            self.queue.remove(hot)

    # -------------------------------------------------------------------------------------------------- writer

    def write(self, *, everything: bool = False) -> float | None:
        """*Writer.* Store what is due (`everything`: all that waits). Never raises for a disk's sake.

        Returns the seconds after which it wants to be called again; None if it waits for nothing.
        """
        if self.disk is None:
            return None
        while True:
            now = self._clock()
            if now < self._retry_at and not everything:
                return self._retry_at - now
            if self._held_until and now >= self._held_until:
                self._held_until = 0.0
                self.disk.hold_at(None)
            with self.lock:
                batch = self._take(now, everything)
                touches = self._take_touches(now, bool(batch) or everything)
                busy = batch or touches or self._repairs or self._new_namespaces or self._new_hashes
            if not busy:
                return self._next_write(now)
            if not self._write_some(self.disk, batch, touches):
                return max(0.0, self._retry_at - self._clock())

    def _next_write(self, now: float) -> float | None:
        with self.lock:
            due = self.queue.next_due()
            times = [due] if due is not None else []
            if self.touched:
                times.append(self._touches_written + _TOUCH_SECONDS)
        return max(0.0, min(times) - now) if times else None

    def _take(self, now: float, everything: bool) -> list[HotNode]:
        """The next nodes to store, parents first, pinned until `_written`."""
        chosen: dict[HotNode, None] = {}
        size = 0
        limit = self.disk.batch_bytes if self.disk else 0
        for hot in list(self.queue) if everything else self.queue.due(now):
            chain: list[HotNode] = []
            at: HotNode | None = hot
            while at is not None and not at.warm and at not in chosen:
                chain.append(at)
                at = self.hot.by_key.get(at.node.parent)
            more = sum(part.size for part in chain)
            if chosen and size + more > limit:
                break
            chosen.update(dict.fromkeys(reversed(chain)))
            size += more
        for hot in chosen:
            self.hot.lease(hot)
        self._writing = list(chosen)
        return self._writing

    def _take_touches(self, now: float, anyway: bool) -> dict[bytes, Touch]:
        if not self.touched or not (anyway or now - self._touches_written >= _TOUCH_SECONDS):
            return {}
        keys = list(self.touched)[:_TOUCHES_AT_ONCE]
        if len(keys) == len(self.touched):
            self._touches_written = now
        return {key: self.touched.pop(key) for key in keys}

    def _write_some(self, disk: Disk, batch: list[HotNode], touches: dict[bytes, Touch]) -> bool:
        """One round of everything that changes the disk; False if it failed."""
        gone: list[Placed] = []
        written: dict[bytes, int] = {}
        orphans: Sequence[bytes] = ()
        covered: Sequence[bytes] = ()
        failure: Exception | None = None
        try:
            self._repair(disk)
            self._put_small(disk)
            need = sum(pages(hot.size) for hot in batch)
            if batch and disk.lacks(need) > 0:
                disk.store([], touches)  # so that what was used lately does not go
                touches = {}
                disk.make_room(need, self._may_evict, gone)
            pending = [Pending(hot.node, self.arena.view(hot.offset, hot.size)) for hot in batch]
            written, orphans, covered = disk.store(pending, touches)
        except (DiskFullError, DiskTroubleError) as error:
            failure = error
        except Exception as error:
            log.exception("writing to the store failed")
            failure = error
        with self.lock:
            self._hidden -= self._evicting
            self._evicting.clear()
            self.counters.evicted_warm += len(gone)
            self.left_disk([node.record.key for node in gone], drop=False)
            self.left_disk(covered, drop=True)
            self.counters.superseded += len(covered)
            for hot in batch:
                if hot.key in written:
                    hot.warm = hot.warm or hot.indexed
                    hot.node.record.stored = written[hot.key]
                    self.counters.written_nodes += 1
                    self.counters.written_bytes += written[hot.key]
                if failure is None or isinstance(failure, BudgetError):
                    self.queue.remove(hot)
                self.counters.dropped_nodes += isinstance(failure, BudgetError)
                self.hot.release(hot)
            for key in orphans:
                self.forget_hot_subtree(key)
            self._writing = []
            if failure is not None:
                self.touched = {**touches, **self.touched}
        self._judge(disk, failure)
        return failure is None or isinstance(failure, BudgetError)

    def _put_small(self, disk: Disk) -> None:
        with self.lock:
            namespaces, hashes = dict(self._new_namespaces), dict(self._new_hashes)
        for namespace, description in namespaces.items():
            disk.put_namespace(namespace, description)
            with self.lock:
                self._new_namespaces.pop(namespace, None)
        for identity, sha256 in hashes.items():
            disk.put_file_hash(identity, sha256)
            with self.lock:
                self._new_hashes.pop(identity, None)

    def _judge(self, disk: Disk, failure: Exception | None) -> None:
        """Note how the disk does, and when to try again."""
        with self.lock:
            if failure is None or isinstance(failure, BudgetError):
                self._backoff = _BACKOFF[0]
                self._retry_at = 0.0
                if not self._held_until:
                    self.warm_state, self.warm_reason = "ok", ""
                self.hot.set_keep_queued(self.warm_state == "ok")
                return
            self.counters.errors += 1
            full = isinstance(failure, DiskFullError)
            state = "full" if full else "error"
            if state != self.warm_state:
                log.warning("the store cannot be written, blocks stay in memory for now: %s", failure)
            self.warm_state, self.warm_reason = state, str(failure)
            self._retry_at = self._clock() + self._backoff
            self._backoff = min(self._backoff * 2, _BACKOFF[1])
            self.hot.set_keep_queued(False)
            if full and not self._held_until:
                self._held_until = self._clock() + _FULL_SECONDS
        if full:
            try:
                disk.hold_at(disk.used())
            except Exception as error:
                log.debug("the store's size is not known: %s", error)

    def _may_evict(self, key: bytes) -> bool:
        """Whether a node may leave the disk; if so it is hidden from now on."""
        with self.lock:
            hot = self.hot.by_key.get(key)
            in_use = key in self._loading or key in self.touched or (hot is not None and hot.leases > 0)
            below = [self.hot.by_key[child.record.key] for child in self.hot.table.children(key)]
            if in_use or any(child.queued or child in self._writing for child in below):
                return False
            self._hidden.add(key)
            self._evicting.add(key)
            return True

    def left_disk(self, keys: Sequence[bytes], *, drop: bool) -> None:
        """Nodes are not on disk any more. `drop`: nor shall those copies of them stay that are in RAM."""
        self._removals += bool(keys)
        for key in keys:
            self.touched.pop(key, None)
            hot = self.hot.by_key.get(key)
            if hot is None:
                for below in self.hot.subtree(key):  # it was their way from the root
                    self.forget_hot(below)
            elif drop and (hot.warm or hot in self._writing):
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

    def _is_stored(self, place: bytes) -> bool:
        if self.disk is None:
            return False
        with self.disk.table(self._hidden) as table:
            return table.get(place) is not None

    def removed_by_hand(self, keys: Sequence[bytes]) -> None:
        """*Writer.* Nodes were purged from the disk: RAM follows, with all that has lost its parent."""
        with self.lock:
            self.left_disk(keys, drop=True)
            with self.view() as (_tables, warm):
                for hot in list(self.hot.by_key.values()):
                    parent = hot.node.parent
                    known = parent in self.namespaces or parent in self.hot.by_key
                    if hot.indexed and not known and (warm is None or warm.place(parent) is None):
                        self.forget_hot_subtree(hot.key)
            self._held_until = 0.0
            self._retry_at = 0.0
        if self.disk is not None:
            self.disk.hold_at(None)

    # ---------------------------------------------------------------------------------------------------- faults

    def _damage(self, place: bytes, reason: str) -> None:
        """A payload is not what was written: the node and all below it are gone, from now on."""
        with self.lock, self.view() as (_tables, warm):
            record = warm.get(place) if warm is not None else None
            if warm is None or record is None:
                return
            below = [node.record.key for node in warm.subtree(record.key)]
            log.error("a stored block is damaged (%s); it and what follows it will be computed again", reason)
            self.counters.damaged += 1
            self._hidden.update((record.key, *below))
            self._repairs.append(record.key)
            self.forget_hot_subtree(record.key)
        self._wake()

    def _repair(self, disk: Disk) -> None:
        with self.lock:
            keys = list(self._repairs)
        for key in keys:
            with disk.table() as table:
                node = table.place(key)
                nodes = [*table.subtree(key), *([node] if node is not None else [])]
            disk.remove(nodes)
            with self.lock:
                gone = [node.record.key for node in nodes]
                self._repairs.remove(key)
                self._hidden.difference_update((key, *gone))
                self.left_disk(gone, drop=True)

    def _trouble(self, what: str, error: Exception) -> None:
        with self.lock:
            self.counters.errors += 1
        log.warning("%s failed: %s", what, error)

    def close(self) -> int:
        """*Writer.* Write what waits and close the disk; returns the nodes that could not be written.

        No other thread may use the cache any more.
        """
        self.write(everything=True)
        if self.disk is not None:
            self.disk.close()
        return len(self.queue)

    def check_integrity(self) -> None:
        """Raises ValueError if leases, bytes and index do not agree. Cheap enough for an idle moment."""
        with self.lock:
            self.arena.check()
            self.hot.check()
            self.queue.check()
            reserved = sum(pages(size) for session in self._sessions for size in session.reserved.values())
            loading = sum(pages(size) for size in self._loading.values())
            if self.hot.slot_bytes() + reserved + loading != self.arena.used:
                raise ValueError(f"{self.arena.used} bytes of slots are in use, not by nodes, writers or loads")
            leases = sum(len(lease.held) for session in self._sessions for lease in session.leases)
            counted = sum(hot.leases for hot in (*self.hot.by_key.values(), *self.hot.detached))
            if counted != leases + len(self._writing):
                raise ValueError(f"{counted} leases are counted, {leases} and {len(self._writing)} are held")
            with self.view() as (_tables, warm):
                for hot in self.hot.by_key.values():
                    parent = hot.node.parent
                    above = parent in self.namespaces or parent in self.hot.by_key
                    if not above and (warm is None or warm.place(parent) is None):
                        raise ValueError(f"hot node {hot.key.hex()} has no parent")
                    if hot.warm and warm is not None and hot.key not in self._hidden and warm.place(hot.key) is None:
                        raise ValueError(f"hot node {hot.key.hex()} is not on disk, as it should be")


class Session:
    """What one client holds: reserved slots and leases. Closing it gives everything back."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self.reserved: dict[int, int] = {}  # offset -> bytes
        self.leases: set[Lease] = set()

    def lookup(self, namespace: bytes, tokens: bytes, *, limit: int, exact: bool = False) -> Lease:
        """`Cache.lookup`, leased to this session."""
        return self._cache.lookup(namespace, tokens, limit=limit, exact=exact, load=True, session=self)

    def release(self, lease: Lease) -> None:
        with self._cache.lock:
            self.leases.discard(lease)
            self._cache.release(lease)

    def reserve(self, sizes: Sequence[int]) -> list[int]:
        """Slots for blocks about to be exported: their offsets, fewer where there is no more room."""
        cache = self._cache
        offsets: list[int] = []
        for size in sizes:
            with cache.lock:
                offset = cache.hot.allocate(size)
                if offset is None:
                    cache.counters.no_room += 1
                    break
                self.reserved[offset] = size
            if not cache.arena.populate(offset, size):
                self.abandon([offset])
                break
            offsets.append(offset)
        return offsets

    def abandon(self, offsets: Sequence[int]) -> None:
        """Give reserved slots back unused; unknown ones are ignored."""
        cache = self._cache
        with cache.lock:
            for offset in offsets:
                size = self.reserved.pop(offset, None)
                if size is not None:
                    cache.arena.free(offset, size, cache._clock())

    def commit(self, namespace: bytes, nodes: Sequence[NewNode]) -> None:
        """Publish filled slots as nodes, parents before children; those that are known or cannot be are dropped."""
        self._cache._commit(self, namespace, nodes)

    def close(self) -> None:
        """The client is gone."""
        cache = self._cache
        with cache.lock:
            for lease in list(self.leases):
                self.release(lease)
            self.abandon(list(self.reserved))
            cache._sessions.discard(self)


def _differences(description: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where stored descriptions of the same model content differ, in words."""
    found: dict[str, None] = {}
    for other in others:
        if not description.get("model_sha256") or other.get("model_sha256") != description.get("model_sha256"):
            continue
        for name in sorted({*description, *other}):
            stored, here = other.get(name), description.get(name)
            if stored != here:
                found[f"{name}: stored prefixes have {_shown(stored)}, this run {_shown(here)}"] = None
    return list(found)


def _shown(value: object) -> str:
    return "none" if value is None else str(value)
