"""Every family of models through engine and real store: cold, hot, after a restart, at branches, from a full store.

Logits are compared, not texts, and each family has a control that must fail: another prompt's state in the same
place. The models are tiny and random (`tests/tiny_model.py`); their weights are such that wrong state shows.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from homeprefixd.engine import edge_restoring, edge_saving, namespaces, probe, restoring
from homeprefixd.engine.building import DEBUG_LOGITS
from homeprefixd.engine.edges import EdgeSlicer
from homeprefixd.frames.worker import AdapterFile, Constraint, Delta, Finished, LoraChoice, Message, Sampling
from homeprefixd.lora import described
from homeprefixd.prefix import link
from homeprefixd.prefix.client import Lookup, Slot, StoreClient
from homeprefixd.prefix.thinning import KEPT
from tests.integration.engine.running import Logits, Running, load_frame
from tests.tiny_lora import make_lora
from tests.tiny_model import BYTES_VOCABULARY, LAYERS, WIDTH
from tests.unit.prefix.prefix_testing import MIB, Store

FULL = ["llama", "qwen3", "deepseek2", "qwen2vl"]
WINDOW = ["gemma2", "gemma3", "gpt-oss"]
RECURRENT = ["mamba2", "granitehybrid", "lfm2", "falcon-h1", "qwen35", "qwen3next"]
WHOLE = ["lfm2+window", "deepseek4"]  # with memories that can only be copied whole, or that is all we know of them
EDGED = [*WINDOW, *RECURRENT, *WHOLE]

BASE = 320  # tokens: five blocks

Serve = Callable[..., "House"]


def tokens(count: int, seed: int) -> list[int]:
    """Pseudo-random ones of the small vocabulary."""
    ids: list[int] = np.random.default_rng(seed).integers(3, BYTES_VOCABULARY, count).tolist()
    return ids


class PatientClient(StoreClient):
    """One that waits for its slots also where other tests run."""

    def reserve(
        self, sizes: Sequence[int], timeout: float = 20.0, *, runs: bool = False, after: bytes = b""
    ) -> list[Slot]:
        return super().reserve(sizes, timeout, runs=runs, after=after)


class House:
    """A worker's parts in this process and a real store process on a directory."""

    def __init__(self, model: Path, directory: Path, sizes: dict[str, int], changes: dict[str, Any]) -> None:
        directory.mkdir(exist_ok=True)
        self.store = Store(directory, **sizes)
        connected = threading.Event()
        self.client = PatientClient(connected.set)
        self.client.attach(self.store.adopt())
        assert connected.wait(20)
        changes = {"threads": 1, **changes}  # two would wait for each other where other tests run
        self.running = Running(load_frame(model, **changes), self.client)  # type: ignore[arg-type]
        self.running.known()

    def ask(self, prompt: list[int] | list[Message], max_tokens: int = 1, **changes: Any) -> Finished:
        return self.running.ask(prompt, max_tokens, **changes)[1]

    def cold(self, prompt: list[int], max_tokens: int = 1) -> Finished:
        return self.ask(prompt, max_tokens, cache=False)

    def stats(self) -> dict[str, Any]:
        return self.store.stats()

    def close(self) -> None:
        if self.store.process.poll() is None:
            counters = self.running.engine.counters
            assert not counters["integrity_errors"]
            assert not counters["position_errors"]
            self.running.close()
            self.client.close()
            assert self.store.flush() == 0
            status, said = self.store.stop()
            assert status == 0, said


@pytest.fixture
def serve(
    small: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., House]]:
    monkeypatch.setenv(DEBUG_LOGITS, "1")
    monkeypatch.setattr(restoring, "_PLAN_PATIENCE", 20.0)  # what is tested is what comes, not when
    monkeypatch.setattr(edge_restoring, "BLOCK_PATIENCE", 20.0)
    monkeypatch.setattr(edge_saving, "SLOW", 20.0)
    monkeypatch.setattr(link, "_SILENCE", 20.0)
    houses: list[House] = []

    def start(arch: str, *, hot: int = 64 * MIB, warm: int = 256 * MIB, **changes: Any) -> House:
        for house in houses:
            house.close()
        houses.append(House(small(arch), tmp_path / "cache", {"hot": hot, "warm": warm}, changes))
        return houses[-1]

    yield start
    for house in houses:
        house.close()


