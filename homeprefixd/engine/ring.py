"""In which cells a restored sliding window lies: where those of a run that computed everything would.

llama.cpp uses a window's cells in a ring. Alone in its context, a run has position p in cell p mod the ring's size.
Attention adds up in the order of the cells, so from where the ring begins anew a window that lies elsewhere gives other
roundings: it has earlier tokens before later ones, the run has them the other way round.

A restored state takes the next free cells, round the end of the ring if need be. So where it matters those before its
first one are filled first, with cells that nobody sees: they have the lowest positions, which the window left long
ago. llama.cpp gives them away as it does with all that a window has left.
"""

from __future__ import annotations

import numpy as np

from .context import PARTIAL_ONLY, Context
from .slices import BlockSize, SliceError

HEADER = 8
"""Bytes before a state, the same whether it is whole or partial."""

_FIRST = 8  # bytes between the header and a window's cells: how many streams and cells there are
_PIECE = 8 << 20  # bytes that are filled in one go


class Ring:
    """Of one context, whose scratch sequence it uses. Engine thread only.

    `state`: of a window's cells at positions 0 to `positions`, as llama.cpp writes it (partial), `cell` its size.
    """

    def __init__(
        self, context: Context, scratch: int, size: int, state: bytes, positions: int, cell: BlockSize
    ) -> None:
        self._context, self._scratch = context, scratch
        self.size = size
        self.positions = positions
        """Below this all positions of a sequence that was filled may be fillers."""
        self._state, self._cell = state, cell

    def missing(self, start: int, reach: int) -> int:
        """Cells to be filled before position `start` is restored; 0 where no cell is used a second time before
        `reach` tokens are computed, so that their order is the same anyway."""
        if start // self.size == max(start, reach - 1) // self.size:
            return 0
        count = start % self.size
        return count if count % self.positions == 0 and start >= self.positions else 0

    def is_alone(self) -> bool:
        """Whether nobody has cells in the ring."""
        return all(self._context.pos_max(other) == -1 for other in range(self._context.settings.n_seq_max))

    def fill(self, seq: int, count: int) -> None:
        """Give `seq` the next `count` cells (a multiple of `positions`). Raises SliceError."""
        pieces = [(self.positions, self._state)]
        self._put(seq, self._state)
        filled = self.positions
        while 2 * filled <= count and 2 * len(pieces[-1][1]) <= _PIECE:
            self._put(seq, pieces[-1][1])
            filled *= 2
            pieces.append((filled, self._export(seq)))
        for cells, state in reversed(pieces):
            while count - filled >= cells:
                self._put(seq, state)
                filled += cells
        size = self._context.state_size(seq, PARTIAL_ONLY)
        if size != HEADER + self._cell.of(count):
            raise SliceError(f"a window of {size} bytes after {count} cells were filled")

    def is_in_order(self, seq: int, lowest: int, end: int) -> bool:
        """Whether the window [lowest, end) of `seq` goes round the ring's end where it should, if it goes round."""
        anew = end - end % self.size
        if not lowest < anew < end:
            return True
        context, scratch = self._context, self._scratch
        context.copy(seq, scratch, anew - 1, anew + 1)
        try:
            state = self._export(scratch)
        finally:
            context.remove(scratch)
        first = int.from_bytes(state[HEADER + _FIRST : HEADER + _FIRST + 4], "little")
        return first == anew  # cells are written in their order, each with its position first

    def _put(self, seq: int, state: bytes) -> None:
        context, scratch = self._context, self._scratch
        read = context.import_state(scratch, np.frombuffer(state, np.uint8).ctypes.data, len(state), PARTIAL_ONLY)
        context.copy(scratch, seq)
        context.remove(scratch)
        if read != len(state):
            raise SliceError(f"llama.cpp read {read} of {len(state)} bytes")

    def _export(self, seq: int) -> bytes:
        return export_state(self._context, seq, PARTIAL_ONLY)


def export_state(context: Context, seq: int, flags: int = 0) -> bytes:
    """The state of a sequence. Raises SliceError."""
    size = context.state_size(seq, flags)
    buffer = np.zeros(size, np.uint8)
    if not size or context.export_state(seq, buffer.ctypes.data, size, flags) != size:
        raise SliceError("llama.cpp does not give the state of a sequence")
    return buffer.tobytes()
