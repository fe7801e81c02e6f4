"""Spans and edges from the store into the context. As `restoring.py`, for models whose state has edges.

Such a state can be gone on from only where the plan ends, so it is all or nothing: when a node is lost, late or not
what it should be, the sequence is emptied and computed. What was looked up also tells where prompts part (a learned
branch point): known tokens beyond the last node that can be resumed.
"""

from __future__ import annotations

import logging
import time

from ..frames.store import PlanNode
from ..prefix.blocks import BLOCK_TOKENS
from .edges import EdgeSlicer
from .restoring import BLOCK_PATIENCE, Restorer
from .sequence import Sequence
from .sharing import LEAST
from .store import Lookup

logger = logging.getLogger(__name__)

_FILLED = 16 << 20  # bytes of cells filled for the sake of rounding where none is promised: some milliseconds


class EdgeRestorer(Restorer):
    """`counters` gets what those of `Restorer` do."""

    shares_cells = False

    _slicer: EdgeSlicer

    def planned(self, sequence: Sequence) -> bool:
        """As in `Restorer`; then the points at which prefill calls must end are known, too."""
        known = sequence.plan is not None
        if not super().planned(sequence):
            return False
        if not known:
            self._set_points(sequence)
        return True

    def _set_points(self, sequence: Sequence) -> None:
        # without the cache, too: calls that end elsewhere round differently
        points = dict(sequence.request.points)
        found = sequence.lookup.known if sequence.lookup is not None else 0
        if found >= sequence.matched + LEAST and not any(0 <= found - point < LEAST for point in points):
            points[found] = "branch"
        if self.exact:  # only what lies on the grid can be used
            points = {point - point % BLOCK_TOKENS: kind for point, kind in points.items()}
        sequence.points = {point: kind for point, kind in sorted(points.items()) if point >= LEAST}

    def _step(self, sequence: Sequence, began: float, time_box: float) -> bool:
        plan = sequence.plan or ()
        while sequence.next_node < len(plan):
            if time.perf_counter() - began > time_box:
                return False
            index = sequence.next_node
            node = plan[index]
            edged = index + 1 < len(plan) and plan[index + 1].edge
            span = self._ready(sequence, index)
            edge = self._ready(sequence, index + 1) if edged else None
            if span is None or (edged and edge is None):
                return self._give_up(sequence) if self._is_lost(sequence, index, edged) else False
            before = plan[index - 1] if index else None
            at = before.start + before.use if before is not None else 0
            if edged and not any(other.edge for other in plan[:index]):
                most = None if self.exact else _FILLED
                self._slicer.place(sequence.seq_id, node.start, len(sequence.tokens), most)
            self._slicer.import_node(sequence.seq_id, at, node.start, node.count, span, edge)
            sequence.next_node += 2 if edged else 1
            sequence.stalled_since = time.perf_counter()
        if plan and sequence.n_past == 0:
            self._slicer.check(sequence.seq_id, plan[-1].start)
            self._take(sequence, plan)
        return True

    def _refused(self, seq: int, lookup: Lookup, plan: tuple[PlanNode, ...], index: int) -> tuple[int, str] | None:
        if plan[index].edge:
            return None
        refused = super()._refused(seq, lookup, plan, index)
        if refused is not None or index + 1 >= len(plan) or not plan[index + 1].edge:
            return refused
        span, edge = lookup.wait_block(index, 0), lookup.wait_block(index + 1, 0)
        if span is None or edge is None:
            return None
        reason = self._slicer.refuses(seq, plan[index].start, plan[index].count, span, edge)
        return (index + 1, reason) if reason else None

    def _is_lost(self, sequence: Sequence, index: int, edged: bool) -> bool:
        lookup = sequence.lookup
        if lookup is None or "lost" in (lookup.state(index), lookup.state(index + 1) if edged else ""):
            return True
        return time.perf_counter() - sequence.stalled_since > BLOCK_PATIENCE

    def _give_up(self, sequence: Sequence) -> bool:
        self._counters["restore_lost"] += 1
        self._empty(sequence)
        sequence.forget_state()
        self._tell_lost(sequence)
        return True

    def _take(self, sequence: Sequence, plan: tuple[PlanNode, ...]) -> None:
        """All of the plan is in the context."""
        end = plan[-1].start
        sequence.n_past = sequence.restored = end
        sequence.saved = end - end % BLOCK_TOKENS
        if end % BLOCK_TOKENS == 0 and all(node.grid for node in plan):
            sequence.grid_until = end
        self._counters["restore_tokens"] += end
        if not sequence.started:
            sequence.cached = end
            in_edge = not self._slicer.size.per_token  # spans have nothing in them
            for node in plan:
                if not node.edge:
                    tier = plan[-1].tier if in_edge else node.tier
                    sequence.tiers[tier] = sequence.tiers.get(tier, 0) + node.use
