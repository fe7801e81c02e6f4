"""Which prompt is computed next and how much of it in one call, from what earlier calls took. Engine thread only."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable

from ..prefix.blocks import BLOCK_TOKENS
from .chunks import SHORTEST_CALL, longest_call
from .gate import Gate
from .sequence import Phase, Sequence
from .shares import AGEING, Shares

_SMOOTH = 0.3  # weight of the newest call in the mean rate
_SIDE = 1 / 6  # of its distance that a background request is behind here: a short one costs others little
_MOST_OWED = 2.0  # seconds, either way: what was long ago does not count
_FULL = 0.75  # of the tokens that fit: a call that says whether more would
_MORE = 1.25  # times as many tokens as the last call's rate says are tried


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
        self._fits = 0.0  # tokens of a call that takes `max_stall`; 0: not known
        self._due: Sequence | None = None  # whose turn it is by age, where that is not the one with the least to do
        self._owed = 0.0  # seconds that others had more than those whose turn it was

    def choose(self, residents: Iterable[Sequence]) -> Sequence | None:
        """The one with the least to do, so that a cached prompt is not kept waiting by a long one; but half of the time
        belongs to the one whose turn it would be with ageing, so that those do not keep it waiting for ever.
        """
        now = time.perf_counter()
        # Slower than prompts are computed, else all would have their turn as they came.
        ageing = self._rate / 2 or AGEING
        quick = due = None
        least = first = math.inf
        for sequence in residents:
            if sequence.phase is not Phase.PREFILL:
                continue
            left, urgency = len(sequence.tokens) - sequence.n_past, sequence.urgency
            cost = left - (urgency if urgency > 0 else _SIDE * urgency)
            if cost < least:
                quick, least = sequence, cost
            worth = left - ageing * (now - sequence.request.arrived + urgency / AGEING)
            if worth < first:
                due, first = sequence, worth
        self._due = due if due is not quick else None
        return due if self._owed > 0 else quick

    def longest(self, *, beside_others: bool) -> int:
        """Tokens of the longest call now: nobody, also one that arrives meanwhile, waits much longer for it."""
        whole = self._exact or not beside_others or not self._fits
        return longest_call(self._fits, self._batch, whole_blocks=whole)

    def _learn(self, count: int, seconds: float) -> None:
        """How many tokens fit `max_stall`, from a call of `count`.

        Longer calls cost less a token. So the next may be a little longer than this one's rate says; else short calls
        would make the next ones shorter, down to the shortest. One that was short as its prompt was tells little.
        """
        fits = count * self._max_stall / max(seconds, 1e-9)
        if seconds > self._max_stall:
            self._fits = min(self._fits or fits, fits)
        elif not self._fits or count >= _FULL * self._fits:
            self._fits = max(self._fits, min(_MORE * fits, 2.0 * count))

    def account(self, sequence: Sequence, end: int, seconds: float) -> None:
        """`sequence` was computed up to `end` in one call that took `seconds`."""
        start, count = sequence.n_past, end - sequence.n_past
        if self._due is not None:
            owed = self._owed + (-seconds if sequence is self._due else seconds)
            self._owed = min(max(owed, -_MOST_OWED), _MOST_OWED)
        on_grid = start % BLOCK_TOKENS == 0 and count % BLOCK_TOKENS == 0
        if count >= SHORTEST_CALL:
            self._learn(count, seconds)
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
