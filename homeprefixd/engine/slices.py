"""State of blocks out of and into a context, with every check that llama.cpp leaves to its caller.

A block [start, end) of a sequence goes through a scratch sequence: `seq_cp` shares its cells, the state of scratch is
the state of the block alone. llama.cpp returns success for a block imported twice, one left out, or another one's
bytes; so positions are checked before and after, the size gives the number of cells, and whatever fails leaves the
sequence empty. Only for models whose whole state is cells of full attention; for the others see `edges.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..prefix.runs import Layout
from .cell_table import CellTable
from .context import Context


class SliceError(Exception):
    """A block could not be exported or imported. After an import, the sequence is empty."""


@dataclass(frozen=True)
class BlockSize:
    """Bytes of a block's state: `fixed + tokens * per_token`."""

    fixed: int
    per_token: int

    def of(self, tokens: int) -> int:
        return self.fixed + tokens * self.per_token


class Slicer:
    """Exports and imports blocks of one context through its scratch sequence. Engine thread only."""

    def __init__(
        self,
        context: Context,
        scratch: int,
        size: BlockSize,
        layout: Layout | None = None,
        cells: CellTable | None = None,
    ) -> None:
        self._context = context
        self._scratch = scratch
        self.size = size
        self.layout = layout
        """Of runs of blocks, exported and imported as one; None where that gains nothing, or is not certain."""
        self.cells = cells
        """Where a block's positions stand; None where that is not known."""

    def export(self, seq: int, start: int, end: int, view: memoryview) -> int:
        """Write the state of positions [start, end) of `seq` to `view` (writable): a block, or a run of them.

        Returns bytes. Raises SliceError.
        """
        context, expected = self._context, self.size.of(end - start)
        if len(view) < expected:
            raise SliceError(f"a slot of {len(view)} bytes for {expected}")
        target = np.frombuffer(view, np.uint8)
        if not target.flags.writeable:
            raise SliceError("a slot that cannot be written")
        context.copy(seq, self._scratch, start, end)
        try:
            if context.pos_min(self._scratch) != start or context.pos_max(self._scratch) != end - 1:
                raise SliceError(f"positions {start} to {end - 1} of sequence {seq} are not all in memory")
            written = context.export_state(self._scratch, target.ctypes.data, expected)
        finally:
            self._empty_scratch()
        if written != expected:
            raise SliceError(f"llama.cpp wrote {written} of {expected} bytes")
        return written

    def import_block(self, seq: int, start: int, count: int, use: int, view: memoryview) -> None:
        """Append a block, or a run, of `count` tokens at position `start` to `seq`; keep its first `use` tokens.

        Raises SliceError; `seq` is empty then.
        """
        try:
            self._import(seq, start, count, use, view)
        except SliceError:
            self.empty(seq)
            raise

    def empty(self, seq: int) -> bool:
        """Forget a sequence of which something could not be restored, and what of it may be in scratch.

        Where nobody else has cells, the context is as it was when it was made. False: llama.cpp has not forgotten all;
        then only `clear` helps.
        """
        context, both = self._context, (seq, self._scratch)
        for own in both:
            context.remove(own)
        if all(context.pos_max(other) == -1 for other in range(context.settings.n_seq_max) if other not in both):
            context.clear()
            return True
        return all(context.pos_min(own) == context.pos_max(own) == -1 for own in both)

    def clear(self, seq: int) -> None:
        """Forget all sequences that are where `seq` is."""
        self._context.clear()

    def refuses(self, seq: int, start: int, count: int, state: memoryview, edge: memoryview | None = None) -> str:
        """Why the state of a block for position `start` can never be imported; "" if it can, or if what it fails for
        may be something else, such as want of cells. `seq` is empty, `edge` is the block's where states have edges."""
        if self._context.pos_max(self._scratch) != -1 or not self._has_room(count):
            return ""
        try:
            self._load(start, count, state, edge)
        except SliceError as error:
            return str(error)
        finally:
            self.empty(seq)
        return ""

    def _has_room(self, count: int) -> bool:
        """Whether there are free cells for so many tokens for certain: cells that several share count for each."""
        context = self._context
        used = sum(context.pos_max(seq) + 1 for seq in range(context.settings.n_seq_max))
        return used + count <= context.n_ctx

    def _load(self, start: int, count: int, state: memoryview, edge: memoryview | None = None) -> None:
        """A block's state into scratch, which is empty; checked. Raises SliceError, and leaves there what there is."""
        context, scratch, expected = self._context, self._scratch, self.size.of(count)
        if len(state) != expected:
            raise SliceError(f"{len(state)} bytes for {count} tokens, which have {expected}")
        if self.cells is not None and not self.cells.holds(state, start, count):
            raise SliceError("the state is that of other positions")
        read = context.import_state(scratch, np.frombuffer(state, np.uint8).ctypes.data, expected)
        if read != expected:
            raise SliceError(f"llama.cpp read {read} of {expected} bytes")
        if context.pos_min(scratch) != start or context.pos_max(scratch) != start + count - 1:
            raise SliceError("the state is that of other positions")

    def _import(self, seq: int, start: int, count: int, use: int, view: memoryview) -> None:
        context, scratch = self._context, self._scratch
        at = context.pos_max(seq) + 1
        if start != at:
            raise SliceError(f"a block for position {start} where {at} comes next")
        if not 0 < use <= count:
            raise SliceError(f"{use} tokens of a block of {count}")
        if context.pos_max(scratch) != -1:
            raise SliceError("the scratch sequence is not empty")
        self._load(start, count, view)
        context.copy(scratch, seq)
        self._empty_scratch()
        if use < count and not context.remove(seq, start + use):
            raise SliceError("the block cannot be cut")
        if context.pos_max(seq) != start + use - 1 or context.pos_min(seq) != 0:
            raise SliceError(f"positions {context.pos_min(seq)} to {context.pos_max(seq)} after the import")

    def _empty_scratch(self) -> None:
        self._context.remove(self._scratch)
        if self._context.pos_max(self._scratch) != -1:
            raise SliceError("the scratch sequence cannot be emptied")
