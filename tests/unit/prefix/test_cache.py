"""cache.py: what is published, where it lies, who keeps it, who goes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lmdb
import pytest
from prefix_testing import DESCRIPTION, MIB, House, payload_of

from homeprefixd.errors import NotFoundError, RequestError, StoreError
from homeprefixd.frames.store import NewNode
from homeprefixd.prefix import listing
from homeprefixd.prefix.blocks import BLOCK_TOKENS, block_key, to_le
from homeprefixd.prefix.cache import BlockLostError
from homeprefixd.prefix.codec import PIECE
from homeprefixd.prefix.disk import DiskFullError
from homeprefixd.prefix.purge import purge
from homeprefixd.prefix.tree import Placed

PROMPT = list(range(1000, 1000 + 3 * BLOCK_TOKENS + 10))
OTHER = PROMPT[: 2 * BLOCK_TOKENS] + list(range(9000, 9000 + BLOCK_TOKENS + 5))


def tiers(house: House, tokens: list[int]) -> list[str]:
    return [tier for tier, _state in house.restore(tokens)]


def test_saved_blocks_are_hot_at_once_and_warm_after_a_restart(house: House) -> None:
    keys = house.save(PROMPT, size=PIECE + 100)
    expected = [payload_of(key, PIECE + 100)[: PIECE + 100] for key in keys]
    assert house.restore(PROMPT) == [("hot", state) for state in expected]
    house.cache.write(everything=True)
    house.reopen()
    assert house.restore(PROMPT) == [("warm", state) for state in expected]
    assert house.restore(PROMPT) == [("hot", state) for state in expected]


def test_matches_to_the_token(house: House) -> None:
    house.save(PROMPT)
    assert house.known(PROMPT) == len(PROMPT)
    assert house.known(PROMPT, limit=len(PROMPT) - 1) == len(PROMPT) - 1
    assert house.known(OTHER) == 2 * BLOCK_TOKENS
    assert house.known([*PROMPT[:100], 1, 2, 3]) == 100
    assert house.known([1, *PROMPT]) == 0
    house.reopen()
    assert house.known([*PROMPT[:100], 1, 2, 3]) == 100


def test_exact_takes_only_whole_grid_nodes(house: House) -> None:
    house.save(PROMPT[:128], grid=True)
    house.save(PROMPT, grid=False, skip=2)
    assert house.known(PROMPT) == len(PROMPT)
    assert house.known(PROMPT, exact=True) == 128
    assert house.known(PROMPT[:100], exact=True) == 64


def test_a_grid_node_replaces_one_that_is_not(house: House) -> None:
    house.save(PROMPT, grid=False)
    house.cache.write(everything=True)
    house.save(PROMPT, grid=True, mark=b"better")
    better = house.restore(PROMPT, exact=True)
    assert len(better) == 4
    house.save(PROMPT, grid=False, mark=b"worse")
    assert house.restore(PROMPT) == better
    house.cache.write(everything=True)
    house.reopen()
    assert [state for _tier, state in house.restore(PROMPT, exact=True)] == [state for _tier, state in better]
    assert house.cache.disk is not None
    assert house.cache.disk.nodes() == 4


def test_blocks_that_cannot_be_reached_are_refused(house: House) -> None:
    def commit(parent: bytes, tokens: bytes, start: int, size: int = 100, namespace: bytes | None = None) -> int:
        [offset] = house.session.reserve([100])
        node = NewNode(parent, tokens, start, offset, size, True, 0.1, "prompt", "")
        house.session.commit(namespace or house.namespace, [node])
        return len(house.cache.hot)

    block = to_le(range(64))
    assert commit(b"x" * 32, block, 64) == 0  # no such parent
    assert commit(house.namespace, block, 64) == 0  # does not start where its parent ends
    assert commit(b"n" * 32, block, 0, namespace=b"n" * 32) == 0  # no such namespace
    assert commit(house.namespace, to_le(range(65)), 0) == 0  # longer than a block
    assert commit(house.namespace, b"", 0) == 0
    assert commit(house.namespace, b"123", 0) == 0
    assert commit(house.namespace, block, 0, size=101) == 0  # longer than its slot
    assert house.cache.counters.refused_nodes == 7
    assert house.cache.arena.used == 0
    assert commit(house.namespace, to_le(range(10)), 0) == 1
    assert commit(block_key(house.namespace, to_le(range(10))), block, 10) == 1  # below a tail
    [whole] = house.save(list(range(500, 564)))
    assert commit(whole, block, 128) == 2  # not where its parent ends
    assert commit(whole, block, 64) == 3


def test_a_longer_tail_supersedes_a_shorter_one_in_every_tier(house: House) -> None:
    house.save(PROMPT[:70])
    house.cache.write(everything=True)
    house.save(PROMPT[:80])
    house.save(PROMPT[:75])  # covered already
    assert len(house.cache.hot) == 2
    house.cache.write(everything=True)
    assert house.cache.disk is not None
    assert house.cache.disk.nodes() == 2
    assert house.cache.counters.superseded == 1
    assert house.known(PROMPT[:80]) == 80


def test_growing_tails_are_not_written(house: House) -> None:
    house.save(PROMPT[:70])
    house.now += 0.5
    house.cache.write()
    house.save(PROMPT[:71])
    house.now += 1.9
    house.cache.write()
    assert house.cache.counters.written_nodes == 1
    house.now += 0.2
    house.cache.write()
    assert house.cache.counters.written_nodes == 2
    assert house.cache.counters.superseded == 1


def test_the_queue_is_bounded_and_lets_tails_go_first(make: Callable[..., House]) -> None:
    house = make(write_queue=10_000)
    house.save([7] * 70, size=3000)
    house.save(OTHER, size=3000)
    assert house.cache.queue.bytes == 9_000
    without = [hot for hot in house.cache.hot.by_key.values() if house.cache.queue.lacks_room_for(hot)]
    assert len(without) == 3  # a tail that waited, then what came when only blocks waited
    assert all(hot.node.length == BLOCK_TOKENS for hot in house.cache.queue)
    house.cache.check_integrity()


def test_what_had_no_room_in_the_queue_is_written_later(make: Callable[..., House]) -> None:
    house = make(write_queue=10_000)
    house.save([7] * 70, size=3000)
    house.save(OTHER, size=3000)
    for _ in range(4):
        house.now += 40.0
        house.cache.write()
    assert house.cache.counters.dropped_nodes == 0
    assert all(hot.warm for hot in house.cache.hot.by_key.values())
    house.reopen()
    assert house.known(OTHER) == len(OTHER)
    assert house.known([7] * 70) == 70


def test_what_had_no_room_in_the_queue_and_leaves_ram_is_dropped(make: Callable[..., House]) -> None:
    house = make(hot=5 * 4096, write_queue=4096)
    house.save(PROMPT)
    house.now += 100.0
    house.save(OTHER)
    house.cache.check_integrity()
    assert house.cache.counters.dropped_nodes > 0


def test_hot_evicts_the_least_used_leaf_first(make: Callable[..., House]) -> None:
    house = make(hot=10 * 4096)
    house.save(PROMPT)
    house.save([1, *PROMPT[:127]])
    house.cache.write(everything=True)
    house.restore(PROMPT)
    house.save([2, *PROMPT])
    house.cache.write(everything=True)
    house.save([3])
    assert tiers(house, PROMPT) == ["hot"] * 4
    assert tiers(house, [1, *PROMPT[:127]])[0] == "hot"
    assert house.cache.counters.evicted_hot >= 1
    house.cache.check_integrity()


def test_a_parent_stays_while_a_child_is_hot(make: Callable[..., House]) -> None:
    house = make(hot=4 * 4096)
    house.save(PROMPT[:64])
    house.save([1])
    house.save(PROMPT[:192], skip=1)  # used later than its parent
    house.cache.write(everything=True)
    house.save([2])
    assert house.cache.counters.evicted_hot == 1
    assert tiers(house, PROMPT[:192]) == ["hot"] * 3
    assert tiers(house, [1]) == ["warm"]


def test_a_leased_slot_stays(make: Callable[..., House]) -> None:
    house = make(hot=4 * 4096)
    keys = house.save(PROMPT)
    house.cache.write(everything=True)
    lease = house.session.lookup(house.namespace, to_le(PROMPT), limit=1000)
    assert house.session.reserve([4096]) == []
    assert house.known(PROMPT) == len(PROMPT)
    assert len(house.cache.hot) == 4
    purge(house.cache, everything=True, now=house.now)
    assert house.known(PROMPT) == 0
    for index, key in enumerate(keys):
        assert house.block(lease, index) == payload_of(key, 3000)[:3000]
    house.cache.check_integrity()
    house.session.release(lease)
    assert house.cache.arena.used == 0
    assert len(house.session.reserve([4096] * 5)) == 4


def test_new_blocks_get_room_before_unwritten_ones_that_are_not_used(make: Callable[..., House]) -> None:
    house = make(hot=4 * 4096)
    house.save(PROMPT)
    assert house.session.reserve([4096]) == []  # it might continue just these
    assert house.cache.counters.dropped_nodes == 0
    assert house.known(PROMPT) > 3 * BLOCK_TOKENS
    house.now += 100.0
    assert len(house.session.reserve([4096] * 2)) == 2
    assert house.cache.counters.dropped_nodes == 2
    assert house.known(PROMPT) == 2 * BLOCK_TOKENS
    assert house.session.reserve([4 * 4096 + 1]) == []


@pytest.mark.parametrize("queue", [4 * 4096, 64 * MIB])
def test_a_prompt_larger_than_ram_is_kept_whole(make: Callable[..., House], queue: int) -> None:
    """While it is computed, what is on disk already makes room for what comes."""
    house = make(hot=8 * 4096, write_queue=queue)
    tokens = list(range(2000, 2000 + 20 * BLOCK_TOKENS))
    for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
        house.save(tokens[:end], skip=end // BLOCK_TOKENS - 1)
        house.now += 1.0
        if end % (2 * BLOCK_TOKENS) == 0:  # the writer is never quite done
            house.cache.write(everything=True)
        house.cache.check_integrity()
    assert house.cache.counters.dropped_nodes == house.cache.counters.refused_nodes == 0
    assert house.known(tokens) == len(tokens)
    lease = house.cache.lookup(house.namespace, to_le(tokens), limit=len(tokens), exact=False, load=False)
    assert 6 <= [node.tier for node in lease.plan].count("hot") <= 8


@pytest.mark.parametrize("settings", [{"warm": 0}, {"daily_writes": 1}], ids=["no disk", "nothing may be written"])
def test_of_a_prompt_larger_than_ram_the_beginning_stays(make: Callable[..., House], settings: dict[str, int]) -> None:
    house = make(hot=8 * 4096, write_queue=4 * 4096, **settings)
    house.save([1] * 200)
    house.cache.write(everything=True)
    house.now += 100.0
    tokens = list(range(2000, 2000 + 20 * BLOCK_TOKENS))
    saved = 0
    for end in range(4 * BLOCK_TOKENS, len(tokens) + 1, 4 * BLOCK_TOKENS):
        saved = len(house.save(tokens[:end], skip=saved))
        house.now += 1.0
        house.cache.write()
        house.cache.check_integrity()
    assert house.cache.counters.refused_nodes == 0
    assert house.known(tokens) >= 8 * BLOCK_TOKENS


def test_what_a_client_held_is_free_when_it_is_gone(house: House) -> None:
    house.save(PROMPT)
    client = house.cache.session()
    client.lookup(house.namespace, to_le(PROMPT), limit=1000)
    client.reserve([5000, 6000])
    house.cache.check_integrity()
    client.close()
    house.cache.check_integrity()
    assert house.cache.arena.used == 4 * 4096
    assert all(hot.leases == 0 for hot in house.cache.hot.by_key.values())


def test_warm_keeps_its_budget_leaf_first(make: Callable[..., House]) -> None:
    house = make(warm=4 * MIB, hot=32 * MIB)
    assert house.cache.disk is not None
    for number in range(12):
        house.save([number, *PROMPT[:130]], size=400_000)
        house.cache.write(everything=True)
        house.restore([0, *PROMPT[:130]])
        house.cache.check_integrity()
        assert house.cache.disk.used() <= 4 * MIB
    assert house.cache.counters.evicted_warm > 0
    house.cache.write(everything=True)
    assert house.cache.disk.file_bytes() < 1.5 * 4 * MIB
    house.reopen()
    assert tiers(house, [0, *PROMPT[:130]]) == ["warm"] * 3  # the one in use is still there
    assert tiers(house, [11, *PROMPT[:130]]) == ["warm"] * 3
    assert tiers(house, [1, *PROMPT[:130]]) == []


def test_what_is_used_while_room_is_made_stays(make: Callable[..., House]) -> None:
    house = make(warm=4 * MIB, hot=32 * MIB)
    house.save([0] * 10, size=400_000)
    house.cache.write(everything=True)
    disk = house.cache.disk
    assert disk is not None
    really = disk.make_room

    def make_room(*arguments: Any) -> None:
        house.restore([0] * 10)
        really(*arguments)

    disk.make_room = make_room  # type: ignore[method-assign]
    for number in range(1, 30):
        house.save([number] * 10, size=400_000)
        house.cache.write(everything=True)
    assert house.cache.counters.evicted_warm > 0
    house.reopen()
    assert tiers(house, [0] * 10) == ["warm"]


def test_a_block_whose_way_from_the_root_is_evicted_goes_too(make: Callable[..., House]) -> None:
    house = make(warm=4 * MIB, hot=32 * MIB, write_queue=1)
    house.save(PROMPT[:64], size=400_000)
    house.reopen()
    house.save([9])
    house.save(PROMPT[:128], 400_000, skip=1)  # the queue is full: it is hot only, and its parent warm only
    assert len(house.cache.hot) == 2
    for number in range(30):
        house.save([number] * 64, size=400_000)
        house.cache.write(everything=True)
        house.cache.check_integrity()
    assert house.known(PROMPT[:128]) == 0
    assert house.cache.hot.table.has_children(house.namespace)


def test_a_prompt_larger_than_the_budget_is_kept_as_far_as_it_goes(make: Callable[..., House]) -> None:
    house = make(warm=4 * MIB, hot=64 * MIB)
    long = list(range(40 * BLOCK_TOKENS))
    house.save(long, size=400_000)
    house.cache.write(everything=True)
    assert len(house.cache.queue) == 0
    house.reopen()
    found = house.known(long)
    assert 10 * BLOCK_TOKENS < found < 40 * BLOCK_TOKENS


def test_nothing_waits_for_a_write(house: House) -> None:
    """Everything that a request needs of the cache, while the disk hangs."""
    house.save(PROMPT)
    disk = house.cache.disk
    assert disk is not None
    hangs, goes_on = threading.Event(), threading.Event()
    really = disk.store

    def store(*arguments: Any) -> Any:
        hangs.set()
        assert goes_on.wait(30)
        return really(*arguments)

    disk.store = store  # type: ignore[method-assign]
    writer = threading.Thread(target=lambda: house.cache.write(everything=True))
    writer.start()
    assert hangs.wait(30)
    done = threading.Event()

    def request() -> None:
        house.restore(PROMPT)
        house.save(OTHER)
        house.restore(OTHER)
        listing.stats(house.cache, store_id="", uptime=0)
        house.cache.check_integrity()
        done.set()

    threading.Thread(target=request, daemon=True).start()
    in_time = done.wait(10)
    goes_on.set()
    writer.join()
    assert in_time
    assert tiers(house, OTHER) == ["hot"] * 4


def test_a_node_superseded_while_it_is_written_goes(house: House) -> None:
    house.save(PROMPT[:70])
    disk = house.cache.disk
    assert disk is not None
    really = disk.store

    def store(*arguments: Any) -> Any:
        disk.store = really  # type: ignore[method-assign]
        house.save(PROMPT[:90])
        house.cache.check_integrity()
        return really(*arguments)

    disk.store = store  # type: ignore[method-assign]
    house.cache.write(everything=True)
    house.cache.check_integrity()
    assert disk.nodes() == 2
    assert house.known(PROMPT[:90]) == 90


def test_two_lookups_share_one_load(house: House) -> None:
    house.save(PROMPT)
    house.reopen()
    first = house.session.lookup(house.namespace, to_le(PROMPT), limit=1000)
    second = house.session.lookup(house.namespace, to_le(PROMPT), limit=1000)
    assert [node.offset for node in second.plan] == [-1] * 4
    offsets = [house.cache.load(first, index, house.decoder) for index in range(4)]
    assert [house.cache.load(second, index, house.decoder) for index in range(4)] == offsets
    assert house.cache.counters.loaded_nodes == 4
    house.cache.check_integrity()


def test_a_load_that_a_purge_overtakes_is_lost(house: House) -> None:
    house.save(PROMPT)
    house.reopen()
    disk = house.cache.disk
    assert disk is not None
    really = disk.load
    lease = house.session.lookup(house.namespace, to_le(PROMPT), limit=1000)

    def load(*arguments: Any) -> Any:
        record = really(*arguments)
        purge(house.cache, everything=True, now=house.now)
        return record

    disk.load = load  # type: ignore[method-assign]
    with pytest.raises(BlockLostError):
        house.cache.load(lease, 0, house.decoder)
    house.cache.check_integrity()
    assert len(house.cache.hot) == 0
    assert house.cache.arena.used == 0


def damage(house: House, key: bytes) -> None:
    """Flip a byte of a stored payload, through the file."""
    house.session.close()
    house.cache.close()
    env = lmdb.open(str(house.directory), max_dbs=8)
    payloads = env.open_db(b"payloads")
    with env.begin(write=True) as txn:
        piece = bytearray(txn.get(key + b"\0\0", db=payloads))
        piece[100] ^= 4
        txn.put(key + b"\0\0", bytes(piece), db=payloads)
    env.close()
    house.open()


def test_a_damaged_block_goes_with_all_below_it_once(house: House) -> None:
    keys = house.save(PROMPT)
    house.save(OTHER)
    damage(house, keys[1])
    with pytest.raises(BlockLostError, match="damaged"):
        house.restore(PROMPT)
    assert house.known(PROMPT) == BLOCK_TOKENS
    house.cache.write()
    assert house.cache.disk is not None
    assert house.cache.disk.nodes() == 1
    house.cache.check_integrity()
    house.save(PROMPT)  # computed again
    assert len(house.restore(PROMPT)) == 4
    house.reopen()
    assert len(house.restore(PROMPT)) == 4
    assert house.cache.counters.damaged == 0


def test_a_purge_takes_what_waits_to_be_removed_as_damaged(house: House) -> None:
    """No step of it sees that, and it would be there again if the process died before its next round of writing."""
    keys = house.save(PROMPT)
    house.cache.write(everything=True)
    damage(house, keys[1])
    with pytest.raises(BlockLostError, match="damaged"):
        house.restore(PROMPT)
    assert house.cache.disk is not None
    assert house.cache.disk.nodes() == len(keys)
    purge(house.cache, everything=True, now=house.now)
    assert house.cache.disk.nodes() == 0
    house.cache.check_integrity()


def test_a_block_computed_again_before_the_damaged_one_is_gone_stays(house: House) -> None:
    keys = house.save(PROMPT)
    damage(house, keys[1])
    with pytest.raises(BlockLostError):
        house.restore(PROMPT)
    house.save(PROMPT)
    assert len(house.restore(PROMPT)) == 4
    house.cache.write(everything=True)
    house.cache.check_integrity()
    house.reopen()
    assert len(house.restore(PROMPT)) == 4


def test_a_block_computed_again_is_not_lost_with_the_damaged_one(house: House) -> None:
    """Nor what follows it, though the same round of writing removes the damaged one and stores the new one."""
    keys = house.save(PROMPT)
    house.reopen()
    assert house.cache.disk is not None
    with house.cache.disk.table() as table:
        node = table.place(keys[1])
        assert node is not None
    house.cache.damaged(node.tree_key, "a test says so")
    house.save(PROMPT)
    house.cache.write(everything=True)
    assert house.cache.disk.nodes() == len(keys)
    assert [house.cache.hot.by_key[key].warm for key in keys[1:]] == [True] * len(keys[1:])
    house.cache.check_integrity()


def test_what_is_about_to_be_removed_does_not_come_back_into_ram(house: House) -> None:
    """What lies behind a damaged block is whole, and may be asked for by a reader that does not know yet."""
    keys = house.save(PROMPT)
    house.reopen()
    lease = house.session.lookup(house.namespace, to_le(PROMPT), limit=len(PROMPT))
    assert len(house.cache.damaged(lease.places[1], "a test says so")) == len(keys) - 1
    with pytest.raises(BlockLostError, match="removed"):
        house.cache.load(lease, 2, house.decoder)
    house.session.release(lease)
    house.save(PROMPT)
    house.cache.write(everything=True)
    assert house.cache.disk is not None
    assert house.cache.disk.nodes() == len(keys)
    house.cache.check_integrity()


def test_a_failing_disk_is_a_slower_cache(house: House) -> None:
    disk = house.cache.disk
    assert disk is not None
    really = disk.store

    def fails(*_arguments: Any) -> Any:
        raise DiskFullError("no space")

    disk.store = fails  # type: ignore[method-assign]
    house.save(PROMPT)
    house.now += 1
    wait = house.cache.write()
    assert wait is not None
    assert wait > 0
    assert house.cache.warm_state == "full"
    assert tiers(house, PROMPT) == ["hot"] * 4
    assert house.cache.write() is not None  # waits, does not try
    assert house.cache.counters.errors == 1
    assert len(house.cache.queue) == 4
    disk.store = really  # type: ignore[method-assign]
    house.now += 700
    house.cache.write()
    assert house.cache.warm_state == "ok"
    assert len(house.cache.queue) == 0
    assert disk.nodes() == 4
    house.cache.check_integrity()


def test_a_full_disk_that_has_room_again_is_noticed(house: House) -> None:
    disk = house.cache.disk
    assert disk is not None
    really, free = disk.store, 1000

    def fails(*_arguments: Any) -> Any:
        raise DiskFullError("no space")

    disk.free_bytes = lambda: free  # type: ignore[method-assign]
    disk.store = fails  # type: ignore[method-assign]
    house.save(PROMPT)
    house.cache.write(everything=True)
    house.save(OTHER)
    house.cache.write(everything=True)  # a second failure: it would wait longer
    disk.store = really  # type: ignore[method-assign]
    for _ in range(3):
        house.now += 1.0
        house.cache.write()
        assert house.cache.warm_state == "full"
    free += disk.batch_bytes
    house.now += 2.0
    wait = house.cache.write()
    assert house.cache.warm_state == "ok"
    assert wait is None
    assert disk.nodes() == 6


def test_the_writer_comes_by_to_look_while_the_disk_is_full(house: House) -> None:
    disk = house.cache.disk
    assert disk is not None

    def fails(*_arguments: Any) -> Any:
        raise DiskFullError("no space")

    disk.store = fails  # type: ignore[method-assign]
    house.save(PROMPT)
    for _ in range(10):
        wait = house.cache.write(everything=True)
        assert wait is not None
        assert wait <= 2.0
        house.now += wait


def test_the_last_flush_ends_in_time(make: Callable[..., House], monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written until then is whole, and the rest is counted."""
    house = make(hot=32 * MIB)
    disk = house.cache.disk
    assert disk is not None
    really = disk.store

    def slow(*arguments: Any) -> Any:
        house.now += 4.0
        return really(*arguments)

    disk.store = slow  # type: ignore[method-assign]
    monkeypatch.setattr("homeprefixd.prefix.disk_file._BATCH", 1 * MIB)
    for number in range(10):
        house.save([number, *PROMPT[:63]], size=1 * MIB)
    house.cache.deadline = house.now + 10.0
    assert house.close() == 7
    house.open()
    assert sum(house.known([number, *PROMPT[:63]]) == 64 for number in range(10)) == 3
    assert house.cache.disk is not None
    assert house.cache.disk.sums.nodes == {house.namespace.hex(): 3}


