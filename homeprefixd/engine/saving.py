"""Blocks out of the context into the store, as they become whole; tails at the end.

Trouble is counted and costs the block, never the request. What could not be saved for want of room or of a store is
tried again with the next blocks, as long as its cells are there. Engine thread only.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict

from ..frames import NewNode
from ..prefix.blocks import BLOCK_TOKENS, to_le
from .bindings import Model
from .namespaces import Namespaces
from .sequence import Sequence
from .sharing import LEAST
from .slices import SliceError, Slicer
from .store import Slot, Store

logger = logging.getLogger(__name__)

_PREVIEW = 160  # bytes
PAUSE = 1.0  # seconds without saving after the store had no room or no time
SLOW = 0.1  # seconds that a reservation may take


class Saver:
    """`counters` gets: save_seconds, save_tokens, save_errors, save_skipped."""

    def __init__(
        self, store: Store, slicer: Slicer, model: Model, namespaces: Namespaces, counters: defaultdict[str, float]
    ) -> None:
        self._store, self._slicer, self._model = store, slicer, model
        self._namespaces, self._counters = namespaces, counters
        self._paused_until = 0.0

    def save(self, sequence: Sequence, *, tail: bool = False) -> None:
        """Export what became whole; with `tail`, also what is shorter than a block."""
        start, end = sequence.saved, sequence.n_past
        whole = end - end % BLOCK_TOKENS
        if not sequence.request.cache or sequence.no_save or end <= sequence.restored or end < LEAST:
            return
        if whole <= start and not (tail and end > start):
            return
        began = time.perf_counter()
        namespace = self._namespaces.opened(sequence.request.space)
        if namespace is None or not self._store.connected or began < self._paused_until:
            self._counters["save_skipped"] += 1
            return
        edges = [(at, at + BLOCK_TOKENS) for at in range(start, whole, BLOCK_TOKENS)]
        if tail and end > whole:
            edges.append((whole, end))
        slots = list(self._store.reserve([self._slicer.size.of(b - a) for a, b in edges]))
        if len(slots) < len(edges) or time.perf_counter() - began > SLOW:
            self._paused_until = time.perf_counter() + PAUSE
        nodes = self._export(sequence, namespace, edges, slots)
        if nodes:
            self._store.commit(namespace, nodes, sequence.request.owner)
            self._counters["save_tokens"] += sum(len(node.tokens) // 4 for node in nodes)
        self._counters["save_seconds"] += time.perf_counter() - began

    def _export(
        self, sequence: Sequence, namespace: bytes, edges: list[tuple[int, int]], slots: list[Slot]
    ) -> list[NewNode]:
        nodes: list[NewNode] = []
        per_token = sequence.unsaved_cost / max(1, edges[-1][1] - max(edges[0][0], sequence.restored))
        for (start, end), slot in zip(edges, slots, strict=False):
            try:
                size = self._slicer.export(sequence.seq_id, start, end, slot.view)
            except SliceError as error:
                logger.warning("a block was not saved: %s", error)
                self._counters["save_errors"] += 1
                sequence.no_save = True
                self._store.abandon(slots[len(nodes) :])
                break
            tokens = sequence.tokens[start:end]
            computed = end - max(start, min(end, sequence.restored))
            nodes.append(
                NewNode(
                    parent=sequence.key_before(start, namespace),
                    tokens=to_le(tokens),
                    start=start,
                    offset=slot.offset,
                    size=size,
                    grid=end <= sequence.grid_until,
                    cost=per_token * computed,
                    kind="prompt" if end <= sequence.n_prompt else "reply",
                    preview=preview(self._model, tokens),
                )
            )
            sequence.unsaved_cost = max(0.0, sequence.unsaved_cost - per_token * computed)
            if end - start == BLOCK_TOKENS:
                sequence.saved = end
        return nodes


def preview(model: Model, tokens: list[int]) -> str:
    """The beginning of the text of `tokens`."""
    data = b""
    for token in tokens:
        data += model.piece(token, special=True)
        if len(data) >= _PREVIEW:
            break
    # a character cut at either end is left out
    return data[:_PREVIEW].decode("utf-8", "ignore")
