"""Load or compute? How much of what the cache knows is restored: as much as makes the first token come soonest.

Measured while the worker runs: what a prefill call costs, by its length and depth, and what importing a token's state
costs; the store says how fast it reads from disk. On a CPU restoring always wins; a GPU with a small model beats a slow
disk. While a rate is not known, everything is restored; and so it is now and then later, so that rates are not kept
that are not true any more.
"""

from __future__ import annotations

import logging
from collections import defaultdict

import numpy as np

from ..frames.store import PlanNode
from ..frames.worker import GateDecision
from ..prefix.blocks import BLOCK_TOKENS

_CALLS = 8  # prefill calls and
_TOKENS = 256  # tokens that were computed before the rates count
_FORGET = 0.98  # weight of what was measured until now when a call of a whole block is measured anew
_MARGIN = 1.25  # computing must be predicted to be so much faster, as predictions are what they are
_TRY_AGAIN = 16  # every so often everything is restored though computing seems faster
_RIDGE = 1e-6

logger = logging.getLogger(__name__)


class PrefillCost:
    """Seconds of a prefill call as a sum: for the call, for each token, for each token and token before it.

    Fitted by least squares with forgetting; no part is negative. Not thread-safe.
    """

    def __init__(self) -> None:
        self._squares = np.zeros((3, 3))
        self._products = np.zeros(3)
        self._calls = 0
        self._tokens = 0
        self._batch = 1
        self.parts: tuple[float, float, float] = (0.0, 0.0, 0.0)
        """Seconds: of a call, of a token, of a token and one before it. 0 while too little is known."""

    @property
    def known(self) -> bool:
        return self._calls >= _CALLS and self._tokens >= _TOKENS

    @property
    def batch(self) -> int:
        """Tokens of the longest call until now."""
        return self._batch

    def add(self, start: int, count: int, seconds: float) -> None:
        """A call that computed `count` tokens behind `start`."""
        row = _row(1, start, count)
        keep = _FORGET ** min(1.0, count / BLOCK_TOKENS)  # the single tokens after restored prefixes say little
        self._squares = self._squares * keep + np.outer(row, row)
        self._products = self._products * keep + row * seconds
        self._calls += 1
        self._tokens += count
        self._batch = max(self._batch, count)
        if self.known:
            self.parts = self._fit()

    def _fit(self) -> tuple[float, float, float]:
        """Parts that come out negative are 0, and the others are fitted without them."""
        used = [0, 1, 2]
        while used:
            squares = self._squares[np.ix_(used, used)]
            scale = np.sqrt(np.maximum(np.diag(squares), 1e-30))
            scaled = squares / np.outer(scale, scale) + _RIDGE * np.eye(len(used))
            found = np.linalg.solve(scaled, self._products[used] / scale) / scale
            if found.min() >= 0:
                parts = [0.0, 0.0, 0.0]
                for index, value in zip(used, found, strict=True):
                    parts[index] = float(value)
                return parts[0], parts[1], parts[2]
            del used[int(found.argmin())]
        return 0.0, 0.0, 0.0

    def predict(self, start: int, end: int) -> float:
        """Seconds to compute tokens [start, end)."""
        count = max(0, end - start)
        calls = -(-count // self._batch)
        return float(_row(calls, start, count) @ np.array(self.parts))


def _row(calls: int, start: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array([calls, count, count * (start + count / 2)], np.float64)


class Gate:
    """`counters` gets: gate_loaded, gate_computed (tokens known to the cache that were restored, and that were not)."""

    def __init__(self, counters: defaultdict[str, float]) -> None:
        self._counters = counters
        self.prefill = PrefillCost()
        self._refused = 0

    def computed(self, start: int, count: int, seconds: float) -> None:
        """A prefill call was measured."""
        self.prefill.add(start, count, seconds)

    def import_cost(self) -> float:
        """Seconds that the state of a token takes on its way from RAM into the context; 0: not known."""
        tokens = self._counters["restore_tokens"]
        return self._counters["restore_seconds"] / tokens if tokens >= _TOKENS else 0.0

    def choose(
        self, plan: tuple[PlanNode, ...], total: int, warm_rate: float, *, whole: bool = False
    ) -> tuple[tuple[PlanNode, ...], GateDecision]:
        """The first nodes of `plan` that are to be restored, of a prompt of `total` tokens, and why.

        `warm_rate`: bytes a second that come from disk; 0: not known. `whole`: a part of the plan is of no use.
        """
        if not plan:
            return plan, GateDecision(0, 0, "unknown", disk_rate=warm_rate)
        known = plan[-1].start + plan[-1].use
        best, reason = len(plan), "unmeasured"
        load: float | None = None
        compute: float | None = None
        if self._tells():
            load, compute = self._load_cost(plan, warm_rate), self.prefill.predict(0, known)
            best = self._best(plan, total, warm_rate, whole)
            reason = "faster" if best == len(plan) else "computed"
        if best < len(plan):
            self._refused += 1
            if self._refused % _TRY_AGAIN == 0:
                best, reason = len(plan), "again"
        chosen = plan[:best]
        kept = chosen[-1].start + chosen[-1].use if chosen else 0
        self._counters["gate_loaded"] += kept
        self._counters["gate_computed"] += known - kept
        tiers: dict[str, int] = {}
        for node in plan:
            tiers[node.tier] = tiers.get(node.tier, 0) + node.use
        rate = known / compute if compute else 0.0
        decision = GateDecision(known, kept, reason, tiers, load, compute, warm_rate, rate)
        if kept < known:
            logger.debug("%d of %d known tokens are restored: %s", kept, known, decision)
        return chosen, decision

    def _tells(self) -> bool:
        """Whether enough is measured; not where calls were too much alike to tell."""
        _call, token, depth = self.prefill.parts
        return bool(token or depth)

    def _load_cost(self, plan: tuple[PlanNode, ...], warm_rate: float) -> float:
        """Seconds to restore all of it."""
        from_disk = sum(node.size for node in plan if node.tier == "warm")
        tokens = sum(node.count for node in plan)
        return self.import_cost() * tokens + (from_disk / warm_rate if warm_rate > 0 else 0.0)

    def _best(self, plan: tuple[PlanNode, ...], total: int, warm_rate: float, whole: bool) -> int:
        """How many nodes to restore so that the prompt is done soonest; of equals the most."""
        each = self.import_cost()
        loading = 0.0
        computing = self.prefill.predict(0, total)
        best, at_best = 0, (loading, computing)
        for index, node in enumerate(plan):
            loading += each * node.count
            if node.tier == "warm" and warm_rate > 0:
                loading += node.size / warm_rate
            computing = self.prefill.predict(node.start + node.use, total)
            if loading + computing <= sum(at_best) and (not whole or index == len(plan) - 1):
                best, at_best = index + 1, (loading, computing)
        rest_computed, rest_loaded = at_best[1] - computing, loading - at_best[0]
        return best if rest_computed * _MARGIN < rest_loaded else len(plan)

    def rates(self) -> dict[str, float]:
        """For predictions elsewhere, in seconds: `call`, `token`, `depth` (of a token and one before it), `restore` (of
        a token); `batch` in tokens. Empty while too little is known."""
        if not self.prefill.known:
            return {}
        call, token, depth = self.prefill.parts
        return {
            "call": call,
            "token": token,
            "depth": depth,
            "batch": float(self.prefill.batch),
            "restore": self.import_cost(),
        }