class TestLookupsReadTheDiskWithoutTheLock:
    """Others get the lock meanwhile, and what they change is noticed."""

    @staticmethod
    def looked_up_meanwhile(house: House, change: Callable[[], object]) -> int:
        """Tokens of PROMPT that a look-up finds whose disk's transaction began before `change`."""
        disk = house.cache.disk
        assert disk is not None
        reads, goes_on = threading.Event(), threading.Event()
        really, slow = disk.table, True

        @contextlib.contextmanager
        def table(*arguments: Any) -> Iterator[Any]:
            nonlocal slow
            with really(*arguments) as found:
                if slow:
                    slow = False
                    reads.set()
                    assert goes_on.wait(30)
                yield found

        disk.table = table  # type: ignore[method-assign,assignment]
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(house.known(PROMPT)))
        thread.start()
        assert reads.wait(30)
        change()
        goes_on.set()
        thread.join()
        disk.table = really  # type: ignore[method-assign]
        return found[0]

    def test_others_go_on(self, house: House) -> None:
        house.save(PROMPT)
        house.reopen()
        others: list[int] = []
        assert self.looked_up_meanwhile(house, lambda: others.append(house.known(PROMPT))) == len(PROMPT)
        assert others == [len(PROMPT)]

    def test_what_was_purged_is_not_found(self, house: House) -> None:
        house.save(PROMPT)
        house.reopen()
        assert self.looked_up_meanwhile(house, lambda: purge(house.cache, everything=True, now=house.now)) == 0

    def test_what_moved_to_disk_is_found(self, make: Callable[..., House]) -> None:
        house = make(hot=8 * 4096)
        house.save(PROMPT)

        def move() -> None:
            house.cache.write(everything=True)
            house.save([1] * (8 * BLOCK_TOKENS))
            assert keys.isdisjoint(house.cache.hot.by_key)

        keys = set(house.cache.hot.by_key)
        assert self.looked_up_meanwhile(house, move) == len(PROMPT)


