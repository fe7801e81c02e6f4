"""The other end of the store, for the worker: look up, import from and export into the arena.

`StoreClient` never raises for the store's sake: while there is none, or it dies, everything that was asked of it is
answered as lost, and the worker computes. `AdminClient`, for commands on a closed store, is in `admin.py`.

Memory of an arena stays mapped as long as something refers to it (a view, a lookup, a slot), whatever happens to the
store that made it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from ..channel import Channel, ChannelClosedError
from ..frames import Frame
from ..frames import store as frames
from ..frames.store import FromStore, NewNode, PlanNode
from .admin import AdminClient
from .blocks import BLOCK_TOKENS, Namespace
from .runs import layout_of

__all__ = ["AdminClient", "BlockState", "Lookup", "OpenedNamespace", "Slot", "StoreClient"]

BlockState = Literal["loading", "ready", "lost"]

_EPOCH_SHIFT = 44  # offsets of an arena are below 2**44
_EPOCHS = 1 << 18

_SILENCE = 1.0
"""Seconds without any answer, while one is due, after which a store is asked nothing: nobody waits for it."""
_ASK_AGAIN = 5.0
"""Seconds between questions to such a store whose answer nobody waits for."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpenedNamespace:
    """A namespace that the store knows. `mismatch`: how stored prefixes of the same model content differ, in words."""

    key: Namespace
    mismatch: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Slot:
    """Room in the arena for a block or a run. `offset` names it in a NewNode; it is not a position in `view`."""

    offset: int
    size: int
    view: memoryview  # writable, `size` bytes


@dataclass(frozen=True, slots=True)
class Run:
    """Where a block lies that is number `part` of a run of `parts`; `view` is the run. See `runs.py`."""

    offset: int
    part: int
    parts: int
    view: memoryview


@dataclass(frozen=True, slots=True)
class _At:
    """Where a block lies in the arena, see PlanNode."""

    offset: int
    part: int
    parts: int
    run_size: int

    @classmethod
    def of(cls, frame: PlanNode | frames.BlockReady) -> _At:
        return cls(frame.offset, frame.part, frame.parts, frame.run_size)


