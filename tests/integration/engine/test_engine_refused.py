"""Stored states that are no states of the model, though their checksums fit: found once, dropped, computed anew.

Each family through engine and real store. What is wrong is what a file made by hand may have wrong.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable

import pytest

from homeprefixd.engine.cell_table import CellTable
from homeprefixd.engine.edges import EdgeSlicer
from homeprefixd.engine.places import Places
from homeprefixd.engine.ring import HEADER
from homeprefixd.frames.store import NewNode, PlanNode, Purge, Verify
from homeprefixd.frames.worker import Delta
from homeprefixd.prefix.blocks import EDGE, to_le
from tests.integration.engine.test_engine_edges import FULL, WHOLE, WINDOW, House, Serve, tokens
from tests.integration.engine.test_engine_edges import serve as serve  # a fixture

Change = Callable[[bytearray], bytearray]

PROMPT = 330  # tokens


def namespace_of(house: House) -> bytes:
    namespaces = house.running.worker.namespaces
    assert namespaces is not None
    namespace = namespaces.opened(namespaces.usual)
    assert namespace is not None
    return namespace


def states_of(house: House, namespace: bytes, prompt: list[int]) -> list[tuple[PlanNode, bytes]]:
    """What is stored of a prompt."""
    lookup = house.client.lookup(namespace, to_le(prompt), len(prompt) - 1, True)
    plan = lookup.wait_plan(20)
    assert plan
    found = []
    for index, node in enumerate(plan):
        state = lookup.wait_block(index, 20)
        assert state is not None
        found.append((node, bytes(state)))
    lookup.release()
    return found


def put_back(
    house: House, namespace: bytes, prompt: list[int], states: list[tuple[PlanNode, bytes]], wrong: int, change: Change
) -> None:
    """Have the store forget all, and hold the same again, but node `wrong` of it changed."""
    parent, nodes = namespace, []
    for index, (node, state) in enumerate(states):
        data = change(bytearray(state)) if index == wrong else bytearray(state)
        [slot] = house.client.reserve([len(data)], after=parent)
        slot.view[:] = data
        own = EDGE if node.edge else to_le(prompt[node.start : node.start + node.count])
        holds = index + 1 < len(states) and states[index + 1][0].edge
        nodes.append(
            NewNode(parent, own, node.start, slot.offset, len(data), node.grid, 0.1, "prompt", "", holds_edge=holds)
        )
        parent = parent if node.edge else node.key
    house.client.commit(namespace, nodes)


def at(offset: int, value: int) -> Change:
    def change(state: bytearray) -> bytearray:
        struct.pack_into("<I", state, offset, value & 0xFFFFFFFF)
        return state

    return change


def shorter(state: bytearray) -> bytearray:
    return state[:-1]


def zeros(state: bytearray) -> bytearray:
    return bytearray(len(state))


def check(house: House, change: Change, *, edge: bool = False) -> None:
    """A request gets what a cold run does, and so does the next, which reuses as much as before."""
    namespace, prompt = namespace_of(house), tokens(PROMPT, 5)
    cold = house.cold(prompt).timings.logits_sha256
    house.ask(prompt)
    before = house.ask(prompt)
    assert before.timings.cache_n > 64
    states = states_of(house, namespace, prompt)
    wrong = next(i for i, (node, _) in enumerate(states) if node.edge == edge and (edge or node.start >= 64))
    assert house.store.ask(Purge(3, all=True)).nodes
    put_back(house, namespace, prompt, states, wrong, change)
    found = house.ask(prompt)
    assert found.timings.logits_sha256 == cold
    time.sleep(0.1)
    counters = house.stats()["counters"]
    assert counters["damaged"] == 1
    again = house.ask(prompt)
    assert (again.timings.cache_n, again.timings.logits_sha256) == (before.timings.cache_n, cold)
    assert house.stats()["counters"]["damaged"] == 1  # it was dropped once
    assert house.store.ask(Verify(4)).damaged == 0
    other = tokens(PROMPT, 6)
    assert house.ask(other).timings.logits_sha256 == house.cold(other).timings.logits_sha256


WRONG: dict[str, Change] = {
    "short": shorter,
    "zeros": zeros,
    "largest": at(16, 0x7FFFFFFF),  # of the first cell's position
    "negative": at(16, -1),
    "third": at(40, 0x7FFFFFFF),
    "shifted": at(16, 3),
    "cells": at(12, 0x7FFFFFFF),
}


@pytest.mark.parametrize(
    ("arch", "wrong"), [*(("llama", wrong) for wrong in WRONG), *((arch, "largest") for arch in FULL[1:])]
)
def test_a_block_that_is_none(serve: Serve, arch: str, wrong: str) -> None:
    check(serve(arch, reuse="exact"), WRONG[wrong])


@pytest.mark.parametrize("wrong", ["largest", "short"])
def test_with_flash_attention(serve: Serve, wrong: str) -> None:
    check(serve("llama", reuse="exact", flash_attention=True), WRONG[wrong])


@pytest.mark.parametrize(
    ("arch", "wrong"),
    [
        *(("gemma3", wrong) for wrong in WRONG),
        ("gpt-oss", "largest"),
        ("granitehybrid", "zeros"),
        ("qwen35", "largest"),
    ],
)
def test_a_span_that_is_none(serve: Serve, arch: str, wrong: str) -> None:
    check(serve(arch, reuse="exact"), WRONG[wrong])


EDGES: dict[str, Change] = {"short": shorter, "zeros": zeros}


@pytest.mark.parametrize(
    ("arch", "wrong"),
    [
        *((arch, wrong) for arch in ("gemma3", "falcon-h1") for wrong in ("short", "zeros", "largest", "negative")),
        *((arch, "largest") for arch in ("gpt-oss", "mamba2", "lfm2", "qwen3next")),
    ],
)
def test_an_edge_that_is_none(serve: Serve, arch: str, wrong: str) -> None:
    house = serve(arch, reuse="exact")
    first = 8 if arch in WINDOW else 4
    changes = {**EDGES, "largest": at(first, 0x7FFFFFFF), "negative": at(first, -1)}
    check(house, changes[wrong], edge=True)


@pytest.mark.parametrize("wrong", ["short", "zeros"])
@pytest.mark.parametrize("arch", WHOLE)
def test_a_snapshot_that_is_none(serve: Serve, arch: str, wrong: str) -> None:
    check(serve(arch, reuse="exact"), EDGES[wrong], edge=True)


@pytest.mark.parametrize("arch", ["llama", "gemma3", "mamba2", "lfm2", "qwen35"])
def test_where_cells_stand_is_known(serve: Serve, arch: str) -> None:
    slicer = serve(arch).running.engine._restorer._slicer  # type: ignore[union-attr]
    assert (slicer.cells is None) == (arch == "mamba2")  # whose spans have nothing in them
    assert slicer.cells is None or slicer.cells.at == HEADER + 8
    assert not isinstance(slicer, EdgeSlicer) or slicer.edge_cells is not None


def test_what_llama_cpp_does_not_forget(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is not known how positions are stored, it is as good: alone, all is forgotten."""
    monkeypatch.setattr(CellTable, "of", lambda *_: None)
    check(serve("llama", reuse="exact"), WRONG["largest"])


