"""Prefixes that are computed once: the same answers with the cache off, cold, hot, cut, and with a broken store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from homeprefixd.engine.fingerprint import library_hashes
from homeprefixd.engine.slices import Slicer
from homeprefixd.frames.worker import Accepted, Finished, Message, NamespaceKnown, Progress
from tests.integration.engine.memory_store import MemoryStore
from tests.integration.engine.running import GREEDY, Running

Run = Callable[..., Running]
Tokens = Callable[..., list[int]]

POLICY = "The house has three floors. " + " ".join(
    f"Lamp {i} in room {i * 7 % 13} may be switched {'on' if i % 3 else 'off'} after {i % 12} o'clock."
    for i in range(12)
)


def chat(*texts: str) -> list[Message]:
    roles = ["system", *["user", "assistant"] * 5]
    return [Message(role=role, content=text) for role, text in zip(roles, texts, strict=False)]


def test_greedy_answers_do_not_depend_on_the_cache(run: Run, demo_model: Path) -> None:
    first, second = chat(POLICY, "Which lamps are on?"), chat(POLICY, "Name the capital of France.")
    running = run(demo_model)
    off = [running.ask(prompt, 24, cache=False) for prompt in (first, second)]
    assert not running.store.nodes
    running.known()
    cold, hot = running.ask(first, 24), running.ask(first, 24)
    cut = running.ask(second, 24)
    assert [cold[0], cut[0]] == [off[0][0], off[1][0]]
    assert hot[0] == cold[0]
    n = cold[1].timings.total_prompt_n
    assert cold[1].timings.cache_n == 0
    assert hot[1].timings.cache_n == n - 1  # all but the one that must be computed
    assert hot[1].timings.prompt_n == 1
    assert hot[1].timings.cache_tiers == {"hot": n - 1}
    timings = cut[1].timings
    assert 0 < timings.cache_n < timings.total_prompt_n - 1
    assert timings.cache_n % 64  # to the token, not to the block
    assert timings.cache_n + timings.prompt_n == timings.total_prompt_n
    assert running.store.orphans == 0
    assert running.engine.counters["restore_errors"] == 0
    assert timings.prompt_n < n / 3


def test_exact_reuse_gives_the_same_bits(
    run: Run, demo_model: Path, tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOMEPREFIXD_DEBUG_LOGITS", "1")
    prompt = tokens(202)
    running = run(demo_model, reuse="exact")
    running.known()
    off = running.ask(prompt, 2, cache=False)[1].timings
    cold = running.ask(prompt, 70)[1].timings
    hot = running.ask(prompt, 2)[1].timings
    assert cold.cache_n == 0
    assert hot.cache_n == 192  # neither the remainder nor what was generated: not on the grid
    assert off.logits_sha256 == cold.logits_sha256 == hot.logits_sha256 != ""
    # Another course through the calls: blocks of 64 alone, then more of the same prompt.
    other = run(demo_model, running.store, reuse="exact", batch=64)
    other.known()
    again = other.ask(prompt + tokens(100, 1), 1)[1].timings
    assert again.cache_n == 192
    running.store.forget()
    assert other.ask(prompt + tokens(100, 1), 1)[1].timings.logits_sha256 == again.logits_sha256


@pytest.mark.parametrize("flash", [False, True])
def test_long_prefixes_come_back_in_runs(
    run: Run, tiny: Callable[[str], Path], tokens: Tokens, monkeypatch: pytest.MonkeyPatch, flash: bool
) -> None:
    monkeypatch.setenv("HOMEPREFIXD_DEBUG_LOGITS", "1")
    lengths: list[int] = []
    original = Slicer.import_block

    def import_block(self: Slicer, seq: int, start: int, count: int, use: int, view: memoryview) -> None:
        lengths.append(count)
        original(self, seq, start, count, use, view)

    monkeypatch.setattr(Slicer, "import_block", import_block)
    prompt = tokens(64 * 23 + 10)
    running = run(tiny("llama"), reuse="exact", flash_attention=flash)
    running.known()
    cold = running.ask(prompt, 2)[1].timings
    lengths.clear()
    hot = running.ask(prompt, 2)[1].timings
    assert (hot.cache_n, hot.prompt_n) == (64 * 23, 10)
    assert lengths == ([64] * 23 if flash else [1024, 448])
    assert hot.logits_sha256 == cold.logits_sha256
    running.store.change = lambda index, payload: running.store.payloads[prompt_key] if index == 9 else payload
    prompt_key = next(iter(running.store.payloads))  # a block of other positions, of the right size
    wrong = running.ask(prompt, 2)[1].timings
    assert (wrong.cache_n, wrong.prompt_n) == (0, len(prompt))
    assert wrong.logits_sha256 == cold.logits_sha256
    assert running.engine.counters["restore_errors"] == 1


def test_blocks_are_saved_one_by_one_where_no_run_finds_room(
    run: Run, tiny: Callable[[str], Path], tokens: Tokens
) -> None:
    running = run(tiny("llama"))
    running.known()
    running.store.scattered = True
    prompt = tokens(64 * 20 + 10)
    running.ask(prompt, 1)
    assert len(running.store.runs) == 0
    assert running.ask(prompt, 1)[1].timings.cache_n == len(prompt) - 1
    assert not running.engine.counters["save_skipped"]


def test_an_idle_engine_computes_the_same_bits_whatever_ran_before(
    run: Run, demo_model: Path, tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cells of the next request begin at the first one again, not where those of an odd crowd ended."""
    monkeypatch.setenv("HOMEPREFIXD_DEBUG_LOGITS", "1")
    running = run(demo_model, parallel=3)
    fresh = running.ask(tokens(150), 1, cache=False)[1].timings.logits_sha256
    for first, second in ((5, 40), (40, 5)):
        rids = [running.start(tokens(37, 1), first), running.start(tokens(53, 2), second)]
        for rid in rids:
            running.finish(rid)
        assert running.ask(tokens(150), 1, cache=False)[1].timings.logits_sha256 == fresh