def test_uses_are_remembered_over_a_restart(house: House) -> None:
    house.save(PROMPT)
    house.save([1, *PROMPT])
    house.cache.write(everything=True)
    house.restore(PROMPT)
    house.restore(PROMPT)
    [newest, _other] = listing.prefixes(house.cache, limit=10)[0]
    house.reopen()
    [again, _other] = listing.prefixes(house.cache, limit=10)[0]
    assert again.id == newest.id
    assert again.hits == newest.hits == 2
    assert again.last_use == newest.last_use


def test_who_asked_for_a_prefix(house: House) -> None:
    """The request that asked for most of it, as long as it is remembered."""
    house.save(PROMPT)
    house.save(OTHER)
    for request, tokens in (("a", PROMPT), ("b", OTHER), ("c", PROMPT[:64]), ("d", PROMPT[:10]), ("e", PROMPT)):
        house.cache.recent.note(request, house.namespace, to_le(tokens))
    for _ in range(2):
        found = {info.tokens: info.request for info in listing.prefixes(house.cache, limit=10)[0]}
        assert found == {len(PROMPT): "e", len(OTHER): "b"}
    house.cache.recent.clear()
    assert {info.request for info in listing.prefixes(house.cache, limit=10)[0]} == {""}


class TestWithoutDisk:
    def test_hot_only(self, make: Callable[..., House]) -> None:
        house = make(warm=0)
        house.save(PROMPT)
        assert tiers(house, PROMPT) == ["hot"] * 4
        assert house.cache.write(everything=True) is None
        assert listing.stats(house.cache, store_id="", uptime=0)["warm"]["state"] == "off"
        [prefix] = listing.prefixes(house.cache, limit=10)[0]
        assert prefix.tiers == ["hot"]
        assert purge(house.cache, prefix=prefix.id, now=house.now).nodes == 4
        assert house.known(PROMPT) == 0