class Lookup:
    """A match on its way: the plan, then its blocks. Release it when its blocks have been imported.

    Thread-safe. `on_update` is called from the client's reader thread whenever something new is known.
    """

    def __init__(self, link: _Link | None, ticket: int, on_update: Callable[[], None] | None) -> None:
        self._link = link
        self._ticket = ticket
        self._on_update = on_update
        self._changed = threading.Condition()
        self._plan: tuple[PlanNode, ...] | None = None
        self._known = 0
        self._at: dict[int, _At] = {}
        self._lost_from: int | None = None if link is not None else 0
        self._answered = link is None
        self._released = link is None
        self.reason = "" if link is not None else "no store"
        """Why blocks were lost."""
        self.warm_rate = 0.0
        """Bytes a second that the store reads from disk; 0: not known."""
        self._streamed = False
        self._taken = -1  # so that 0 is said, too

    @property
    def plan(self) -> tuple[PlanNode, ...] | None:
        """The plan, if it is known by now; None also if it will never be."""
        return self._plan

    @property
    def known(self) -> int:
        """Leading tokens that are known to the store, whether they can be resumed or not; 0 while there is no plan."""
        return self._known

    @property
    def answered(self) -> bool:
        """Whether the plan is known, or known never to come."""
        return self._answered

    def wait_plan(self, timeout: float) -> tuple[PlanNode, ...] | None:
        """The nodes that match, in order; None if the store is gone or did not answer within `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._answered, timeout)
            return self._plan

    def state(self, index: int) -> BlockState:
        """Of node `index`. `loading` includes: the plan is not known yet."""
        with self._changed:
            return self._state(index)

    def wait_block(self, index: int, timeout: float) -> memoryview | None:
        """The state of node `index`, verified; None if it is lost, or not ready within `timeout` seconds.

        Valid until `release`, or until it was `taken`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._state(index) != "loading", timeout)
            if self._state(index) != "ready" or self._link is None or self._plan is None:
                return None
            at, size = self._at[index], self._plan[index].size
        if at.parts == 1:
            return self._link.view(at.offset, size)
        run = self._link.view(at.offset, at.run_size)
        layout = layout_of(run, BLOCK_TOKENS, at.parts) if run is not None else None
        if run is None or layout is None:
            return None
        state = memoryview(bytearray(size))
        layout.take(run, at.part, 1, at.parts, state)
        return state

    def run(self, index: int) -> Run | None:
        """Where node `index` lies, if it is there and a part of a run; `wait_block` would take it out of it."""
        with self._changed:
            at = self._at.get(index) if self._state(index) == "ready" else None
        if at is None or at.parts == 1 or self._link is None:
            return None
        view = self._link.view(at.offset, at.run_size)
        return Run(at.offset, at.part, at.parts, view) if view is not None else None

    def taken(self, count: int) -> None:
        """The first `count` nodes were imported: they are not looked at again. Others may only come then.

        0: they are wanted now. Some may not come before that, so that they hold nobody up.
        """
        with self._changed:
            if not self._streamed or self._released or count <= self._taken:
                return
            self._taken = count
        if self._link is not None:
            self._link.send(frames.Taken(self._ticket, count))

    def release(self) -> None:
        """End the leases; again does nothing."""
        with self._changed:
            if self._released:
                return
            self._released = True
        if self._link is not None:
            self._link.forget(self._ticket)
            self._link.send(frames.Release(self._ticket))

    def _state(self, index: int) -> BlockState:
        if self._lost_from is not None and index >= self._lost_from:
            return "lost"
        if self._plan is not None and index >= len(self._plan):
            return "lost"
        return "ready" if index in self._at else "loading"

    def _on_frame(self, frame: Any) -> None:
        with self._changed:
            if isinstance(frame, frames.Plan):
                self._known = frame.known
                self._plan = tuple(frame.nodes)
                self.warm_rate = frame.warm_rate
                self._streamed = frame.streamed
                self._answered = True
                self._at = {i: _At.of(node) for i, node in enumerate(frame.nodes) if node.offset >= 0}
            elif isinstance(frame, frames.BlockReady):
                self._at[frame.index] = _At.of(frame)
            elif isinstance(frame, frames.BlockLost):
                self._lose(frame.index, frame.reason)
            self._changed.notify_all()
        self._updated()

    def _on_closed(self) -> None:
        with self._changed:
            self._answered = True
            self._lose(0, "the store is gone")
            self._changed.notify_all()
        self._updated()

    def _lose(self, index: int, reason: str) -> None:
        self._lost_from = index if self._lost_from is None else min(self._lost_from, index)
        self.reason = self.reason or reason

    def _updated(self) -> None:
        if self._on_update is not None:
            try:
                self._on_update()
            except Exception:
                log.exception("a callback of a lookup failed")


