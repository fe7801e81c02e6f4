"""Several requests at once: cells that are shared, prefixes that are computed once, who goes first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from homeprefixd.engine.prefills import Prefills
from homeprefixd.frames.worker import Accepted, Delta, Finished, Progress
from tests.integration.engine.memory_store import MemoryStore
from tests.integration.engine.running import Logits, Running

Run = Callable[..., Running]
Tiny = Callable[[str], Path]
Tokens = Callable[..., list[int]]


def streaming(running: Running, prompt: list[int], tokens: int = 400) -> str:
    """Start a request and wait until it generates."""
    rid = running.start(prompt, tokens)
    running.wait(lambda: len(running.of(rid, Delta)) > 2)
    return rid


def test_a_second_request_uses_the_cells_of_one_that_runs(run: Run, demo_model: Path, tokens: Tokens) -> None:
    running = run(demo_model, parallel=3, ctx=1024, pool=2048)
    running.known()
    prompt = tokens(170)
    others = [[*prompt[:150], 5 + i, 6, 7] for i in range(2)]
    alone = [running.ask(other, 6, cache=False)[0] for other in others]
    first = streaming(running, prompt)
    rids = [streaming(running, other, 300) for other in others]
    figures = running.engine.figures()
    running.worker.intake.cancel(first)
    running.finish(first)
    assert running.engine.figures().running == 2  # the cells they share with it stay
    for rid in rids:
        running.worker.intake.cancel(rid)
    ends = [running.finish(rid) for rid in rids]
    assert [end.timings.cache_tiers for end in ends] == [{"shared": 150}] * 2
    assert [end.timings.prompt_n for end in ends] == [3, 3]
    assert figures.cells_shared == 300
    assert 170 + 6 < figures.cells_used < 170 + 6 + 400 + 2 * 300
    for rid, text in zip(rids, alone, strict=True):
        assert running.text(rid)[:5] == text[:5]
    assert running.engine.counters["restore_tokens"] == 0
    assert running.engine.figures().cells_used == 0
    hot = running.ask([*prompt[:150], 5, 6, 7], 1)[1].timings
    assert hot.cache_tiers == {"hot": 152}  # what was computed behind shared cells was saved, too


def test_what_is_shared_is_what_would_be_computed(
    run: Run, tiny: Tiny, tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = Logits(monkeypatch)
    running = run(tiny("qwen3"), parallel=2)
    running.known()
    other = [*tokens(300)[:250], *tokens(20, 1)]
    alone = running.ask(other, 40, cache=False)[1].rid
    first = streaming(running, tokens(300))
    second = running.ask(other, 40)[1]
    running.worker.intake.cancel(first)
    running.finish(first)
    assert second.timings.cache_tiers == {"shared": 250}
    assert logits.compare(alone, second.rid) > 5


@pytest.mark.parametrize("away", [False, True], ids=["store", "no store"])
def test_one_cold_prefix_of_four_is_computed_once(
    run: Run, demo_model: Path, tokens: Tokens, monkeypatch: pytest.MonkeyPatch, away: bool
) -> None:
    logits = Logits(monkeypatch)
    store = MemoryStore()
    store.connected = not away
    running = run(demo_model, store, parallel=4, batch=128, ctx=1024, pool=2048)
    if not away:
        running.known()
    prefix = tokens(64 * 4 + 10)  # three calls
    tails = [tokens(20, 7 + i) for i in range(4)]
    alone = [running.ask([*prefix, *tail], 6, cache=False)[1].rid for tail in tails]
    before = running.engine.counters["prefill_tokens"]
    rids = [running.start([*prefix, *tail], 6) for tail in tails]
    ends = [running.finish(rid) for rid in rids]
    computed = running.engine.counters["prefill_tokens"] - before
    assert computed <= 1.05 * (len(prefix) + sum(len(tail) for tail in tails))
    assert sum(end.timings.prompt_n for end in ends) == computed
    assert all(logits.compare(rid, other) > 0 for rid, other in zip(rids, alone, strict=True))
    assert [set(end.timings.cache_tiers) for end in ends] == [set(), {"shared"}, {"shared"}, {"shared"}]


def test_who_waits_for_a_prefix_goes_on_when_its_computer_leaves(run: Run, demo_model: Path, tokens: Tokens) -> None:
    running = run(demo_model, batch=64, ctx=2048)
    running.known()
    prompt = tokens(500)
    first = running.start([*prompt, 1], 4)
    second = running.start([*prompt, 2], 4)
    running.wait(lambda: [f for f in running.of(first, Progress) if f.done >= 128])
    running.worker.intake.cancel(first)
    done = running.finish(first).timings
    end = running.finish(second).timings
    assert done.predicted_n == 0
    assert end.cache_n >= 128
    assert end.cache_n + end.prompt_n == 501
    assert running.engine.counters["prefill_tokens"] < 501 + 64  # nothing twice, but a call that was under way


def test_exact_shares_what_was_computed_on_the_grid(run: Run, demo_model: Path, tokens: Tokens) -> None:
    running = run(demo_model, reuse="exact", ctx=2048)
    running.known()
    prompt = tokens(200)
    first = streaming(running, prompt)
    second = running.ask([*prompt[:180], 5], 2)[1]
    running.worker.intake.cancel(first)
    running.finish(first)
    assert second.timings.cache_tiers == {"shared": 128}


@pytest.mark.parametrize("changes", [{"salt": "other"}, {"cache": False}])
def test_cells_of_others_are_not_shared(run: Run, tiny: Tiny, tokens: Tokens, changes: dict[str, object]) -> None:
    running = run(tiny("llama"))
    running.known()
    first = streaming(running, tokens(200))
    second = running.ask([*tokens(200)[:180], 5], 2, **changes)[1]
    running.worker.intake.cancel(first)
    running.finish(first)
    assert second.timings.cache_n == 0


def test_a_longer_stored_prefix_goes_on_behind_shared_cells(run: Run, tiny: Tiny, tokens: Tokens) -> None:
    running = run(tiny("llama"))
    running.known()
    prompt = tokens(400)
    running.ask(prompt, 1)
    first = streaming(running, [*prompt[:150], *tokens(20, 3)])
    second = running.ask([*prompt[:390], 5, 6], 2)[1]
    running.worker.intake.cancel(first)
    running.finish(first)
    assert second.timings.cache_tiers == {"shared": 128, "hot": 262}
    assert second.timings.prompt_n == 2


def test_models_with_edges_share_nothing(run: Run, tiny: Tiny, tokens: Tokens) -> None:
    running = run(tiny("granitehybrid"))
    first = streaming(running, tokens(200))
    second = running.ask([*tokens(200)[:180], 5], 2)[1]
    running.worker.intake.cancel(first)
    running.finish(first)
    assert second.timings.cache_n == 0


def test_who_is_left_in_high_cells_moves_to_the_first(
    run: Run, tiny: Tiny, tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("homeprefixd.engine.residents._HOLES", 500)
    logits = Logits(monkeypatch)
    running = run(tiny("qwen3"), ctx=2048, pool=4096)
    running.known()
    alone = running.ask(tokens(100), 400, cache=False)[1].rid
    long = running.start(tokens(900, 1), 40)  # so that the other one is there before it ends
    running.wait(lambda: running.of(long, Progress))
    short = running.start(tokens(100), 400)
    running.finish(long)
    end = running.finish(short)
    assert running.engine.counters["holes_closed"] == 1
    assert running.engine.counters["set_aside"] == 1
    assert end.timings.predicted_n == 400
    assert end.timings.cache_n == 0
    assert logits.compare(alone, short) > 5


def order_of_ends(running: Running, rids: list[str]) -> list[str]:
    for rid in rids:
        running.finish(rid)
    return [f.rid for _, f in running.frames if isinstance(f, Finished) and f.rid in rids]


def test_urgent_requests_go_first(run: Run, tiny: Tiny, tokens: Tokens) -> None:
    running = run(tiny("llama"), parallel=1)
    running.known()
    first = streaming(running, tokens(100), 200)
    classes = ("background", "normal", "interactive")
    rids = [running.start(tokens(100, i), 3, priority=name) for i, name in enumerate(classes, 1)]
    assert order_of_ends(running, [first, *rids]) == [first, *rids[::-1]]


def test_background_requests_make_way_and_come_back(run: Run, tiny: Tiny, tokens: Tokens) -> None:
    running = run(tiny("qwen3"), parallel=1)
    running.known()
    alone = running.ask(tokens(100), 300, cache=False)[0]
    slow = running.start(tokens(100), 300, priority="background")
    running.wait(lambda: len(running.of(slow, Delta)) > 2)
    rids = [running.start(tokens(100, i), 3, priority="interactive") for i in (1, 2)]
    assert order_of_ends(running, [slow, *rids]) == [*rids, slow]
    assert 1 <= running.engine.counters["set_aside"] <= 3
    assert len(running.of(slow, Finished)) == 1
    assert len(running.text(slow)) > 100
    assert running.text(slow)[:40] == alone[:40]


def test_background_requests_make_way_for_want_of_cells(run: Run, tiny: Tiny, tokens: Tokens) -> None:
    """There are places, but one long request has the cells."""
    running = run(tiny("qwen3"), parallel=4, ctx=1024, pool=1024)
    running.known()
    slow = running.start(tokens(700), 200, priority="background")
    running.wait(lambda: len(running.of(slow, Delta)) > 2)
    voice = running.start(tokens(600, 1), 3, priority="interactive")
    assert order_of_ends(running, [slow, voice]) == [voice, slow]
    assert running.engine.counters["set_aside"] == 1
    assert len(running.of(slow, Finished)) == 1


def test_nobody_makes_way_in_vain(run: Run, tiny: Tiny, tokens: Tokens) -> None:
    """There would be a place, but no cells."""
    running = run(tiny("qwen3"), parallel=2, ctx=1024, pool=1024)
    running.known()
    first = streaming(running, tokens(600), 200)
    slow = running.start(tokens(60, 1), 100, priority="background")
    running.wait(lambda: len(running.of(slow, Delta)) > 2)
    late = running.start(tokens(700, 2), 3)
    assert order_of_ends(running, [first, slow, late])[-1] == late
    assert running.engine.counters["set_aside"] == 0


def test_what_was_saved_while_one_waited_for_a_place_is_used(
    run: Run, tiny: Tiny, tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("homeprefixd.engine.admission._OUTDATED", 0.0)
    running = run(tiny("llama"), parallel=1)
    running.known()
    first = running.start(tokens(500), 30)
    running.wait(lambda: running.of(first, Accepted))
    second = running.start([*tokens(500), 7, 8, 9], 3)
    running.finish(first)
    assert running.finish(second).timings.cache_n >= 448


def test_who_has_waited_for_long_goes_first(
    run: Run, tiny: Tiny, tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of classes that are one step apart, with a second's waiting worth so much that a moment makes up for it."""
    monkeypatch.setattr("homeprefixd.engine.admission.AGEING", 1e9)
    running = run(tiny("llama"), parallel=1)
    running.known()
    first = streaming(running, tokens(100), 200)
    rids = [running.start(tokens(100, 1), 3, priority="background")]
    running.wait(lambda: len(running.of(rids[0], Accepted)) == 1)
    rids.append(running.start(tokens(100, 2), 3))
    assert order_of_ends(running, [first, *rids]) == [first, *rids]