def _same(house: House, prompt: list[int], cached: int) -> None:
    """A request reuses exactly so much, and its logits are those of a cold run, bit for bit."""
    found = house.ask(prompt)
    assert found.timings.cache_n == cached
    assert found.timings.logits_sha256 == house.cold(prompt).timings.logits_sha256


@pytest.mark.parametrize(
    ("arch", "kv_type"),
    [*((arch, "f16") for arch in [*FULL, *EDGED]), *((arch, "q8_0") for arch in ("llama", "gemma3", "qwen35"))],
)
def test_hot_and_after_a_restart_the_logits_are_those_of_a_cold_run(serve: Serve, arch: str, kv_type: str) -> None:
    changes = {"kv_type": kv_type, "flash_attention": kv_type != "f16"}
    house = serve(arch, **changes)
    info = house.running.worker.info
    assert info.cache_mode == ("blocks" if arch in FULL else "whole sequence" if arch in WHOLE else "blocks with edges")
    assert bool(info.cache_reason) == (arch in WHOLE)
    base = tokens(BASE, 1)
    assert house.ask([*base, 5]).timings.cache_n == 0
    _same(house, [*base, *tokens(10, 2)], BASE)
    house = serve(arch, **changes)
    _same(house, [*base, *tokens(12, 3)], BASE)
    assert not house.running.engine.counters["restore_errors"]


@pytest.mark.long
@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
@pytest.mark.parametrize("arch", [*FULL, *EDGED])
def test_every_family_with_each_type_with_and_without_flash_attention(
    serve: Serve, arch: str, kv_type: str, flash: bool
) -> None:
    """The full form of the one above. Without flash attention V cannot be quantised."""
    quantised_k = kv_type == "q8_0" and not flash
    if kv_type == "q8_0" and (arch == "deepseek2" or (quantised_k and arch == "deepseek4")):
        pytest.skip("its K and V have one type, and heads of 48 numbers are no whole blocks")
    changes = {"kv_type": kv_type, "flash_attention": flash, "kv_type_v": "f16" if quantised_k else ""}
    house = serve(arch, **changes)
    base = tokens(BASE, 1)
    assert house.ask([*base, 5]).timings.cache_n == 0
    _same(house, [*base, *tokens(10, 2)], BASE)
    house = serve(arch, **changes)
    _same(house, [*base, *tokens(12, 3)], BASE)
    assert not house.running.engine.counters["restore_errors"]


@pytest.mark.parametrize(
    ("arch", "type_k", "type_v", "flash"),
    [
        ("llama", "q8_0", "f16", False),
        ("llama", "f16", "q8_0", True),
        ("qwen3", "q5_1", "iq4_nl", True),
        ("gemma3", "q4_1", "q5_0", True),
        ("qwen35", "bf16", "q4_0", True),
    ],
)
def test_k_and_v_can_have_types_of_their_own(serve: Serve, arch: str, type_k: str, type_v: str, flash: bool) -> None:
    """The state's size tells that both are what they should be."""
    changes = {"kv_type": type_k, "kv_type_v": type_v, "flash_attention": flash}
    house = serve(arch, **changes)
    if arch in FULL:
        bits = {"f16": 16, "q8_0": 8.5, "q5_1": 6, "iq4_nl": 4.5}
        expected = LAYERS * WIDTH * (bits[type_k] + bits[type_v]) / 8
        assert expected <= house.running.worker.info.kv_bytes_per_token < expected + 24  # and a cell's position
    base = tokens(BASE, 1)
    assert house.ask([*base, 5]).timings.cache_n == 0
    _same(house, [*base, *tokens(10, 2)], BASE)
    house = serve(arch, **changes)
    _same(house, [*base, *tokens(12, 3)], BASE)
    assert not house.running.engine.counters["restore_errors"]


