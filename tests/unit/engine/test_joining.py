"""Joining: what comes out is, byte for byte, the state of all blocks, wherever the blocks lie."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import pytest

from homeprefixd.engine.joining import Joiner, JoinError, joiner_of

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


def joiner() -> Joiner:
    found = joiner_of(memoryview(state(0, TOKENS)), TOKENS)
    assert found is not None
    return found


def in_slots(blocks: Sequence[bytes], order: Sequence[int], slot: int, offset: int = 0) -> list[memoryview]:
    """The blocks in one buffer, in any order, as an arena has them; what lies between them is not theirs."""
    buffer = np.full(offset + slot * len(blocks), 0xEE, np.uint8)
    views = []
    for block, place in zip(blocks, order, strict=True):
        at = offset + place * slot
        buffer[at : at + len(block)] = np.frombuffer(block, np.uint8)
        views.append(buffer.data[at : at + len(block)])
    return views


BLOCKS = [state(640 + TOKENS * i, TOKENS) for i in range(4)]
SLOT = -(-len(BLOCKS[0]) // 4096) * 4096


@pytest.mark.parametrize(
    "views",
    [
        in_slots(BLOCKS, [0, 1, 2, 3], SLOT),
        in_slots(BLOCKS, [2, 0, 3, 1], SLOT),
        in_slots(BLOCKS, [3, 2, 1, 0], SLOT, offset=4096),
        in_slots(BLOCKS, [1, 3, 0, 2], SLOT + 36),  # not all on one grid
        [memoryview(block) for block in BLOCKS],
    ],
    ids=["in order", "shuffled", "backwards", "off the grid", "apart"],
)
def test_joined_is_what_one_state_of_all_would_be(views: list[memoryview]) -> None:
    whole = state(640, TOKENS * len(views))
    out = np.full(len(whole) + 100, 0xAA, np.uint8)
    assert joiner().join(views, [TOKENS] * len(views), 640, out) == len(whole)
    assert out[: len(whole)].tobytes() == whole
    assert (out[len(whole) :] == 0xAA).all()


def test_blocks_of_other_lengths_join_too() -> None:
    views = [memoryview(state(0, 64)), memoryview(state(64, 20)), memoryview(state(84, 64))]
    whole = state(0, 148)
    out = np.empty(len(whole), np.uint8)
    assert joiner().join(views, [64, 20, 64], 0, out) == len(whole)
    assert out.tobytes() == whole


@pytest.mark.parametrize("start", [0, 64])
def test_blocks_that_do_not_follow_each_other_are_refused(start: int) -> None:
    views = in_slots([state(0, 64), state(128, 64)], [0, 1], SLOT)
    with pytest.raises(JoinError, match="positions are not"):
        joiner().join(views, [64, 64], start, np.empty(2 * SLOT, np.uint8))


def test_a_block_of_another_size_is_refused() -> None:
    with pytest.raises(JoinError, match="bytes for"):
        joiner().join([memoryview(BLOCKS[0]), memoryview(BLOCKS[1])[:-4]], [64, 64], 640, np.empty(2 * SLOT, np.uint8))