@pytest.mark.parametrize(("priority", "stays"), [("normal", True), ("interactive", False)])
def test_who_has_waited_for_long_does_not_make_way_for_a_chat(
    run: Run, tiny: Tiny, tokens: Tokens, monkeypatch: pytest.MonkeyPatch, priority: str, stays: bool
) -> None:
    monkeypatch.setattr("homeprefixd.engine.admission.AGEING", 1e9)
    running = run(tiny("llama"), parallel=1)
    running.known()
    slow = running.start(tokens(100), 200, priority="background")
    running.wait(lambda: len(running.of(slow, Delta)) > 2)
    rid = running.start(tokens(100, 1), 3, priority=priority)
    assert order_of_ends(running, [slow, rid]) == ([slow, rid] if stays else [rid, slow])


def test_nobody_makes_way_for_an_equal(run: Run, tiny: Tiny, tokens: Tokens) -> None:
    running = run(tiny("llama"), parallel=1)
    running.known()
    slow = streaming(running, tokens(100), 200)
    rid = running.start(tokens(100, 1), 3, priority="interactive")
    assert order_of_ends(running, [slow, rid]) == [slow, rid]
    assert running.engine.counters["set_aside"] == 0


def test_a_client_that_asks_much_waits_for_one_that_does_not(run: Run, tiny: Tiny, tokens: Tokens) -> None:
    running = run(tiny("llama"), parallel=1, max_queue=20)
    running.known()
    rids = [running.start(tokens(600, i), 50, client="camera") for i in range(6)]
    running.wait(lambda: running.of(rids[1], Delta))
    voice = running.start(tokens(60, 50), 3, client="voice")
    order = order_of_ends(running, [*rids, voice])
    assert order.index(voice) <= 3  # after what ran when it came, not after all six


