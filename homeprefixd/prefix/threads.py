"""The store's own threads: readers that load warm blocks, and the writer.

Both drive `cache.py` and know no sockets.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from .cache import BlockLostError, Cache, Lease
from .codec import Decoder
from .disk_file import GoneError
from .hot import HotNode
from .loading import NoRoomYetError

_NICE = 5
"""Of the writer. Measured with prefill on all cores: at 19 it is starved while it holds the interpreter's lock, so that
look-ups take up to 250 ms and a stop more than 60 s; at 5 they take at most 46 ms (26 ms at 0), and it keeps up."""

_PREPARED = 64 << 20  # bytes of hot memory that are kept filled in, so that a restart's first blocks find them
_KEEP_SECONDS = 30.0  # that freed memory is kept
_HOUSEKEEPING_SECONDS = 10.0

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Job:
    """The blocks of one lookup that are to be loaded, in order."""

    lease: Lease
    todo: deque[int]
    ready: Callable[[int, HotNode], None]  # index, node
    lost: Callable[[int, str], None]  # index, reason


class Readers:
    """Loads the warm blocks of lookups: each lookup's in order, several lookups in turn."""

    def __init__(self, cache: Cache, count: int) -> None:
        self._cache = cache
        self._jobs: deque[_Job] = deque()
        self._parked: list[_Job] = []  # those that wait until blocks before them are taken, or there is room
        self._freed = 0  # how often there was news of that
        self._changed = threading.Condition()
        self._ending = False
        self._threads = [
            threading.Thread(target=self._run, name=f"reader-{number}", daemon=True) for number in range(count)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Finish the blocks being loaded, and no more."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def load(self, lease: Lease, ready: Callable[[int, HotNode], None], lost: Callable[[int, str], None]) -> None:
        """Load what is not ready yet. For each block `ready(index, node)` is called, from a reader's thread, as soon as
        it is; after `lost(index, reason)` nothing more of this lookup is loaded."""
        todo = deque(index for index, node in enumerate(lease.plan) if node.offset < 0)
        if todo:
            with self._changed:
                self._jobs.append(_Job(lease, todo, ready, lost))
                self._changed.notify_all()

    def cancel(self, lease: Lease) -> None:
        """Load no more for this lookup."""
        with self._changed:
            for job in (*self._jobs, *self._parked):
                if job.lease is lease:
                    job.todo.clear()
            self._parked = [job for job in self._parked if job.todo]

    def resume(self) -> None:
        """Blocks were taken (`Cache.taken`), a lookup was released, or memory became free in another way: there may be
        room for what waits."""
        with self._changed:
            self._freed += 1
            if self._parked:
                self._jobs += self._parked
                self._parked = []
                self._changed.notify_all()

    def _run(self) -> None:
        decoder = Decoder()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._ending)
                if self._ending:
                    return
                job = self._jobs.popleft()
                if not job.todo:
                    continue
                index = job.todo.popleft()
                seen = self._freed
                if job.todo:
                    self._jobs.append(job)  # the next one in turn; another reader may take this one's next block
            try:
                hot = self._cache.load(job.lease, index, decoder)
            except NoRoomYetError:
                self._park(job, index, seen)
            except BlockLostError as error:
                self._lose(job, index, str(error))
            except Exception as error:
                log.exception("loading a block failed")
                self._lose(job, index, str(error))
            else:
                job.ready(index, hot)

    def _park(self, job: _Job, index: int, seen: int) -> None:
        """Until there is news, unless there was some since `seen`."""
        with self._changed:
            job.todo = deque(sorted((index, *job.todo)))
            if job in self._jobs:
                self._jobs.remove(job)
            if job in self._parked:
                return
            if self._freed == seen:
                self._parked.append(job)
            else:
                self._jobs.append(job)
                self._changed.notify_all()

    def _lose(self, job: _Job, index: int, reason: str) -> None:
        with self._changed:
            job.todo.clear()
        if not job.lease.released:
            job.lost(index, reason)


class Writer:
    """The thread that owns the disk's writes; below the priority of prefill."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._jobs: deque[Callable[[], None]] = deque()
        self._woken = False
        self._ending = False
        self._cache: Cache | None = None
        self._clients: set[threading.Thread] = set()
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._pending = 0

    def start(self, cache: Cache) -> None:
        self._cache = cache
        self._thread.start()

    def wake(self) -> None:
        """There is something to write. From any thread; does not block."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` in this thread, soon."""
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()

    def stop(self, seconds: float) -> int:
        """Write what waits, for about `seconds`, and close the disk; returns the nodes that were not written.

        Nobody else may use the cache any more. A transaction that has begun is finished, nothing is cut.
        """
        with self._changed:
            if self._cache is not None:
                self._cache.deadline = self._cache.clock() + seconds
            self._ending = True
            self._changed.notify_all()
        self._thread.join()
        return self._pending

    def _run(self) -> None:
        cache = self._cache
        if cache is None:
            return
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        self._guarded(lambda: _prepare(cache))
        due: float | None = 0.0
        housekeeping = time.monotonic() + _HOUSEKEEPING_SECONDS
        while True:
            wait = max(0.0, min([housekeeping - time.monotonic(), *([due] if due is not None else [])]))
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._woken or self._ending, wait)
                self._woken = False
                ending = self._ending
                job = self._jobs.popleft() if self._jobs else None
            if job is not None:
                self._guarded(job)
                due = 0.0
                continue
            if ending:
                self._pending = cache.close()
                return
            due = self._write(cache)
            if time.monotonic() >= housekeeping:
                self._guarded(lambda: _keep_house(cache))
                housekeeping = time.monotonic() + _HOUSEKEEPING_SECONDS

    @staticmethod
    def _write(cache: Cache) -> float | None:
        try:
            return cache.write()
        except Exception:
            log.exception("writing failed")
            return _HOUSEKEEPING_SECONDS

    @staticmethod
    def _guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except Exception:
            log.exception("a task of the writer failed")


def _prepare(cache: Cache) -> None:
    more = True
    while more:
        with cache.lock:
            more = cache.arena.prepare(min(_PREPARED, cache.arena.limit // 8), time.monotonic())


def _keep_house(cache: Cache) -> None:
    before = time.monotonic() - _KEEP_SECONDS
    more = 1
    while more:
        with cache.lock:
            more = cache.arena.give_back(before, min(_PREPARED, cache.arena.limit // 8))
    if cache.disk is not None:
        try:
            cache.disk.check_place()
        except GoneError as error:
            cache.judge(error)
    if log.isEnabledFor(logging.DEBUG):
        cache.check_integrity()