class _Reply:
    """One answer that a thread waits for."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._frame: Any = None

    def _on_frame(self, frame: Any) -> None:
        self._frame = frame
        self._done.set()

    def _on_closed(self) -> None:
        self._done.set()

    def wait(self, timeout: float) -> Any:
        """The frame; None if none came."""
        self._done.wait(timeout)
        return self._frame


class _Link:
    """One connection to one store, its arena, and who waits for what."""

    def __init__(self, sock: socket.socket, epoch: int) -> None:
        self.channel: Channel[FromStore] = Channel(sock, FromStore)
        self.epoch = epoch
        self.slots: dict[int, Slot] = {}  # by real offset
        self.store_id = ""
        self.lock = threading.Lock()
        self._memory: memoryview | None = None
        self._waiting: dict[int, Lookup | _Reply] = {}
        self._closed = False
        self._due_since = 0.0  # monotonic time since when an answer is due and nothing has come; 0: none is due
        self._asked_again = 0.0

    @property
    def silent(self) -> bool:
        """Whether the store answers nothing: it stands still, or its disk does. Any answer ends this."""
        since, now = self._due_since, time.monotonic()
        if not since or now - since < _SILENCE:
            return False
        with self.lock:
            again = now - max(since, self._asked_again) >= _ASK_AGAIN
            if again:
                self._asked_again = now
        if again:
            self.send(frames.FileHash(0, 0, 0, 0, 0))
        return True

    def send(self, frame: Frame) -> bool:
        """False if the connection is gone. Does not wait for a store that does not read."""
        if self._closed:
            return False
        try:
            self.channel.post(frame)
        except ChannelClosedError:
            return False
        return True

    def ask(self, ticket: int, frame: Frame, waiter: Lookup | _Reply) -> None:
        """Send a frame whose answers go to `waiter`; a store that is silent counts as gone."""
        lost = self.silent
        with self.lock:
            lost = lost or self._closed
            if not lost:
                self._waiting[ticket] = waiter
                self._due_since = self._due_since or time.monotonic()
        if lost or not self.send(frame):
            self.forget(ticket)
            waiter._on_closed()

    def forget(self, ticket: int) -> None:
        with self.lock:
            self._waiting.pop(ticket, None)

    def view(self, offset: int, size: int) -> memoryview | None:
        return self._memory[offset : offset + size] if self._memory is not None else None

    @property
    def room(self) -> int:
        """Bytes of the arena; 0 while there is none."""
        return len(self._memory) if self._memory is not None else 0

    def welcome(self, frame: frames.Welcome) -> None:
        """Map the arena. Raises OSError."""
        self.store_id = frame.store_id
        if frame.arena_bytes > 0:
            descriptor = self.channel.take_descriptor()
            try:
                self._memory = memoryview(mmap.mmap(descriptor, frame.arena_bytes))
            finally:
                os.close(descriptor)

    def dispatch(self, frame: Any) -> None:
        """Hand an answer to who waits for it."""
        self._due_since = 0.0
        with self.lock:
            waiter = self._waiting.get(frame.ticket)
            if isinstance(waiter, _Reply):
                del self._waiting[frame.ticket]
                waiter._on_frame(frame)  # under the lock, so that who gives up after `forget` has it or never will
        if isinstance(waiter, Lookup):
            waiter._on_frame(frame)
        elif waiter is None and isinstance(frame, frames.Reserved) and frame.offsets:
            self.send(frames.Abandon(frame.offsets))  # it came too late

    def close(self) -> None:
        """Answer everything that waits as lost."""
        with self.lock:
            self._closed = True
            waiting = list(self._waiting.values())
            self._waiting.clear()
            self.slots.clear()
        self.channel.close()
        for waiter in waiting:
            waiter._on_closed()


class StoreClient:
    """The store as a worker sees it. Thread-safe; no method raises because of the store.

    `on_connect` is called from the reader thread each time a store has become usable.
    """

    def __init__(self, on_connect: Callable[[], None] | None = None) -> None:
        self._on_connect = on_connect
        self._lock = threading.Condition()
        self._link: _Link | None = None  # usable: welcomed, not closed
        self._coming: _Link | None = None
        self._tickets = itertools.count(1)
        self._epochs = itertools.count()
        self._descriptions: dict[Namespace, dict[str, Any]] = {}

    @property
    def connected(self) -> bool:
        """Whether there is a store to ask, and it answers."""
        link = self._link
        return link is not None and not link.silent

    @property
    def room(self) -> int:
        """Bytes that blocks in RAM can take; 0 without a store."""
        link = self._link
        return link.room if link is not None else 0

    @property
    def store_id(self) -> str:
        """Of the store that is connected; "" if none is."""
        link = self._link
        return link.store_id if link is not None else ""

    def attach(self, sock: socket.socket) -> None:
        """Use the store at the other end of `sock` from now on; a store before it is left. Does not block."""
        link = _Link(sock, next(self._epochs) % _EPOCHS)
        with self._lock:
            old, coming = self._link, self._coming
            self._link, self._coming = None, link
        for before in (old, coming):
            if before is not None:
                before.close()
        link.send(frames.Hello(arena=True))
        threading.Thread(target=self._read, args=(link,), name="store-reader", daemon=True).start()

    def close(self) -> None:
        """Leave the store."""
        with self._lock:
            links = (self._link, self._coming)
            self._link = self._coming = None
            self._lock.notify_all()
        for link in links:
            if link is not None:
                link.close()

    def open_namespace(self, description: Mapping[str, Any], timeout: float) -> OpenedNamespace | None:
        """Register a namespace; None if the store did not answer within `timeout` seconds.

        It is registered again by itself with each store that is attached later.
        """
        deadline = time.monotonic() + timeout
        with self._lock:
            self._lock.wait_for(lambda: self._link is not None, timeout)
            link = self._link
        if link is None:
            return None
        ticket = next(self._tickets)
        reply = self._ask(link, ticket, frames.OpenNamespace(ticket, dict(description)), deadline)
        if reply is None:
            return None
        opened = OpenedNamespace(Namespace(reply.namespace), tuple(reply.mismatch))
        with self._lock:
            self._descriptions[opened.key] = dict(description)
        return opened

    def lookup(
        self,
        namespace: bytes,
        tokens_le: bytes,
        limit: int,
        exact: bool,
        on_update: Callable[[], None] | None = None,
        *,
        load: bool = True,
        request: str = "",
    ) -> Lookup:
        """Ask how far `tokens_le` (u32 LE) are known, at most `limit` tokens. Does not block.

        `load`: make the blocks ready and lease them until `release`; else only the plan is asked for. `request`: id by
        which the prompt can be named later.
        """
        link = self._link
        ticket = next(self._tickets)
        lookup = Lookup(link, ticket, on_update)
        if link is not None:
            link.ask(ticket, frames.Match(ticket, namespace, tokens_le, limit, exact, load, request), lookup)
        return lookup

    def reserve(
        self, sizes: Sequence[int], timeout: float = 0.25, *, runs: bool = False, after: bytes = b""
    ) -> list[Slot]:
        """Slots of at least these sizes in bytes, in order; fewer, or none, where there is no more room.

        `runs`: of several blocks each, which may be had one by one where this finds no room. `after`: key of the node
        that they continue.
        """
        link = self._link
        if link is None or not sizes:
            return []
        ticket = next(self._tickets)
        reply = self._ask(link, ticket, frames.Reserve(ticket, list(sizes), runs, after), time.monotonic() + timeout)
        slots: list[Slot] = []
        if reply is None:
            return slots
        with link.lock:
            for offset, size in zip(reply.offsets, sizes, strict=False):
                view = link.view(offset, size)
                if view is not None and not link._closed:
                    slot = Slot(link.epoch << _EPOCH_SHIFT | offset, size, view)
                    link.slots[offset] = slot
                    slots.append(slot)
        return slots

    def commit(self, namespace: bytes, nodes: Sequence[NewNode], owner: str = "") -> None:
        """Publish blocks in slots, parents before children. Those in slots of a store that is gone are dropped.

        `owner`: name of the API key that they were computed for, "" for none.
        """
        link = self._link
        if link is None:
            return
        ours: list[NewNode] = []
        with link.lock:
            for node in nodes:
                offset = self._real_offset(link, node.offset)
                if offset is not None and offset in link.slots:
                    ours.append(msgspec.structs.replace(node, offset=offset))
            for node in ours:
                link.slots.pop(node.offset, None)
        if ours:
            link.send(frames.Commit(namespace, ours, owner))

    def abandon(self, slots: Sequence[Slot]) -> None:
        """Give slots back unused."""
        link = self._link
        if link is None:
            return
        offsets: list[int] = []
        with link.lock:
            for slot in slots:
                offset = self._real_offset(link, slot.offset)
                if offset is not None and link.slots.pop(offset, None) is not None:
                    offsets.append(offset)
        if offsets:
            link.send(frames.Abandon(offsets))

    def neighbour(self, namespace: bytes, tokens_le: bytes, beyond: int, timeout: float) -> bytes:
        """Tokens (u32 LE) of the stored prompt that begins as `tokens_le`, to `beyond` tokens behind the first that
        differs; b"" if there is none, or no answer within `timeout` seconds."""
        reply = self._answer(lambda ticket: frames.Neighbour(ticket, namespace, tokens_le, beyond), timeout)
        return reply.tokens if reply is not None else b""

    def trace(self, namespace: bytes, tokens_le: bytes, timeout: float) -> frames.Traced | None:
        """What keeps `tokens_le` (u32 LE) from being found; None without an answer within `timeout` seconds."""
        reply: frames.Traced | None = self._answer(lambda ticket: frames.Trace(ticket, namespace, tokens_le), timeout)
        return reply

    def recall(self, namespace: bytes, text: bytes, timeout: float) -> frames.Recalled | None:
        """What is remembered of the longest prompt that `text` begins with; None if that is nothing, or not known."""
        reply: frames.Recalled | None = self._answer(lambda ticket: frames.Recall(ticket, namespace, text), timeout)
        return reply if reply is not None and reply.length else None

    def remember(self, frame: frames.Remember) -> None:
        """What was generated after a prompt. Does not block."""
        link = self._link
        if link is not None:
            link.send(frame)

    def file_hash(self, device: int, inode: int, size: int, mtime_ns: int, timeout: float = 1.0) -> str:
        """The remembered SHA-256 of a file; "" if none is, or there is no store."""
        reply = self._answer(lambda ticket: frames.FileHash(ticket, device, inode, size, mtime_ns), timeout)
        return reply.sha256 if reply is not None else ""

    def remember_file_hash(self, device: int, inode: int, size: int, mtime_ns: int, sha256: str) -> None:
        """Remember the SHA-256 of a file. Does not block."""
        link = self._link
        if link is not None:
            link.send(frames.FileHash(next(self._tickets), device, inode, size, mtime_ns, sha256))

    def _answer(self, question: Callable[[int], Frame], timeout: float) -> Any:
        """The answer to a frame, which is made from its ticket; None without a store, or after `timeout` seconds."""
        link = self._link
        if link is None:
            return None
        ticket = next(self._tickets)
        return self._ask(link, ticket, question(ticket), time.monotonic() + timeout)

    @staticmethod
    def _real_offset(link: _Link, offset: int) -> int | None:
        """None if it is not of this store."""
        return offset & ((1 << _EPOCH_SHIFT) - 1) if offset >> _EPOCH_SHIFT == link.epoch else None

    @staticmethod
    def _ask(link: _Link, ticket: int, frame: Frame, deadline: float) -> Any:
        reply = _Reply()
        link.ask(ticket, frame, reply)
        answer = reply.wait(max(0.0, deadline - time.monotonic()))
        if answer is None:
            link.forget(ticket)
            answer = reply.wait(0)  # it came in between: then nobody else will see it
        return answer

    def _read(self, link: _Link) -> None:
        """The reader thread of one link."""
        try:
            frame = link.channel.receive()
            if not isinstance(frame, frames.Welcome):
                raise ChannelClosedError(f"the store's first frame is {type(frame).__name__}")
            link.welcome(frame)
            with self._lock:
                if self._coming is not link:
                    raise ChannelClosedError("another store was attached meanwhile")
                descriptions = list(self._descriptions.values())
                for description in descriptions:  # before anybody can commit
                    link.send(frames.OpenNamespace(next(self._tickets), description))
                self._link, self._coming = link, None
                self._lock.notify_all()
            if self._on_connect is not None:
                with contextlib.suppress(Exception):
                    self._on_connect()
            while True:
                link.dispatch(link.channel.receive())
        except (OSError, ValueError) as error:  # ChannelClosedError is an OSError
            log.info("the connection to the store has ended: %s", error)
        except Exception:
            log.exception("reading from the store failed")
        finally:
            with self._lock:
                if self._link is link:
                    self._link = None
                if self._coming is link:
                    self._coming = None
            link.close()
