"""Does a full store cost requests anything, and does its file stay within its budget? `homeprefixd bench turnover`.

The real store process is filled and overfilled by one-shot prompts, as fast as `rate` says, while requests come in
turn: each looks up one of a few household prefixes, waits for all its blocks, and saves a block of its own. The same
load and hot tier are measured with a budget that is never reached (nothing is evicted from disk), before and after the
store turns over within its budget. Requests count once as much was written as the hot tier holds: until then all comes
from RAM. From then on nearly all comes from disk, with and without eviction: the prefixes are more than RAM has room
for beside what waits to be written, and what comes in strict turn has always left it by then. How much did is told with
the figures, as a block from RAM costs next to nothing: where it is not alike, nor are the times. No model: see
`store_process.py`.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ..prefix.blocks import BLOCK_TOKENS
from .figures import percentile
from .rows import Row, at_least, at_most
from .store_process import DEMO_BLOCK, MadeUpWorker, States, StoreProcess

PREFIXES = 6
_PREFIX_SHARE = 4  # of the budget, all household prefixes together
_ONE_SHOT = 4  # blocks
_CALM = 2.0  # times the budget is written in each round without eviction
_SPARE = 2  # times that is its budget then
_LOOK = 0.1  # s between looks at the store's figures
_PATIENCE = 3600.0  # s that one pass may take


@dataclass
class Pass:
    """What one run came to; times in seconds."""

    requests: list[float] = field(default_factory=list)
    asked: int = 0  # requests, also those whose time does not count
    lost: int = 0  # of these, that did not get all of their prefix
    wrong: int = 0  # blocks that hold something else
    blocks: int = 0  # that came for those whose time counts
    warm: int = 0  # of these, from disk
    written: int = 0  # bytes, as stored
    evicted: int = 0  # blocks, from disk
    errors: int = 0  # of the disk, and damage
    file: int = 0  # bytes of the file on disk, the most that was seen
    seconds: float = 0.0

    def add(self, other: Pass) -> None:
        """Both together."""
        self.requests += other.requests
        for name in ("asked", "lost", "wrong", "blocks", "warm", "written", "evicted", "errors", "seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.file = max(self.file, other.file)


def measure(
    *,
    size: int = 1 << 30,
    times: float = 20.0,
    rate: float = 100e6,
    every: float = 0.1,
    rounds: int = 2,
    block: int = DEMO_BLOCK,
    directory: Path | None = None,
    say: Callable[[str], None] = lambda _text: None,
) -> list[Row]:
    """The bars' rows. Sizes in bytes; `times` the budget is written, `rate` bytes of state come in a second, and a
    request each `every` seconds. `rounds`: without eviction, half of them before the others. `directory`: where on
    disk; without eviction up to twice `size` are there.

    Raises StoreError.
    """
    load = _Load(States(block), block, size, rate, every, directory)
    calm = Pass()
    volume = int(size * _CALM)

    def without_eviction(numbers: range) -> None:
        for number in numbers:
            say(f"nothing is evicted: {number + 1} of {rounds}")
            calm.add(load.run(volume * _SPARE, volume))

    without_eviction(range(rounds // 2))
    say(f"turning over {times:g} times")
    full = load.run(size, int(size * times))
    without_eviction(range(rounds // 2, rounds))
    return _rows(calm, full, size, times)


def _rows(calm: Pass, full: Pass, size: int, times: float) -> list[Row]:
    rows = []
    for what, percent, bar in (("median", 50, 1.1), ("p99", 99, 1.5)):
        before, after = percentile(calm.requests, percent), percentile(full.requests, percent)
        share = after / before if before and after else None
        note = (
            f"{after * 1e3:.1f} ms of {len(full.requests)}, without eviction {before * 1e3:.1f} ms of"
            f" {len(calm.requests)}"
            if before and after
            else "nothing was measured"
        )
        rows.append(at_most(f"requests while it turns over / without eviction, {what}", share, bar, note))
    speed = full.written / full.seconds / 1e6 if full.seconds else 0.0
    note = f"{full.written >> 20} MiB at {speed:.0f} MB/s, {full.evicted} blocks evicted"
    rows.append(at_least("written / budget", full.written / size, times, note))
    note = f"{full.file / (1 << 20):.0f} MiB for a budget of {size >> 20} MiB"
    rows.append(at_most("file / budget", full.file / size, 1.1, note))
    wrong = calm.wrong + full.wrong + calm.errors + full.errors
    rows.append(at_most("wrong blocks and errors", wrong, 0, f"{calm.evicted} evicted where none should be"))
    warm = [100 * found.warm / found.blocks if found.blocks else 0.0 for found in (calm, full)]
    lost = (
        f"of {calm.asked + full.asked}; from disk came {warm[1]:.0f} % of their blocks, without eviction"
        f" {warm[0]:.0f} %"
    )
    rows.append(at_most("requests that lost a part of their prefix", calm.lost + full.lost, 0, lost))
    return rows


@dataclass(frozen=True)
class _Load:
    """What a store is loaded with. `block`, `size`: bytes; `size` sets the hot tier and how long prefixes are."""

    states: States
    block: int
    size: int
    rate: float
    every: float
    directory: Path | None

    def run(self, budget: int, volume: int) -> Pass:
        """A store from nothing until `volume` bytes were written. Raises StoreError."""
        place = Path(tempfile.mkdtemp(prefix="homeprefixd-turnover-", dir=self.directory))
        hot = max(32 << 20, self.size // 4)
        try:
            store = StoreProcess(place / "cache", hot=hot, warm=budget)
            try:
                return _Turnover(store, self).run(volume, min(hot, volume // 2))
            finally:
                store.stop()
        finally:
            shutil.rmtree(place, ignore_errors=True)


class _Turnover:
    """One store under load."""

    def __init__(self, store: StoreProcess, load: _Load) -> None:
        self._store, self._load = store, load
        blocks = max(2, load.size // _PREFIX_SHARE // PREFIXES // load.block)
        self._prefixes = [_prompt(number, blocks) for number in range(PREFIXES)]
        self._counting = threading.Event()
        self._ending = threading.Event()
        self._failed: list[BaseException] = []
        self._found = Pass()

    def run(self, volume: int, settled: int) -> Pass:
        """Load it until `volume` bytes were written, or what it does fails; requests count from `settled` bytes on."""
        begin = time.monotonic()
        worker = self._worker()
        try:
            for tokens in self._prefixes:
                worker.save(tokens)
                self._store.flush()
                for _use in range(3):
                    worker.ask(tokens)
        finally:
            worker.close()
        with self._loaded():
            while not self._failed and time.monotonic() - begin < _PATIENCE:
                figures = self._store.stats()
                written = figures["writes"]["total"]
                self._found.file = max(self._found.file, figures["warm"]["file_bytes"])
                if written >= settled:
                    self._counting.set()
                if written >= volume:
                    break
                time.sleep(_LOOK)
        if self._failed:
            raise self._failed[0]
        counters = figures["counters"]
        self._found.written = figures["writes"]["total"]
        self._found.evicted = counters["evicted_warm"]
        self._found.errors = counters["errors"] + counters["damaged"]
        self._found.seconds = time.monotonic() - begin
        return self._found

    def _worker(self) -> MadeUpWorker:
        return MadeUpWorker(self._store, self._load.states, self._load.block)

    @contextmanager
    def _loaded(self) -> Iterator[None]:
        threads = [
            threading.Thread(target=self._guarded, args=(part,), name=part.__name__)
            for part in (self._one_shots, self._requests)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._ending.set()
            for thread in threads:
                thread.join()

    def _guarded(self, part: Callable[[MadeUpWorker], None]) -> None:
        try:
            worker = self._worker()
            try:
                part(worker)
            finally:
                worker.close()
        except BaseException as error:
            self._failed.append(error)

    def _one_shots(self, worker: MadeUpWorker) -> None:
        """Prompts that nobody sends again."""
        begin, done, number = time.monotonic(), 0, PREFIXES
        while not self._ending.is_set():
            number += 1
            done += worker.save(_prompt(number, _ONE_SHOT))[1] * self._load.block
            ahead = done / self._load.rate - (time.monotonic() - begin)
            self._ending.wait(max(0.0, ahead))

    def _requests(self, worker: MadeUpWorker) -> None:
        """Each household prefix in turn, with a question of its own behind it."""
        begin, number = time.monotonic(), 0
        while not self._ending.is_set():
            tokens = self._prefixes[number % PREFIXES]
            blocks = len(tokens) // BLOCK_TOKENS
            asked = worker.ask(tokens)
            seconds, _saved = worker.save([*tokens, *_prompt(number, 1, first=1 << 20)], known=blocks)
            if self._counting.is_set():
                self._found.requests.append(asked.seconds + seconds)
                self._found.blocks += asked.blocks
                self._found.warm += asked.warm
            self._found.asked += 1
            self._found.lost += asked.blocks < blocks
            self._found.wrong += asked.wrong
            number += 1
            self._ending.wait(max(0.0, begin + number * self._load.every - time.monotonic()))


def _prompt(number: int, blocks: int, first: int = 0) -> list[int]:
    """Tokens of a prompt that no other number begins with."""
    return [first + number, *range(1, blocks * BLOCK_TOKENS)]
