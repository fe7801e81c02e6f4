"""What a cache of some size would have saved: replays a trace against eviction policies, without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .evictors import BOUND, EVICTORS, OURS, SIMPLE, Evictor
from .traces import Arrival, read_trace


@dataclass(frozen=True)
class Prefill:
    """How long prefill takes: `speed` tokens per second at the beginning, half of it after `half` tokens."""

    speed: float = 250.0
    half: int = 16_384

    def seconds(self, start: int, tokens: int) -> float:
        """Of tokens at positions from `start`."""
        return tokens / self.speed * (1 + (start + tokens / 2) / self.half)


@dataclass(frozen=True)
class Outcome:
    """One policy at one size."""

    policy: str
    block: int  # tokens
    budget_tokens: int
    budget_share: float  # of all distinct blocks
    hit_ratio: float  # of tokens
    seconds_saved: float
    seconds_total: float  # without a cache
    tokens_written: int


@dataclass(frozen=True)
class Verdict:
    """How ours does at one size."""

    budget_share: float
    ours: float  # hit ratios
    best: str
    best_ratio: float
    bound: float

    @property
    def behind(self) -> float:
        """The best simple policy's hit ratio less ours; at most 0 where ours is better."""
        return self.best_ratio - self.ours


def unbounded_tokens(trace: Sequence[Arrival]) -> int:
    """Tokens of all distinct blocks."""
    return sum({block.key: block.tokens for arrival in trace for block in arrival.blocks}.values())


def replay(trace: Sequence[Arrival], evictor: Evictor, prefill: Prefill) -> tuple[int, float, float]:
    """Tokens that matched, seconds of prefill that they saved, seconds of all."""
    matched, saved, total = 0, 0.0, 0.0
    for arrival in trace:
        start, seconds = 0, []
        for block in arrival.blocks:
            seconds.append(prefill.seconds(start, block.tokens))
            start += block.tokens
        found = evictor.serve(arrival.at, arrival.blocks, seconds)
        matched += sum(block.tokens for block in arrival.blocks[:found])
        saved += sum(seconds[:found])
        total += sum(seconds)
    return matched, saved, total


def simulate(
    path: Path,
    *,
    budgets: Sequence[float],
    blocks: Sequence[int],
    policies: Sequence[str] = tuple(EVICTORS),
    prefill: Prefill | None = None,
    limit: int | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> list[Outcome]:
    """Every policy at every budget (shares of the unbounded size) with every block size (tokens).

    `limit`: only so many requests. Raises RequestError if the trace cannot be read.
    """
    prefill = prefill or Prefill()
    outcomes: list[Outcome] = []
    for block in blocks:
        trace = read_trace(path, block, limit)
        everything = unbounded_tokens(trace)
        asked = sum(arrival.tokens for arrival in trace)
        for share in budgets:
            tokens = max(1, round(everything * share))
            for name in policies:
                say(f"{name}, blocks of {block} tokens, {share:.0%} of {everything:,} tokens")
                evictor = EVICTORS[name](tokens, trace)
                matched, saved, total = replay(trace, evictor, prefill)
                outcomes.append(Outcome(name, block, tokens, share, matched / asked, saved, total, evictor.written))
    return outcomes


def verdicts(outcomes: Sequence[Outcome]) -> list[Verdict]:
    """For each size (of the first block size) at which ours, the simple ones and the bound were replayed."""
    found: list[Verdict] = []
    block = outcomes[0].block if outcomes else 0
    for share in dict.fromkeys(one.budget_share for one in outcomes):
        here = {one.policy: one.hit_ratio for one in outcomes if (one.budget_share, one.block) == (share, block)}
        simple = {name: here[name] for name in SIMPLE if name in here}
        if OURS in here and BOUND in here and simple:
            best = max(simple, key=lambda name: simple[name])
            found.append(Verdict(share, here[OURS], best, simple[best], here[BOUND]))
    return found
