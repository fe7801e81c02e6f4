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
from .blocks import BLOCK_TOKENS, MODEL_NAME, Namespace, TokensBE, block_key, namespace_of, swap
from .codec import DamagedError, Decoder
from .disk import Disk, MissingError, Touch, WarmTable
from .hot import HotNode, HotTier
from .policy import Policy
from .session import Session
from .tree import NodeTable, Placed, Record, is_covered, match, shorter
from .write_behind import WriteBehind
from .write_queue import WriteQueue

MAX_TOUCHES = 20_000
"""Nodes whose last use is remembered until it is written; more are forgotten, oldest first."""

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
        self.wake = wake
        self._wall = wall
        self.clock = clock
        self.sessions: set[Session] = set()
        self.loading: dict[bytes, int] = {}  # node's key -> bytes
        self.writing: list[HotNode] = []
        self.hidden: set[bytes] = set()  # nodes on disk that are about to be removed
        self.repairs: list[bytes] = []  # of those, the damaged ones; all below these are hidden too
        self.removals = 0  # grows whenever nodes leave the disk
        self.new_namespaces: dict[bytes, dict[str, Any]] = {}
        self.new_hashes: dict[bytes, str] = {}
        self._hashes: dict[bytes, str] = {}
        self._behind = WriteBehind(self, disk) if disk is not None else None

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

    def open_namespace(self, description: Mapping[str, Any]) -> tuple[Namespace, list[str]]:
        """Register a description. Returns its key and how stored ones of the same model content differ from it."""
        namespace = namespace_of(description)
        with self.lock:
            if self.namespaces.get(namespace) != description:  # unknown, or called by another name now
                self.namespaces[namespace] = dict(description)
                self.new_namespaces[namespace] = dict(description)
            stored = self.disk.sums.nodes if self.disk else {}
            others = [d for key, d in self.namespaces.items() if key != namespace and key.hex() in stored]
        self.wake()
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
            self.trouble("looking up", error)
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
            while key in self.loading and key not in self.hot.by_key and not lease.released:
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
            self.loading[key] = size
            removals = self.removals
        place = lease.places[index]
        record, reason = self._read(place, offset, size, decoder)
        with self.lock:
            del self.loading[key]
            self._loaded.notify_all()
            if record is not None and removals != self.removals and not self._is_stored(place):
                record, reason = None, "removed"
            if record is None:
                self.arena.free(offset, size, self.clock())
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
            self.trouble("reading a block", error)
            return None, f"cannot be read: {error}"
        with self.lock:
            self.counters.loaded_nodes += 1
            self.counters.loaded_bytes += size
            self.counters.restore_seconds += time.perf_counter() - begin
        return record, ""

    def _publish_loaded(self, place: bytes, record: Record, offset: int) -> HotNode | None:
        hot = self.hot.by_key.get(record.key)
        if hot is not None:  # computed again and committed meanwhile
            self.arena.free(offset, record.size, self.clock())
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
            self.trouble("looking up a file's hash", error)
            return ""

    def remember_file_hash(self, identity: bytes, sha256: str) -> None:
        """Remember a file's SHA-256, on disk soon."""
        with self.lock:
            self._hashes[identity] = sha256
            if len(self._hashes) > _REMEMBERED_HASHES:
                del self._hashes[next(iter(self._hashes))]
            if self.disk is not None:
                self.new_hashes[identity] = sha256
        self.wake()

    # ---------------------------------------------------------------------------------------------- committing

    def commit(self, session: Session, namespace: bytes, nodes: Sequence[NewNode]) -> None:
        with self.view() as (tables, warm):
            now = self._wall()
            for new in nodes:
                room = session.reserved.pop(new.offset, None)
                if room is None:
                    self.counters.refused_nodes += 1
                    continue
                node = self._admit(namespace, new, room, tables, warm, now)
                if node is None:
                    self.arena.free(new.offset, room, self.clock())
                    continue
                self.arena.shrink(new.offset, room, new.size, self.clock())
                self._publish(node, new.offset, warm)
        self.wake()

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
            given_up = self.queue.add(hot, self.clock())
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
        return self._behind.write(everything=everything) if self._behind is not None else None

    def left_disk(self, keys: Sequence[bytes], *, drop: bool) -> None:
        """Nodes are not on disk any more. `drop`: nor shall those copies of them stay that are in RAM."""
        self.removals += bool(keys)
        for key in keys:
            self.touched.pop(key, None)
            hot = self.hot.by_key.get(key)
            if hot is None:
                for below in self.hot.subtree(key):  # it was their way from the root
                    self.forget_hot(below)
            elif drop and (hot.warm or hot in self.writing):
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
        with self.disk.table(self.hidden) as table:
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
        if self._behind is not None:
            self._behind.try_again()

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
            self.hidden.update((record.key, *below))
            self.repairs.append(record.key)
            self.forget_hot_subtree(record.key)
        self.wake()

    def trouble(self, what: str, error: Exception) -> None:
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
            reserved = sum(pages(size) for session in self.sessions for size in session.reserved.values())
            loading = sum(pages(size) for size in self.loading.values())
            if self.hot.slot_bytes() + reserved + loading != self.arena.used:
                raise ValueError(f"{self.arena.used} bytes of slots are in use, not by nodes, writers or loads")
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


def _differences(description: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where stored descriptions of the same model content and salt differ, in words."""
    here = _flat(description)
    found: dict[str, None] = {}
    for other in map(_flat, others):
        if "model_sha256" in here and all(other.get(name) == here.get(name) for name in ("model_sha256", "salt")):
            for name in sorted({*here, *other} - {MODEL_NAME}):
                if other.get(name) != here.get(name):
                    stored, now = other.get(name, "none"), here.get(name, "none")
                    found[f"{name}: stored prefixes have {stored}, this run {now}"] = None
    return list(found)


def _flat(description: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Nested fields by dotted names."""
    flat: dict[str, Any] = {}
    for name, value in description.items():
        flat.update(_flat(value, f"{above}{name}.") if isinstance(value, Mapping) else {above + name: value})
    return flat
