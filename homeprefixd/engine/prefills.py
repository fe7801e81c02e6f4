"""Which prompt is computed next and how much of it in one call, from what earlier calls took. Engine thread only."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable

from ..prefix.blocks import BLOCK_TOKENS
from .chunks import SHORTEST_CALL, longest_call
from .gate import Gate
from .sequence import Phase, Sequence
from .shares import AGEING, Shares

_SMOOTH = 0.3  # weight of the newest call in the mean rate


class Prefills:
    """`batch`: tokens of the longest call; `max_stall`: seconds of one beside replies that run.

    `exact`: calls are whole blocks, whatever that costs others. `gate` None: cache off.
    """

    def __init__(
        self,
        batch: int,
        max_stall: float,
        shares: Shares,
        counters: defaultdict[str, float],
        *,
        exact: bool,
        gate: Gate | None,
    ) -> None:
        self._batch, self._max_stall, self._exact = batch, max_stall, exact
        self._shares, self._counters, self._gate = shares, counters, gate
        self._rate = 0.0  # tokens per second

    def choose(self, residents: Iterable[Sequence]) -> Sequence | None:
        """The one with the least to do, with ageing, so that a cached prompt is not kept waiting by a long one."""
        best, best_worth = None, 0.0
        now = time.perf_counter()
        for sequence in residents:
            if sequence.phase is Phase.PREFILL:
                left = len(sequence.tokens) - sequence.n_past
                worth = left - max(AGEING, self._rate / 2) * (now - sequence.request.arrived) - sequence.urgency
                if best is None or worth < best_worth:
                    best, best_worth = sequence, worth
        return best

    def longest(self, *, beside_others: bool) -> int:
        """Tokens of the longest call now: nobody, also one that arrives meanwhile, waits much longer for it."""
        whole = self._exact or not beside_others
        return longest_call(self._rate, self._max_stall, self._batch, whole_blocks=whole)

    def account(self, sequence: Sequence, end: int, seconds: float) -> None:
        """`sequence` was computed up to `end` in one call that took `seconds`."""
        start, count = sequence.n_past, end - sequence.n_past
        on_grid = start % BLOCK_TOKENS == 0 and count % BLOCK_TOKENS == 0
        if count >= SHORTEST_CALL:
            rate = count / max(seconds, 1e-9)
            self._rate = rate if not self._rate else (1 - _SMOOTH) * self._rate + _SMOOTH * rate
        if on_grid and sequence.aligned and sequence.grid_until == start:
            sequence.grid_until = end
        sequence.n_past = end
        sequence.unsaved_cost += seconds
        self._counters["prefill_tokens"] += count
        self._counters["prefill_seconds"] += seconds
        if self._gate is not None:
            self._gate.computed(start, count, seconds)
        self._shares.count(sequence.request.client, prefilled=count, now=time.perf_counter())
