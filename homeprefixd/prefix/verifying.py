"""Reading all that is stored, to find what the disk has lost: when somebody asks, and when nothing else happens.

Nothing waits for it: it reads a few nodes in one short transaction, without the cache's lock, at a bounded rate. What
is damaged goes the same way as when a request finds it, with all below it; what cannot even be read as a node is
discarded by the writer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from .cache import Cache
from .checking import Checked, Problem, check_some, is_still
from .disk import DiskFullError, DiskTroubleError

SCRUB_RATE = 8 << 20
"""Bytes a second that are read when nothing else happens."""

SCRUB_EVERY = 7 * 86_400.0
"""Seconds between the end of one pass over all and the beginning of the next."""

_IDLE_SECONDS = 30.0  # without look-ups and commits, after which scrubbing goes on
_LOOK = 0.2  # seconds between questions whether to stop
_NAMED = 100  # problems that are named

log = logging.getLogger(__name__)

Submit = Callable[[Callable[[], None]], None]
"""Runs something in the writer's thread."""


@dataclass
class Findings:
    """What a pass found."""

    nodes: int = 0
    bytes: int = 0  # of payload, as stored
    damaged: int = 0
    removed: int = 0  # with those below them, as far as the disk let them go
    problems: list[str] = field(default_factory=list)  # "id: reason", the first ones
    seconds: float = 0.0
    complete: bool = False


def _rest(seconds: Callable[[], float], stop: Callable[[], bool]) -> None:
    """Wait, but not beyond what `stop` says; `seconds` from now may change meanwhile."""
    begin = time.monotonic()
    while (left := begin + seconds() - time.monotonic()) > 0 and not stop():
        time.sleep(min(left, _LOOK))


def _seconds(size: int, rate: Callable[[], float]) -> float:
    """That reading `size` bytes takes."""
    speed = rate()
    return max(0.001, size / speed if speed > 0 else 0.0)


class Verifier:
    """Passes over all nodes of a cache. One at a time."""

    def __init__(self, cache: Cache, submit: Submit) -> None:
        self._cache = cache
        self._submit = submit
        self._running = threading.Lock()

    @property
    def running(self) -> bool:
        return self._running.locked()

    def run(
        self,
        *,
        repair: bool,
        rate: float | Callable[[], float],
        stop: Callable[[], bool] = lambda: False,
        pause: Callable[[], bool] = lambda: False,
        found: Findings | None = None,
    ) -> Findings | None:
        """Read everything, at most `rate` bytes a second (0: as fast as it goes). None if it is doing so already.

        `repair`: remove what is damaged. `stop` is asked several times a second and ends it early; while `pause` says
        so, it waits. `found`: where it counts. Raises DiskTroubleError if the tables themselves cannot be read.
        """
        if not self._running.acquire(blocking=False):
            return None
        try:
            speed = rate if callable(rate) else lambda: rate
            return self._run(repair, speed, stop, pause, Findings() if found is None else found)
        finally:
            self._running.release()

    def _run(
        self,
        repair: bool,
        rate: Callable[[], float],
        stop: Callable[[], bool],
        pause: Callable[[], bool],
        found: Findings,
    ) -> Findings:
        unreadable: dict[bytes, bytes] = {}
        waiting: set[bytes] = set()
        begin = time.monotonic()
        at: bytes | None = b""
        while at is not None and self._cache.disk is not None:
            while pause() and not stop():
                _rest(lambda: 1.0, stop)
            if stop():
                break
            checked = self._some(at)
            self._take(checked, found, repair, unreadable, waiting)
            self._count(found, waiting)
            at = checked.following
            _rest(partial(_seconds, checked.size, rate), stop)
        if unreadable:
            log.error("%d stored nodes are damaged; they are removed, with those below them", len(unreadable))
            gone: list[bytes] = []
            self._in_writer(lambda: self._cache.discard(unreadable, gone))
            found.removed += len(gone)
        self._count(found, waiting)  # the writer may have gone on where it had to stop
        found.complete = at is None
        found.seconds = time.monotonic() - begin
        return found

    def _some(self, at: bytes) -> Checked:
        disk = self._cache.disk
        if disk is None:
            return Checked(0, 0, [], None)
        with disk.reading() as (txn, tables):
            return check_some(txn, tables, at)

    def _is_still(self, problem: Problem) -> bool:
        if self._cache.disk is None:
            return False
        with self._cache.disk.reading() as (txn, tables):
            return is_still(txn, tables, problem)

    def _take(
        self, checked: Checked, found: Findings, repair: bool, unreadable: dict[bytes, bytes], waiting: set[bytes]
    ) -> None:
        """`unreadable`: tree key -> key of what is to be discarded; `waiting`: keys of what is to be removed."""
        found.nodes += checked.nodes
        found.bytes += checked.size
        for problem in checked.problems:
            if problem.key in self._cache.hidden or not self._is_still(problem):
                continue  # it is about to be removed, or was by now
            found.damaged += 1
            if len(found.problems) < _NAMED:
                found.problems.append(f"{problem.key.hex()[:16]}: {problem.reason}")
            if repair and problem.readable and (going := self._cache.damaged(problem.tree_key, problem.reason)):
                waiting.update(going)
                self._in_writer(self._cache.repair)
            elif repair:
                unreadable[problem.tree_key] = problem.key

    def _count(self, found: Findings, waiting: set[bytes]) -> None:
        """Those that have left the disk wait no longer."""
        with self._cache.lock:
            gone = waiting - self._cache.hidden
        found.removed += len(gone)
        waiting -= gone

    def _in_writer(self, change: Callable[[], None]) -> None:
        """Run `change` in the writer's thread and wait for it, done or refused by the disk."""
        done = threading.Event()

        def run() -> None:
            try:
                change()
            except (DiskFullError, DiskTroubleError) as error:
                self._cache.trouble("removing what is damaged", error)
            finally:
                done.set()

        self._submit(run)
        while not done.wait(0.5) and not self._cache.out_of_time():
            pass


