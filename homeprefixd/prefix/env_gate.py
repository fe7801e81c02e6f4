"""Lets many threads use an open file, and one of them exchange it for another while none does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class EnvGate:
    """`use` is taken by who reads or writes, also within another `use`; `alone` waits until nobody does.

    Who comes while somebody waits to be alone is let in: one use may be within another. Uses last moments, so the
    one that waits finds a gap; it gives up when there is none.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._users = 0
        self._is_alone = False

    @contextmanager
    def use(self) -> Iterator[None]:
        with self._changed:
            while self._is_alone:
                self._changed.wait()
            self._users += 1
        try:
            yield
        finally:
            with self._changed:
                self._users -= 1
                if not self._users:
                    self._changed.notify_all()

    @contextmanager
    def alone(self, patience: float) -> Iterator[bool]:
        """Yields whether it is, within `patience` seconds; nobody gets in until it is left."""
        with self._changed:
            free = self._changed.wait_for(lambda: not self._users and not self._is_alone, patience)
            self._is_alone = free
        try:
            yield free
        finally:
            if free:
                with self._changed:
                    self._is_alone = False
                    self._changed.notify_all()
