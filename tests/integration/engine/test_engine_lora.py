"""LoRA adapters in the engine: each request computes with its own, and reuses only what was computed with the same.

Logits are compared, not text; each comparison is seen to tell adapters apart.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from homeprefixd import lora
from homeprefixd.engine import namespaces
from homeprefixd.errors import RequestError, UnavailableError
from homeprefixd.frames.worker import AdapterFile, Finished, LoraChoice
from tests.integration.engine.memory_store import MemoryStore
from tests.integration.engine.running import Logits, Running
from tests.tiny_lora import make_lora

Run = Callable[..., Running]
A, B = [LoraChoice("a")], [LoraChoice("b")]
PROMPT = [3 + (i * 37 + i * i * 5) % 250 for i in range(193)]  # three blocks, and the token that is always computed


@pytest.fixture
def files(small: Callable[[str], Path], tmp_path: Path) -> Callable[[str], list[AdapterFile]]:
    """Two adapters of a tiny model."""

    def get(arch: str) -> list[AdapterFile]:
        made = [make_lora(small(arch), tmp_path / f"{arch}-{name}.gguf", seed=ord(name)) for name in "ab"]
        return [AdapterFile(name, str(path), 1.0) for name, path in zip("ab", made, strict=True)]

    return get


def apart(one: np.ndarray, other: np.ndarray) -> float:
    """How far logits are from others, as a share of the largest."""
    return float(np.abs(one - other).max() / np.abs(one).max())


def first(logits: Logits, running: Running, prompt: Any = PROMPT, **changes: Any) -> tuple[np.ndarray, Finished]:
    """Logits of the first token of a request."""
    rid = running.start(prompt, 2, **changes)
    end = running.finish(rid)
    return logits.of.pop(rid)[0], end


def test_reuse_with_an_adapter_is_bit_identical_and_of_the_same_adapter_only(
    run: Run, small: Any, files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Likewise of models with edges: `test_engine_edges.py`."""
    logits = Logits(monkeypatch)
    adapters = files("llama")
    running = run(small("llama"), reuse="exact", adapters=adapters, parallel=1, ctx=512)
    running.known()
    wanted: list[Any] = [A, B, None]
    cold = [first(logits, running, lora=choice) for choice in wanted]
    assert [end.timings.cache_n for _, end in cold] == [0, 0, 0]
    for one in range(3):
        for other in range(one):
            assert apart(cold[one][0], cold[other][0]) > 0.05, "adapters that change nothing test nothing"
    plain = run(small("llama"), reuse="exact", parallel=1, ctx=512)
    assert np.array_equal(first(logits, plain)[0], cold[2][0])
    for choice, (expected, _) in zip(wanted, cold, strict=True):
        found, end = first(logits, running, lora=choice)
        assert end.timings.cache_n == 192
        assert np.array_equal(found, expected)
    again = run(
        small("llama"), running.store, reuse="exact", adapters=adapters, parallel=1, ctx=512
    )  # as after a restart
    again.known()
    for choice, (expected, _) in zip(wanted, cold, strict=True):
        found, end = first(logits, again, lora=choice)
        assert end.timings.cache_n == 192
        assert np.array_equal(found, expected)


