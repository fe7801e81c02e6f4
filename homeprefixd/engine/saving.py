"""Blocks out of the context into the store, as they become whole and make a run; what is left, and tails, at the end.

Trouble is counted and costs the block, never the request. What could not be saved for want of room or of a store is
tried again with the next blocks, as long as its cells are there. Engine thread only.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict

from ..frames.store import NewNode
from ..prefix.blocks import BLOCK_TOKENS, to_le
from ..prefix.runs import longest_run
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
HELD = 5.0  # seconds of prefill that may wait to become a longer run: as much is lost if the process is killed


class Saver:
    """`counters` gets: save_seconds, save_tokens, save_errors, save_skipped."""

    def __init__(
        self, store: Store, slicer: Slicer, model: Model, namespaces: Namespaces, counters: defaultdict[str, float]
    ) -> None:
        self._store, self._slicer, self._model = store, slicer, model
        self._namespaces, self._counters = namespaces, counters
        self._paused_until = 0.0

    def save(self, sequence: Sequence, *, tail: bool = False, runs: bool = True) -> None:
        """Export what became whole; with `tail`, also what is shorter than a block.

        `runs`: several blocks as one state, where they lie in order.
        """
        start, end = sequence.saved, sequence.n_past
        whole = end - end % BLOCK_TOKENS
        if not sequence.request.cache or sequence.no_save or end <= sequence.restored or end < LEAST:
            return
        if whole <= start and not (tail and end > start):
            return
        run = self._longest_run() * BLOCK_TOKENS
        if not tail and end != sequence.n_prompt and sequence.unsaved_cost < HELD:
            whole -= (whole - start) % run  # the rest waits to make a run with what comes
            if whole <= start:
                return
        began = time.perf_counter()
        namespace = self._namespaces.opened(sequence.request.space)
        if namespace is None or not self._store.connected or began < self._paused_until:
            self._counters["save_skipped"] += 1
            return
        step = run if runs else BLOCK_TOKENS
        pieces = [(at, min(at + step, whole)) for at in range(start, whole, step)]
        if tail and end > whole:
            pieces.append((whole, end))
        in_runs = step > BLOCK_TOKENS
        sizes = [self._slicer.size.of(b - a) for a, b in pieces]
        slots = list(self._store.reserve(sizes, runs=in_runs, after=sequence.key_before(start, namespace)))
        lacking = len(slots) < len(pieces)
        if time.perf_counter() - began > SLOW or (lacking and not in_runs):
            self._paused_until = time.perf_counter() + PAUSE
        nodes, scattered = self._export(sequence, namespace, pieces, slots)
        if nodes:
            self._store.commit(namespace, nodes, sequence.request.owner)
            self._counters["save_tokens"] += sum(len(node.tokens) // 4 for node in nodes)
        self._counters["save_seconds"] += time.perf_counter() - began
        if scattered or (lacking and in_runs):  # in memory that is free in small pieces only, or in the context
            self.save(sequence, tail=tail, runs=False)

    def _longest_run(self) -> int:
        """Blocks that are saved as one state."""
        if self._slicer.layout is None:
            return 1
        return longest_run(self._slicer.size.of(BLOCK_TOKENS), self._store.room)

    def _export(
        self, sequence: Sequence, namespace: bytes, pieces: list[tuple[int, int]], slots: list[Slot]
    ) -> tuple[list[NewNode], bool]:
        """Export blocks, runs of them and tails as they are cut into `pieces`, as far as there are slots.

        Also says whether it ended at cells that make no run.
        """
        nodes: list[NewNode] = []
        scattered = False
        per_token = sequence.unsaved_cost / max(1, pieces[-1][1] - max(pieces[0][0], sequence.restored))
        for number, ((start, end), slot) in enumerate(zip(pieces, slots, strict=False)):
            try:
                parts = self._fill(sequence, start, end, slot)
            except SliceError as error:
                logger.warning("a block was not saved: %s", error)
                self._counters["save_errors"] += 1
                sequence.no_save = True
                parts = 0
            else:
                scattered = not parts
            if not parts:
                self._store.abandon(slots[number:])
                break
            for part in range(parts):
                at = start + part * BLOCK_TOKENS
                nodes.append(
                    self._node(sequence, namespace, at, min(end, at + BLOCK_TOKENS), slot, part, parts, per_token)
                )
        return nodes, scattered

    def _fill(self, sequence: Sequence, start: int, end: int, slot: Slot) -> int:
        """Write the state of positions [start, end) to a slot; its parts, 0 if they lie so that they make no run."""
        size = self._slicer.export(sequence.seq_id, start, end, slot.view)
        parts, layout = max(1, (end - start) // BLOCK_TOKENS), self._slicer.layout
        if parts > 1 and (layout is None or not layout.is_in_order(slot.view[:size], parts, start)):
            return 0
        return parts

    def _node(
        self,
        sequence: Sequence,
        namespace: bytes,
        start: int,
        end: int,
        slot: Slot,
        part: int,
        parts: int,
        per_token: float,
    ) -> NewNode:
        """What the store is told of the block [start, end), which is saved now."""
        tokens = sequence.tokens[start:end]
        computed = end - max(start, min(end, sequence.restored))
        node = NewNode(
            parent=sequence.key_before(start, namespace),
            tokens=to_le(tokens),
            start=start,
            offset=slot.offset,
            size=self._slicer.size.of(end - start),
            grid=end <= sequence.grid_until,
            cost=per_token * computed,
            kind="prompt" if end <= sequence.n_prompt else "reply",
            preview=preview(self._model, tokens),
            part=part,
            parts=parts,
        )
        sequence.unsaved_cost = max(0.0, sequence.unsaved_cost - per_token * computed)
        if end - start == BLOCK_TOKENS:
            sequence.saved = end
        return node


def preview(model: Model, tokens: list[int]) -> str:
    """The beginning of the text of `tokens`."""
    data = b""
    for token in tokens:
        data += model.piece(token, special=True)
        if len(data) >= _PREVIEW:
            break
    # a character cut at either end is left out
    return data[:_PREVIEW].decode("utf-8", "ignore")
