"""Where in a state the positions of its cells stand, so that they are looked at before llama.cpp takes them.

What has a position that cannot be (below 0, or the largest number of all) llama.cpp takes in and never forgets: no
range that can be named has it. A cell that is left makes others round differently, and its sequence is never empty.
The format is llama.cpp's own (`state_write_meta`), not promised by its API: it is read off a state that it has written.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_STEPS = (12, 20, 24)  # position, number of ids, id; with further coordinates (M-RoPE), and the token
_COUNT = 4  # bytes before the first position that say how many cells there are


@dataclass(frozen=True)
class CellTable:
    """`at`: byte of the first position, `step`: bytes from one to the next."""

    at: int
    step: int

    @classmethod
    def of(cls, state: memoryview, at: int, start: int, count: int) -> CellTable | None:
        """Read off a good state of positions [start, start + count), whose first one should stand at `at`; None if it
        is another format."""
        for step in _STEPS:
            table = cls(at, step)
            if table.holds(state, start, count):
                return table
        return None

    def holds(self, state: memoryview, start: int, count: int) -> bool:
        """Whether `state` has just the positions [start, start + count), in any order."""
        if len(state) < self.at + count * self.step:
            return False
        if int.from_bytes(state[self.at - _COUNT : self.at], "little") != count:
            return False
        positions = np.ndarray((count,), np.int32, state, self.at, (self.step,))
        return bool(np.array_equal(np.sort(positions), np.arange(start, start + count, dtype=np.int32)))
