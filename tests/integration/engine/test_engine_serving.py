"""Requests side by side: fairness, limits, ends of every kind, and nobody hurt by another's trouble."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from homeprefixd.engine.bindings import Model
from homeprefixd.engine.context import Context
from homeprefixd.engine.failures import DecodeError
from homeprefixd.engine.places import Place
from homeprefixd.engine.prefills import Prefills
from homeprefixd.engine.scheduler import Engine
from homeprefixd.engine.sequence import Sequence
from homeprefixd.errors import ContextOverflowError, HomeprefixdError, RequestError, UnavailableError
from homeprefixd.frames.worker import Accepted, Delta, Failure, Finished, Message, Progress, Sampling
from tests.integration.engine.running import Logits, Running

Run = Callable[..., Running]
Tiny = Callable[[str], Path]
Tokens = Callable[..., list[int]]


def test_two_streams_at_once_say_what_each_says_alone(
    run: Run, demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = Logits(monkeypatch)
    running = run(demo_model)
    prompts = ["The capital of France is", "Once upon a time, there was a"]
    alone = [running.ask(prompt, 30, cache=False)[1].rid for prompt in prompts]
    rids = [running.start(prompt, 30, cache=False) for prompt in prompts]
    for rid, other in zip(rids, alone, strict=True):
        running.finish(rid)
        assert logits.compare(rid, other) > 5
    order = [f.rid for _, f in running.frames if isinstance(f, Delta) and f.rid in rids]
    first_end = next(i for i, rid in enumerate(order) if i > 25 and rid != order[0])
    assert set(order[:first_end]) == set(rids)  # not one after the other


def test_the_tokens_of_a_step_leave_together(run: Run, tiny: Tiny, tokens: Tokens) -> None:
    running = run(tiny("llama"), parallel=3)
    writes: list[list[str]] = []

    @contextlib.contextmanager
    def together() -> Iterator[None]:
        before = len(running.frames)
        yield
        writes.append([f.rid for _, f in running.frames[before:] if isinstance(f, Delta)])

    running.engine._together = together
    rids = [running.start(tokens(30, seed), 200, cache=False) for seed in range(3)]
    for rid in rids:
        assert running.finish(rid).reason == "length"
    assert max(writes, key=len) in [[*order] for order in itertools.permutations(rids)]
    for rid in rids:  # all but the first of each, which its prefill gives
        assert sum(write.count(rid) for write in writes) == len(running.of(rid, Delta)) - 1


def test_a_stream_goes_on_while_a_long_prompt_is_prefilled(run: Run, demo_model: Path, tokens: Tokens) -> None:
    running = run(demo_model, max_stall=0.4)
    rid = running.start("Once upon a time", 400)
    running.wait(lambda: len(running.of(rid, Delta)) > 3)
    long = running.start(tokens(700), 1)
    running.finish(long)
    running.worker.intake.cancel(rid)
    running.finish(rid)
    begin = next(at for at, f in running.frames if isinstance(f, Progress) and f.rid == long)
    end = next(at for at, f in running.frames if isinstance(f, Finished) and f.rid == long)
    during = [at for at, f in running.frames if isinstance(f, Delta) and f.rid == rid and begin < at < end]
    calls = len(running.of(long, Progress))
    assert calls >= 5  # shorter ones than the batch of 512
    assert len(during) >= calls - 3  # a token between any two of them


def test_more_requests_than_places(run: Run, tiny: Tiny, tokens: Tokens) -> None:
    running = run(tiny("llama"), parallel=2)
    running.known()
    rids = [running.start(tokens(100, seed), 20) for seed in range(7)]
    assert [running.finish(rid).timings.predicted_n for rid in rids] == [20] * 7
    figures = running.engine.figures()
    assert (figures.running, figures.waiting, figures.cells_used) == (0, 0, 0)
    assert figures.cells >= 2048
    assert figures.counters["decode_tokens"] == 7 * 19  # the first one comes from the prompt


def test_a_full_context_sets_the_youngest_aside_unnoticed(
    run: Run, tiny: Tiny, tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = Logits(monkeypatch)
    running = run(tiny("qwen3"), ctx=1024, pool=1024)
    running.known()
    prompts = [tokens(370, 1), tokens(380, 2)]  # so that it is full after some 130 tokens of each
    alone = [running.ask(prompt, 200, cache=False)[1].rid for prompt in prompts]
    before = running.engine.counters["prefill_tokens"]
    rids = [running.start(prompt, 200) for prompt in prompts]
    ends = [running.finish(rid) for rid in rids]
    assert running.engine.counters["set_aside"] >= 1
    assert [end.timings.predicted_n for end in ends] == [200, 200]
    # It came back by look-up: each time only the one token was computed that always must be.
    assert running.engine.counters["prefill_tokens"] - before == 370 + 380 + running.engine.counters["set_aside"]
    assert [end.timings.cache_n for end in ends] == [0, 0]  # nothing of the prompt was reused at first
    assert not [f for rid in rids for f in running.of(rid, Failure)]
    for rid, other in zip(rids, alone, strict=True):
        assert logits.compare(rid, other) > 10


def test_coming_back_goes_on_where_it_was(
    run: Run, tiny: Tiny, tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Set aside at will, without neighbours: the same calls on the same state, so the same bits."""
    logits = Logits(monkeypatch)
    running = run(tiny("qwen3"))
    running.known()
    first = running.ask(tokens(200, 1), 100, cache=False)[1].rid
    original = Engine._decode
    asked: list[int] = []

    def decode(self: Engine, place: Place) -> None:
        sequence = place.running[0]
        if sequence.generated == 50 and not asked:
            asked.append(len(sequence.tokens))
            self._set_aside(sequence)
            return
        original(self, place)

    monkeypatch.setattr(Engine, "_decode", decode)
    second = running.ask(tokens(200, 1), 100)[1].rid
    assert asked == [250]
    assert running.engine.counters["restore_tokens"] == 249
    assert running.text(first) == running.text(second)
    assert all(np.array_equal(a, b) for a, b in zip(logits.of[first], logits.of[second], strict=True))


