"""A disk with faults: slow, narrow, failing, full, short or wrong reads. Everything else of it is the real one."""

from __future__ import annotations

import contextlib
import errno
import random
import resource
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from homeprefixd.prefix.codec import Decoder
from homeprefixd.prefix.disk import Disk
from homeprefixd.prefix.disk_file import disk_error
from homeprefixd.prefix.tree import Record


@dataclass
class Faults:
    """What is wrong with a disk now."""

    held: threading.Event | None = None  # each write waits for it
    latency: float = 0.0  # s before each read and each write
    bandwidth: float = 0.0  # bytes of state a second that are read; 0: as fast as it goes
    read_error: int = 0  # errno of each read
    write_error: int = 0  # errno of each transaction that changes something
    good_writes: int = 0  # transactions that go well before those
    short_reads: bool = False  # the end of each piece is missing
    flips: float = 0.0  # share of pieces of which a bit is wrong as they are read
    numbers: random.Random = field(default_factory=lambda: random.Random(1))
    reads: int = 0
    flipped: int = 0


class FaultyDisk(Disk):
    """Set `faults` at any time."""

    faults = Faults()

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.faults = Faults()
        super().__init__(*arguments, **named)

    def load(self, tree_key: bytes, out: memoryview, decoder: Decoder) -> Record:
        faults = self.faults
        faults.reads += 1
        time.sleep(faults.latency + (len(out) / faults.bandwidth if faults.bandwidth else 0.0))
        if faults.read_error:
            raise disk_error(OSError(faults.read_error, "injected"), self._file)
        wrong: Any = _WrongDecoder(decoder, faults)
        return super().load(tree_key, out, wrong)

    def _write(self, change: Callable[[Any], object]) -> None:
        time.sleep(self.faults.latency)
        if self.faults.held is not None:
            self.faults.held.wait(60)
        if self.faults.good_writes:
            self.faults.good_writes -= 1
        elif self.faults.write_error:
            raise disk_error(OSError(self.faults.write_error, "injected"), self._file)
        super()._write(change)


class _WrongDecoder:
    """Sees pieces as a bad disk gives them."""

    def __init__(self, inner: Decoder, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults

    def decode(self, key: bytes, number: int, record: memoryview, out: memoryview) -> None:
        faults, data = self._faults, bytearray(record)
        if faults.short_reads:
            del data[-1:]
        if faults.flips and faults.numbers.random() < faults.flips:
            at = faults.numbers.randrange(8 * len(data))
            data[at // 8] ^= 1 << at % 8
            faults.flipped += 1
        self._inner.decode(key, number, memoryview(data), out)


@contextlib.contextmanager
def no_file_larger_than(size: int) -> Iterator[None]:
    """A disk that is full: this process can make no file larger (EFBIG, which is taken as ENOSPC is)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


FULL = (errno.ENOSPC, errno.EDQUOT)
