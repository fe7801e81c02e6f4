"""Blocks from the store into the context, as they become ready. Engine thread only.

A block that is lost, late or not what it should be ends the restoring: the rest is computed.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable

from ..prefix.blocks import BLOCK_TOKENS
from .namespaces import Namespaces
from .sequence import Sequence
from .slices import SliceError, Slicer
from .store import Store

logger = logging.getLogger(__name__)

_PLAN_PATIENCE = 0.25  # seconds that a request waits for the plan
_BLOCK_PATIENCE = 1.0  # seconds without a next block


class Restorer:
    """`counters` gets: restore_seconds, restore_tokens, restore_errors, restore_lost, lookup_late."""

    def __init__(
        self,
        store: Store,
        slicer: Slicer,
        namespaces: Namespaces,
        exact: bool,
        counters: defaultdict[str, float],
    ) -> None:
        self._store, self._slicer, self._namespaces = store, slicer, namespaces
        self._exact, self._counters = exact, counters

    def begin(self, sequence: Sequence, on_update: Callable[[], None], *, may_wait: bool) -> None:
        """Start the look-up, at most to the token before the last. `may_wait`: not on the engine's thread.

        `on_update` is called from another thread when the plan or a block has come.
        """
        self.end(sequence)
        if not sequence.request.cache or sequence.no_lookup or len(sequence.tokens) < 2:
            return
        salt = sequence.request.salt
        namespace = self._namespaces.key(salt) if may_wait else self._namespaces.opened(salt)
        if namespace is not None and self._store.connected:
            sequence.lookup_since = time.perf_counter()
            sequence.lookup = self._store.lookup(
                namespace, sequence.le(), len(sequence.tokens) - 1, self._exact, on_update
            )

    def planned(self, sequence: Sequence) -> bool:
        """True once it is known what the cache has, or too much time has passed; `sequence.plan` is set then."""
        if sequence.plan is None:
            plan = None if sequence.lookup is None else sequence.lookup.wait_plan(0)
            if plan is None and sequence.lookup is not None:
                lost = sequence.lookup.state(0) == "lost"
                if not lost and time.perf_counter() - sequence.lookup_since < _PLAN_PATIENCE:
                    return False
                self._counters["lookup_late"] += not lost
                self.end(sequence)
            sequence.plan = plan or ()
        return True

    def end(self, sequence: Sequence) -> None:
        """Give the leases of its blocks back."""
        if sequence.lookup is not None:
            sequence.lookup.release()
            sequence.lookup = None
        sequence.plan = None
        sequence.next_node = 0

    def step(self, sequence: Sequence, time_box: float) -> bool:
        """Import what is ready, for about `time_box` seconds. True: done, what is missing must be computed."""
        began = time.perf_counter()
        sequence.stalled_since = sequence.stalled_since or began
        try:
            return self._step(sequence, began, time_box)
        except SliceError as error:
            logger.warning("a cached prefix could not be restored, it is computed: %s", error)
            self._counters["restore_errors"] += 1
            sequence.forget_state()
            sequence.no_lookup = True
            if not sequence.started:
                sequence.cached = 0
                sequence.tiers.clear()
            return True
        finally:
            self._counters["restore_seconds"] += time.perf_counter() - began

    def _step(self, sequence: Sequence, began: float, time_box: float) -> bool:
        plan, lookup = sequence.plan or (), sequence.lookup
        while lookup is not None and sequence.next_node < len(plan):
            index, node = sequence.next_node, plan[sequence.next_node]
            view = lookup.wait_block(index, 0)
            now = time.perf_counter()
            if view is None:
                lost = lookup.state(index) == "lost"
                if lost or now - sequence.stalled_since > _BLOCK_PATIENCE:
                    self._counters["restore_lost"] += 1
                    return True
                return False
            if node.start + node.use > len(sequence.tokens) - 1:
                raise SliceError("the store matched the last token, too")
            if self._exact and not (node.grid and node.use == node.count == BLOCK_TOKENS):
                return True
            self._slicer.import_block(sequence.seq_id, node.start, node.count, node.use, view)
            self._account(sequence, index)
            sequence.stalled_since = now
            if now - began > time_box:
                return sequence.next_node == len(plan)
        return True

    def _account(self, sequence: Sequence, index: int) -> None:
        node = (sequence.plan or ())[index]
        sequence.next_node += 1
        sequence.n_past = sequence.restored = node.start + node.use
        sequence.saved = sequence.n_past - sequence.n_past % BLOCK_TOKENS
        if node.grid and node.use == BLOCK_TOKENS and sequence.grid_until == node.start:
            sequence.grid_until = sequence.n_past
        self._counters["restore_tokens"] += node.use
        if not sequence.started:
            sequence.cached = sequence.n_past
            sequence.tiers[node.tier] = sequence.tiers.get(node.tier, 0) + node.use
