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
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ..channel import ChannelClosedError
from ..frames import Frame
from ..frames import store as frames
from ..frames.store import NewNode
from .admin import AdminClient
from .blocks import Namespace
from .link import Link, Reply, Slot
from .lookup import BlockState, Lookup

__all__ = ["AdminClient", "BlockState", "Lookup", "OpenedNamespace", "Slot", "StoreClient"]

_EPOCH_SHIFT = 44  # offsets of an arena are below 2**44
_EPOCHS = 1 << 18

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpenedNamespace:
    """A namespace that the store knows. `mismatch`: how stored prefixes of the same model content differ, in words."""

    key: Namespace
    mismatch: tuple[str, ...]


class StoreClient:
    """The store as a worker sees it. Thread-safe; no method raises because of the store.

    `on_connect` is called from the reader thread each time a store has become usable.
    """

    def __init__(self, on_connect: Callable[[], None] | None = None) -> None:
        self._on_connect = on_connect
        self._lock = threading.Condition()
        self._link: Link | None = None  # usable: welcomed, not closed
        self._coming: Link | None = None
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
        link = Link(sock, next(self._epochs) % _EPOCHS)
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
                if view is not None and not link.closed:
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

    def refuse(self, namespace: bytes, key: bytes, reason: str) -> None:
        """The state of node `key` cannot be imported, for a reason of its own. Does not block."""
        link = self._link
        if link is not None:
            link.send(frames.Refuse(namespace, key, reason))

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
    def _real_offset(link: Link, offset: int) -> int | None:
        """None if it is not of this store."""
        return offset & ((1 << _EPOCH_SHIFT) - 1) if offset >> _EPOCH_SHIFT == link.epoch else None

    @staticmethod
    def _ask(link: Link, ticket: int, frame: Frame, deadline: float) -> Any:
        reply = Reply()
        link.ask(ticket, frame, reply)
        answer = reply.wait(max(0.0, deadline - time.monotonic()))
        if answer is None:
            link.forget(ticket)
            answer = reply.wait(0)  # it came in between: then nobody else will see it
        return answer

    def _read(self, link: Link) -> None:
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