class TestPurge:
    @pytest.fixture(params=["hot", "written", "warm"])
    def stored(self, house: House, request: pytest.FixtureRequest) -> House:
        """Two prompts that share two blocks, in one tier, in both, or in the other."""
        house.save(PROMPT)
        house.save(OTHER)
        if request.param != "hot":
            house.cache.write(everything=True)
        if request.param == "warm":
            house.reopen()
        return house

    def test_all(self, stored: House) -> None:
        assert purge(stored.cache, everything=True, now=stored.now).nodes == 6
        assert stored.known(PROMPT) == 0
        stored.reopen()
        assert stored.known(PROMPT) == 0

    def test_one_prefix_and_what_only_leads_there(self, stored: House) -> None:
        infos, total = listing.prefixes(stored.cache, limit=10)
        assert total == 6
        assert listing.prefixes(stored.cache, limit=10, model="nope") == ([], 0)
        assert {info.tokens for info in infos} == {len(PROMPT), len(OTHER)}
        [mine] = [info for info in infos if info.tokens == len(PROMPT)]
        assert mine.own_tokens == BLOCK_TOKENS + 10
        assert purge(stored.cache, prefix=mine.id, now=stored.now).nodes == 2
        assert stored.known(PROMPT) == 2 * BLOCK_TOKENS
        assert stored.known(OTHER) == len(OTHER)
        [other] = listing.prefixes(stored.cache, limit=10)[0]
        assert other.own_tokens == len(OTHER)
        assert purge(stored.cache, prefix=other.id[:5], now=stored.now).nodes == 4
        assert listing.prefixes(stored.cache, limit=10) == ([], 0)

    def test_an_inner_node_goes_with_all_below_it(self, stored: House) -> None:
        inner = block_key(stored.namespace, to_le(PROMPT[:64])).hex()
        assert purge(stored.cache, prefix=inner, now=stored.now).nodes == 6

    def test_old_ones(self, stored: House) -> None:
        stored.now += 1000
        stored.restore(OTHER)
        assert purge(stored.cache, older_than=500, now=stored.now).nodes == 2
        assert stored.known(OTHER) == len(OTHER)
        assert stored.known(PROMPT) == 2 * BLOCK_TOKENS
        stored.cache.check_integrity()

    def test_one_model(self, stored: House) -> None:
        assert purge(stored.cache, model="abababab", now=stored.now).nodes == 6
        with pytest.raises(NotFoundError, match="cdcd"):
            purge(stored.cache, model="cdcd", now=stored.now)

    @pytest.mark.parametrize("filters", [{"everything": True}, {"older_than": 10.0}, {"model": "abab"}])
    def test_in_steps_between_which_others_get_the_lock(self, house: House, filters: dict[str, Any]) -> None:
        for number in range(100):
            house.save([number, *PROMPT[:63], *PROMPT], size=100)
        house.cache.write(everything=True)
        house.now += 100
        house.save([1] * 10)
        disk = house.cache.disk
        assert disk is not None
        really, steps = disk.remove, []

        def remove(nodes: Sequence[Placed]) -> None:
            steps.append(len(nodes))
            others = threading.Thread(target=lambda: found.append(house.known([99, *PROMPT[:63], *PROMPT])))
            found: list[int] = []
            others.start()
            others.join(10)
            assert found  # it had not to wait for this step
            really(nodes)

        disk.remove = remove  # type: ignore[method-assign]
        removed = purge(house.cache, now=house.now, **filters)
        assert removed.nodes == 500 + ("older_than" not in filters)
        assert max(steps) <= 128 + 5  # and a way up
        assert disk.nodes() == 0
        house.cache.check_integrity()

    def test_the_end_of_the_process_ends_it(self, stored: House) -> None:
        stored.cache.deadline = stored.now
        with pytest.raises(StoreError, match="the store ends; 0 nodes"):
            purge(stored.cache, everything=True, now=stored.now)
        stored.cache.deadline = None
        assert stored.known(PROMPT) == len(PROMPT)
        stored.cache.check_integrity()

    def test_nothing_is_committed_below_what_goes(self, house: House) -> None:
        house.save(PROMPT)
        house.cache.write(everything=True)
        disk = house.cache.disk
        assert disk is not None
        really = disk.remove

        def remove(nodes: Sequence[Placed]) -> None:
            disk.remove = really  # type: ignore[method-assign]
            house.save([*PROMPT[:BLOCK_TOKENS], 5, 6], skip=1)
            really(nodes)
            house.save([7, 8, 9])

        disk.remove = remove  # type: ignore[method-assign]
        purge(house.cache, everything=True, now=house.now)
        house.cache.check_integrity()
        assert house.cache.counters.refused_nodes == 1
        assert house.known(PROMPT) == 0
        assert house.known([7, 8, 9]) == 3  # after its step: new

    def test_bad_filters(self, stored: House) -> None:
        for filters in ({}, {"everything": True, "model": "a"}, {"older_than": -1.0}):
            with pytest.raises(RequestError):
                purge(stored.cache, now=stored.now, **filters)  # type: ignore[arg-type]
        for prefix in ("xyz", "0" * 16, "\u0661"):
            with pytest.raises(NotFoundError):
                purge(stored.cache, prefix=prefix, now=stored.now)
        assert stored.known(PROMPT) == len(PROMPT)


