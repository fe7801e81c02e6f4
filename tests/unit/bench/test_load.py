"""An open loop: requests go out at their times; what a restart, an error and a chat's next turn do."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from homeprefixd.bench.load import CUT, ERROR, GOOD, Load, Snapshot
from homeprefixd.errors import UnavailableError
from tests.unit.bench.measured import FakeTarget, plan_of, session


async def test_a_slow_server_delays_no_request(fake: FakeTarget) -> None:
    fake.delay = 0.8
    plan = plan_of(*(session(0.1 * number, number=number) for number in range(6)))
    run = await Load(fake, plan, "cold").run()
    assert [record.outcome for record in run.records] == [GOOD] * 6
    assert max(record.sent - record.planned for record in run.records) < 0.5
    assert max(record.sent for record in run.records) < min(record.sent + (record.ttft or 0) for record in run.records)
    assert all(record.ttft is not None and 0.79 < record.ttft < 3.0 for record in run.records)
    assert run.elapsed >= 1.29
    assert 0 < run.client_cpu < run.elapsed


async def test_the_next_turn_comes_after_the_reply_and_carries_it(fake: FakeTarget) -> None:
    fake.delay = 0.3
    run = await Load(fake, plan_of(session(0.0, 0.4, 0.4)), "cold").run()
    assert [len(body["messages"]) for _, body in fake.asked] == [1, 3, 5]
    last = fake.asked[-1][1]["messages"]
    assert [message["role"] for message in last] == ["user", "assistant", "user", "assistant", "user"]
    assert last[1]["content"] == "1.0 1.1 1.2 "
    assert last[3]["content"] == "3.0 3.1 3.2 "
    for one, two in pairwise(run.records):
        assert 0.39 < two.sent - (one.sent + one.total) < 1.5


async def test_nothing_is_sent_after_the_duration(fake: FakeTarget) -> None:
    run = await Load(fake, plan_of(session(0.0, 0.1, 0.5, 0.1), duration=0.5), "cold").run()
    assert [record.turn for record in run.records] == [0, 1]


async def test_what_is_sent(fake: FakeTarget) -> None:
    for phase, plain in (("cold", False), ("off", False), ("cold", True)):
        await Load(fake, plan_of(session(0.0)), phase, plain=plain).run()
    cold, off, plain_body = (body for _, body in fake.asked)
    assert (cold["ignore_eos"], cold["cache_prompt"], cold["temperature"], cold["max_tokens"]) == (True, True, 0, 3)
    assert off["cache_prompt"] is False
    assert not {"ignore_eos", "cache_prompt"} & set(plain_body)


async def test_what_is_noted(fake: FakeTarget) -> None:
    fake.gap = 0.05
    run = await Load(fake, plan_of(session(0.0)), "cold").run()
    (record,) = run.records
    assert (record.prompt_tokens, record.cached_tokens, record.output_tokens) == (100, 40, 3)
    assert len(record.arrivals) == 3
    assert all(0.04 < gap < 0.5 for gap in record.gaps)
    assert record.total > sum(record.gaps)
    assert record.attempts == 1
    assert not record.after_restart


async def test_a_refused_turn_ends_its_session(fake: FakeTarget) -> None:
    fake.status = lambda body: 400 if len(body["messages"]) == 3 else 200
    run = await Load(fake, plan_of(session(0.0, 0.0, 0.0), session(0.1, app="voice")), "cold").run()
    assert [(r.app, r.turn, r.outcome) for r in run.records] == [
        ("chat", 0, GOOD),
        ("chat", 1, ERROR),
        ("voice", 0, GOOD),
    ]
    assert run.records[1].error == "HTTP 400: no: 400"


async def test_without_a_restart_a_broken_connection_is_an_error(fake: FakeTarget) -> None:
    fake.away = True
    run = await Load(fake, plan_of(session(0.0)), "cold").run()
    assert [(record.outcome, record.attempts) for record in run.records] == [(ERROR, 1)]


async def test_a_restart(fake: FakeTarget) -> None:
    """One request is streaming, one waits for its first token, one comes while it is away, one afterwards."""
    fake.pause, fake.gap = 0.3, 0.15
    plan = plan_of(
        session(0.0, app="voice", max_tokens=12),
        session(0.4, app="documents"),
        session(0.7, app="camera"),
        session(1.4, app="titles"),
    )
    fake.delay = 0.2
    run = await Load(fake, plan, "cold", restart_at=0.5).run()
    assert run.restart is not None
    assert run.restart.stopped is not None
    assert run.restart.ready is not None
    ready = run.restart.ready
    assert run.restart.began == pytest.approx(0.5, abs=0.15)
    assert run.restart.stopped - run.restart.began == pytest.approx(0.3, abs=0.25)
    streaming, waiting, away, after = run.records
    assert (streaming.outcome, streaming.attempts, streaming.after_restart) == (CUT, 1, False)
    assert 1 <= len(streaming.arrivals) < 12
    for record in (waiting, away):
        assert (record.outcome, record.attempts, record.after_restart) == (GOOD, 2, True)
        assert record.ttft == pytest.approx(record.arrivals[0] - record.sent)
        assert record.ttft_ready == pytest.approx(record.arrivals[0] - ready)
        assert record.ttft is not None
        assert record.ttft_ready is not None
        assert record.ttft_ready < record.ttft - 0.2
    assert (after.outcome, after.attempts, after.after_restart) == (GOOD, 1, True)
    assert after.ttft_ready == after.ttft


async def test_a_cut_chat_goes_on_with_what_came(fake: FakeTarget) -> None:
    fake.gap, fake.pause = 0.1, 0.05
    run = await Load(fake, plan_of(session(0.0, 0.5, max_tokens=8)), "cold", restart_at=0.35).run()
    assert [record.outcome for record in run.records] == [CUT, GOOD]
    carried = fake.asked[-1][1]["messages"][1]["content"].split()
    assert 1 <= len(carried) < 8


async def test_a_target_that_does_not_come_back(fake: FakeTarget) -> None:
    def fail() -> None:
        raise UnavailableError("the model is gone")

    fake.start = fail  # type: ignore[method-assign]
    plan = plan_of(session(0.0), session(0.4))
    with pytest.raises(UnavailableError, match="the model is gone"):
        await asyncio.wait_for(Load(fake, plan, "cold", restart_at=0.2).run(), 20)


async def test_progress(fake: FakeTarget) -> None:
    fake.delay = 0.7
    seen: list[Snapshot] = []
    plan = plan_of(session(0.0), session(0.1, number=1), session(1.2, number=2))
    await Load(fake, plan, "hot", progress=seen.append).run()
    assert (seen[0].target, seen[0].phase, seen[0].sent, seen[0].running, seen[0].done) == ("fake", "hot", 2, 2, 0)
    assert seen[0].ttft_p50 is None
    later = next(snapshot for snapshot in seen if snapshot.done == 2)
    assert later.running == later.sent - 2
    assert later.ttft_p50 is not None
    assert 0.69 <= later.ttft_p50 < 2.0