class Scrubber:
    """A thread that verifies everything now and then, while nothing else happens."""

    def __init__(
        self, cache: Cache, asked: Verifier, submit: Submit, *, rate: float = SCRUB_RATE, every: float = SCRUB_EVERY
    ) -> None:
        """`asked`: what somebody has asked for, while which it waits."""
        self._cache = cache
        self._asked = asked
        self._verifier = Verifier(cache, submit)
        self._submit = submit
        self._rate = rate
        self._every = every
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._live, name="scrubber", daemon=True)
        self._seen: tuple[int, ...] = ()
        self._since = cache.clock()
        self._running = False
        self._found = Findings()

    def start(self) -> None:
        disk = self._cache.disk
        if disk is not None and not disk.read_only:
            self._thread.start()

    def figures(self) -> dict[str, Any]:
        """Of the pass that is running, or was last since the start; `last`: Unix time of the end of the last one, s."""
        disk = self._cache.disk
        return {
            "rate": self._rate,
            "every": self._every,
            "running": self._running,
            "last": disk.sums.scrubbed if disk is not None else 0.0,
            "nodes": self._found.nodes,
            "bytes": self._found.bytes,
            "damaged": self._found.damaged,
            "removed": self._found.removed,
        }

    def set_rate(self, rate: float) -> None:
        """Bytes a second from now on; 0: none, a pass that is running waits."""
        self._rate = rate

    def stop(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _must_wait(self) -> bool:
        return self._asked.running or self._rate <= 0 or self._is_busy()

    def _live(self) -> None:
        disk = self._cache.disk
        while disk is not None and not self._stop.is_set():
            wait = disk.sums.scrubbed + self._every - self._cache.wall()
            if wait > 0 or self._rate <= 0 or self._is_busy():
                self._stop.wait(min(max(1.0, wait), _IDLE_SECONDS))
                continue
            self._found, self._running = Findings(), True
            try:
                found = self._verifier.run(
                    repair=True,
                    rate=lambda: self._rate,
                    stop=self._stop.is_set,
                    pause=self._must_wait,
                    found=self._found,
                )
            except Exception as error:
                self._cache.trouble("verifying what is stored", error)
                found = None
            finally:
                self._running = False
            if found is not None and found.complete:
                log.info("verified %d blocks, %d MiB: %d damaged", found.nodes, found.bytes >> 20, found.damaged)
                self._submit(lambda: disk.note_scrub(self._cache.wall()))
                self._stop.wait(_IDLE_SECONDS)
            elif not self._stop.is_set():
                self._stop.wait(60 * _IDLE_SECONDS)

    def _is_busy(self) -> bool:
        """Whether there were look-ups or commits within the last moments."""
        counters = self._cache.counters
        now = self._cache.clock()
        seen = (counters.lookups, counters.saved_nodes, counters.known_nodes, counters.loaded_nodes)
        if seen != self._seen:
            self._seen, self._since = seen, now
        return now - self._since < _IDLE_SECONDS
