"""State of nodes out of and into a context where it has edges: sliding windows, recurrent and hybrid models.

A node's state is a *span*, needed for ever, and an *edge*, needed only to go on from there: the sliding window's
cells, or the recurrent state, which llama.cpp calls partial and writes last. What it does not tell, and is checked
here (see also `slices.py`):

* A recurrent state exists only where a decode call ended, and `seq_cp` ignores the range: an edge is that of the
  sequence's last position, or none.
* A window's cells are gone once later tokens have taken them: an edge must have all cells of its node.
* Where a window's cells lie decides how attention rounds: see `ring.py`.
* With an edge left out, positions do not tell whether a span is there twice or not at all: the importer counts, and
  at the end llama.cpp's own size of the state must agree.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from ..prefix.blocks import Edges
from .cell_table import CellTable
from .context import PARTIAL_ONLY, Context
from .ring import HEADER, Ring, export_state
from .slices import BlockSize, SliceError, Slicer

logger = logging.getLogger(__name__)

_Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


@dataclass(frozen=True)
class EdgeShape:
    """What edges of a model are like. `recurrent`: (also) a recurrent state; `window`: positions, 0 without one."""

    recurrent: bool
    window: int
    size: BlockSize
    empty: bytes
    """The edge of an empty sequence, which stands in where a node's own is not needed."""

    @property
    def needs(self) -> Edges:
        return Edges(self.window)

    def of(self, tokens: int) -> int:
        """Bytes of the edge of a node. Cells that the node's own end does not see any more are not written."""
        return self.size.of(min(tokens, self.window) if self.window else tokens)