class TestNamespaces:
    def test_another_is_another_tree(self, house: House) -> None:
        house.save(PROMPT)
        other, mismatch = house.cache.open_namespace({**DESCRIPTION, "kv_type": "q8_0"})
        lease = house.cache.lookup(other, to_le(PROMPT), limit=1000, exact=False, load=False)
        assert lease.plan == []
        assert mismatch == []  # nothing is stored yet

    def test_a_mismatch_names_the_field(self, house: House) -> None:
        house.save(PROMPT)
        house.reopen()
        assert house.cache.open_namespace({**DESCRIPTION, "kv_type": "q8_0", "rope": {"scale": 1}})[1] == [
            "kv_type: stored prefixes have f16, this run q8_0",
            "rope.scale: stored prefixes have none, this run 1",
        ]
        assert house.cache.open_namespace({**DESCRIPTION, "model_sha256": "cd" * 32})[1] == []
        assert house.cache.open_namespace({**DESCRIPTION, "salt": "mine"})[1] == []
        assert house.cache.open_namespace(DESCRIPTION)[1] == []


def test_file_hashes_survive(house: House) -> None:
    assert house.cache.file_hash(b"id") == ""
    house.cache.remember_file_hash(b"id", "ab")
    assert house.cache.file_hash(b"id") == "ab"
    house.reopen()
    assert house.cache.file_hash(b"id") == "ab"
    purge(house.cache, everything=True, now=house.now)
    assert house.cache.file_hash(b"id") == "ab"