def test_grid_is_claimed_only_for_what_was_computed_alone_on_the_grid(
    run: Run, tiny: Callable[[str], Path], tokens: Tokens
) -> None:
    running = run(tiny("qwen3"))
    running.known()
    running.ask(tokens(200), 100)
    nodes = sorted(running.store.nodes.values(), key=lambda node: node.start)
    assert [(n.start, len(n.tokens) // 4, n.grid, n.kind) for n in nodes] == [
        (0, 64, True, "prompt"),
        (64, 64, True, "prompt"),
        (128, 64, True, "prompt"),
        (192, 64, False, "reply"),
        (256, 43, False, "reply"),  # the last token was sampled, never evaluated
    ]
    assert all(node.cost > 0 and node.preview for node in nodes)
    # Beside another stream: right, but not the same bits.
    running.store.forget()
    long = running.start(tokens(100, 1), 600)
    running.wait(lambda: running.of(long, Progress))
    running.ask(tokens(200, 2), 1)
    running.engine.cancel(long)
    running.finish(long)
    beside = [n for n in running.store.nodes.values() if n.tokens[:4] == (tokens(200, 2)[0]).to_bytes(4, "little")]
    assert beside
    assert not any(node.grid for node in beside)


def test_the_next_turn_starts_after_the_reply(run: Run, demo_model: Path) -> None:
    running = run(demo_model)
    running.known()
    turn = chat(POLICY[:400], "Tell me about lamps.")
    reply, end = running.ask(turn, 40, sampling=GREEDY)
    turn += [Message(role="assistant", content=reply), Message(role="user", content="Go on.")]
    timings = running.ask(turn, 1)[1].timings
    assert timings.cache_n >= end.timings.total_prompt_n + 35
    assert timings.prompt_n < 20


def test_what_was_generated_is_saved_as_it_becomes_whole(run: Run, tiny: Callable[[str], Path], tokens: Tokens) -> None:
    running = run(tiny("llama"))
    running.known()
    rid = running.start(tokens(10), 1500)
    running.wait(lambda: any(node.kind == "reply" for node in list(running.store.nodes.values())))
    assert not running.of(rid, Finished)
    running.worker.intake.cancel(rid)
    assert running.finish(rid).reason == "cancelled"


def test_what_is_too_short_to_be_reused_is_not_kept(run: Run, tiny: Callable[[str], Path], tokens: Tokens) -> None:
    running = run(tiny("llama"))
    running.known()
    running.ask(tokens(8), 4)
    assert not running.store.nodes
    running.ask(tokens(8), 12)
    assert [len(node.tokens) // 4 for node in running.store.nodes.values()] == [19]


def test_blocks_say_which_key_they_were_computed_for(run: Run, tiny: Callable[[str], Path], tokens: Tokens) -> None:
    running = run(tiny("llama"))
    running.known()
    running.ask(tokens(130, seed=1), 1, client="key the guest")
    assert set(running.store.owners.values()) == {"the guest"}
    running.ask(tokens(130, seed=2), 1, client="10.0.0.1 curl/8")
    assert set(running.store.owners.values()) == {"the guest", ""}


def test_a_request_says_what_was_restored_and_why(run: Run, demo_model: Path, tokens: Tokens) -> None:
    running = run(demo_model, batch=64)
    running.gate(True)
    running.known()
    prompt = tokens(300)
    nothing = running.ask(prompt, 1, cache=False)[1].gate
    cold = running.ask(prompt, 1)[1].gate
    assert nothing is None
    assert cold is not None
    assert (cold.known, cold.restored, cold.reason) == (0, 0, "unknown")
    for turn in range(1, 4):  # until enough is measured
        running.ask(prompt, 1)
        running.ask([*prompt[:100], *tokens(100, seed=turn)], 1)
    hot = running.ask(prompt, 1)[1].gate
    assert hot is not None
    assert (hot.known, hot.restored, hot.reason, hot.tiers) == (299, 299, "faster", {"hot": 299})
    assert hot.load_s is not None
    assert hot.compute_s is not None
    assert hot.load_s < hot.compute_s / 5
    assert 20 < hot.prefill_rate < 20_000
    running.store.silent = True
    late = running.ask(prompt, 1)[1].gate
    assert late is not None
    assert late.reason == "late"


def test_a_cancelled_prefill_keeps_its_blocks(run: Run, demo_model: Path, tokens: Tokens) -> None:
    running = run(demo_model, batch=64)
    running.known()
    prompt = tokens(1200)
    rid = running.start(prompt, 5)
    running.wait(lambda: len(running.of(rid, Progress)) >= 3)
    running.worker.intake.cancel(rid)
    end = running.finish(rid)
    assert end.reason == "cancelled"
    done = running.of(rid, Progress)[-1].done
    assert 192 <= done < 1200  # all of it takes seconds
    assert running.ask(prompt[: done + 30], 1)[1].timings.cache_n == done
    assert running.engine.figures().cells_used == 0


def test_requests_have_their_own_salt(run: Run, tiny: Callable[[str], Path], tokens: Tokens) -> None:
    running = run(tiny("llama"))
    running.known()
    prompt = tokens(150)
    running.ask(prompt, 1)
    assert running.ask(prompt, 1, salt="anna")[1].timings.cache_n == 0
    assert running.ask(prompt, 1, salt="anna")[1].timings.cache_n == 149
    assert running.ask(prompt, 1, salt="ben")[1].timings.cache_n == 0
    assert running.ask(prompt, 1)[1].timings.cache_n == 149


def test_the_namespace_holds_what_changes_state_and_nothing_else(
    run: Run, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    store = MemoryStore()
    path = tiny("llama")
    copy = tmp_path / "other-name.gguf"
    copy.write_bytes(path.read_bytes())
    for place, changes in (
        (path, {}),
        (copy, {"alias": "x", "ctx": 512, "batch": 128, "threads": 1, "parallel": 1, "chat_template": "{{ 1 }}"}),
    ):
        run(place, store, **changes).known()
    assert len(store.namespaces) == 1
    (description,) = store.namespaces.values()
    assert description["libraries"] == library_hashes()
    assert "libllama.so" in description["libraries"]
    for changes in ({"kv_type": "q8_0", "flash_attention": True}, {"salt": "s"}, {"flash_attention": True}):
        before = len(store.namespaces)
        run(path, store, **changes).known()
        assert len(store.namespaces) == before + 1
    assert len(store.hashes) == 2  # by file, remembered


def test_it_serves_before_its_hash_is_known(run: Run, tiny: Callable[[str], Path], tokens: Tokens) -> None:
    store = MemoryStore()
    store.connected = False
    running = run(tiny("llama"), store)
    text, end = running.ask(tokens(200), 5)
    assert end.timings.cache_n == 0
    assert not store.nodes
    running.wait(lambda: [f for _, f in running.frames if isinstance(f, NamespaceKnown)])
    store.connected = True
    assert running.ask(tokens(200), 5)[0] == text
    assert running.ask(tokens(200), 5)[1].timings.cache_n == 199


@pytest.mark.parametrize("fault", ["silent", "full", "lost", "late", "rubbish", "swapped", "cut short", "away"])
def test_a_broken_store_is_a_slow_one(run: Run, tiny: Callable[[str], Path], tokens: Tokens, fault: str) -> None:
    running = run(tiny("qwen3"))
    running.known()
    store, prompt = running.store, tokens(300)
    right = running.ask(prompt, 20)[0]
    used = 0
    if fault == "silent":
        store.silent = True
    elif fault == "full":
        store.forget()
        store.full = True
    elif fault == "lost":
        store.lost_from, used = 2, 128
    elif fault == "late":
        store.ready_up_to, used = 3, 192
    elif fault == "rubbish":
        store.change = lambda index, view: view if index < 2 else memoryview(bytes(len(view)))
    elif fault == "swapped":
        first = next(store.payloads[key] for key, node in store.nodes.items() if node.start == 0)
        store.change = lambda index, view: first
    elif fault == "cut short":
        store.change = lambda index, view: view if index < 2 else view[:-100]
    else:
        store.connected = False
    text, end = running.ask(prompt, 20)
    assert text == right
    assert end.timings.cache_n == used
    assert sum(end.timings.cache_tiers.values()) == used
    assert end.timings.prompt_n == 300 - used
    if fault in ("lost", "late", "rubbish", "cut short"):
        assert end.gate is not None
        assert (end.gate.known, end.gate.restored, end.gate.reason) == (299, used, "lost")
    assert (running.engine.counters["restore_errors"] > 0) is (fault in ("rubbish", "swapped", "cut short"))


def test_saving_goes_on_when_there_is_room_again(
    run: Run, tiny: Callable[[str], Path], tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("homeprefixd.engine.saving.PAUSE", 0.01)
    running = run(tiny("llama"), batch=64)
    running.known()
    running.store.full = True
    rid = running.start(tokens(600), 600)
    running.wait(lambda: running.of(rid, Progress)[-1:] and running.of(rid, Progress)[-1].done > 300, 120)
    running.store.full = False
    running.finish(rid, 280)
    assert running.ask(tokens(600), 1)[1].timings.cache_n == 599
    assert running.store.orphans == 0


def test_two_with_one_cold_prefix_compute_it_once(run: Run, demo_model: Path, tokens: Tokens) -> None:
    running = run(demo_model, batch=64)
    running.known()
    prompt = tokens(400)
    first = running.start([*prompt, 1, 2], 4)
    running.wait(lambda: running.of(first, Progress))
    second, other = running.start([*prompt, 3, 4], 4), running.start(tokens(80, 5), 4)
    assert running.finish(second).timings.cache_n >= 384
    assert running.finish(first).timings.cache_n == 0
    assert running.finish(other).timings.cache_n == 0
    assert running.engine.counters["prefill_tokens"] < 600


def test_reuse_off(run: Run, tiny: Callable[[str], Path], tokens: Tokens) -> None:
    running = run(tiny("llama"), reuse="off")
    assert (running.worker.info.cache_mode, running.worker.info.cache_reason) == ("off", "`cache.reuse` is off.")
    running.ask(tokens(100), 2)
    assert running.ask(tokens(100), 2)[1].timings.cache_n == 0


def test_accepted_comes_first(run: Run, tiny: Callable[[str], Path], tokens: Tokens) -> None:
    running = run(tiny("llama"))
    rid = running.ask(tokens(100), 3)[1].rid
    kinds = [type(frame).__name__ for frame in running.of(rid)]
    assert kinds[0] == "Accepted"
    assert kinds[-1] == "Finished"
    assert running.of(rid, Accepted)[0].prompt_n == 100
    assert [p.done for p in running.of(rid, Progress)] == [64, 100]