class EdgeSlicer(Slicer):
    """Exports and imports nodes of one context through its scratch sequence. Engine thread only.

    `bare`: the span of any node, where it is the same for all: purely recurrent models have nothing in it. Blocks
    (`export`, `import_block`) do not hold all of such a state: SliceError. `ring`: of the window's cells, None where
    their order does not matter.
    """

    def __init__(
        self,
        context: Context,
        scratch: int,
        span: BlockSize,
        edge: EdgeShape,
        bare: bytes = b"",
        ring: Ring | None = None,
    ) -> None:
        super().__init__(context, scratch, span)
        self.edge = edge
        self.edge_cells: CellTable | None = None
        """Where the positions of an edge stand; None where that is not known."""
        self._bare = bare
        self._ring = ring
        self._filled = -1  # sequence that was placed
        self._buffer: _Bytes = np.zeros(0, np.uint8)

    def edge_bytes(self, seq: int, start: int, end: int) -> int:
        """Of the edge of a node of `seq`."""
        return self.edge.of(end - start)

    def export_node(self, seq: int, start: int, end: int, span: memoryview | None, edge: memoryview | None) -> None:
        """Write the state of positions [start, end) of `seq`: what is not None. Raises SliceError.

        With `edge`, [start, end) must be whole in the window, or `end` the sequence's end for a recurrent state.
        """
        count = end - start
        if span is not None and len(span) != self.size.of(count):
            raise SliceError(f"a slot of {len(span)} bytes for a span of {self.size.of(count)}")
        if edge is not None and len(edge) != self.edge.of(count):
            raise SliceError(f"a slot of {len(edge)} bytes for an edge of {self.edge.of(count)}")
        if edge is None and self._bare:
            if span is not None:
                span[:] = self._bare
            return
        context, scratch = self._context, self._scratch
        if edge is not None and self.edge.recurrent and context.pos_max(seq) != end - 1:
            raise SliceError(f"a recurrent state of position {context.pos_max(seq)} where {end - 1} is wanted")
        context.copy(seq, scratch, start, end)
        try:
            if edge is not None:
                self._check_positions(scratch, start, end)
            whole, partial = context.state_size(scratch), context.state_size(scratch, PARTIAL_ONLY) - HEADER
            if whole - partial != self.size.of(count):
                raise SliceError(f"a span of {whole - partial} bytes, {count} tokens have {self.size.of(count)}")
            if edge is not None and partial != self.edge.of(count):
                raise SliceError(f"an edge of {partial} bytes, {count} tokens have {self.edge.of(count)}")
            buffer = self._room(whole)
            written = context.export_state(scratch, buffer.ctypes.data, whole)
        finally:
            self._empty_scratch()
        if written != whole:
            raise SliceError(f"llama.cpp wrote {written} of {whole} bytes")
        if span is not None:
            np.frombuffer(span, np.uint8)[:] = buffer[: whole - partial]
        if edge is not None:
            np.frombuffer(edge, np.uint8)[:] = buffer[whole - partial : whole]

    def place(self, seq: int, start: int, reach: int, most: int | None = None) -> None:
        """Before the first edge of `seq`, that of a node which begins at `start`, is imported: let the window's cells
        be those that a run alone in the context would have used, if that matters until `reach` tokens are computed.

        Nothing is done where others have cells, or for more than `most` bytes. Raises SliceError; `seq` is empty then,
        and it is not tried again.
        """
        ring, self._filled = self._ring, -1
        count = ring.missing(start, reach) if ring is not None else 0
        if ring is None or not count or not ring.is_alone():
            return
        if most is not None and self.edge.size.of(count) > most:
            return
        try:
            ring.fill(seq, count)
        except SliceError:
            self._ring = None
            self.empty(seq)
            raise
        self._filled = seq

    def import_node(self, seq: int, at: int, start: int, count: int, span: memoryview, edge: memoryview | None) -> int:
        """Append a node of `count` tokens at position `start` to `seq`, which has `at`. Returns what it has then.

        Raises SliceError; `seq` is empty then. When all are there, `check` the whole.
        """
        try:
            return self._append(seq, at, start, count, span, edge)
        except SliceError:
            self.empty(seq)
            raise

    def check(self, seq: int, end: int) -> None:
        """Whether `seq` has the positions up to `end`, each once, and can go on there. Raises SliceError; it is empty
        then."""
        context = self._context
        span = context.state_size(seq) - context.state_size(seq, PARTIAL_ONLY) + HEADER
        low, high = self._pos_min(seq, end), context.pos_max(seq)
        lowest = end - 1 if self.edge.recurrent else max(0, end - self.edge.window)
        if high != end - 1 or low > lowest or (self.edge.recurrent and low != lowest) or span != self.size.of(end):
            self.empty(seq)
            raise SliceError(f"positions {low} to {high}, spans of {span} bytes after restoring {end} tokens")
        if self._ring is not None and self._filled == seq and not self._ring.is_in_order(seq, lowest, end):
            logger.info("llama.cpp uses a window's cells otherwise than expected: what is restored may round otherwise")
            self._ring = None
        self._filled = -1

    def _pos_min(self, seq: int, end: int) -> int:
        """Lowest position of `seq` that was restored and not filled in."""
        context, scratch = self._context, self._scratch
        if self._ring is None or self._filled != seq:
            return context.pos_min(seq)
        context.copy(seq, scratch, self._ring.positions, end)
        low = context.pos_min(scratch)
        self._empty_scratch()
        return low

    def _append(self, seq: int, at: int, start: int, count: int, span: memoryview, edge: memoryview | None) -> int:
        context, scratch = self._context, self._scratch
        if start != at or count <= 0:
            raise SliceError(f"a node for position {start} where {at} comes next")
        if context.state_size(scratch, PARTIAL_ONLY) != HEADER + len(self.edge.empty):
            raise SliceError("the scratch sequence is not empty")
        self._load(start, count, span, edge)
        context.copy(scratch, seq)
        self._empty_scratch()
        return at + count

    def _load(self, start: int, count: int, state: memoryview, edge: memoryview | None = None) -> None:
        context, scratch, span = self._context, self._scratch, state
        if len(span) != self.size.of(count):
            raise SliceError(f"a span of {len(span)} bytes for {count} tokens, which have {self.size.of(count)}")
        if edge is not None and len(edge) != self.edge.of(count):
            raise SliceError(f"an edge of {len(edge)} bytes for {count} tokens, which have {self.edge.of(count)}")
        if self._bare and span != self._bare:
            raise SliceError("a span that is none of this model")
        if self.cells is not None and not self.cells.holds(span, start, count):
            raise SliceError("the span is that of other positions")
        if edge is not None and self.edge_cells is not None:
            end = start + count
            first = end - 1 if self.edge.recurrent else max(start, end - self.edge.window)
            if not self.edge_cells.holds(edge, first, end - first):
                raise SliceError("the edge is that of other positions")
        if edge is None and self._bare:
            return
        last = edge if edge is not None else memoryview(self.edge.empty)
        size = len(span) + len(last)
        buffer = self._room(size)
        buffer[: len(span)] = np.frombuffer(span, np.uint8)
        buffer[len(span) : size] = np.frombuffer(last, np.uint8)
        read = context.import_state(scratch, buffer.ctypes.data, size)
        if read != size:
            raise SliceError(f"llama.cpp read {read} of {size} bytes")
        if edge is not None:
            self._check_positions(scratch, start, start + count)
        if context.state_size(scratch) != size:
            raise SliceError(f"the state has {context.state_size(scratch)} bytes after importing {size}")

    def _has_room(self, count: int) -> bool:
        """Also in the window, whose cells are counted by the size of its state."""
        if not super()._has_room(count):
            return False
        context, cell = self._context, self.edge.size.per_token
        if not self.edge.window or not cell:
            return True
        used = sum(
            max(0, context.state_size(seq, PARTIAL_ONLY) - HEADER - self.edge.size.fixed) // cell
            for seq in range(context.settings.n_seq_max)
        )
        return used + min(count, self.edge.window) <= context.window_cells

    def _check_positions(self, seq: int, start: int, end: int) -> None:
        """That `seq` has an edge, and it is that of [start, end)."""
        low, high = self._context.pos_min(seq), self._context.pos_max(seq)
        lowest = end - 1 if self.edge.recurrent else start
        exact = low == lowest or (not self.edge.recurrent and low == max(start, end - self.edge.window))
        if high != end - 1 or not exact:
            raise SliceError(f"an edge of positions {low} to {high} where {lowest} to {end - 1} are wanted")

    def _room(self, size: int) -> _Bytes:
        if len(self._buffer) < size:
            self._buffer = np.zeros(size, np.uint8)
        return self._buffer


