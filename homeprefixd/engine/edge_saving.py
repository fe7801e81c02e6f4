"""Spans and edges out of the context into the store. As `saving.py`, for models whose state has edges.

Every block's span is kept; an edge only where somebody may go on from: `Sequence.points`, the end of the reply, and for
a sliding window the nodes that cover it before those. A reply's end is not known before, so while it grows each of its
nodes gets one; the store removes those that turn out superfluous (`prefix/thinning.py`).
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from dataclasses import dataclass

from ..frames.store import NewNode
from ..prefix.blocks import BLOCK_TOKENS, EDGE, block_key, to_le
from .bindings import Model
from .edges import EdgeSlicer
from .namespaces import Namespaces
from .saving import PAUSE, SLOW, preview
from .sequence import Sequence
from .sharing import LEAST
from .slices import SliceError
from .store import Slot, Store

logger = logging.getLogger(__name__)

_WINDOW = "window"


@dataclass(frozen=True)
class _Piece:
    """A node to be saved. `edge`: what its edge is for, "" for none.

    `span_bytes`, `edge_bytes`: of what is to be saved of it, 0 for nothing.
    """

    start: int
    end: int
    edge: str
    span_bytes: int
    edge_bytes: int

    @property
    def sizes(self) -> list[int]:
        return [size for size in (self.span_bytes, self.edge_bytes) if size]


class EdgeSaver:
    """`counters` gets: save_seconds, save_tokens, save_errors, save_skipped, save_edges."""

    def __init__(
        self, store: Store, slicer: EdgeSlicer, model: Model, namespaces: Namespaces, counters: defaultdict[str, float]
    ) -> None:
        self._store, self._slicer, self._model = store, slicer, model
        self._namespaces, self._counters = namespaces, counters
        self._paused_until = 0.0

    def save(self, sequence: Sequence, *, tail: bool = False) -> None:
        """Export what became whole and, where a point or (`tail`) the sequence ends, what can be gone on from."""
        if not sequence.request.cache or sequence.no_save or sequence.n_past <= sequence.restored:
            return
        if sequence.n_past < LEAST:
            return
        pieces = self._pieces(sequence, tail)
        if not pieces:
            return
        began = time.perf_counter()
        namespace = self._namespaces.opened(sequence.request.space)
        if namespace is None or not self._store.connected or began < self._paused_until:
            self._counters["save_skipped"] += 1
            return
        sizes = [size for piece in pieces for size in piece.sizes]
        slots = list(self._store.reserve(sizes, after=sequence.key_before(sequence.saved, namespace)))
        if len(slots) < len(sizes) or time.perf_counter() - began > SLOW:
            self._paused_until = time.perf_counter() + PAUSE
        nodes = self._export(sequence, namespace, pieces, slots)
        if nodes:
            self._store.commit(namespace, nodes, sequence.request.owner)
            edges = sum(node.tokens == EDGE for node in nodes)
            self._counters["save_edges"] += edges
            self._counters["save_tokens"] += sum(len(node.tokens) // 4 for node in nodes) - edges
        self._counters["save_seconds"] += time.perf_counter() - began

    def _pieces(self, sequence: Sequence, tail: bool) -> list[_Piece]:
        start, end = sequence.saved, sequence.n_past
        whole = end - end % BLOCK_TOKENS
        kind = sequence.points.get(end, "")
        if tail and not kind:
            kind = "prompt" if end <= sequence.n_prompt else "reply"
        pieces = [
            self._piece(sequence, at, at + BLOCK_TOKENS, self._edge(sequence, at, at + BLOCK_TOKENS, kind))
            for at in range(start, whole, BLOCK_TOKENS)
        ]
        if kind and end > whole:
            pieces.append(self._piece(sequence, whole, end, kind))
        elif kind and not pieces:
            pieces.append(self._piece(sequence, end - BLOCK_TOKENS, end, kind, known=True))
        return pieces

    def _edge(self, sequence: Sequence, start: int, end: int, kind: str) -> str:
        """What the edge of a whole block is for."""
        if end == sequence.n_past and kind:
            return kind
        window = self._slicer.edge.window
        needed = window and (
            end > sequence.n_prompt or any(start < point and end > point - window for point in sequence.points)
        )
        return _WINDOW if needed else ""

    def _piece(self, sequence: Sequence, start: int, end: int, edge: str, *, known: bool = False) -> _Piece:
        span_bytes = 0 if known else self._slicer.size.of(end - start)
        edge_bytes = self._slicer.edge_bytes(sequence.seq_id, start, end) if edge else 0
        return _Piece(start, end, edge, span_bytes, edge_bytes)

    def _export(self, sequence: Sequence, namespace: bytes, pieces: list[_Piece], slots: list[Slot]) -> list[NewNode]:
        nodes: list[NewNode] = []
        left = list(slots)
        per_token = sequence.unsaved_cost / max(1, pieces[-1].end - max(pieces[0].start, sequence.restored))
        for piece in pieces:
            needed = len(piece.sizes)
            if len(left) < needed:
                break
            span = left[0] if piece.span_bytes else None
            edge = left[needed - 1] if piece.edge else None
            views = (
                None if span is None else span.view[: piece.span_bytes],
                None if edge is None else edge.view[: piece.edge_bytes],
            )
            try:
                self._slicer.export_node(sequence.seq_id, piece.start, piece.end, *views)
            except SliceError as error:
                logger.warning("a block was not saved: %s", error)
                self._counters["save_errors"] += 1
                sequence.no_save = True
                break
            del left[:needed]
            self._add(sequence, namespace, piece, per_token, span, edge, nodes)
        self._store.abandon(left)
        return nodes

    def _add(
        self,
        sequence: Sequence,
        namespace: bytes,
        piece: _Piece,
        per_token: float,
        span: Slot | None,
        edge: Slot | None,
        nodes: list[NewNode],
    ) -> None:
        """What is to be published of a piece."""
        start, end = piece.start, piece.end
        tokens = sequence.tokens[start:end]
        parent = sequence.key_before(start, namespace)
        grid = end <= sequence.grid_until
        if span is not None:
            computed = end - max(start, min(end, sequence.restored))
            cost = per_token * computed
            sequence.unsaved_cost = max(0.0, sequence.unsaved_cost - cost)
            kind = "prompt" if end <= sequence.n_prompt else "reply"
            text = preview(self._model, tokens)
            holds = edge is not None
            nodes.append(
                NewNode(
                    parent,
                    to_le(tokens),
                    start,
                    span.offset,
                    piece.span_bytes,
                    grid,
                    cost,
                    kind,
                    text,
                    holds_edge=holds,
                )
            )
            if end - start == BLOCK_TOKENS:
                sequence.saved = end
        if edge is not None:
            own = block_key(parent, to_le(tokens))
            nodes.append(NewNode(own, EDGE, end, edge.offset, piece.edge_bytes, grid, 0.0, piece.edge, ""))
