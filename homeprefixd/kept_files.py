"""Small files of the cache directory in which processes keep what they have found out: read with care, changed in turn.

Whatever lies under their names, reading it neither waits nor takes much memory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

_LOCK = "kept.lock"
_PATIENCE = 2.0  # s that one waits for its turn; then it goes without, and an entry may be lost
_AGAIN = 0.01  # s


def read_kept(path: Path, most: int) -> bytes:
    """A file of at most `most` bytes. Raises OSError, also for what is no regular file or larger."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        if status.st_size > most:
            raise OSError(errno.EFBIG, "it is too large to be what was kept")
        return file.read(most)


def write_kept(path: Path, data: bytes) -> None:
    """Put a new file in its place, as a whole. Raises OSError."""
    part = path.with_suffix(f".{os.getpid()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        with open(os.open(part, flags, 0o600), "wb") as file:
            file.write(data)
        part.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


@contextlib.contextmanager
def one_at_a_time(directory: Path) -> Iterator[None]:
    """While a file of this directory is read, changed and written, no other process does so. Raises no error of its
    own; waits for some seconds at most."""
    descriptor = -1
    try:
        with contextlib.suppress(OSError):
            flags = os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(directory / _LOCK, flags, 0o600)
            until = time.monotonic() + _PATIENCE
            while not _taken(descriptor) and time.monotonic() < until:
                time.sleep(_AGAIN)
        yield
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