def test_listing(house: House) -> None:
    house.save(PROMPT)
    [info] = listing.prefixes(house.cache, limit=10)[0]
    assert info.preview == "from 0…from 192"
    assert info.bytes == info.own_bytes == 4 * 3000
    assert info.tiers == ["hot"]
    house.reopen()
    [info] = listing.prefixes(house.cache, limit=10)[0]
    assert info.tiers == ["warm"]
    assert info.bytes < 4 * 3000
    assert listing.prefixes(house.cache, limit=10, model="nobody")[0] == []
    assert len(listing.prefixes(house.cache, limit=10, model="abab")[0]) == 1


def test_warm_bytes_of_ten_conversations(make: Callable[..., House]) -> None:
    """One shared prefix of 2,200 tokens, ten questions and answers: stored once, and hardly more than its content."""
    house = make(hot=128 * MIB, warm=512 * MIB)
    size = 1_476_072  # of a block of the demo model
    prefix = list(range(2200))
    for number in range(10):
        for end in (20, 40):  # the prompt, then with the reply: its tail is superseded
            house.save([*prefix, *range(10_000 * (number + 1), 10_000 * (number + 1) + end)], size)
            house.cache.write(everything=True)
    disk = house.cache.disk
    assert disk is not None
    assert disk.nodes() == 34 + 10
    assert disk.used() <= 1.05 * disk.sums.stored
    assert disk.file_bytes() <= 1.1 * disk.sums.stored