def test_a_prefix_that_someone_urgent_waits_for_is_urgent(
    run: Run, demo_model: Path, tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = run(demo_model, batch=64, ctx=2048, parallel=3)
    running.known()
    shared, other = tokens(260), tokens(260, 1)
    background = running.start([*shared, 1], 2, priority="background")
    running.wait(lambda: running.of(background, Progress))
    normal = running.start(other, 2)
    urgent = running.start([*shared, 2], 2, priority="interactive")
    order = order_of_ends(running, [background, normal, urgent])
    assert order[-1] == normal


def test_a_prefix_is_urgent_for_as_long_as_someone_waits_for_it(run: Run, demo_model: Path, tokens: Tokens) -> None:
    running = run(demo_model, batch=64, ctx=2048, parallel=3)
    running.known()
    shared = tokens(130)
    background = running.start([*shared, *tokens(600, 5)], 2, priority="background")
    running.wait(lambda: running.of(background, Progress))
    normal = running.start(tokens(700, 1), 2)
    urgent = running.start([*shared, 2], 2, priority="interactive")
    assert order_of_ends(running, [background, normal, urgent]) == [urgent, normal, background]


def test_calls_are_short_from_the_start_of_a_long_prompt(
    run: Run, tiny: Tiny, tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that arrives while nobody decodes must not wait for a call of the whole batch."""
    running = run(tiny("llama"), batch=512, max_stall=0.001, ctx=2048)
    running.known()
    lengths: list[int] = []
    original = Prefills.account

    def account(self: Prefills, sequence: object, end: int, seconds: float) -> None:
        lengths.append(end - sequence.n_past)  # type: ignore[attr-defined]
        original(self, sequence, end, seconds)  # type: ignore[arg-type]

    monkeypatch.setattr(Prefills, "account", account)
    running.ask(tokens(500), 1)
    assert set(lengths) == {64, 500 % 64}
