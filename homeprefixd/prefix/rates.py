"""How fast blocks come from disk, measured while they come."""

from __future__ import annotations

import threading

_FORGET = 0.9  # weight of what was measured until now when as much as `_SAMPLE` is measured anew
_SAMPLE = 1 << 20  # bytes


class ReadRate:
    """Bytes of state a second, of one reader: reading, checksum and decoding. Later reads count more. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes = 0.0
        self._seconds = 0.0

    def add(self, size: int, seconds: float) -> None:
        """A payload of `size` bytes took `seconds`."""
        with self._lock:
            keep = _FORGET ** (size / _SAMPLE)
            self._bytes = self._bytes * keep + size
            self._seconds = self._seconds * keep + seconds

    @property
    def value(self) -> float:
        """0 while nothing was measured."""
        with self._lock:
            return self._bytes / self._seconds if self._seconds > 0 else 0.0