def test_a_sampler_keeps_its_state_while_set_aside(run: Run, tiny: Tiny, tokens: Tokens) -> None:
    """Biases and penalties far above any logit: the text depends on what the sampler has seen, and on nothing else."""
    running = run(tiny("qwen3"), ctx=512, pool=512)
    running.known()
    bias = {5000 + i: 10_000.0 - 100 * i for i in range(40)}
    sampling = Sampling(temperature=0, logit_bias=bias, frequency_penalty=37.0, repeat_last_n=400, ignore_eos=True)
    alone = [running.ask(tokens(100, seed), 300, cache=False, sampling=sampling)[0] for seed in (1, 2)]
    rids = [running.start(tokens(100, seed), 300, sampling=sampling) for seed in (1, 2)]
    for rid in rids:
        running.finish(rid)
    assert running.engine.counters["set_aside"] >= 1
    assert [running.text(rid) for rid in rids] == alone


def test_ends_of_different_length_with_saving(
    run: Run, tiny: Tiny, tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One ends, and is exported, in the middle of a step that others take part in."""
    logits = Logits(monkeypatch)
    running = run(tiny("qwen3"), parallel=3)
    running.known()
    lengths = (8, 11, 30)
    alone = [running.ask(tokens(90, n), n, cache=False)[1].rid for n in lengths]
    rids = [running.start(tokens(90, n), n) for n in lengths]
    for rid in rids:
        running.finish(rid)
    compared = [logits.compare(rid, other) for rid, other in zip(rids, alone, strict=True)]
    assert compared[:2] == [8, 11]
    assert compared[2] > 14  # past both ends


@pytest.mark.parametrize("arch", ["gemma3", "granitehybrid", "llama"])
def test_set_aside_without_a_store_computes_again(
    run: Run, tiny: Tiny, tokens: Tokens, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = Logits(monkeypatch)
    running = run(tiny(arch), ctx=512, pool=512, reuse="off")
    alone = [running.ask(tokens(200, seed), 100)[1].rid for seed in (1, 2)]
    rids = [running.start(tokens(200, seed), 100) for seed in (1, 2)]
    assert [running.finish(rid).timings.predicted_n for rid in rids] == [100, 100]
    assert running.engine.counters["set_aside"] >= 1
    assert running.engine.counters["position_errors"] == 0
    for rid, other in zip(rids, alone, strict=True):
        assert logits.compare(rid, other) > 5


def test_cells_that_are_missing_are_noticed(
    run: Run, tiny: Tiny, tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp computes at any position of an empty sequence, without a word."""
    running = run(tiny("llama"), batch=64)
    running.known()
    right = running.ask(tokens(300), 20)[0]
    original = Prefills.account
    lost: list[int] = []

    def account(self: Prefills, sequence: Sequence, end: int, seconds: float) -> None:
        original(self, sequence, end, seconds)
        if end == 192 and not lost:
            lost.append(end)
            running.engine._places.remove(sequence.seq_id)

    monkeypatch.setattr(Prefills, "account", account)
    text, end = running.ask(tokens(300), 20, cache=False)
    assert lost
    assert text == right
    assert running.engine.counters["position_errors"] == 1
    assert end.timings.cache_n == 0


def test_what_never_fits_is_refused_at_once(run: Run, tiny: Tiny, tokens: Tokens) -> None:
    running = run(tiny("llama"), ctx=300)
    rid = running.start(tokens(300))
    with pytest.raises(
        ContextOverflowError, match=r"300 tokens, which exceeds the available context size of 300.*`model\.ctx`"
    ) as caught:
        running.finish(rid)
    assert caught.value.details == {"n_prompt_tokens": 300, "n_ctx": 300}
    assert not running.of(rid, Accepted)
    # one that just fits ends where the context ends
    end = running.ask(tokens(295), -1)[1]
    assert (end.reason, end.timings.predicted_n) == ("length", 5)


def test_megabytes_are_refused_before_they_are_tokenised(
    run: Run, demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = run(demo_model, ctx=300)
    short = "Hello there. " * 400  # not certain by its length: counted
    with pytest.raises(ContextOverflowError, match=r"has \d+ tokens"):
        running.ask(short)
    monkeypatch.delattr(Model, "tokenize")
    for prompt in ("Hello there. " * 100_000, [Message(role="user", content="Hello there. " * 100_000)]):
        begin = time.monotonic()
        with pytest.raises(
            ContextOverflowError, match=r"has at least \d+ tokens, which exceeds the available context size of 300"
        ) as caught:
            running.ask(prompt)
        assert caught.value.details["n_prompt_tokens"] > 300
        assert time.monotonic() - begin < 10


def test_a_full_queue_says_so(run: Run, tiny: Tiny, tokens: Tokens) -> None:
    running = run(tiny("llama"), parallel=1, max_queue=2)
    rids = [running.start(tokens(20), 1800) for _ in range(8)]
    failed = running.wait(lambda: [f for rid in rids for f in running.of(rid, Failure)])
    assert {f.error for f in failed} == {"BusyError"}
    assert "max_queue" in failed[0].message
    assert failed[0].details["retry_after"] >= 1
    assert not running.of(failed[0].rid, Accepted)
    for rid in rids:
        running.worker.intake.cancel(rid)
    running.wait(lambda: all(running.of(rid, (Finished, Failure)) for rid in rids))
    running.ask(tokens(20), 1)  # room again


def test_cancelling_who_waits_who_is_unknown_and_who_is_done(run: Run, tiny: Tiny, tokens: Tokens) -> None:
    running = run(tiny("llama"), parallel=1)
    first = running.start(tokens(20), 1500)
    second = running.start(tokens(20, 1), 5)
    running.wait(lambda: running.of(first, Delta))
    running.worker.intake.cancel(second)
    assert running.finish(second).reason == "cancelled"
    assert not running.of(first, Finished)
    running.worker.intake.cancel("nobody")
    running.worker.intake.cancel(first)
    assert running.finish(first).reason == "cancelled"
    running.worker.intake.cancel(first)
    running.ask(tokens(20), 2)
    assert len(running.of(first, Finished)) == 1


def test_a_character_over_several_tokens_is_never_cut(run: Run, demo_model: Path) -> None:
    running = run(demo_model)
    prompt = "🏠" * 12  # three tokens each, and the model goes on with it
    rid = running.start(prompt, 41)
    running.finish(rid)
    pieces = [delta.text for delta in running.of(rid, Delta)]
    assert "".join(pieces).count("🏠") > 10
    assert "�" not in "".join(pieces[:-1])  # only the very end may be cut, by max_tokens
    whole = running.ask(prompt, 41, stream=False)
    assert whole[1].text == "".join(pieces)
    assert not running.of(whole[1].rid, Delta)


def test_stop_strings_end_the_text_before_them(run: Run, demo_model: Path) -> None:
    running = run(demo_model)
    prompt = "One, two, three, four, five,"
    full = running.ask(prompt, 40)[0]
    stop = full[12:20]
    text, end = running.ask(prompt, 40, stop=["never said", stop])
    assert (end.reason, end.stop) == ("stop", stop)
    assert text == full[: full.index(stop)]
    whole = running.ask(prompt, 40, stop=[stop], stream=False)[1]
    assert whole.text == text


def test_the_end_of_generation(run: Run, demo_model: Path) -> None:
    running = run(demo_model)
    say = [Message(role="user", content="Say: hi")]
    text, end = running.ask(say, 200, sampling=Sampling(temperature=0))
    assert (end.reason, end.stop) == ("stop", None)
    assert "<|im_end|>" not in text
    n = end.timings.predicted_n
    assert n < 200
    longer = running.ask(say, n + 20, sampling=Sampling(temperature=0, ignore_eos=True))[1]
    assert (longer.reason, longer.timings.predicted_n) == ("length", n + 20)
    held = running.ask(say, 200, sampling=Sampling(temperature=0, min_tokens=n + 5))[1]
    assert held.timings.predicted_n > n + 4
    nothing = running.ask(say, 0)
    assert (nothing[0], nothing[1].reason, nothing[1].timings.predicted_n) == ("", "length", 0)


def test_seeds_and_biases(run: Run, tiny: Tiny) -> None:
    running = run(tiny("llama"))
    hot = {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0}

    def say(**changes: Any) -> str:
        return running.ask("My favourite animal is", 12, cache=False, sampling=Sampling(**{**hot, **changes}))[0]

    assert say(seed=7) == say(seed=7)
    assert len({say(seed=seed) for seed in range(4)}) == 4
    assert len({say(seed=-1) for _ in range(4)}) > 1
    assert say(seed=0xFFFFFFFF) == say(seed=0xFFFFFFFF)
    cat = running.worker.engine._model.tokenize(" cat")
    assert len(cat) == 1
    assert say(logit_bias={cat[0]: 1000.0}) == " cat" * 12
    assert say(top_k=1, seed=1) == say(top_k=1, seed=2)
    plain = say(temperature=0, repeat_penalty=1.0)
    assert say(temperature=0, presence_penalty=2.0, frequency_penalty=2.0, repeat_last_n=-1) != plain
    # Those that only llama-server knows: what leaves one candidate is greedy, and what changes chances changes texts.
    usual = say(seed=7)
    assert say(top_n_sigma=1e-6, seed=7) == plain
    assert say(xtc_probability=1.0, xtc_threshold=0.0, seed=7) != usual
    assert say(dynatemp_range=1.4, seed=7) != usual
    assert say(samplers=(), seed=7) != usual
    assert say(samplers=("temperature", "top_k"), top_k=1, seed=7) == plain
    hottest = {"temperature": 100.0, "min_p": 0.99}
    assert say(**hottest, samplers=("min_p", "temperature"), seed=7) == plain  # of the chances as they were
    assert say(**hottest, samplers=("temperature", "min_p"), seed=7) != plain  # when all are about the same
    versions = [say(mirostat=version, mirostat_tau=1.0, seed=7) for version in (1, 2)]
    assert usual not in versions
    assert versions == [say(mirostat=version, mirostat_tau=1.0, seed=7) for version in (1, 2)]


def test_dry_ends_repetitions_and_sequence_breakers_keep_them(run: Run, tiny: Tiny) -> None:
    """With a bias far above any logit only a repetition that DRY ends is not told."""
    running = run(tiny("llama"))
    cat, dog = (running.worker.engine._model.tokenize(text)[0] for text in (" cat", " dog"))

    def say(**changes: Any) -> str:
        bias = {cat: 1000.0, dog: 500.0}
        sampling = Sampling(temperature=0, ignore_eos=True, logit_bias=bias, **changes)
        return running.ask("A", 8, cache=False, sampling=sampling)[0]

    assert say() == " cat" * 8
    dry = {"dry_multiplier": 100.0, "dry_base": 4.0}
    assert say(**dry).startswith(" cat" * 3)
    assert " dog" in say(**dry)
    assert say(**dry, dry_sequence_breakers=(" cat",)) == " cat" * 8
    assert say(**dry, dry_penalty_last_n=0) == " cat" * 8
    assert say(**dry, dry_allowed_length=20) == " cat" * 8
    assert say(**dry, samplers=("top_k",)) == " cat" * 8
    assert say(**dry, dry_penalty_last_n=-1) == say(**dry)


def test_slow_samplers_do_not_stall_others(run: Run, demo_model: Path) -> None:
    """Many texts that end a repetition: llama.cpp looks at all tokens for each."""
    running = run(demo_model)
    stream = running.start("Once upon a time", 60)
    running.wait(lambda: running.of(stream, Delta))
    breakers = tuple(f"{letter}hello there my friend what" for letter in "abcdef")
    other = running.start("x", 2, sampling=Sampling(dry_multiplier=1.0, dry_sequence_breakers=breakers))
    asked = time.perf_counter()
    third = running.start("Two and two", 2)
    running.finish(third)
    running.finish(other)
    ready = next(at for at, f in running.frames if isinstance(f, Accepted) and f.rid == other)
    assert next(at for at, f in running.frames if isinstance(f, Accepted) and f.rid == third) < ready
    meanwhile = [at for at, f in running.frames if isinstance(f, Delta) and f.rid == stream and asked < at < ready]
    running.finish(stream)
    assert len(meanwhile) > 3


def test_bad_requests_are_refused_in_words(run: Run, tiny: Tiny, demo_model: Path) -> None:
    running = run(tiny("llama"))
    for prompt, changes, match in (
        ([], {}, "empty"),
        ("", {}, "empty"),
        ([1, 10**6], {}, "token ids outside"),
        (None, {}, "Exactly one"),
        ("x", {"sampling": Sampling(logit_bias={10**6: 1.0})}, "logit_bias"),
        ([Message(role="user", content="x")], {"template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ):
        with pytest.raises(RequestError, match=match):
            running.finish(running.start(prompt, **changes))
    assert running.engine.figures().running == 0


def test_an_unexpected_exception_ends_one_request_only(
    run: Run, tiny: Tiny, tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = run(tiny("llama"))
    healthy = running.start(tokens(30, 1), 1000)
    running.wait(lambda: running.of(healthy, Delta))
    original = Engine._next_token
    victims: list[str] = []

    def next_token(self: Engine, sequence: Sequence, context: Context, index: int) -> str:
        if sequence.request.rid in victims and sequence.generated == 5:
            raise KeyError("boom")
        return original(self, sequence, context, index)

    monkeypatch.setattr(Engine, "_next_token", next_token)
    victims.append(f"r{running._count + 1}")
    victim = running.start(tokens(30, 2), 100)
    with pytest.raises(HomeprefixdError, match=r"failed on this request \(KeyError\)"):
        running.finish(victim)
    seen = len(running.of(healthy, Delta))
    running.wait(lambda: len(running.of(healthy, Delta)) > seen + 5 or running.of(healthy, Finished))
    running.worker.intake.cancel(healthy)
    running.finish(healthy)
    assert running.engine.figures().cells_used == 0


def test_a_decode_that_fails_is_told_and_cleared(
    run: Run, tiny: Tiny, tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = run(tiny("llama"))
    running.known()
    original = Context.decode
    broken = [0]

    def decode(self: Context, batch: Any) -> bool:
        if broken[0]:
            broken[0] -= 1
            raise DecodeError(-3, "compute failed")
        return original(self, batch)

    monkeypatch.setattr(Context, "decode", decode)
    for phase in ("prefill", "decode"):
        rid = running.start(tokens(100, 3), 900)
        if phase == "decode":
            running.wait(lambda rid=rid: running.of(rid, Delta))
        broken[0] = 1
        with pytest.raises(HomeprefixdError, match=r"llama_decode: -3 \(compute failed\)"):
            running.finish(rid)
        assert running.engine.figures().running == 0
    assert running.ask(tokens(100, 3), 5)[1].timings.predicted_n == 5


def test_stop_lets_running_requests_finish(run: Run, tiny: Tiny, tokens: Tokens) -> None:
    running = run(tiny("llama"))
    rid = running.start(tokens(50), 200)
    running.wait(lambda: running.of(rid, Delta))
    running.engine.stop(30)
    late = running.start(tokens(50), 2)
    with pytest.raises(UnavailableError, match="stopping"):
        running.finish(late)
    assert running.finish(rid).timings.predicted_n == 200
    running._thread.join(10)
    assert not running._thread.is_alive()


def test_stop_ends_what_outlives_the_grace_and_keeps_its_blocks(run: Run, demo_model: Path, tokens: Tokens) -> None:
    running = run(demo_model)
    running.known()
    rid = running.start(tokens(50), 1900)
    running.wait(lambda: running.of(rid, Delta))
    running.engine.stop(0.5)
    with pytest.raises(UnavailableError, match="stopped before the reply was complete"):
        running.finish(rid, 10)
    kept = sum(len(node.tokens) // 4 for node in running.store.nodes.values())
    assert kept == 50 + running.engine.counters["decode_tokens"]  # to the last token, wherever the grid lies
    running._thread.join(10)
    assert not running._thread.is_alive()


def test_figures_show_a_long_step(run: Run, demo_model: Path, tokens: Tokens) -> None:
    running = run(demo_model)
    rid = running.start(tokens(300), 1)
    running.wait(lambda: running.of(rid, Accepted))
    deadline = time.monotonic() + 20
    while running.engine.figures().step_age < 0.05:
        assert time.monotonic() < deadline
        assert not running.of(rid, Finished)
    running.finish(rid)
    assert running.engine.figures().step_age == 0
