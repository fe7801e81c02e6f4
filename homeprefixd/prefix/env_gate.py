"""Lets many threads use an open file, and one of them exchange it for another while none does."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_CLOSED = 0.05  # s that newcomers are kept out while the last ones leave
_OPEN = 0.01  # s between
_LOOK = 0.0005  # s between looks whether all have left
_SLOTS = 64  # beyond which those of ended threads are forgotten


@dataclass(eq=False)
class _Slot:
    """A thread, and how many uses it is within."""

    thread: threading.Thread
    depth: int = 0


class EnvGate:
    """`use` is taken by who reads or writes, also within another `use`; `alone` waits until nobody does.

    A use takes no lock: it notes itself first and looks then, while who wants to be alone closes first and looks then;
    the interpreter's lock puts these steps in an order. While somebody waits to be alone newcomers are kept out, for
    moments only: one that is inside may wait for a lock that one outside holds.
    """

    def __init__(self) -> None:
        self._closed = False
        self._changed = threading.Condition()
        self._alone = threading.Lock()
        self._slots: list[_Slot] = []
        self._own = threading.local()

    @contextmanager
    def use(self) -> Iterator[None]:
        slot = getattr(self._own, "slot", None) or self._new_slot()
        slot.depth += 1
        while self._closed and slot.depth == 1:
            slot.depth = 0
            with self._changed:
                self._changed.wait_for(lambda: not self._closed)
            slot.depth = 1
        try:
            yield
        finally:
            slot.depth -= 1

    @contextmanager
    def alone(self, patience: float) -> Iterator[bool]:
        """Yields whether it is, within about `patience` seconds; nobody gets in until it is left.

        Not for a thread that is inside.
        """
        with self._alone:
            free = self._close(time.monotonic() + patience)
            try:
                yield free
            finally:
                self._open()

    def _close(self, deadline: float) -> bool:
        while True:
            self._closed = True
            moment = time.monotonic() + _CLOSED
            while any(slot.depth for slot in list(self._slots)):
                if time.monotonic() >= moment:
                    break
                time.sleep(_LOOK)
            else:
                return True
            self._open()
            if time.monotonic() >= deadline:
                return False
            time.sleep(_OPEN)

    def _open(self) -> None:
        with self._changed:
            self._closed = False
            self._changed.notify_all()

    def _new_slot(self) -> _Slot:
        slot = self._own.slot = _Slot(threading.current_thread())
        with self._changed:
            if len(self._slots) > _SLOTS:
                self._slots = [other for other in self._slots if other.depth or other.thread.is_alive()]
            self._slots.append(slot)
        return slot
