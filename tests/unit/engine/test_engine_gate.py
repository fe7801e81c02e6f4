"""Load or compute: what is measured, and what follows from it."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from homeprefixd.engine.gate import Gate, PrefillCost
from homeprefixd.explain.causes import GATE
from homeprefixd.frames.store import PlanNode
from homeprefixd.frames.worker import GateDecision

SIZE = 1_000_000  # bytes of a block


def plan(blocks: int, tier: str = "warm", last: int = 64) -> tuple[PlanNode, ...]:
    uses = [64] * (blocks - 1) + [last]
    return tuple(
        PlanNode(bytes([n]) * 32, 64 * n, 64, use, tier, SIZE, True, -1)  # type: ignore[arg-type]
        for n, use in enumerate(uses)
    )


def gate(per_token: float, *, depth: float = 0.0, restore: float = 1e-5) -> Gate:
    """One that has measured much: seconds of a token computed, and of one restored."""
    counters: defaultdict[str, float] = defaultdict(float)
    counters["restore_tokens"], counters["restore_seconds"] = 10_000.0, 10_000 * restore
    found = Gate(counters)
    for start in range(0, 4096, 256):
        found.computed(start, 256, 256 * per_token + depth * 256 * (start + 128))
    return found


class TestCost:
    def test_it_finds_what_calls_cost(self) -> None:
        cost = PrefillCost()
        numbers = random.Random(1)
        for _call in range(300):
            start, count = 64 * numbers.randrange(60), numbers.choice([7, 30, 64, 128, 256])
            exact = 0.03 + 0.004 * count + 1e-6 * count * (start + count / 2)
            cost.add(start, count, exact * numbers.uniform(0.9, 1.1))
        assert cost.batch == 256
        for start, end in ((0, 64), (0, 2048), (1000, 1011), (3000, 3500)):
            calls, count = -(-(end - start) // 256), end - start
            exact = 0.03 * calls + 0.004 * count + 1e-6 * count * (start + count / 2)
            assert cost.predict(start, end) == pytest.approx(exact, rel=0.15)

    def test_no_part_is_negative(self) -> None:
        cost = PrefillCost()
        for start in range(0, 2048, 64):  # deeper ones happened to be faster
            cost.add(start, 64, 1.0 - start / 4096)
        assert min(cost.parts) >= 0
        assert cost.predict(0, 640) > 0

    def test_it_follows_a_machine_that_became_slower(self) -> None:
        cost = PrefillCost()
        for seconds in (0.1, 0.4):
            for call in range(300):
                cost.add(64 * (call % 30), 64, seconds)
        assert cost.predict(0, 64) == pytest.approx(0.4, rel=0.1)

    def test_little_is_not_known(self) -> None:
        cost = PrefillCost()
        for _call in range(7):
            cost.add(0, 256, 1.0)
        assert not cost.known


class TestGate:
    def test_while_nothing_is_known_all_is_restored(self) -> None:
        fresh = Gate(defaultdict(float))
        assert fresh.choose(plan(5), 1000, 1.0)[0] == plan(5)
        assert fresh.choose((), 1000, 1.0)[0] == ()
        assert fresh.rates() == {}
        slow = gate(1e-4)
        assert slow.choose(plan(5), 1000, 0.0)[0] == plan(5)  # nothing was read from disk yet

    def test_a_cpu_never_beats_a_disk(self) -> None:
        assert len(gate(5e-3).choose(plan(30), 2000, 200e6)[0]) == 30

    def test_a_fast_gpu_beats_a_slow_disk(self) -> None:
        """64 tokens in 6.4 ms; a block of 1 MB in 100 ms."""
        fast = gate(1e-4)
        assert fast.choose(plan(30), 2000, 10e6)[0] == ()
        assert fast._counters["gate_computed"] == 30 * 64
        assert fast.choose(plan(30, "hot"), 2000, 10e6)[0] == plan(30, "hot")  # memory is not the disk
        assert fast._counters["gate_loaded"] == 30 * 64

    def test_what_is_in_memory_is_taken_and_the_rest_computed(self) -> None:
        mixed = (*plan(10, "hot"), *plan(30)[10:])
        assert gate(1e-4).choose(mixed, 2000, 10e6)[0] == mixed[:10]

    def test_deep_tokens_cost_more_so_that_loading_begins_to_pay(self) -> None:
        """To leave out what lies before is not possible: it is all or the first part."""
        assert len(gate(1e-4, depth=1e-6).choose(plan(30), 2000, 100e6)[0]) == 30

    def test_a_node_of_which_little_is_used_is_left_alone(self) -> None:
        """A whole block, 20 ms away, must come for two tokens of it: 2 ms."""
        assert len(gate(1e-3).choose(plan(5, last=2), 263, 50e6)[0]) == 4
        assert len(gate(1e-3).choose(plan(5, last=64), 325, 50e6)[0]) == 5

    def test_what_is_hardly_faster_changes_nothing(self) -> None:
        """64 tokens in 6.4 ms, a block in 7 ms."""
        assert len(gate(1e-4).choose(plan(30), 2000, SIZE / 7e-3)[0]) == 30

    def test_calls_that_are_all_alike_say_nothing_wrong(self) -> None:
        """Of single tokens behind restored prefixes, with noise: what a token costs cannot be told from a call."""
        numbers = random.Random(1)
        counters: defaultdict[str, float] = defaultdict(float)
        counters["restore_tokens"], counters["restore_seconds"] = 10_000.0, 0.1
        found = Gate(counters)
        for start in range(0, 2048, 256):
            found.computed(start, 256, 1.2)
        for _request in range(500):
            found.computed(2000 + numbers.randrange(100), 1, 0.04 * numbers.uniform(0.5, 2.0))
            assert len(found.choose(plan(30), 1921, 200e6)[0]) == 30

    def test_now_and_then_it_tries_again(self) -> None:
        fast = gate(1e-4)
        found = [len(fast.choose(plan(30), 2000, 10e6)[0]) for _request in range(32)]
        assert found.count(30) == 2
        assert found.count(0) == 30

    def test_where_a_part_is_of_no_use_it_is_all_or_nothing(self) -> None:
        mixed = (*plan(10, "hot"), *plan(30)[10:])
        assert gate(1e-4).choose(mixed, 2000, 10e6, whole=True)[0] == ()
        assert gate(1e-4).choose(mixed, 2000, 1e9, whole=True)[0] == mixed

    @pytest.mark.parametrize(
        ("seconds", "tier", "rate", "restored", "reason"),
        [
            (1e-4, "warm", 10e6, 0, "computed"),
            (1e-4, "hot", 10e6, 1920, "faster"),
            (5e-3, "warm", 200e6, 1920, "faster"),
        ],
    )
    def test_the_decision_and_its_reason(
        self, seconds: float, tier: str, rate: float, restored: int, reason: str
    ) -> None:
        decision = gate(seconds).choose(plan(30, tier), 2000, rate)[1]
        assert (decision.known, decision.restored, decision.reason) == (1920, restored, reason)
        assert decision.tiers == {tier: 1920}
        assert decision.compute_s == pytest.approx(1920 * seconds, rel=0.05)
        assert decision.load_s == pytest.approx(1920 * 1e-5 + (30 * SIZE / rate if tier == "warm" else 0), rel=0.05)
        assert decision.prefill_rate == pytest.approx(1 / seconds, rel=0.05)
        assert decision.disk_rate == rate
        assert decision.reason in GATE

    def test_reasons_where_nothing_is_weighed(self) -> None:
        fresh = Gate(defaultdict(float))
        assert fresh.choose(plan(5), 1000, 1.0)[1] == GateDecision(320, 320, "unmeasured", {"warm": 320}, disk_rate=1.0)
        assert fresh.choose((), 1000, 1.0)[1].reason == "unknown"
        fast = gate(1e-4)
        reasons = [fast.choose(plan(30), 2000, 10e6)[1].reason for _request in range(32)]
        assert {reason: reasons.count(reason) for reason in set(reasons)} == {"computed": 30, "again": 2}

    def test_rates(self) -> None:
        rates = gate(2e-3, restore=3e-5).rates()
        assert rates["batch"] == 256
        assert rates["restore"] == pytest.approx(3e-5)
        assert 256 * rates["token"] + rates["call"] == pytest.approx(256 * 2e-3, rel=0.05)
