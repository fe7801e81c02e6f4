"""Blocks from the store into the context, as they become ready. Engine thread only.

A block that is lost, late or not what it should be ends the restoring: the rest is computed.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable

import msgspec

from ..frames.store import PlanNode
from ..frames.worker import GateDecision
from ..prefix.blocks import BLOCK_TOKENS
from ..prefix.scratch import Scratch
from .gate import Gate
from .namespaces import Namespaces
from .sequence import Sequence
from .sharing import LEAST
from .slices import SliceError, Slicer
from .store import Lookup, Store

logger = logging.getLogger(__name__)

_PLAN_PATIENCE = 0.25  # seconds that a request waits for the plan
BLOCK_PATIENCE = 1.0  # seconds without a next block
_TAKEN = 4  # blocks that are taken out of a run at a time, where not all of it is used


class Restorer:
    """`counters` gets: restore_seconds, restore_tokens, restore_errors, restore_refused, restore_lost, lookup_late."""

    shares_cells = True
    """Whether a part of a sequence can be used by another one that runs; else a part of a plan is of no use either."""

    def __init__(
        self,
        store: Store,
        slicer: Slicer,
        namespaces: Namespaces,
        exact: bool,
        counters: defaultdict[str, float],
    ) -> None:
        self._store, self._slicer, self._namespaces = store, slicer, namespaces
        self.exact, self._counters = exact, counters
        self.gate = Gate(counters)
        self._scratch = Scratch()  # for a part of a run
        self.must_clear = False
        """Whether llama.cpp keeps something of what could not be restored: nobody may go on in that context."""

    @property
    def connected(self) -> bool:
        """Whether there is a store to restore from."""
        return self._store.connected

    def begin(self, sequence: Sequence, on_update: Callable[[], None], *, may_wait: bool) -> None:
        """Start the look-up, at most to the token before the last. `may_wait`: not on the engine's thread.

        `on_update` is called from another thread when the plan or a block has come.
        """
        self.end(sequence)
        sequence.saved_before = self._counters["save_tokens"]
        if not sequence.request.cache or sequence.no_lookup or len(sequence.tokens) < 2:
            return
        if sequence.must_compute:
            sequence.gate = GateDecision(0, 0, "prompt_logprobs")
            return
        space = sequence.request.space
        namespace = self._namespaces.key(space) if may_wait else self._namespaces.opened(space)
        if namespace is not None and self._store.connected:
            sequence.lookup_since = time.perf_counter()
            sequence.lookup = self._store.lookup(
                namespace, sequence.le(), len(sequence.tokens) - 1, self.exact, on_update, request=sequence.request.rid
            )

    def saved_since(self, sequence: Sequence) -> bool:
        """Whether anything was saved since its look-up began: it might find more now."""
        return self._counters["save_tokens"] != sequence.saved_before

    def planned(self, sequence: Sequence) -> bool:
        """True once it is known what the cache has, or too much time has passed; `sequence.plan` is set then."""
        if sequence.plan is None:
            asked = sequence.lookup is not None
            plan = None if sequence.lookup is None else sequence.lookup.wait_plan(0)
            if plan is None and sequence.lookup is not None:
                lost = sequence.lookup.state(0) == "lost"
                if not lost and time.perf_counter() - sequence.lookup_since < _PLAN_PATIENCE:
                    return False
                self._counters["lookup_late"] += not lost
                self.end(sequence)
            if plan and plan[-1].start + plan[-1].use < LEAST:
                plan = ()
            rate = sequence.lookup.warm_rate if sequence.lookup is not None else 0.0
            sequence.plan, decision = self.gate.choose(
                plan or (), len(sequence.tokens), rate, whole=not self.shares_cells
            )
            if asked and not sequence.started:
                sequence.gate = decision if plan is not None else GateDecision(0, 0, "late")
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
        if sequence.lookup is not None:
            sequence.lookup.taken(sequence.next_node)
        try:
            return self._step(sequence, began, time_box)
        except SliceError as error:
            logger.warning("a cached prefix could not be restored, it is computed: %s", error)
            self._counters["restore_errors"] += 1
            self._empty(sequence)
            if not self.must_clear:
                self._blame(sequence)
                self._empty(sequence)
            sequence.forget_state()
            sequence.no_lookup = True
            if not sequence.started:
                sequence.cached = 0
                sequence.tiers.clear()
            self._tell_lost(sequence)
            return True
        finally:
            if sequence.lookup is not None and sequence.next_node:
                sequence.lookup.taken(sequence.next_node)
            self._counters["restore_seconds"] += time.perf_counter() - began

    def clear(self, seq: int) -> None:
        """All have left the context of `seq`: forget what llama.cpp keeps there."""
        self._slicer.clear(seq)
        self.must_clear = False

    def _empty(self, sequence: Sequence) -> None:
        self.must_clear = not self._slicer.empty(sequence.seq_id)

    def _blame(self, sequence: Sequence) -> None:
        """Tell the store of the first node that was to be imported now and that can never be, if there is one.

        Each is tried once more, alone: for a fault of the worker's own nothing that is stored must go.
        """
        lookup, plan = sequence.lookup, sequence.plan or ()
        namespace = self._namespaces.opened(sequence.request.space)
        if lookup is None or namespace is None:
            return
        last = sequence.next_node
        run = lookup.run(last)
        for index in range(last, min(len(plan), last + (run.parts if run is not None else 1))):
            if (refused := self._refused(sequence.seq_id, lookup, plan, index)) is not None:
                number, reason = refused
                logger.warning("the store is told that a block of it is none of this model's: %s", reason)
                self._counters["restore_refused"] += 1
                self._store.refuse(namespace, plan[number].key, reason)
                return

    def _refused(self, seq: int, lookup: Lookup, plan: tuple[PlanNode, ...], index: int) -> tuple[int, str] | None:
        """Which node can never be imported, of those that are imported together with node `index`, and why."""
        state = lookup.wait_block(index, 0)
        reason = self._slicer.refuses(seq, plan[index].start, plan[index].count, state) if state is not None else ""
        return (index, reason) if reason else None

    def _step(self, sequence: Sequence, began: float, time_box: float) -> bool:
        plan = sequence.plan or ()
        while sequence.next_node < len(plan):
            if time.perf_counter() - began > time_box:
                return False
            if not self._may_use(plan[sequence.next_node]):
                return True
            found = self._next(sequence)
            if found is None:
                return self._is_over(sequence)
            nodes, state = found
            count, use = sum(node.count for node in nodes), sum(node.use for node in nodes)
            self._slicer.import_block(sequence.seq_id, nodes[0].start, count, use, state)
            self._account(sequence, len(nodes))
        return True

    def _next(self, sequence: Sequence) -> tuple[list[PlanNode], memoryview] | None:
        """The next nodes of the plan that can be imported in one go, and their state; None if there are none now."""
        plan, index, lookup, layout = sequence.plan or (), sequence.next_node, sequence.lookup, self._slicer.layout
        run = lookup.run(index) if lookup is not None else None
        if lookup is None or run is None or layout is None:
            state = self._ready(sequence, index)
            return ([plan[index]], state) if state is not None else None
        self._check(sequence, plan[index])
        nodes = [plan[index]]
        while run.part + len(nodes) < run.parts and index + len(nodes) < len(plan):
            node = plan[index + len(nodes)]
            if nodes[-1].use < BLOCK_TOKENS or not self._may_use(node):
                break
            other = lookup.run(index + len(nodes))
            if other is None or (other.offset, other.part) != (run.offset, run.part + len(nodes)):
                break
            self._check(sequence, node)
            nodes.append(node)
        if len(nodes) == run.parts:
            if not layout.is_in_order(run.view, run.parts, nodes[0].start):
                raise SliceError("a run whose parts are not at their places")
            return nodes, run.view
        del nodes[_TAKEN:]
        state = self._scratch(layout.size(len(nodes)))
        try:
            layout.take(run.view, run.part, len(nodes), run.parts, state)
        except ValueError as error:
            raise SliceError(str(error)) from error
        return nodes, state

    def _may_use(self, node: PlanNode) -> bool:
        return not self.exact or (node.grid and node.use == node.count == BLOCK_TOKENS)

    def _ready(self, sequence: Sequence, index: int) -> memoryview | None:
        """The state of a node of the plan, if it is there."""
        self._check(sequence, (sequence.plan or ())[index])
        return sequence.lookup.wait_block(index, 0) if sequence.lookup is not None else None

    def _check(self, sequence: Sequence, node: PlanNode) -> None:
        if node.start + node.use > len(sequence.tokens) - 1:
            raise SliceError("the store matched the last token, too")

    def _is_over(self, sequence: Sequence) -> bool:
        """The next node is not ready: True if it never will be."""
        lookup = sequence.lookup
        if lookup is None:
            return True
        lost = lookup.state(sequence.next_node) == "lost"
        if lost or time.perf_counter() - sequence.stalled_since > BLOCK_PATIENCE:
            self._counters["restore_lost"] += 1
            self._tell_lost(sequence)
            return True
        return False

    @staticmethod
    def _tell_lost(sequence: Sequence) -> None:
        """Not all that was chosen has come: the record says so."""
        if sequence.gate is not None and not sequence.started:
            sequence.gate = msgspec.structs.replace(sequence.gate, restored=sequence.n_past, reason="lost")

    def _account(self, sequence: Sequence, count: int) -> None:
        """The next `count` nodes of the plan are in the context."""
        for node in (sequence.plan or ())[sequence.next_node : sequence.next_node + count]:
            sequence.n_past = sequence.restored = node.start + node.use
            if node.grid and node.use == BLOCK_TOKENS and sequence.grid_until == node.start:
                sequence.grid_until = sequence.n_past
            self._counters["restore_tokens"] += node.use
            if not sequence.started:
                sequence.cached = sequence.n_past
                sequence.tiers[node.tier] = sequence.tiers.get(node.tier, 0) + node.use
        sequence.next_node += count
        sequence.saved = sequence.n_past - sequence.n_past % BLOCK_TOKENS
        sequence.stalled_since = time.perf_counter()
