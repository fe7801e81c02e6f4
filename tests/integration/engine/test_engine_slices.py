"""Blocks out of and into a context: right ones give the same bits, wrong ones are refused and leave nothing."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from homeprefixd.engine.bindings import Model
from homeprefixd.engine.context import Batch, Context, ContextSettings
from homeprefixd.engine.edges import EdgeSlicer
from homeprefixd.engine.llama_log import LlamaLog
from homeprefixd.engine.proving import make_slicer
from homeprefixd.engine.slices import BlockSize, SliceError, Slicer
from homeprefixd.engine.whole import WholeSlicer
from homeprefixd.prefix.runs import Layout, layout_of

SCRATCH = 2
Tokens = np.ndarray


class Bench:
    """A context, and the five blocks of a prompt in `blocks`; the context is empty."""

    def __init__(self, model: Model, flash_attention: bool) -> None:
        self.context = Context(model, ContextSettings(1024, 512, SCRATCH + 1, 2, "f16", flash_attention))
        slicer, reason = make_slicer(self.context, SCRATCH)
        assert isinstance(slicer, Slicer), reason
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


@pytest.fixture(params=["demo", "demo-flash", "llama", "qwen3-flash"])
def bench(request: pytest.FixtureRequest, demo_model: Path, tiny: Callable[[str], Path]) -> Iterator[Bench]:
    log = LlamaLog()
    name, _, flash = request.param.partition("-")
    model = Model.load(demo_model if name == "demo" else tiny(name), log)
    bench = Bench(model, bool(flash))
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


def test_a_run_is_what_llama_cpp_writes_for_all(bench: Bench) -> None:
    layout = bench.slicer.layout
    assert (layout is None) == bench.context.flash_attention  # V lies as K does: a run would gain nothing
    if layout is None:
        return
    for block in range(5):
        bench.take(block)
    whole = bench.export(0, 0, 192)
    bench.context.clear()
    made = memoryview(bytearray(layout.size(3)))
    for part in range(3):
        layout.put(bench.blocks[part], made, part, 3)
    assert made == whole
    bench.take(0)
    run = memoryview(bytearray(layout.size(4)))
    for part in range(4):
        layout.put(bench.blocks[1 + part], run, part, 4)
    assert layout.is_in_order(run, 4, 64)
    bench.slicer.import_block(0, 64, 256, 256, run)
    bench.decode(320, 330)
    assert bench.context.logits(-1).tobytes() == bench.cold.tobytes()
    for part in range(4):
        single = memoryview(bytearray(layout.size(1)))
        layout.take(run, part, 1, 4, single)
        assert single == bench.blocks[1 + part]


@pytest.mark.parametrize("bench", ["demo", "llama", "qwen2vl"], indirect=True)  # without flash attention
def test_blocks_in_scattered_cells_can_lie_in_a_run_too(bench: Bench) -> None:
    """Computed while another leaves, the rest of a block lies before its beginning: not in the order of positions."""
    layout, context = bench.slicer.layout, bench.context
    assert layout is not None
    bench.decode(0, 100, seq=1)
    bench.decode(0, 32)
    context.remove(1)
    bench.decode(32, 64)
    bench.decode(64, 128)
    blocks = [bench.export(0, 0, 64), bench.export(0, 64, 128)]
    assert not layout.is_in_order(bench.export(0, 0, 128), 2, 0)  # so it cannot be saved as one
    cell = layout._tables[0].width
    positions = np.ndarray(64, np.int32, np.frombuffer(blocks[0], np.uint8), 16, (cell,))
    assert sorted(positions) == list(range(64))
    assert list(positions) != list(range(64))
    logits = []
    for joined in (False, True):
        context.clear()
        if joined:
            run = memoryview(bytearray(layout.size(2)))
            for part, block in enumerate(blocks):
                layout.put(block, run, part, 2)
            assert layout.is_in_order(run, 2, 0)
            bench.slicer.import_block(0, 0, 128, 128, run)
        else:
            for index, block in enumerate(blocks):
                bench.slicer.import_block(0, index * 64, 64, 64, block)
        bench.decode(128, 192)
        logits.append(context.logits(-1))
    assert logits[0].tobytes() == logits[1].tobytes()
    context.clear()
    bench.decode(0, 128)
    bench.decode(128, 192)
    cold = context.logits(-1)
    assert np.abs(logits[1] - cold).max() / np.abs(cold).max() < 0.08  # other cells, other rounding


def test_states_of_another_layout_are_not_put_together(bench: Bench) -> None:
    state = bench.blocks[0]
    found = layout_of(state, 64)
    assert (found is None) == bench.context.flash_attention
    changes = [(8, 2), (12, 63), (16 + 64 * 12, 0), (16 + 64 * 12 + 4, 0), (16 + 64 * 12 + 4, 5000)]
    changes += [(16 + 64 * 12 + 4, 2), (16 + 64 * 12 + 12, 1 << 30)]
    for at, value in changes:
        other = bytearray(state)
        other[at : at + 4] = value.to_bytes(4, "little")
        assert layout_of(memoryview(other), 64) is None, (at, value)
    assert layout_of(state[:-1], 64) is None
    assert layout_of(state[:20], 64) is None


def test_a_layout_that_is_wrong_is_not_used(fresh: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Layout.put

    def spoiled(self: Layout, state: memoryview, run: memoryview, part: int, parts: int) -> None:
        original(self, state, run, part, parts)
        run[-1] ^= 1

    monkeypatch.setattr(Layout, "put", spoiled)
    made, reason = make_slicer(fresh, SCRATCH)
    assert isinstance(made, Slicer), reason
    assert made.layout is None


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
    bench.refuse("other positions", 0)
    bench.slicer.cells = None  # as where it is not known how positions are stored
    bench.refuse("llama.cpp read 0", 0)


def test_positions_that_cannot_be_never_reach_llama_cpp(bench: Bench) -> None:
    """It would not forget them."""
    for position in (0x7FFFFFFF, -1, -5, 64):
        state = bytearray(bench.blocks[0])
        struct.pack_into("<i", state, 16 + 12 * 3, position)
        bench.blocks[0] = memoryview(state)
        bench.refuse("other positions", 0)
        assert "other positions" in bench.slicer.refuses(0, 0, 64, bench.blocks[0])
        assert not bench.slicer.refuses(0, 64, 64, bench.blocks[1])
    assert bench.context.state_size(0) == bench.context.state_size(SCRATCH)


def test_want_of_cells_is_no_fault_of_a_state(bench: Bench) -> None:
    for block in range(5):
        bench.take(block)
    bench.decode(320, 330)
    bench.context.copy(0, 1)
    broken = memoryview(bytes(bench.slicer.size.of(512)))
    assert bench.slicer.refuses(0, 0, 512, broken) == ""  # 660 of 1024 cells may be in use
    assert bench.slicer.refuses(0, 0, 64, broken) != ""


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


@pytest.mark.parametrize("arch", ["gemma3", "mamba2", "granitehybrid"])
def test_models_with_edges_have_another_slicer(arch: str, tiny: Callable[[str], Path]) -> None:
    log = LlamaLog()
    model = Model.load(tiny(arch), log)
    context = Context(model, ContextSettings(512, 64, 3, 2, "f16", True))
    made, reason = make_slicer(context, SCRATCH)
    context.close()
    model.close()
    log.close()
    assert isinstance(made, EdgeSlicer), reason


@pytest.fixture
def fresh(tiny: Callable[[str], Path]) -> Iterator[Context]:
    log = LlamaLog()
    model = Model.load(tiny("llama"), log)
    context = Context(model, ContextSettings(512, 64, 3, 2, "f16", False))
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
    made, reason = make_slicer(fresh, SCRATCH)
    assert isinstance(made, WholeSlicer)
    assert "other logits" in reason
    assert fresh.pos_max(0) == -1


def test_the_self_test_notices_an_importer_without_checks(fresh: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(self: Slicer, seq: int, start: int, count: int, use: int, view: memoryview) -> None:
        fresh.import_state(SCRATCH, np.frombuffer(view, np.uint8).ctypes.data, len(view))
        fresh.copy(SCRATCH, seq)
        fresh.remove(SCRATCH)

    monkeypatch.setattr(Slicer, "import_block", careless)
    made, reason = make_slicer(fresh, SCRATCH)
    assert isinstance(made, WholeSlicer)
    assert "taken for the first" in reason


def test_sizes_are_linear() -> None:
    assert BlockSize(100, 7).of(64) == 548