def test_others_leave_what_llama_cpp_does_not_forget(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """And those that are in the same context come back."""
    monkeypatch.setattr(CellTable, "of", lambda *_: None)
    monkeypatch.setattr(Places, "cost", lambda _self, place, *_: place.first)  # all into the first
    house = serve("llama", parallel=2)
    running, namespace, prompt = house.running, namespace_of(house), tokens(PROMPT, 5)
    house.ask(prompt)
    states = states_of(house, namespace, prompt)
    assert house.store.ask(Purge(3, all=True)).nodes
    put_back(house, namespace, prompt, states, 2, WRONG["largest"])
    beside = running.start(tokens(100, 9), 1200)
    running.wait(lambda: running.of(beside, Delta))
    found = house.ask(prompt)
    assert running.finish(beside).reason == "length"
    assert found.timings.cache_n == 0
    assert running.engine.counters["set_aside"] == 1
    assert house.stats()["counters"]["damaged"] == 0  # with others there, that is not certain
    first, second = house.ask(prompt), house.ask(prompt)
    assert house.stats()["counters"]["damaged"] == 1
    assert (first.timings.cache_n, second.timings.cache_n) == (0, PROMPT - 1)
    assert first.timings.logits_sha256 == house.cold(prompt).timings.logits_sha256
