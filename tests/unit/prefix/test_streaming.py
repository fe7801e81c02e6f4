"""A prompt that RAM cannot hold at once comes all the same: in order, what was taken making room for what follows."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefix_testing import DESCRIPTION, MIB, House, Store, Worker, payload_of

from homeprefixd.prefix.blocks import to_le
from homeprefixd.prefix.client import Lookup
from homeprefixd.prefix.loading import NoRoomYetError

BLOCKS, SIZE = 40, 200_000  # 8 MB of state
PROMPT = list(range(64 * BLOCKS))


def take_all(lookup: Lookup) -> int:
    """As the engine does: how many blocks came, each seen to be what was saved."""
    plan = lookup.wait_plan(10)
    assert plan is not None
    for index, node in enumerate(plan):
        block = lookup.wait_block(index, 10)
        if block is None:
            return index
        assert bytes(block) == payload_of(node.key, node.size)[: node.size]
        del block
        lookup.taken(index + 1)
    return len(plan)


@pytest.fixture
def stored(
    tmp_path: Path, start_store: Callable[..., Store], start_worker: Callable[[Store], Worker]
) -> tuple[Store, Worker]:
    """A store with 4 MiB of RAM, and the prompt on its disk."""
    store = start_store(tmp_path, hot=4 * MIB, warm=64 * MIB)
    store.greet()
    worker = start_worker(store)
    for end in range(1, BLOCKS + 1):  # as what is not written yet must not make room for what follows it
        worker.save(PROMPT[: 64 * end], SIZE, skip=end - 1)
        assert worker.client.open_namespace(DESCRIPTION, timeout=10) is not None  # so the commit has come
        assert store.flush() == 0
    return store, worker


def figures_at_rest(store: Store) -> Any:
    """Once nothing is leased any more."""
    deadline = time.monotonic() + 10
    while (figures := store.stats())["hot"]["leased"]:
        assert time.monotonic() < deadline, figures["hot"]
        time.sleep(0.01)
    return figures


def test_it_comes_whole(stored: tuple[Store, Worker]) -> None:
    store, worker = stored
    for _ in range(3):  # the first time its end is in RAM, then what is left of the time before
        lookup = worker.client.lookup(worker.namespace, to_le(PROMPT), 1 << 30, exact=False)
        assert take_all(lookup) == BLOCKS
        lookup.release()
    assert figures_at_rest(store)["counters"]["lost"] == 0


def test_two_at_once_and_others_that_leave(stored: tuple[Store, Worker]) -> None:
    store, worker = stored
    came: list[int] = []

    def one() -> None:
        lookup = worker.client.lookup(worker.namespace, to_le(PROMPT), 1 << 30, exact=False)
        came.append(take_all(lookup))
        lookup.release()

    for _ in range(4):  # which look it up, and take nothing
        left = worker.client.lookup(worker.namespace, to_le(PROMPT), 1 << 30, exact=False)
        assert left.wait_block(0, 10) is not None
        left.release()
    threads = [threading.Thread(target=one) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert came == [BLOCKS] * 2
    figures_at_rest(store)


@pytest.mark.parametrize("blocks", [14, 30], ids=["each would fit alone", "none would fit"])
def test_many_at_once_share_what_room_there_is(
    tmp_path: Path, start_store: Callable[..., Store], start_worker: Callable[[Store], Worker], blocks: int
) -> None:
    """Each comes whole, whatever the others hold; those that wait for their turn hold something, too."""
    store = start_store(tmp_path, hot=4 * MIB, warm=128 * MIB)
    store.greet()
    worker = start_worker(store)
    prompts = [[number, *range(64 * blocks - 1)] for number in range(5)]
    for prompt in prompts:
        for end in range(7, blocks + 7, 7):
            worker.save(prompt[: 64 * end], SIZE, skip=end - 7)
            assert worker.client.open_namespace(DESCRIPTION, timeout=10) is not None  # so the commit has come
            assert store.flush() == 0
    turns = threading.Semaphore(2)
    came: list[int] = []

    def one(prompt: list[int]) -> None:
        for _ in range(4):
            lookup = worker.client.lookup(worker.namespace, to_le(prompt), 1 << 30, exact=False)
            with turns:
                came.append(take_all(lookup))
            lookup.release()

    threads = [threading.Thread(target=one, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert came == [blocks] * 20
    assert figures_at_rest(store)["counters"]["lost"] == 0


def test_what_fits_is_not_streamed(make: Callable[..., House]) -> None:
    house = make(hot=4 * MIB)
    house.save(PROMPT[: 64 * 12], SIZE)
    house.cache.write(everything=True)
    for _ in ("hot", "warm"):
        lease = house.session.lookup(house.namespace, to_le(PROMPT), limit=1 << 30)
        assert not lease.streamed
        house.session.release(lease)
        house.reopen()


def test_what_was_not_taken_stays_and_bounds_what_comes(make: Callable[..., House]) -> None:
    house = make(hot=4 * MIB)
    for end in range(8, BLOCKS + 1, 8):
        house.save(PROMPT[: 64 * end], SIZE, skip=end - 8)
        house.cache.write(everything=True)
    lease = house.session.lookup(house.namespace, to_le(PROMPT), limit=1 << 30)
    assert lease.streamed
    assert lease.plan[-1].tier == "hot"
    assert lease.plan[-1].offset == -1  # it may go, to make room for the beginning
    index = 0
    with contextlib.suppress(NoRoomYetError):
        while index < BLOCKS:
            house.cache.load(lease, index, house.decoder)
            index += 1
    assert 2 * MIB - 2 * SIZE < index * SIZE < 2 * MIB
    first = lease.held[0]
    assert first.leases == 1
    house.cache.taken(lease, 4)
    assert first.leases == 0
    house.cache.load(lease, index, house.decoder)
    house.session.release(lease)
    house.cache.check_integrity()
