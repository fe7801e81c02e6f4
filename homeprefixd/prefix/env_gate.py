"""Lets many threads use an open file, and one of them exchange it for another while none does."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_CLOSED = 0.05  # s that newcomers are kept out while the last ones leave
_OPEN = 0.01  # s between


class EnvGate:
    """`use` is taken by who reads or writes, also within another `use`; `alone` waits until nobody does.

    While somebody waits to be alone newcomers are kept out, for moments only: one that is inside may wait for a lock
    that one outside holds.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._users = 0
        self._is_alone = False
        self._closed = False
        self._own = threading.local()

    @contextmanager
    def use(self) -> Iterator[None]:
        depth = getattr(self._own, "depth", 0)
        with self._changed:
            while self._is_alone or (self._closed and not depth):
                self._changed.wait()
            self._users += 1
        self._own.depth = depth + 1
        try:
            yield
        finally:
            self._own.depth -= 1
            with self._changed:
                self._users -= 1
                if not self._users and self._closed:
                    self._changed.notify_all()

    @contextmanager
    def alone(self, patience: float) -> Iterator[bool]:
        """Yields whether it is, within about `patience` seconds; nobody gets in until it is left.

        Not for a thread that is inside.
        """
        free = self._enter(time.monotonic() + patience)
        try:
            yield free
        finally:
            if free:
                with self._changed:
                    self._is_alone = False
                    self._changed.notify_all()

    def _enter(self, deadline: float) -> bool:
        while True:
            with self._changed:
                self._closed = True
                free = self._changed.wait_for(lambda: not self._users and not self._is_alone, _CLOSED)
                self._is_alone = self._is_alone or free
                self._closed = False
                self._changed.notify_all()
            if free or time.monotonic() >= deadline:
                return free
            time.sleep(_OPEN)
