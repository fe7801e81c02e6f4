"""Memory for one block at a time, that is used again."""

from __future__ import annotations


class Scratch:
    """Room for one block that is on its way elsewhere. Of one thread."""

    def __init__(self) -> None:
        self._memory = bytearray()

    def __call__(self, size: int) -> memoryview:
        """`size` bytes, until it is asked for again."""
        if len(self._memory) < size:
            self._memory = bytearray(size)
        return memoryview(self._memory)[:size]
