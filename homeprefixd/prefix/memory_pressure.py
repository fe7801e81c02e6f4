"""Gives the hot tier's memory back while the machine needs it, down to nothing, and takes it again afterwards.

Two signs: the share of time in which somebody waited for memory (the kernel's pressure stall information), and how much
could be allocated without swapping. It gives back fast and takes again slowly, and what begins and what ends a pressure
lie apart, so that it does not swing. What was only in RAM is written first; what is leased stays until it is released.
What lies on disk is used all the same: it passes through a small part of memory, which is given back at the next look.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .. import machine
from .cache import Cache

EVERY = 2.0  # s
CALM = 20.0  # s without pressure until it grows again

_PRESSED = 0.10  # share of time that somebody waits for memory: begins a pressure
_RELIEVED = 0.01  # ends it
_LEAST_FREE = 0.03  # of the machine's memory: less begins a pressure, twice as much ends it
_LEAST_FREE_BYTES = (64 << 20, 1 << 30)  # the same: at least, at most
_SHARE = 8  # of the limit that goes in one step, or more if more is lacking
_GROWTH = 16  # of the limit that comes back in one step
_PASSAGE = 64 << 20  # bytes that may be used while memory is short
_PASSAGE_SHARE = 8  # of the limit; the smaller one counts
_FEW = 64  # nodes that go while the cache's lock is held

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reading:
    """What the machine says now. Bytes; `stalled`: share of the last moments that somebody waited for memory."""

    available: int
    total: int
    stalled: float


class Gauge:
    """Reads the machine. Not thread-safe."""

    def __init__(self, clock: Callable[[], float], pressure: Path = Path("/proc/pressure/memory")) -> None:
        """`clock`: any, in seconds."""
        self._clock = clock
        self._pressure = pressure
        self._before: tuple[float, int] | None = None

    def __call__(self) -> Reading:
        return Reading(machine.available_memory(), machine.total_memory(), self._stalled())

    def _stalled(self) -> float:
        """Since the last call; 0 where the kernel does not say."""
        now, total = self._clock(), self._total()
        before, self._before = self._before, None if total is None else (now, total)
        if before is None or total is None or now <= before[0]:
            return 0.0
        return min(1.0, max(0, total - before[1]) / 1e6 / (now - before[0]))

    def _total(self) -> int | None:
        """Microseconds of waiting since the machine's start."""
        try:
            lines = self._pressure.read_text().splitlines()
        except OSError:
            return None
        for line in lines:
            kind, *figures = line.split()
            if kind == "some":
                found = dict(figure.partition("=")[::2] for figure in figures)
                return int(found["total"]) if found.get("total", "").isdigit() else None
        return None


class Allowance:
    """How much the hot tier may take: the decision, without the machine. Bytes, seconds."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.value = limit
        self._pressed_at = float("-inf")

    def next(self, reading: Reading, used: int, now: float) -> int:
        """`used`: what it takes now."""
        low, high = _LEAST_FREE_BYTES
        least = int(min(max(reading.total * _LEAST_FREE, low), high))
        self.value = min(self.value, self.limit)
        if reading.stalled >= _PRESSED or reading.available < least:
            step = max(self.limit // _SHARE, least - reading.available)
            self.value = max(0, min(self.value, used) - step)
            self._pressed_at = now
        elif reading.stalled > _RELIEVED or reading.available < 2 * least:
            self._pressed_at = max(self._pressed_at, now - CALM / 2)
        elif self.value < self.limit and now - self._pressed_at >= CALM:
            self.value = min(self.limit, self.value + max(self.limit // _GROWTH, 1))
        return self.value


class Relief:
    """A thread that holds a cache's hot tier to its allowance."""

    def __init__(self, cache: Cache, read: Callable[[], Reading] | None = None, every: float = EVERY) -> None:
        self._cache = cache
        self._read = read or Gauge(cache.clock)
        self._every = every
        self._allowance = Allowance(cache.arena.limit)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._live, name="relief", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def bound(self, limit: int) -> int:
        """Another budget from now on, in bytes; returns it: at most what the arena was made for."""
        arena = self._cache.arena
        limit = max(1, min(limit, arena.limit))
        with self._cache.lock:
            whole = self._allowance.value >= self._allowance.limit
            self._allowance.limit = limit
            self._allowance.value = limit if whole else min(limit, self._allowance.value)
            arena.allowance = self._with_passage(self._allowance.value)
        self.shrink()
        self._cache.freed()
        return limit

    def _with_passage(self, allowance: int) -> int:
        """What may be in use between two looks."""
        return max(allowance, min(_PASSAGE, self._allowance.limit // _PASSAGE_SHARE))

    def look(self) -> None:
        """One look at the machine, and what follows from it."""
        cache = self._cache
        reading = self._read()
        with cache.lock:
            before, whole = self._allowance.value, self._allowance.limit
            after = self._allowance.next(reading, cache.arena.used, cache.clock())
            cache.arena.allowance = self._with_passage(after)
        if after < before == whole:
            log.warning(
                "memory is short (%d MiB available, somebody waits %.0f %% of the time): the hot tier gives back",
                reading.available >> 20, 100 * reading.stalled,
            )  # fmt: skip
        elif before < after == whole:
            log.info("memory is no longer short: the hot tier may take all of its %d MiB again", whole >> 20)
        if after < whole:
            self.shrink()
        if after > before:
            cache.freed()

    def shrink(self) -> None:
        """Evict until the allowance is met, as far as nodes may go, and give all free memory back."""
        cache, allowance = self._cache, self._allowance.value
        more = True
        while more and not self._stop.is_set():
            with cache.lock:
                for _number in range(_FEW):
                    more = cache.arena.used > allowance and cache.hot.evict()
                    if not more:
                        break
        given = 1
        while given and not self._stop.is_set():
            with cache.lock:
                given = cache.arena.give_back(float("inf"), max(0, allowance - cache.arena.used))

    def _live(self) -> None:
        while not self._stop.wait(self._every):
            try:
                self.look()
            except Exception:
                log.exception("looking after the machine's memory failed")
