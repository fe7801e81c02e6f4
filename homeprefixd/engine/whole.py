"""State of models whose memory only allows full copies (`whole sequence`): snapshots instead of spans and edges.

To the store a snapshot is an edge: it belongs to the node where it was taken and is needed only to go on from there.
Spans are one byte each, so that a prompt's tokens are known as with other models. A snapshot can be taken of a
sequence's end only, and is put back into a sequence that is empty; `seq_cp` is never called.
"""

from __future__ import annotations

import numpy as np

from .context import Context
from .edges import EdgeShape, EdgeSlicer
from .slices import BlockSize, SliceError

_SPAN = b"\0"


class WholeSlicer(EdgeSlicer):
    """Exports and imports whole sequences of one context. Engine thread only."""

    def __init__(self, context: Context, scratch: int) -> None:
        super().__init__(context, scratch, BlockSize(1, 0), EdgeShape(True, 0, BlockSize(0, 0), b""), _SPAN)
        self._imported = 0  # bytes of the last snapshot
        self._tainted = False  # llama.cpp may have taken in what it will not forget

    def edge_bytes(self, seq: int, start: int, end: int) -> int:
        """Of a snapshot of `seq`, which ends at `end`."""
        return self._context.state_size(seq)

    def export_node(self, seq: int, start: int, end: int, span: memoryview | None, edge: memoryview | None) -> None:
        """With `edge`, `end` must be the sequence's end. Raises SliceError."""
        if span is not None:
            span[:] = self._bare
        if edge is None:
            return
        if self._context.pos_max(seq) != end - 1:
            raise SliceError(f"a sequence up to {self._context.pos_max(seq)} where {end - 1} is wanted")
        written = self._context.export_state(seq, np.frombuffer(edge, np.uint8).ctypes.data, len(edge))
        if written != len(edge):
            raise SliceError(f"llama.cpp wrote {written} of {len(edge)} bytes")

    def check(self, seq: int, end: int) -> None:
        high, size = self._context.pos_max(seq), self._context.state_size(seq)
        if high != end - 1 or size != self._imported:
            self.empty(seq)
            raise SliceError(f"up to position {high}, {size} bytes after restoring {end} tokens of {self._imported}")

    def _append(self, seq: int, at: int, start: int, count: int, span: memoryview, edge: memoryview | None) -> int:
        if start != at or count <= 0:
            raise SliceError(f"a node for position {start} where {at} comes next")
        if edge is not None and self._context.pos_max(seq) != -1:
            raise SliceError("the sequence is not empty")
        self._put(seq, start, count, span, edge)
        return at + count

    def _put(self, seq: int, start: int, count: int, span: memoryview, edge: memoryview | None) -> None:
        """Into `seq`, which is empty if there is an edge. Raises SliceError."""
        if bytes(span) != self._bare:
            raise SliceError("a span that is none of this model")
        if edge is None:
            return
        self._tainted = True
        read = self._context.import_state(seq, np.frombuffer(edge, np.uint8).ctypes.data, len(edge))
        if read != len(edge):
            raise SliceError(f"llama.cpp read {read} of {len(edge)} bytes")
        high = self._context.pos_max(seq)
        if high != start + count - 1:
            raise SliceError(f"a snapshot up to position {high} where {start + count - 1} is wanted")
        self._imported, self._tainted = read, False

    def refuses(self, seq: int, start: int, count: int, state: memoryview, edge: memoryview | None = None) -> str:
        """Certain only where nobody has cells: of what a snapshot needs nothing is known."""
        context = self._context
        if any(context.pos_max(seq) != -1 for seq in range(context.settings.n_seq_max)):
            return ""
        try:
            self._put(seq, start, count, state, edge)
        except SliceError as error:
            return str(error)
        finally:
            self.clear(seq)
        return ""

    def empty(self, seq: int) -> bool:
        context = self._context
        context.remove(seq)
        if all(context.pos_max(other) == -1 for other in range(context.settings.n_seq_max) if other != seq):
            self.clear(seq)
        return not self._tainted

    def clear(self, seq: int) -> None:
        super().clear(seq)
        self._tainted = False

    def _empty_scratch(self) -> None:
        """It is never used."""
