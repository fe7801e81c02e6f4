"""Whose turn it is where one thread makes what may take seconds each time. Pure; knows nothing of what is made."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from .shares import Use

_Work = TypeVar("_Work")


@dataclass(frozen=True)
class _Waiting(Generic[_Work]):
    rid: str
    client: str
    form: bytes
    work: _Work


class Turns(Generic[_Work]):
    """A queue with a place for each account. First what can be answered at once, then whoever has taken least time of
    late, then who came first: so nobody waits for more than one of those who take much. Any thread.
    """

    def __init__(self, is_known: Callable[[bytes], bool], clock: Callable[[], float] = time.monotonic) -> None:
        """`is_known`: does that form take no time? It may become known while it waits. `clock` in seconds."""
        self._is_known, self._clock = is_known, clock
        self._waiting: list[_Waiting[_Work]] = []
        self._use = Use()  # seconds
        self._changed = threading.Condition()

    def put(self, rid: str, client: str, form: bytes, work: _Work) -> None:
        """`client`: whose share of the time it is. `form`: what is to be made, b"" for what is never known."""
        with self._changed:
            self._waiting.append(_Waiting(rid, client, form, work))
            self._changed.notify()

    def drop(self, rid: str) -> bool:
        """Nobody wants it any more. False: it does not wait here."""
        with self._changed:
            kept = [waiting for waiting in self._waiting if waiting.rid != rid]
            found = len(kept) < len(self._waiting)
            self._waiting = kept
            return found

    def take(self) -> _Work:
        """The next; waits until there is one."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting)
            now = self._clock()
            best = min(self._waiting, key=lambda one: (not self._is_known(one.form), self._use.of(one.client, now)))
            self._waiting.remove(best)
            return best.work

    def spent(self, client: str, seconds: float) -> None:
        """Note what it took. Called before the next is taken, or that may be the same account's again."""
        with self._changed:
            self._use.count(client, seconds, self._clock())
