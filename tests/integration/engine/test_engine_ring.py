"""A restored sliding window lies where a cold run's would: the same bits, also where its ring of cells begins anew.

Whatever else is in the context or unexpected, it is only rounding that differs, or the prefix is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from homeprefixd.engine.bindings import Model
from homeprefixd.engine.context import Batch, Context, ContextSettings
from homeprefixd.engine.edges import EdgeSlicer
from homeprefixd.engine.llama_log import LlamaLog
from homeprefixd.engine.proving import make_slicer
from homeprefixd.engine.ring import Ring
from homeprefixd.engine.slices import SliceError
from tests.tiny_model import BYTES_VOCABULARY

OTHER, SCRATCH = 1, 2
BLOCK, CALL = 64, 256
LONG = 24 * BLOCK  # three times round the ring, twice round that of the wide window

Logits = np.ndarray


class Window:
    """A context and the nodes of a prompt: span and edge of each block."""

    def __init__(self, model: Model, flash_attention: bool) -> None:
        self.context = Context(model, ContextSettings(2048, CALL, SCRATCH + 1, 1, "f16", flash_attention))
        slicer, reason = make_slicer(self.context, SCRATCH)
        assert isinstance(slicer, EdgeSlicer), reason
        assert slicer._ring is not None
        self.slicer, self.ring = slicer, slicer._ring
        self.batch = Batch(CALL)
        self.tokens = np.random.default_rng(1).integers(3, BYTES_VOCABULARY, LONG).astype(np.int32)
        self.nodes = []
        for start in range(0, LONG, BLOCK):
            self.decode(self.tokens[start : start + BLOCK], start)
            node = (memoryview(bytearray(size)) for size in (slicer.size.of(BLOCK), slicer.edge_bytes(0, 0, BLOCK)))
            self.nodes.append(tuple(node))
            slicer.export_node(0, start, start + BLOCK, *self.nodes[-1])
        self.context.clear()

    def decode(self, tokens: np.ndarray, start: int, seq: int = 0) -> Logits:
        self.batch.set_prompt(tokens, start, seq)
        assert self.context.decode(self.batch)
        return self.context.logits(-1)

    def ask(self, question: np.ndarray, start: int) -> Logits:
        for at in range(0, len(question), CALL):
            logits = self.decode(question[at : at + CALL], start + at)
        return logits

    def cold(self, end: int, question: np.ndarray) -> Logits:
        self.context.clear()
        self.ask(self.tokens[:end], 0)
        return self.ask(question, end)

    def restore(self, end: int, reach: int, *, places: bool = True, lacks: int = -1) -> None:
        """`lacks`: a node whose edge is left out."""
        first = True
        for start in range(0, end, BLOCK):
            span, edge = self.nodes[start // BLOCK]
            needed = start + BLOCK > end - self.slicer.edge.window and start != lacks
            if needed and first and places:
                self.slicer.place(0, start, reach)
            first = first and not needed
            self.slicer.import_node(0, start, start, BLOCK, span, edge if needed else None)
        self.slicer.check(0, end)

    def restored(self, end: int, question: np.ndarray, *, places: bool = True) -> Logits:
        self.context.clear()
        self.restore(end, end + len(question), places=places)
        return self.ask(question, end)


@pytest.fixture
def window(request: pytest.FixtureRequest, small: Callable[[str], Path]) -> Iterator[Window]:
    arch, _, flash = request.param.partition(" ")
    log = LlamaLog()
    model = Model.load(small(arch), log)
    window = Window(model, bool(flash))
    yield window
    window.context.close()
    model.close()
    log.close()


def question(length: int) -> np.ndarray:
    return np.random.default_rng(length).integers(3, BYTES_VOCABULARY, length).astype(np.int32)


def close(one: Logits, other: Logits) -> bool:
    """Equal up to rounding, which is coarse with flash attention; wrong state gives logits with nothing in common."""
    return bool(np.abs(one - other).max() < 5e-3 * np.abs(one).max())


@pytest.mark.parametrize(
    ("window", "length"),
    [
        ("gemma2", 63),
        ("gemma3", 300),
        ("gemma3 flash", 63),
        ("gpt-oss", 63),
        ("gpt-oss+wide", 63),
        ("gpt-oss+wide flash", 300),
    ],
    indirect=["window"],
)
def test_at_every_block_the_bits_are_those_of_a_cold_run(window: Window, length: int) -> None:
    """And where cells are not filled first, the control, they are not: there attention adds up in another order."""
    asked = question(length)
    ends, filled, differ = range(BLOCK, LONG - 300, BLOCK), 0, 0
    for end in ends:
        cold = window.cold(end, asked)
        assert np.array_equal(window.restored(end, asked), cold), end
        start = max(0, end - -(-window.slicer.edge.window // BLOCK) * BLOCK)
        if window.ring.missing(start, end + length):
            without = window.restored(end, asked, places=False)
            assert close(without, cold)
            filled += 1
            differ += not np.array_equal(without, cold)
    assert window.slicer._ring is window.ring  # all was as expected
    assert 0 < filled < len(ends) - 4  # it is done where it is needed only
    assert differ > filled // 2


@pytest.mark.parametrize("window", ["gemma3", "gpt-oss+wide"], indirect=True)
def test_beside_others_nothing_is_filled(window: Window, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, end = question(63), window.ring.size
    cold = window.cold(end, asked)
    window.context.clear()
    window.decode(window.tokens[:10], 0, OTHER)
    monkeypatch.setattr(Ring, "fill", None)
    window.restore(end, end + 63)
    assert window.context.pos_max(OTHER) == 9
    found = window.ask(asked, end)
    assert close(found, cold)
    assert not close(found, window.cold(end - BLOCK, asked))


@pytest.mark.parametrize("window", ["gpt-oss+wide"], indirect=True)
def test_another_ring_than_expected_is_noticed(window: Window) -> None:
    asked, end = question(63), 320
    cold = window.cold(end, asked)
    window.ring.size = 256
    assert close(window.restored(end, asked), cold)
    assert window.slicer._ring is None


@pytest.mark.parametrize("window", ["gpt-oss+wide"], indirect=True)
def test_a_smaller_ring_than_expected_costs_one_restore(window: Window) -> None:
    asked, end = question(63), 1024 + BLOCK
    cold = window.cold(end, asked)
    window.ring.size = 1024
    with pytest.raises(SliceError, match=r"llama\.cpp read 0"):
        window.restored(end, asked)
    assert window.context.pos_max(0) == window.context.pos_max(SCRATCH) == -1
    assert close(window.restored(end, asked), cold)


@pytest.mark.parametrize("window", ["gpt-oss+wide"], indirect=True)
def test_what_was_filled_is_taken_for_nothing_else(window: Window) -> None:
    """It is neither exported nor does it stand in for a part of the window that was not restored."""
    end = window.ring.size
    window.restore(end, end + 63)
    assert window.context.pos_min(0) < 8
    with pytest.raises(SliceError, match="an edge of positions"):
        window.slicer.export_node(0, 0, BLOCK, *window.nodes[0])
    window.context.clear()
    with pytest.raises(SliceError, match="after restoring"):
        window.restore(end, end + 63, lacks=end - 3 * BLOCK)
    window.context.clear()
    with pytest.raises(SliceError, match="after restoring"):
        window.restore(end, end + 63, lacks=end - BLOCK)


@pytest.mark.parametrize("window", ["gemma3"], indirect=True)
def test_no_more_is_filled_than_allowed(window: Window) -> None:
    end = window.ring.size
    count = end - BLOCK
    for most, filled in ((window.slicer.edge.size.of(count), 0), (window.slicer.edge.size.of(count) - 1, -1)):
        window.context.clear()
        window.slicer.place(0, count, end + 63, most)
        assert window.slicer._filled == filled