def measure(context: Context, scratch: int, block: int, window: int, recurrent: bool) -> EdgeSlicer:
    """A slicer for a context whose sequence 0 has `2 * block` positions. Raises SliceError if its state is not as
    described above."""
    empty = export_state(context, scratch, PARTIAL_ONLY)[HEADER:]
    spans, edges = [], []
    bare = filler = b""
    for end in (block, 2 * block):
        context.copy(0, scratch, 0, end)
        whole, partial = export_state(context, scratch), export_state(context, scratch, PARTIAL_ONLY)[HEADER:]
        context.remove(scratch)
        if not whole.endswith(partial) or len(partial) <= len(empty):
            raise SliceError("what is needed only at its end does not stand at the end of its state")
        bare = whole[: len(whole) - len(partial)]
        filler = filler or whole[:HEADER] + partial
        spans.append(len(bare))
        edges.append(len(partial))
    span, edge = _linear(spans, block), _linear(edges, block)
    shape = EdgeShape(recurrent, window, edge, empty)
    size = context.window_cells if window else 0
    ring = Ring(context, scratch, size, filler, block, edge) if size else None
    return EdgeSlicer(context, scratch, span, shape, bare if not span.per_token else b"", ring)


def _linear(sizes: list[int], block: int) -> BlockSize:
    per_token, rest = divmod(sizes[1] - sizes[0], block)
    if rest or per_token < 0 or sizes[0] < per_token * block:
        raise SliceError(f"sizes of state are not linear in tokens: {sizes}")
    return BlockSize(sizes[0] - per_token * block, per_token)
