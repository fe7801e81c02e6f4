"""After a start, what was used last comes back into RAM, and nothing is disturbed by it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from prefix_testing import MIB, House, Store, Worker, payload_of

from homeprefixd.prefix import preloading
from homeprefixd.prefix.blocks import BLOCK_TOKENS
from homeprefixd.prefix.codec import Decoder
from homeprefixd.prefix.loading import Loading
from homeprefixd.prefix.preloading import Preloader
from homeprefixd.prefix.tree import Placed

OLD = [*range(256)]
NEW = [*range(128), *range(9000, 9100)]  # two blocks shared, one and a tail of its own
SIZE = 100_000


def preload(house: House, budget: int) -> None:
    loader = Preloader(house.cache, budget)
    loader.start()
    loader._thread.join(10)
    assert not loader._thread.is_alive()
    house.cache.check_integrity()


def stored(house: House) -> list[bytes]:
    old = house.save(OLD, SIZE)
    house.now += 100
    new = house.save(NEW, SIZE)
    house.cache.write(everything=True)
    house.reopen()
    return [*old, *new]


def test_everything_comes_back_where_there_is_room(house: House) -> None:
    keys = stored(house)
    preload(house, 100 * MIB)
    assert set(house.cache.hot.by_key) == set(keys)
    before = house.cache.counters.loaded_nodes
    assert [tier for tier, _ in house.restore(OLD)] == ["hot"] * 4
    assert [state for _, state in house.restore(NEW)] == [payload_of(k, SIZE)[:SIZE] for k in keys[4:]]
    assert house.cache.counters.loaded_nodes == before  # nothing was read again
    assert house.cache.counters.lookups == 2  # it was not taken for use


def test_what_was_used_last_comes_first(house: House) -> None:
    keys = stored(house)
    preload(house, 4 * SIZE)
    assert set(house.cache.hot.by_key) == set(keys[4:])
    house.reopen()
    assert len(house.restore(OLD)) == 4
    house.cache.write(everything=True)
    house.reopen()
    preload(house, 4 * SIZE)
    assert set(house.cache.hot.by_key) == set(keys[:4])


def test_at_most_half_of_the_hot_tier_is_filled(house: House) -> None:
    house.hot = 6 * 102_400
    stored(house)
    preload(house, 100 * MIB)
    assert len(house.cache.hot) == 3
    assert house.cache.counters.evicted_hot == 0


def test_small_blocks_do_not_fill_the_index(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preloading, "MAX_NODES", 3)
    stored(house)
    preload(house, 100 * MIB)
    assert 3 <= len(house.cache.hot) <= 4  # whole paths


def test_none_is_none(house: House) -> None:
    stored(house)
    loader = Preloader(house.cache, 0)
    loader.start()
    loader.stop()
    assert len(house.cache.hot) == 0


def test_it_pauses_while_somebody_asks(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preloading, "PAUSE", 0.3)
    stored(house)
    original = Loading.preload
    asked = threading.Event()
    loaded = threading.Event()

    def load(self: Loading, nodes: Sequence[Placed], decoder: Decoder) -> int:
        done = original(self, nodes, decoder)
        if not asked.is_set():
            house.restore(NEW[:BLOCK_TOKENS])
            asked.set()
        else:
            loaded.set()
        return done

    monkeypatch.setattr(Loading, "preload", load)
    loader = Preloader(house.cache, 100 * MIB)
    loader.start()
    assert asked.wait(5)
    assert not loaded.wait(0.15)
    assert loaded.wait(5)
    loader._thread.join(5)
    assert len(house.cache.hot) == 6


def test_a_damaged_block_ends_it_and_is_dropped(house: House) -> None:
    keys = stored(house)
    disk = house.cache.disk
    assert disk is not None
    with disk._env.begin(write=True) as txn:
        payloads = disk._tables[b"payloads"]
        cursor = txn.cursor(payloads)
        assert cursor.set_range(keys[4])
        value = bytearray(cursor.value())
        value[-1] ^= 1
        txn.put(cursor.key(), bytes(value), db=payloads)
    preload(house, 100 * MIB)
    assert house.cache.counters.damaged == 1
    assert not house.cache.hot.by_key.keys() & {keys[4], keys[6], keys[7]}


def test_a_real_store_answers_from_memory_after_a_restart(
    tmp_path: Path, start_store: Callable[..., Store], start_worker: Callable[[Store], Worker]
) -> None:
    store = start_store(tmp_path)
    keys = start_worker(store).save(OLD, SIZE)
    assert store.flush() == 0
    store.stop()
    for budget, tier in ((0, "warm"), (100 * MIB, "hot")):
        again = start_store(tmp_path, "--preload", str(budget))
        deadline = time.monotonic() + 10
        while budget and again.stats()["hot"]["nodes"] < 4:
            assert time.monotonic() < deadline
        assert start_worker(again).restore(OLD) == ([tier] * 4, keys)
        status, said = again.stop()
        assert status == 0
        assert ("4 blocks that were used last are in memory again" in said) == bool(budget)
