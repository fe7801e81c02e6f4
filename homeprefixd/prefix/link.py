"""One connection of a worker to one store: its arena, mapped, and who waits for which answer."""

from __future__ import annotations

import mmap
import os
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

from ..channel import Channel, ChannelClosedError
from ..frames import Frame
from ..frames import store as frames
from ..frames.store import FromStore
from .lookup import Lookup

_SILENCE = 1.0
"""Seconds without any answer, while one is due, after which a store is asked nothing: nobody waits for it."""
_ASK_AGAIN = 5.0
"""Seconds between questions to such a store whose answer nobody waits for."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Room in the arena for a block or a run. `offset` names it in a NewNode; it is not a position in `view`."""

    offset: int
    size: int
    view: memoryview  # writable, `size` bytes


class Reply:
    """One answer that a thread waits for."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._frame: Any = None

    def on_frame(self, frame: Any) -> None:
        self._frame = frame
        self._done.set()

    def on_closed(self) -> None:
        self._done.set()

    def wait(self, timeout: float) -> Any:
        """The frame; None if none came."""
        self._done.wait(timeout)
        return self._frame


class Link:
    """One connection to one store, its arena, and who waits for what."""

    def __init__(self, sock: socket.socket, epoch: int) -> None:
        self.channel: Channel[FromStore] = Channel(sock, FromStore)
        self.epoch = epoch
        self.slots: dict[int, Slot] = {}  # by real offset
        self.store_id = ""
        self.lock = threading.Lock()
        self._memory: memoryview | None = None
        self._waiting: dict[int, Lookup | Reply] = {}
        self.closed = False
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
        if self.closed:
            return False
        try:
            self.channel.post(frame)
        except ChannelClosedError:
            return False
        return True

    def ask(self, ticket: int, frame: Frame, waiter: Lookup | Reply) -> None:
        """Send a frame whose answers go to `waiter`; a store that is silent counts as gone."""
        lost = self.silent
        with self.lock:
            lost = lost or self.closed
            if not lost:
                self._waiting[ticket] = waiter
                self._due_since = self._due_since or time.monotonic()
        if lost or not self.send(frame):
            self.forget(ticket)
            waiter.on_closed()

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
            if isinstance(waiter, Reply):
                del self._waiting[frame.ticket]
                waiter.on_frame(frame)  # under the lock, so that who gives up after `forget` has it or never will
        if isinstance(waiter, Lookup):
            waiter.on_frame(frame)
        elif waiter is None and isinstance(frame, frames.Reserved) and frame.offsets:
            self.send(frames.Abandon(frame.offsets))  # it came too late

    def close(self) -> None:
        """Answer everything that waits as lost."""
        with self.lock:
            self.closed = True
            waiting = list(self._waiting.values())
            self._waiting.clear()
            self.slots.clear()
        self.channel.close()
        for waiter in waiting:
            waiter.on_closed()