def test_what_is_used_is_always_found_whatever_goes_on(make: Callable[..., House]) -> None:
    """Look-ups read the disk without the lock: nothing that moves between the tiers meanwhile escapes them."""
    house = make(hot=16 * 4096 * 4, warm=2 * MIB)
    used = list(range(10 * BLOCK_TOKENS))
    house.save(used)
    house.cache.write(everything=True)
    ends, wrong = threading.Event(), []

    def look() -> None:
        session = house.cache.session()
        while not ends.is_set():
            lease = session.lookup(house.namespace, to_le(used), limit=1 << 20)
            matched = sum(node.use for node in lease.plan)
            if matched < len(used):
                wrong.append(matched)
            session.release(lease)
        session.close()

    def write() -> None:
        while not ends.is_set():
            house.cache.write(everything=True)

    threads = [threading.Thread(target=look) for _ in range(2)] + [threading.Thread(target=write)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 1.5
    number = 100
    while time.monotonic() < deadline:
        number += 1
        house.save([number] * (3 * BLOCK_TOKENS), size=9000)
    ends.set()
    for thread in threads:
        thread.join()
    house.cache.write(everything=True)
    assert house.cache.counters.evicted_hot > 100
    assert house.cache.counters.evicted_warm > 100
    assert wrong == []


def test_prompts_that_come_once_do_not_flush_what_is_used(make: Callable[..., House]) -> None:
    """A camera's captions, ten times the disk's budget: in either tier what is used stays."""
    house = make(hot=2 * MIB, warm=4 * MIB)
    home = list(range(20 * BLOCK_TOKENS))
    house.save(home, size=20_000)
    number = 100
    for _hour in range(10):
        assert len(house.restore(home)) == 20
        house.now += 60
        for _ in range(100):
            number += 1
            house.save([number] * 100, size=40_000)
            house.now += 36
            if number % 10 == 0:
                house.cache.write(everything=True)
    assert house.cache.disk is not None
    assert house.cache.disk.sums.written.total > 4 * 4 * MIB
    assert house.known(home) == len(home)
    house.reopen()
    assert house.known(home) == len(home)


def test_a_short_prompt_takes_no_more_than_its_own_room(make: Callable[..., House]) -> None:
    """A title for the chat does not push the chat out: of a longer one only the end goes, as much as is needed."""
    house = make(hot=20 * 4096, warm=0)
    chat = list(range(20 * BLOCK_TOKENS))
    house.save(chat)
    house.now += 10
    house.save([5] * 100)
    assert house.known(chat) == 18 * BLOCK_TOKENS
    assert house.known([5] * 100) == 100
    house.now += 10
    house.save([6] * 100)
    assert house.known(chat) >= 16 * BLOCK_TOKENS
