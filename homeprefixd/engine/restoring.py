"""Blocks from the store into the context, as they become ready. Engine thread only.

A block that is lost, late or not what it should be ends the restoring: the rest is computed.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from ..frames import GateDecision, PlanNode
from ..prefix.blocks import BLOCK_TOKENS
from .gate import Gate
from .joining import Joiner, JoinError
from .namespaces import Namespaces
from .sequence import Sequence
from .sharing import LEAST
from .slices import SliceError, Slicer
from .store import Store

logger = logging.getLogger(__name__)

_PLAN_PATIENCE = 0.25  # seconds that a request waits for the plan
BLOCK_PATIENCE = 1.0  # seconds without a next block
_JOINED_BYTES = 32 << 20  # of state that is joined at a time, at most
_JOINED_BLOCKS = 8  # likewise: more gain nothing (measured)
_JOINING = 2  # states that are being joined, or wait to be imported
_ONE_BY_ONE = 5  # blocks that are imported while the first are being joined: joining is the slower of both (measured)


class Restorer:
    """`counters` gets: restore_seconds, restore_tokens, restore_errors, restore_lost, lookup_late."""

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
        block_bytes = slicer.size.of(BLOCK_TOKENS)
        worth = slicer.joiner is not None and 2 * block_bytes <= _JOINED_BYTES
        self._joining = _Joining(slicer.joiner, block_bytes) if slicer.joiner is not None and worth else None

    @property
    def connected(self) -> bool:
        """Whether there is a store to restore from."""
        return self._store.connected

    def begin(self, sequence: Sequence, on_update: Callable[[], None], *, may_wait: bool) -> None:
        """Start the look-up, at most to the token before the last. `may_wait`: not on the engine's thread.

        `on_update` is called from another thread when the plan or a block has come.
        """
        self.end(sequence)
        if not sequence.request.cache or sequence.no_lookup or len(sequence.tokens) < 2:
            return
        space = sequence.request.space
        namespace = self._namespaces.key(space) if may_wait else self._namespaces.opened(space)
        if namespace is not None and self._store.connected:
            sequence.lookup_since = time.perf_counter()
            sequence.lookup = self._store.lookup(
                namespace, sequence.le(), len(sequence.tokens) - 1, self.exact, on_update, request=sequence.request.rid
            )

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
        try:
            return self._step(sequence, began, time_box)
        except SliceError as error:
            logger.warning("a cached prefix could not be restored, it is computed: %s", error)
            self._counters["restore_errors"] += 1
            self._slicer.empty(sequence.seq_id)
            sequence.forget_state()
            sequence.no_lookup = True
            if not sequence.started:
                sequence.cached = 0
                sequence.tiers.clear()
            return True
        finally:
            if sequence.lookup is not None and sequence.next_node:
                sequence.lookup.taken(sequence.next_node)
            self._counters["restore_seconds"] += time.perf_counter() - began

    def _step(self, sequence: Sequence, began: float, time_box: float) -> bool:
        plan = sequence.plan or ()
        coming: deque[_Joined] = deque()  # of the nodes behind the next few
        while sequence.next_node < len(plan):
            if time.perf_counter() - began <= time_box:
                self._join_ahead(sequence, coming)
            elif not coming:
                return False
            if coming and coming[0].first == sequence.next_node:
                joined = coming.popleft()
                count = sum(joined.counts)
                start = plan[joined.first].start
                self._slicer.import_block(sequence.seq_id, start, count, count, joined.state())
                self._account(sequence, len(joined.counts))
                continue
            node = plan[sequence.next_node]
            if not self._may_use(node):
                return True
            view = self._ready(sequence, sequence.next_node)
            if view is None:
                return self._is_over(sequence)
            self._slicer.import_block(sequence.seq_id, node.start, node.count, node.use, view)
            self._account(sequence, 1)
        return True

    def _join_ahead(self, sequence: Sequence, coming: deque[_Joined]) -> None:
        """Have whole blocks that are ready joined, while those before them are imported."""
        if self._joining is None or len(coming) == _JOINING:
            return
        plan = sequence.plan or ()
        first = coming[-1].first + len(coming[-1].counts) if coming else sequence.next_node + _ONE_BY_ONE
        if not coming and any(
            self._ready(sequence, index) is None for index in range(sequence.next_node, min(first, len(plan)))
        ):
            return
        views: list[memoryview] = []
        for index in range(first, min(first + self._joining.most, len(plan))):
            node = plan[index]
            whole = node.use == node.count == BLOCK_TOKENS and self._may_use(node)
            view = self._ready(sequence, index) if whole else None
            if view is None:
                break
            views.append(view)
        if len(views) > 1:
            coming.append(self._joining.begin(first, plan[first].start, views))

    def _may_use(self, node: PlanNode) -> bool:
        return not self.exact or (node.grid and node.use == node.count == BLOCK_TOKENS)

    def _ready(self, sequence: Sequence, index: int) -> memoryview | None:
        """The state of a node of the plan, if it is there."""
        node, lookup = (sequence.plan or ())[index], sequence.lookup
        if node.start + node.use > len(sequence.tokens) - 1:
            raise SliceError("the store matched the last token, too")
        return lookup.wait_block(index, 0) if lookup is not None else None

    def _is_over(self, sequence: Sequence) -> bool:
        """The next node is not ready: True if it never will be."""
        lookup = sequence.lookup
        if lookup is None:
            return True
        lost = lookup.state(sequence.next_node) == "lost"
        if lost or time.perf_counter() - sequence.stalled_since > BLOCK_PATIENCE:
            self._counters["restore_lost"] += 1
            return True
        return False

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


@dataclass(frozen=True)
class _Joined:
    """States on their way to being one; `first` is the index of the first in its plan."""

    first: int
    counts: list[int]
    size: Future[int]
    buffer: np.ndarray[tuple[int], np.dtype[np.uint8]]

    def state(self) -> memoryview:
        """Waits for it. Raises SliceError if the blocks do not fit each other."""
        try:
            return self.buffer[: self.size.result()].data
        except JoinError as error:
            raise SliceError(str(error)) from error


class _Joining:
    """A thread that joins states, and its buffers."""

    def __init__(self, joiner: Joiner, block_bytes: int) -> None:
        self._joiner = joiner
        self.most = min(_JOINED_BLOCKS, _JOINED_BYTES // block_bytes)
        """Blocks that are joined at a time."""
        size = joiner.size(self.most * BLOCK_TOKENS)
        # filled, so that the first request after a restart does not wait for memory
        self._buffers = [np.full(size, 0, np.uint8) for _ in range(_JOINING)]
        self._thread = ThreadPoolExecutor(1, "joining")

    def begin(self, first: int, start: int, views: list[memoryview]) -> _Joined:
        """At most `_JOINING` of these may be in use; those that were left are done before the next one begins."""
        self._buffers.append(self._buffers.pop(0))
        counts = [BLOCK_TOKENS] * len(views)
        buffer = self._buffers[-1]
        size = self._thread.submit(self._joiner.join, views, counts, start, buffer)
        return _Joined(first, counts, size, buffer)
