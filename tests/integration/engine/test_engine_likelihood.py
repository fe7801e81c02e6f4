"""Log-probabilities of a prompt's own tokens, against those that llama.cpp gives for one token after the other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from homeprefixd.engine.context import Batch
from homeprefixd.engine.likelihood import PromptLogprobs, token_logprob
from homeprefixd.engine.scheduler import Engine
from homeprefixd.errors import RequestError
from homeprefixd.frames.worker import Delta, Finished, Progress, TokenLogprob
from tests.integration.engine.running import Running

Run = Callable[..., Running]
Tiny = Callable[[str], Path]
Tokens = Callable[..., list[int]]


def told(running: Running, rid: str) -> list[TokenLogprob]:
    found = [token for delta in running.of(rid, Delta) for token in delta.prompt_logprobs]
    return found or running.finish(rid).prompt_logprobs


def one_by_one(running: Running, prompt: list[int], top: int) -> list[TokenLogprob]:
    """Each token in a call of its own, in a context that nobody uses now."""
    context, batch = running.engine._places.all[0].context, Batch(8)
    model, found = context.model, []
    for at, (token, following) in enumerate(itertools.pairwise(prompt)):
        batch.set_steps([token], [at], [0])
        assert context.decode(batch)
        found.append(token_logprob(context.logits(0), following, top, lambda id_: model.piece(id_, special=True)))
    context.clear()
    return found


@pytest.mark.parametrize("arch", ["llama", "gemma3", "mamba2"])
def test_every_token_of_the_prompt_is_told(run: Run, tiny: Tiny, tokens: Tokens, arch: str) -> None:
    running = run(tiny(arch))
    prompt = tokens(150)
    rid = running.start(prompt, 0, prompt_logprobs=3)
    assert running.finish(rid).reason == "length"
    found = told(running, rid)
    assert [token.token for token in found] == prompt
    assert math.isnan(found[0].logprob)
    assert found[0].top == []
    expected = one_by_one(running, prompt, 3)
    for token, other in zip(found[1:], expected, strict=True):
        assert token.logprob == pytest.approx(other.logprob, abs=0.05)
        assert [one.logprob for one in token.top] == pytest.approx([one.logprob for one in other.top], abs=0.05)
        assert token.top == sorted(token.top, key=lambda one: -one.logprob)


def test_a_known_prompt_is_computed_all_the_same_and_the_next_one_is_not(run: Run, tiny: Tiny, tokens: Tokens) -> None:
    running = run(tiny("llama"))
    running.known()
    prompt = tokens(200)
    first = running.start(prompt, 4, prompt_logprobs=0)
    assert running.finish(first).timings.cache_n == 0
    second = running.start(prompt, 4, prompt_logprobs=0, stream=False)
    end = running.finish(second)
    assert (end.timings.cache_n, end.timings.prompt_n) == (0, 200)
    assert end.gate is not None
    assert end.gate.reason == "prompt_logprobs"
    assert [token.logprob for token in end.prompt_logprobs[1:]] == [token.logprob for token in told(running, first)[1:]]
    assert running.finish(running.start(prompt, 4)).timings.cache_n >= 192  # what was computed for it is kept


def test_streams_go_on_while_a_long_prompt_is_told(run: Run, demo_model: Path, tokens: Tokens) -> None:
    running = run(demo_model, max_stall=0.5)
    rid = running.start("Once upon a time", 400)
    running.wait(lambda: len(running.of(rid, Delta)) > 3)
    long = running.start(tokens(500), 0, prompt_logprobs=1)
    running.finish(long)
    running.worker.intake.cancel(rid)
    running.finish(rid)
    begin = next(at for at, f in running.frames if isinstance(f, Progress) and f.rid == long)
    end = next(at for at, f in running.frames if isinstance(f, Finished) and f.rid == long)
    during = [at for at, f in running.frames if isinstance(f, Delta) and f.rid == rid and begin < at < end]
    calls = len(running.of(long, Progress))
    assert calls >= 500 // 64
    assert len(during) >= calls - 3
    assert len(told(running, long)) == 500


def test_one_that_is_set_aside_meanwhile_tells_each_token_once(
    run: Run, tiny: Tiny, tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = run(tiny("llama"))
    running.known()
    whole = running.start(tokens(200), 0, prompt_logprobs=0, cache=False)
    running.finish(whole)
    original, asked = Engine._prefill, []

    def prefill(self: Engine) -> bool:
        sequence = next(iter(self._residents), None)
        if sequence is not None and sequence.n_past == 128 and not asked:
            asked.append(sequence)
            self._set_aside(sequence)
            return True
        return original(self)

    monkeypatch.setattr(Engine, "_prefill", prefill)
    other = running.start(tokens(200), 0, prompt_logprobs=0)
    assert running.finish(other).timings.cache_n == 0
    assert asked
    assert [token.logprob for token in told(running, other)[1:]] == [
        token.logprob for token in told(running, whole)[1:]
    ]


def test_too_many_are_refused_before_they_are_computed(run: Run, tiny: Tiny, tokens: Tokens) -> None:
    running = run(tiny("llama"))
    with pytest.raises(RequestError, match=r"`logprobs` 4 would tell 500 log-probabilities .* where 499 may be told"):
        running.finish(running.start(tokens(100), 0, prompt_logprobs=4, most_prompt_logprobs=499))
    assert running.finish(running.start(tokens(100), 0, prompt_logprobs=4, most_prompt_logprobs=500))


def test_rows_that_are_known_are_passed_over() -> None:
    rows = np.array([[0.0, 1.0, 2.0], [2.0, 1.0, 0.0], [5.0, 0.0, 5.0]], np.float32)
    found = PromptLogprobs([0, 2, 1], 1, lambda token: b"%d" % token)
    found.take(0, rows[:1])
    found.take(0, rows)
    assert found.complete
    total = math.log(1 + math.e + math.e**2)
    assert [token.logprob for token in found.told[1:]] == pytest.approx([2 - total, 1 - total])
    assert [token.top[0].token for token in found.told[1:]] == [2, 0]