@pytest.mark.parametrize(("arch", "reuse"), [("gemma3", "token"), ("gpt-oss+wide", "exact")])
def test_where_a_windows_cells_begin_anew_it_is_bit_for_bit_too(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, arch: str, reuse: str
) -> None:
    """Cells of a window are used in a ring. A cold run that is about to begin anew with the first one has later tokens
    in cells before those of earlier ones, and adds up in that order. So does what is restored, but for the control.
    """
    logits = Logits(monkeypatch)
    house = serve(arch, batch=256, ctx=4096, reuse=reuse)
    slicer = house.running.engine._restorer._slicer  # type: ignore[union-attr]
    assert isinstance(slicer, EdgeSlicer)
    assert slicer._ring is not None
    ring = slicer._ring.size
    bases = [base for around in (ring, 2 * ring) for base in range(around - 64, around + 192, 64)]
    prompt = tokens(max(bases), 1)
    for base in bases:
        house.ask([*prompt[:base], 5])
        _same(house, [*prompt[:base], *tokens(63, base)], base)
    monkeypatch.setattr(EdgeSlicer, "place", lambda *_: None)
    question = [*prompt[:ring], *tokens(63, 2)]
    found, cold = house.ask(question), house.cold(question)
    assert found.timings.cache_n == ring
    assert found.timings.logits_sha256 != cold.timings.logits_sha256
    logits.compare(found.rid, cold.rid, 2e-4)
    assert not house.running.engine.counters["restore_errors"]


@pytest.mark.parametrize("arch", EDGED)
def test_the_edge_of_another_prompt_would_give_other_logits(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, arch: str
) -> None:
    """The control: it has the right positions, so only the logits tell. That of another position is refused."""
    house = serve(arch)
    edges: dict[tuple[int, int], bytes] = {}  # by prompt, then start of the node
    original = EdgeSlicer.import_node
    control = {"from": 0, "shift": 0, "swap": 0}

    def import_node(
        slicer: EdgeSlicer, seq: int, at: int, start: int, count: int, span: memoryview, edge: memoryview | None
    ) -> int:
        if edge is not None:
            edges.setdefault((control["from"], start), bytes(edge))
            edge = memoryview(edges[0, start + control["shift"]]) if control["swap"] else edge
        return original(slicer, seq, at, start, count, span, edge)

    monkeypatch.setattr(EdgeSlicer, "import_node", import_node)
    prompts = [tokens(BASE, 7), tokens(BASE, 1)]
    for number, base in enumerate(prompts):
        control["from"] = number
        for part in (base[:64], base):
            house.ask([*part, 5])
            house.ask([*part, 6])

    def differs(question: list[int]) -> bool:
        cold = house.cold(question).timings.logits_sha256
        found = house.ask(question).timings
        return found.logits_sha256 != cold

    assert not differs([*prompts[1], *tokens(10, 2)])
    control["swap"] = 1
    assert differs([*prompts[1], *tokens(10, 3)])
    control["shift"] = 64 - BASE
    errors = house.running.engine.counters["restore_errors"]
    assert not differs([*prompts[1], *tokens(10, 4)])
    assert house.running.engine.counters["restore_errors"] == errors + 1