def test_state_of_another_adapter_would_be_seen(
    run: Run, small: Any, files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: with one namespace for all adapters, the comparison above fails."""
    logits = Logits(monkeypatch)
    running = run(small("llama"), reuse="exact", adapters=files("llama"), parallel=1, ctx=512)
    running.known()
    expected, _ = first(logits, running, lora=B, cache=False)
    monkeypatch.setattr(namespaces, "described", lambda adapters, chosen: lora.described(adapters, ()))
    first(logits, running, lora=A)
    found, end = first(logits, running, lora=B)
    assert end.timings.cache_n == 192
    assert apart(expected, found) > 0.01


@pytest.mark.parametrize("pool", [512, 3 * 512])
def test_requests_with_different_adapters_run_together(
    run: Run, small: Any, files: Any, monkeypatch: pytest.MonkeyPatch, pool: int
) -> None:
    """In one context, and in several. Alone or not, each gets the answer of its own adapter."""
    logits = Logits(monkeypatch)
    running = run(small("llama"), adapters=files("llama"), parallel=6, ctx=300, pool=pool)
    running.known()
    choices: list[Any] = [A, B, None, [LoraChoice("a", 0.5), LoraChoice("b", -0.5)]]
    prompts = [PROMPT[:64] + [5 + n] * 3 for n in range(4)]
    alone = [running.start(prompt, 12, lora=choice) for prompt, choice in zip(prompts, choices, strict=True)]
    for rid in alone:
        running.finish(rid)
    together = [
        running.start(prompt, 12, lora=choice, cache=cache)
        for prompt, choice in zip(prompts, choices, strict=True)
        for cache in (True, False)
    ]
    for rid in together:
        running.finish(rid)
    for index, rid in enumerate(together):
        assert logits.compare(rid, alone[index // 2]) > 0
    for one in range(4):
        for other in range(one):
            assert apart(logits.of[alone[one]][0], logits.of[alone[other]][0]) > 0.05
    assert running.engine.counters["errors"] == 0


def test_cells_are_shared_with_the_same_adapter_only(run: Run, small: Any, files: Any) -> None:
    running = run(small("llama"), adapters=files("llama"), parallel=4, ctx=512, pool=2048)
    running.known()
    running.ask(PROMPT, 1, lora=A)
    long = running.start(PROMPT, 200, lora=A)
    running.wait(lambda: len(running.of(long)) > 4)
    same, other, none = (running.start([*PROMPT, 9], 2, lora=choice) for choice in (A, B, None))
    tiers = [running.finish(rid).timings.cache_tiers for rid in (same, other, none)]
    running.finish(long)
    assert tiers[0].get("shared", 0) >= 192
    assert tiers[1:] == [{}, {}]


def test_an_adapter_that_was_trained_again_has_another_namespace(run: Run, small: Any, files: Any) -> None:
    store = MemoryStore()
    adapters = files("llama")
    running = run(small("llama"), store, adapters=adapters, ctx=512)
    running.known()
    running.ask(PROMPT, 1, lora=A)
    assert running.ask(PROMPT, 1, lora=A)[1].timings.cache_n == 192
    make_lora(small("llama"), Path(adapters[0].path), seed=77)
    trained = run(small("llama"), store, adapters=adapters, ctx=512)
    trained.known()
    assert trained.ask(PROMPT, 1, lora=A)[1].timings.cache_n == 0
    assert trained.ask(PROMPT, 1, lora=A)[1].timings.cache_n == 192
    assert running.ask(PROMPT, 1, lora=A)[1].timings.cache_n == 192  # which has the old one in memory


def test_what_was_replaced_after_loading_is_not_cached(
    run: Run, small: Any, files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its hash would be that of another content."""
    adapters = files("llama")
    learn = namespaces.Namespaces._learn

    def replaced(self: namespaces.Namespaces) -> None:
        make_lora(small("llama"), Path(adapters[0].path), seed=78)
        learn(self)

    monkeypatch.setattr(namespaces.Namespaces, "_learn", replaced)
    running = run(small("llama"), adapters=adapters, ctx=512)
    running.known()
    assert [running.ask(PROMPT, 1, lora=A)[1].timings.cache_n for _ in range(2)] == [0, 0]
    assert [running.ask(PROMPT, 1, lora=B)[1].timings.cache_n for _ in range(2)] == [0, 192]


def test_scales(run: Run, small: Any, files: Any) -> None:
    adapters = [*files("llama")]
    adapters[1] = AdapterFile("b", adapters[1].path, 0.5, default=True)
    running = run(small("llama"), adapters=adapters, ctx=512)
    running.known()
    assert [one["scale"] for one in running.worker.namespaces.description["adapters"]] == [0.5]  # type: ignore[union-attr]
    running.ask(PROMPT, 1)
    for choice, reused in (
        (B, 192),  # the default, at its own scale
        ([LoraChoice(1)], 192),  # by its place
        ([LoraChoice("b", 1.0)], 0),
        ([], 0),
        ([LoraChoice("b", 0.0)], 192),  # which is none, as before
        ([LoraChoice("a", 0.0), LoraChoice("b", 0.5)], 192),
    ):
        assert running.ask(PROMPT, 1, lora=choice)[1].timings.cache_n == reused, choice


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ([LoraChoice("c")], ["no adapter 'c'", "a (or 0), b (or 1)"]),
        ([LoraChoice(2)], ["no adapter '2'", "a (or 0)"]),
        ([LoraChoice("a", 1e9)], ["scale of a", "-100 to 100"]),
        ([LoraChoice("a"), LoraChoice(0)], ["a twice"]),
    ],
)
def test_what_is_not_there_is_refused(run: Run, small: Any, files: Any, choice: Any, words: list[str]) -> None:
    running = run(small("llama"), adapters=files("llama"), ctx=512)
    with pytest.raises(RequestError) as error:
        running.ask(PROMPT, 1, lora=choice)
    assert all(word in error.value.message for word in words), error.value.message
    assert error.value.param == "lora"


def test_a_damaged_adapter_harms_only_who_asks_for_it(run: Run, small: Any, files: Any, tmp_path: Path) -> None:
    good, other = files("llama")
    whole = Path(good.path).read_bytes()
    bad = {
        "cut": whole[:-100],
        "short": whole[:3],
        "text": b"no adapter",
        "arch": Path(files("qwen3")[0].path).read_bytes(),
    }
    listed = [other]
    for name, data in bad.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(data)
        listed.append(AdapterFile(name, str(path), 1.0))
    listed.append(AdapterFile("gone", str(tmp_path / "gone.gguf"), 1.0))
    running = run(small("llama"), adapters=listed, ctx=512)
    running.known()
    for name in (*bad, "gone"):
        with pytest.raises(UnavailableError, match=f"adapter {name} cannot be used: .*{name}.gguf"):
            running.ask(PROMPT, 1, lora=[LoraChoice(name)])
    assert [running.ask(PROMPT, 1, lora=B)[1].timings.cache_n for _ in range(2)] == [0, 192]
    assert running.ask(PROMPT, 1)[1].timings.cache_n == 0
