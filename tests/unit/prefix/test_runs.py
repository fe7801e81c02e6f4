"""Runs: byte for byte the state of all blocks; and each block comes out as it went in."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from homeprefixd.prefix.runs import Layout, Layouts, layout_of

TOKENS = 64
LAYERS, ROWS, K_WIDTH = 3, 24, 48


def state(start: int, tokens: int, seed: int = 0) -> bytes:
    """As llama.cpp writes it without flash attention: K has a row for each token, V a row for each dimension."""
    positions = range(start, start + tokens)
    out = [struct.pack("<IiII", 7, -1, 1, tokens)]
    out += [struct.pack("<iIi", position, 1, 0) for position in positions]
    out.append(struct.pack("<II", 1, LAYERS))
    for layer in range(LAYERS):
        out.append(struct.pack("<iQ", 1, K_WIDTH))
        out += [number(seed, layer, position).bytes(K_WIDTH) for position in positions]
    for layer in range(LAYERS):
        out.append(struct.pack("<iII", 1, 2, ROWS))
        rows = np.stack([np.frombuffer(number(seed, 100 + layer, p).bytes(2 * ROWS), np.uint16) for p in positions], 1)
        out.append(rows.tobytes())
    return b"".join(out)


def number(*of: int) -> np.random.Generator:
    return np.random.default_rng(of)


BLOCKS = [state(640 + TOKENS * i, TOKENS) for i in range(4)]
WHOLE = state(640, TOKENS * 4)


@pytest.fixture
def layout() -> Layout:
    found = layout_of(memoryview(BLOCKS[0]), TOKENS)
    assert found is not None
    return found


def filled(layout: Layout, order: list[int], blocks: list[bytes] = BLOCKS) -> memoryview:
    run = memoryview(bytearray(b"\xee" * layout.size(len(blocks))))
    for part in order:
        layout.put(memoryview(blocks[part]), run, part, len(blocks))
    return run


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 2, 0]], ids=str)
def test_a_run_is_what_one_state_of_all_would_be(layout: Layout, order: list[int]) -> None:
    run = filled(layout, order)
    assert run == WHOLE
    assert layout.is_in_order(run, 4, 640)


@pytest.mark.parametrize(("first", "count"), [(0, 1), (1, 1), (3, 1), (0, 2), (1, 3), (0, 4)])
def test_parts_come_out_as_they_went_in(layout: Layout, first: int, count: int) -> None:
    out = memoryview(bytearray(layout.size(count)))
    layout.take(memoryview(WHOLE), first, count, 4, out)
    assert out == state(640 + TOKENS * first, TOKENS * count)


def test_the_layout_is_the_same_read_off_a_run(layout: Layout) -> None:
    of_run = layout_of(memoryview(WHOLE), TOKENS, 4)
    assert of_run is not None
    assert [of_run.size(parts) for parts in (1, 2, 4)] == [layout.size(parts) for parts in (1, 2, 4)]
    assert len(BLOCKS[0]) == layout.size(1)
    out = memoryview(bytearray(layout.size(1)))
    of_run.take(memoryview(WHOLE), 2, 1, 4, out)
    assert out == BLOCKS[2]


@pytest.mark.parametrize("blocks", [[0, 2], [1, 0], [0, 0], [1, 2]], ids=str)
def test_parts_that_are_not_at_their_places_are_seen(layout: Layout, blocks: list[int]) -> None:
    run = filled(layout, [0, 1], [BLOCKS[number] for number in blocks])
    assert not layout.is_in_order(run, 2, 640)


def test_positions_in_any_order_within_a_part_are_in_order(layout: Layout) -> None:
    run = filled(layout, [0, 1], BLOCKS[:2])
    cells = np.ndarray((2 * TOKENS, 3), np.int32, run, 16)
    cells[:TOKENS] = cells[:TOKENS][::-1].copy()
    assert layout.is_in_order(run, 2, 640)
    cells[[0, TOKENS]] = cells[[TOKENS, 0]]  # over the border of two
    assert not layout.is_in_order(run, 2, 640)


def test_states_of_other_sizes_are_refused(layout: Layout) -> None:
    run = memoryview(bytearray(layout.size(2)))
    with pytest.raises(ValueError, match="bytes for 1 and 2 parts"):
        layout.put(memoryview(BLOCKS[0])[:-2], run, 0, 2)
    with pytest.raises(ValueError, match="bytes for 1 and 3 parts"):
        layout.put(memoryview(BLOCKS[0]), run, 0, 3)
    with pytest.raises(ValueError, match="part 0 of 1 to 2 of 2"):
        layout.put(memoryview(BLOCKS[0]), run, 2, 2)


def test_layouts_are_read_off_the_first_state_that_is_seen() -> None:
    namespace, edged = b"n" * 32, b"e" * 32
    layouts = Layouts({namespace: {}, edged: {"edges": {"window": 0}}})
    assert layouts.get(namespace) is None
    assert layouts.learn(namespace, memoryview(WHOLE), 4) is layouts.get(namespace) is not None
    assert layouts.learn(namespace, memoryview(b"other")) is layouts.get(namespace)
    assert layouts.learn(edged, memoryview(WHOLE), 4) is None  # what has edges is never put together
    assert layouts.learn(b"x" * 32, memoryview(b"no state")) is None