@pytest.mark.parametrize("arch", ["deepseek2", *EDGED])
def test_where_prompts_part_is_learned(serve: Serve, monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    logits = Logits(monkeypatch)
    house = serve(arch)
    base = tokens(BASE, 1)
    house.ask([*base, 5])
    second = house.ask([*base[:200], *tokens(60, 4)])
    assert second.timings.cache_n == (0 if arch in EDGED else 200)
    prompt = [*base[:200], *tokens(50, 5)]
    third = house.ask(prompt, 4)
    assert third.timings.cache_n == 200
    logits.compare(third.rid, house.cold(prompt, 4).rid)


@pytest.mark.parametrize("arch", ["gemma3", "mamba2", "granitehybrid", "qwen35", *WHOLE])
def test_a_chat_goes_on_where_it_was(serve: Serve, monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    logits = Logits(monkeypatch)
    house = serve(arch)
    rules = Message("system", " ".join(f"Rule {n}: keep lamp {n} at {n * 7} percent." for n in range(20)))

    def turn(*messages: Message, cached: int) -> Finished:
        found = house.ask([rules, *messages], 6)
        assert found.timings.cache_n >= cached
        logits.compare(found.rid, house.cold(logits.prompts[found.rid], 6).rid)
        return found

    first = turn(Message("user", "Which lamp is brightest?"), cached=0)
    after = len("Which lamp is brightest?<") + len("<<assistant\n")  # in tokens, of a byte each but for the marks
    system = first.timings.total_prompt_n - after
    turn(Message("user", "And now another question."), cached=system)
    again = turn(Message("user", "Which lamp is brightest?"), cached=system)
    assert again.timings.cache_n >= first.timings.total_prompt_n - 11  # "assistant" and its marks
    said = Message("assistant", house.running.text(again.rid))
    house = serve(arch)
    second = turn(Message("user", "Which lamp is brightest?"), said, Message("user", "Why?"), cached=system + 4)
    assert second.timings.cache_n >= first.timings.total_prompt_n - 11  # "assistant" and its marks


@pytest.mark.parametrize("arch", ["gemma3", "granitehybrid", "deepseek4"])
def test_edges_are_few(serve: Serve, monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    """A long chat leaves no edge at each of its turns: those of the last two turns stay, of prompt and reply each."""
    logits = Logits(monkeypatch)
    house = serve(arch)
    prompt, until = tokens(130, 1), 0
    for turn in range(12):
        end = house.ask(prompt, 9)
        assert end.timings.cache_n == until
        until = len(prompt) + 8  # the last token was sampled and not computed
        reply = [int(each.argmax()) for each in logits.of[end.rid]]
        prompt = [*prompt, *reply, *tokens(70, 10 + turn)]
    assert house.stats()["counters"]["thinned"] > 0
    _few_edges(house, 1.5 * KEPT * (2 if arch in WINDOW else 1))


def _start(house: House, chat: list[Message], seed: int) -> str:
    """Ask for a reply of 60 letters, of which a template that strips thoughts has the last 30."""
    words = Constraint("grammar", "root ::= [a-z]{60}")
    return house.running.start(list(chat), 80, constraint=words, sampling=Sampling(seed=seed, temperature=1.0))


def _said(house: House, rid: str) -> Message:
    house.running.finish(rid)
    return Message("assistant", house.running.text(rid))


def _few_edges(house: House, most: float) -> None:
    """The store commits what the worker counted as saved a moment later, and thins only then."""
    deadline = time.monotonic() + 5
    while (edges := _edges(house)) > most and time.monotonic() < deadline:
        time.sleep(0.05)
    assert edges <= most


def _edges(house: House) -> float:
    stats = house.stats()["counters"]
    return house.running.engine.counters["save_edges"] - stats["thinned"] - stats["known_nodes"]


@pytest.mark.parametrize("arch", ["gemma3", "granitehybrid"])
def test_replies_that_are_rendered_otherwise_leave_few_edges(serve: Serve, arch: str) -> None:
    """As by templates that strip thoughts: each turn leaves the way of the last reply. What needs edges is the end of
    the system message, and of the last two turns two points of the prompt and the reply as it was generated."""
    house = serve(arch)
    chat = [Message("system", " ".join(f"Rule {n}: keep lamp {n} at {n * 7} percent." for n in range(4)))]
    for turn in range(12):
        chat.append(Message("user", f"Which lamp is number {turn}, and is it brighter than {turn * 7}?"))
        said = _said(house, _start(house, chat, turn)).content
        assert said is not None
        assert len(said) == 60
        chat.append(Message("assistant", said[30:]))
    _few_edges(house, 1.5 * (1 + 2 * 3) * (2 if arch in WINDOW else 1))


@pytest.mark.parametrize("strips", [False, True])
@pytest.mark.parametrize("arch", ["gemma3", "granitehybrid", "qwen35"])
def test_another_chats_reply_can_be_gone_on_from(serve: Serve, arch: str, strips: bool) -> None:
    """Two replies to one question, as of a choice: while the chat goes on with the one, the other one waits."""
    house = serve(arch)
    begin = [
        Message("system", " ".join(f"Rule {n}: keep lamp {n} at {n * 7} percent." for n in range(4))),
        Message("user", "Which lamp is the brightest of them all, and which one is next to it?"),
    ]
    started = [_start(house, begin, seed) for seed in (1, 2)]
    first, second = (_said(house, rid) for rid in started)

    def goes_on(chat: list[Message], said: Message, seed: int, *, rendered: bool) -> Message:
        """A turn more; it reuses all that was computed of the reply, if that is `rendered` as it was generated."""
        text = str(said.content)
        chat += [said if rendered else Message("assistant", text[30:]), Message("user", f"And lamp number {seed}?")]
        rid = _start(house, chat, seed)
        timings = house.running.finish(rid).timings
        after = (
            len(f"<<user\nAnd lamp number {seed}?<\n<assistant\n") + 2
        )  # marks are tokens; the last was not computed
        if rendered:
            assert timings.cache_n == timings.total_prompt_n - after
        return _said(house, rid)

    chat, other = list(begin), list(begin)
    for seed in (3, 4, 5):
        first = goes_on(chat, first, seed, rendered=not strips)
    for seed in (6, 7):
        second = goes_on(other, second, seed, rendered=True)
    goes_on(chat, first, 8, rendered=True)


@pytest.mark.parametrize("arch", ["gemma3", "granitehybrid", "deepseek4"])
def test_a_full_store_gives_nothing_wrong(serve: Serve, arch: str) -> None:
    house = serve(arch, hot=MIB // 2, warm=2 * MIB)
    reused = 0
    for question, number in enumerate((*range(12), 11, 3, 11)):  # each question is new: reuse ends at a whole block
        prompt = [*tokens(256, number), *tokens(9, 50 + question)]
        house.ask([*prompt[:256], 5])
        found = house.ask(prompt)
        reused += found.timings.cache_n == 256
        assert found.timings.logits_sha256 == house.cold(prompt).timings.logits_sha256
    stats = house.stats()["counters"]
    assert stats["evicted_hot"] > 0
    assert reused > 0
    assert np.isfinite(stats["errors"])
    assert stats["errors"] == 0


@pytest.mark.parametrize(("arch", "hot"), [("llama", 2 * MIB), ("gemma3", MIB), ("falcon-h1", 2 * MIB)])
def test_a_prompt_that_ram_cannot_hold_is_restored(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, arch: str, hot: int
) -> None:
    """From a disk that has all of it; the second time its end is in RAM, in the way of its beginning."""
    logits = Logits(monkeypatch)
    streamed: list[bool] = []
    original = Lookup.taken

    def taken(lookup: Lookup, count: int) -> None:
        streamed.append(lookup._streamed)
        original(lookup, count)

    monkeypatch.setattr(Lookup, "taken", taken)
    house = serve(arch, hot=hot, ctx=4096)
    base = tokens(47 * 64, 1)
    for end in range(320, len(base) + 320, 320):  # as much as can wait to be written
        house.ask([*base[:end], 5])
        assert house.store.flush() == 0
        assert not house.running.engine.counters["restore_lost"]
    house = serve(arch, hot=hot, ctx=4096)
    streamed.clear()
    logits.of.clear()
    for seed in (2, 3):
        prompt = [*base, *tokens(10, seed)]
        found = house.ask(prompt)
        assert found.timings.cache_n == len(base)
        assert found.timings.logits_sha256 == house.cold(prompt).timings.logits_sha256
    assert any(streamed)
    assert not house.running.engine.counters["restore_errors"] + house.running.engine.counters["restore_lost"]


@pytest.mark.parametrize("arch", ["gemma3", "mamba2", "granitehybrid", "deepseek4"])
def test_side_by_side_and_set_aside(serve: Serve, monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    """Sequence ids are used again, requests are cancelled and make way for others: each has its own state."""
    logits = Logits(monkeypatch)
    house = serve(arch, parallel=2)
    running = house.running
    prompts = [[*tokens(200, 1), *tokens(30 + n, 20 + n)] for n in range(4)]
    cold = [house.cold(prompt, 20).rid for prompt in prompts]
    for _ in range(2):
        rids = [running.start(prompt, 20) for prompt in prompts]
        gone = running.start([*prompts[0], 7, 8], 500)
        running.worker.intake.cancel(gone)
        for rid, alone in zip(rids, cold, strict=True):
            running.finish(rid)
            logits.compare(rid, alone)
        assert running.finish(gone).reason == "cancelled"
    slow = running.start(prompts[0], 60, priority="background")
    also = running.start(prompts[1], 60, priority="background")
    running.wait(lambda: running.of(slow, Delta) and running.of(also, Delta))
    urgent = running.start(prompts[2], 4, priority="interactive")
    for rid, alone in ((urgent, cold[2]), (slow, cold[0]), (also, cold[1])):
        running.finish(rid)
        logits.compare(rid, alone)
    assert running.engine.counters["set_aside"] > 0
    assert not running.engine.counters["save_errors"] + running.engine.counters["restore_errors"]


def test_one_that_dies_of_blocks_is_kept_as_a_whole(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = probe.module_command
    commands = iter([["/bin/sh", "-c", "echo loaded; echo 'GGML_ASSERT(p0 <= 0)' >&2; kill -ABRT $$"]])
    monkeypatch.setattr(probe, "module_command", lambda module: next(commands, real(module)))
    changes = {"probes": str(tmp_path), "pool": 8192}
    house = serve("llama", **changes)
    info = house.running.worker.info
    assert info.cache_mode == "whole sequence"
    assert "GGML_ASSERT(p0 <= 0)" in info.cache_reason
    base = tokens(BASE, 1)
    assert house.ask([*base, 5]).timings.cache_n == 0
    _same(house, [*base, *tokens(10, 2)], BASE)
    house = serve("llama", **changes)
    _same(house, [*base, *tokens(12, 3)], BASE)
    house = serve("llama")  # in blocks: another namespace
    assert house.ask([*base, 5]).timings.cache_n == 0


@pytest.mark.parametrize("arch", ["gemma3", "qwen35", "deepseek4"])
def test_adapters(
    serve: Serve, small: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str
) -> None:
    """Each reuses what was computed with it, and with one namespace for all the comparison would fail."""
    files = [make_lora(small(arch), tmp_path / f"{name}.gguf", seed=ord(name)) for name in "ab"]
    adapters = [AdapterFile(name, str(path), 1.0) for name, path in zip("ab", files, strict=True)]
    house = serve(arch, adapters=adapters)
    base = tokens(BASE, 1)
    choices: list[Any] = [[LoraChoice("a")], [LoraChoice("b")], None]

    def hashes(question: list[int], cached: int) -> list[str]:
        found = [house.ask(question, lora=choice).timings for choice in choices]
        assert [timings.cache_n for timings in found] == [cached] * 3
        return [timings.logits_sha256 for timings in found]

    hashes([*base, 5], 0)
    for seed in (2, 3):
        question = [*base, *tokens(10, seed)]
        cold = [house.ask(question, lora=choice, cache=False).timings.logits_sha256 for choice in choices]
        assert len(set(cold)) == 3
        assert hashes(question, BASE) == cold
        house = serve(arch, adapters=adapters)
    monkeypatch.setattr(namespaces, "described", lambda adapters, chosen: described(adapters, ()))
    question = [*base, *tokens(10, 4)]
    cold = [house.ask(question, lora=choice, cache=False).timings.logits_sha256 for choice in choices]
    house.ask([*base, 5], lora=choices[0])
    wrong = house.ask(question, lora=choices[1]).timings
    assert (wrong.cache_n, wrong.logits_sha256 == cold[1]) == (BASE, False)
