"""Runs in the hot tier: saved, written, evicted and loaded ahead as parts; each block is what was saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from prefix_testing import MIB, SHAPE, SHAPED, House, payload_of

from homeprefixd.frames.store import NewNode
from homeprefixd.prefix.blocks import BLOCK_TOKENS, block_key, to_le
from homeprefixd.prefix.hot import HotNode
from homeprefixd.prefix.preloading import Preloader
from homeprefixd.prefix.runs import RUN, longest_run

BLOCKS = 20
PROMPT = list(range(BLOCKS * BLOCK_TOKENS))


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path / "cache")


def hot_nodes(house: House, keys: list[bytes]) -> list[HotNode]:
    return [house.cache.hot.by_key[key] for key in keys]


def expected(keys: list[bytes], tier: str) -> list[tuple[str, bytes]]:
    return [(tier, payload_of(key, SHAPED)) for key in keys]


def test_blocks_of_a_run_are_written_and_read_by_themselves(house: House) -> None:
    keys = house.save(PROMPT, SHAPED)
    nodes = hot_nodes(house, keys)
    assert [(node.part, node.parts) for node in nodes] == [(i % RUN, RUN if i < RUN else 4) for i in range(BLOCKS)]
    assert len({node.extent for node in nodes}) == 2
    assert house.restore(PROMPT) == expected(keys, "hot")
    house.cache.check_integrity()
    house.cache.write(everything=True)
    house.reopen()
    assert house.restore(PROMPT) == expected(keys, "warm")
    house.cache.check_integrity()


def test_what_is_loaded_ahead_lies_in_runs_but_for_the_first(house: House) -> None:
    keys = house.save(PROMPT, SHAPED)
    house.reopen()
    loader = Preloader(house.cache, 4 * MIB)
    loader.start()
    loader._thread.join(10)
    nodes = hot_nodes(house, keys)
    assert [(node.part, node.parts) for node in nodes] == [
        (0, 1),  # from which the layout is read
        *((part, RUN) for part in range(RUN)),
        *((part, BLOCKS - RUN - 1) for part in range(BLOCKS - RUN - 1)),
    ]
    house.cache.check_integrity()
    assert house.restore(PROMPT) == expected(keys, "hot")


def test_what_a_request_waits_for_lies_alone(house: House) -> None:
    keys = house.save(PROMPT, SHAPED)
    house.reopen()
    assert house.restore(PROMPT) == expected(keys, "warm")
    assert {node.parts for node in hot_nodes(house, keys)} == {1}
    house.cache.check_integrity()


def test_a_run_leaves_memory_with_its_last_block(house: House) -> None:
    keys = house.save(PROMPT[: 4 * BLOCK_TOKENS], SHAPED)
    house.cache.write(everything=True)
    used = house.cache.arena.used
    for key in reversed(keys[1:]):
        house.cache.forget_hot(house.cache.hot.by_key[key])
        assert house.cache.arena.used == used
        house.cache.check_integrity()
    assert house.restore(PROMPT[:BLOCK_TOKENS]) == expected(keys[:1], "hot")
    house.cache.forget_hot(house.cache.hot.by_key[keys[0]])
    assert house.cache.arena.used == 0


def test_room_is_made_run_by_run(tmp_path: Path) -> None:
    house = House(tmp_path / "cache", hot=1 * MIB)
    room = longest_run(SHAPED, 1 * MIB)
    for number in range(30):
        prompt = [1000 * number + i for i in range(room * BLOCK_TOKENS)]
        keys = house.save(prompt, SHAPED)
        assert len(keys) == room
        house.cache.write(everything=True)
        house.cache.check_integrity()
    assert house.cache.arena.used <= 1 * MIB
    assert house.restore(prompt) == expected(keys, "hot")


def test_memory_in_small_pieces_is_not_emptied_for_a_run(make: Callable[..., House]) -> None:
    """Chats that grew by turns lie one among the other: almost all of them would have to go."""
    house = make(hot=240 * 4096)
    chats = [[1000 * number + at for at in range(20 * BLOCK_TOKENS)] for number in range(20)]
    for blocks in range(1, 21):
        for chat in chats:
            house.save(chat[: blocks * BLOCK_TOKENS], skip=blocks - 1)
            house.now += 5.0
        house.cache.write(everything=True)
    for parts in (4, 16):
        before = house.cache.counters.evicted_hot
        assert house.session.reserve([parts * 4096], runs=True) == []
        assert parts <= house.cache.counters.evicted_hot - before <= 2 * parts  # each of them 3,000 bytes
    assert house.session.reserve([4096] * 8)
    house.cache.check_integrity()


Wrong = Callable[[NewNode], NewNode]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda node: msgspec.structs.replace(node, part=4),
        lambda node: msgspec.structs.replace(node, part=-1),
        lambda node: msgspec.structs.replace(node, parts=3),
        lambda node: msgspec.structs.replace(node, parts=RUN + 1),
        lambda node: msgspec.structs.replace(node, size=SHAPED - 4),
        lambda node: msgspec.structs.replace(node, tokens=node.tokens[:-4]),
    ],
    ids=["part", "negative part", "fewer parts", "too many parts", "size", "a tail"],
)
def test_what_is_no_part_of_a_run_is_refused(house: House, wrong: Wrong) -> None:
    size = SHAPE.size(4)
    [offset] = house.session.reserve([size])
    tokens = to_le(PROMPT[:BLOCK_TOKENS])
    state = memoryview(payload_of(block_key(house.namespace, tokens), SHAPED))
    for part in range(4):
        SHAPE.put(state, house.cache.arena.view(offset, size), part, 4)
    node = NewNode(house.namespace, tokens, 0, offset, SHAPED, True, 0.2, "prompt", "", part=0, parts=4)
    house.session.commit(house.namespace, [wrong(node)])
    assert house.cache.counters.refused_nodes == 1
    assert house.cache.arena.used == 0
    house.cache.check_integrity()


def test_a_run_takes_no_large_part_of_memory() -> None:
    assert longest_run(1 << 20, 1 << 30) == RUN
    assert longest_run(8 << 20, 1 << 30) == 6
    assert longest_run(1 << 20, 64 << 20) == 4
    assert longest_run(64 << 20, 1 << 30) == 1
    assert longest_run(1 << 20, 0) == 1
