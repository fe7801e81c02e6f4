"""Blocks out of and into a context: right ones give the same bits, wrong ones are refused and leave nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from homeprefixd.engine.bindings import Batch, Context, ContextSettings, Model
from homeprefixd.engine.llama_log import LlamaLog
from homeprefixd.engine.slices import BlockSize, SliceError, Slicer, make_slicer

SCRATCH = 2
Tokens = np.ndarray


class Bench:
    """A context, and the five blocks of a prompt in `blocks`; the context is empty."""

    def __init__(self, model: Model) -> None:
        self.context = Context(model, ContextSettings(1024, 512, SCRATCH + 1, 2, "f16", True))
        slicer = make_slicer(self.context, SCRATCH)
        assert isinstance(slicer, Slicer), slicer
        self.slicer = slicer
        self.batch = Batch(512)
        self.tokens = (np.arange(330) * 7919 % 40000 + 500).astype(np.int32)
        self.decode(0, 320)
        self.blocks = [self.export(0, i * 64, i * 64 + 64) for i in range(5)]
        self.decode(320, 330)
        self.cold = self.context.logits(-1)
        self.context.clear()

    def decode(self, start: int, end: int, seq: int = 0) -> None:
        self.batch.set_prompt(self.tokens[start:end], start, seq)
        assert self.context.decode(self.batch)

    def export(self, seq: int, start: int, end: int) -> memoryview:
        view = memoryview(bytearray(self.slicer.size.of(end - start)))
        assert self.slicer.export(seq, start, end, view) == len(view)
        return view

    def take(self, block: int, start: int | None = None, use: int = 64) -> None:
        self.slicer.import_block(0, block * 64 if start is None else start, 64, use, self.blocks[block])

    def refuse(self, match: str, block: int, start: int | None = None, use: int = 64) -> None:
        with pytest.raises(SliceError, match=match):
            self.take(block, start, use)
        assert self.context.pos_max(0) == -1
        assert self.context.pos_max(SCRATCH) == -1


@pytest.fixture(params=["demo", "llama", "qwen3"])
def bench(request: pytest.FixtureRequest, demo_model: Path, tiny: Callable[[str], Path]) -> Iterator[Bench]:
    log = LlamaLog()
    model = Model.load(demo_model if request.param == "demo" else tiny(request.param), log)
    bench = Bench(model)
    yield bench
    bench.context.close()
    model.close()
    log.close()


def test_restored_blocks_give_the_same_bits(bench: Bench) -> None:
    for block in range(5):
        bench.take(block)
    bench.decode(320, 330)
    assert bench.context.logits(-1).tobytes() == bench.cold.tobytes()
    assert bench.context.pos_max(SCRATCH) == -1
    for block in range(5):
        assert bytes(bench.export(0, block * 64, block * 64 + 64)) == bytes(bench.blocks[block])


def test_a_cut_block_goes_on_from_its_cut(bench: Bench) -> None:
    for block in range(4):
        bench.take(block)
    bench.take(4, use=10)
    assert bench.context.pos_max(0) == 265
    bench.decode(266, 330)
    relative = np.abs(bench.context.logits(-1) - bench.cold).max() / np.abs(bench.cold).max()
    assert relative < 0.05  # right to rounding: f16 state, other batch shapes


def test_wrong_blocks_are_refused(bench: Bench) -> None:
    bench.refuse("comes next", 1)  # the first one left out
    bench.take(0)
    bench.refuse("comes next", 0)  # twice
    bench.take(0)
    bench.refuse("comes next", 2)  # one left out
    bench.take(0)
    bench.refuse("other positions", 2, start=64)  # another one's bytes under the right name
    bench.take(0)
    bench.refuse("tokens of a block", 1, use=0)
    bench.refuse("tokens of a block", 0, use=65)


def test_bytes_of_the_wrong_size_are_refused(bench: Bench) -> None:
    bench.blocks[0] = bench.blocks[0][:-1]
    bench.refuse("bytes for 64 tokens", 0)
    bench.blocks[0] = memoryview(bytes(bench.slicer.size.of(64)))
    bench.refuse("llama.cpp read 0", 0)


def test_an_occupied_scratch_is_noticed(bench: Bench) -> None:
    bench.take(0)
    bench.context.copy(0, SCRATCH, 0, 64)
    bench.refuse("scratch", 1)


def test_exports_that_cannot_be_right_are_refused(bench: Bench) -> None:
    bench.take(0)
    view = memoryview(bytearray(bench.slicer.size.of(64)))
    with pytest.raises(SliceError, match="not all in memory"):
        bench.slicer.export(0, 32, 96, view)
    with pytest.raises(SliceError, match="a slot of"):
        bench.slicer.export(0, 0, 64, view[:-1])
    with pytest.raises(SliceError, match="cannot be written"):
        bench.slicer.export(0, 0, 64, view.toreadonly())
    assert bench.context.pos_max(SCRATCH) == -1
    assert bench.context.pos_max(0) == 63  # an export takes nothing away


def test_other_sequences_do_no_harm(bench: Bench) -> None:
    bench.decode(0, 100, seq=1)
    for block in range(5):
        bench.take(block)
    assert bytes(bench.export(0, 128, 192)) == bytes(bench.blocks[2])
    assert bench.context.pos_max(1) == 99


@pytest.mark.parametrize(
    ("arch", "reason"), [("gemma3", "sliding-window"), ("mamba2", "recurrent"), ("granitehybrid", "hybrid")]
)
def test_models_with_edges_have_no_slicer(arch: str, reason: str, tiny: Callable[[str], Path]) -> None:
    log = LlamaLog()
    model = Model.load(tiny(arch), log)
    context = Context(model, ContextSettings(512, 64, 3, 2, "f16", True))
    made = make_slicer(context, SCRATCH)
    context.close()
    model.close()
    log.close()
    assert isinstance(made, str)
    assert reason in made


@pytest.fixture
def fresh(tiny: Callable[[str], Path]) -> Iterator[Context]:
    log = LlamaLog()
    model = Model.load(tiny("llama"), log)
    context = Context(model, ContextSettings(512, 64, 3, 2, "f16", True))
    yield context
    context.close()
    model.close()
    log.close()


def test_the_self_test_notices_state_that_is_wrong(fresh: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Slicer.export

    def spoiled(self: Slicer, seq: int, start: int, end: int, view: memoryview) -> int:
        size = original(self, seq, start, end, view)
        view[size - 60 : size] = bytes(60)
        return size

    monkeypatch.setattr(Slicer, "export", spoiled)
    made = make_slicer(fresh, SCRATCH)
    assert isinstance(made, str)
    assert "other logits" in made
    assert fresh.pos_max(0) == -1


def test_the_self_test_notices_an_importer_without_checks(fresh: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(self: Slicer, seq: int, start: int, count: int, use: int, view: memoryview) -> None:
        fresh.import_state(SCRATCH, np.frombuffer(view, np.uint8).ctypes.data, len(view))
        fresh.copy(SCRATCH, seq)
        fresh.remove(SCRATCH)

    monkeypatch.setattr(Slicer, "import_block", careless)
    made = make_slicer(fresh, SCRATCH)
    assert isinstance(made, str)
    assert "taken for the first" in made


def test_sizes_are_linear() -> None:
    assert BlockSize(100, 7).of(64) == 548
