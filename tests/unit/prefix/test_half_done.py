"""What stops half-way, or meets what is in use for a moment: nothing is left hidden, given up or counted in vain."""

from __future__ import annotations

import contextlib
import errno
import random
from collections.abc import Callable, Iterator
from typing import Any, cast

import lmdb
import pytest
from faulty_disk import FaultyDisk
from prefix_testing import MIB, House

from homeprefixd.errors import StoreError
from homeprefixd.frames.store import Pin, Unpin
from homeprefixd.prefix.blocks import BLOCK_TOKENS, swap, to_le
from homeprefixd.prefix.cache import BlockLostError
from homeprefixd.prefix.disk import FEW
from homeprefixd.prefix.env_gate import EnvGate
from homeprefixd.prefix.purge import purge
from homeprefixd.prefix.tree import Record
from homeprefixd.prefix.verifying import Verifier
from homeprefixd.prefix.warm_table import WarmTable

LONG = [n % 1000 for n in range(BLOCK_TOKENS * (FEW + 44))]
ONE, TWO, THREE = ([n] * BLOCK_TOKENS * 10 for n in (1, 2, 3))


@pytest.fixture
def house(make: Callable[..., House]) -> House:
    return make(hot=16 * MIB, warm=16 * MIB, kind=FaultyDisk)


def disk_of(house: House) -> FaultyDisk:
    return cast(FaultyDisk, house.cache.disk)


def saved(house: House, tokens: list[int], size: int = 120_000, owner: str = "") -> list[bytes]:
    keys = house.save(tokens, size, owner=owner)
    house.cache.write(everything=True)
    return keys


def on_disk(house: House, keys: list[bytes]) -> int:
    with disk_of(house).table() as table:
        return sum(table.place(key) is not None for key in keys)


def note_damage(house: House, key: bytes) -> None:
    with disk_of(house).table() as table:
        node = table.place(key)
    assert node is not None
    assert house.cache.damaged(node.tree_key, "a test says so")


def later(house: House, times: int = 4) -> None:
    for _ in range(times):
        house.now += 100
        house.cache.write()


def test_what_is_damaged_is_not_hidden_for_ever_if_its_removal_stops_half_way(house: House) -> None:
    keys = saved(house, LONG, 100)
    note_damage(house, keys[0])
    disk_of(house).faults.write_error, disk_of(house).faults.good_writes = errno.ENOSPC, 1
    later(house, 1)
    assert on_disk(house, keys) == len(keys) - FEW
    disk_of(house).faults.write_error = 0
    later(house)
    assert (on_disk(house, keys), house.cache.hidden, house.cache.repairs) == (0, set(), [])
    saved(house, LONG, 100)
    house.reopen()
    assert house.known(LONG) == len(LONG)
    assert purge(house.cache, everything=True, now=house.now).nodes == len(keys)
    assert on_disk(house, keys) == 0


def test_what_is_pinned_stays_while_something_else_is_in_use_for_a_moment(house: House) -> None:
    """Of a budget that was made smaller."""
    pinned, other = saved(house, ONE), saved(house, TWO)
    house.cache.pins.pin(Pin(0, house.namespace, to_le(ONE), label="p"))
    later(house, 1)
    lease = house.session.lookup(house.namespace, to_le(TWO), limit=len(TWO))
    house.cache.resize(disk_of(house).used() - 50_000)
    later(house)
    assert (on_disk(house, pinned), on_disk(house, other)) == (10, 10)
    house.session.release(lease)
    later(house)
    assert on_disk(house, pinned) == 10
    assert on_disk(house, other) < 10
    assert disk_of(house).used() <= disk_of(house).limit


def test_a_smaller_share_is_kept_once_what_is_in_use_is_not(house: House) -> None:
    keys = saved(house, THREE, owner="guest")
    later(house, 1)
    lease = house.session.lookup(house.namespace, to_le(THREE), limit=len(THREE))
    house.cache.set_shares({}, {"guest": 1})
    later(house, 1)
    assert on_disk(house, keys) == 10
    house.session.release(lease)
    later(house)
    [account] = house.cache.accounts()
    assert account.used <= account.limit


@pytest.mark.parametrize("how", ["unpinned", "expired"])
def test_a_smaller_share_is_kept_once_nothing_of_it_is_pinned(house: House, how: str) -> None:
    """Nothing else happens that the store would look at it for."""
    keys = saved(house, THREE, owner="guest")
    house.cache.pins.pin(Pin(0, house.namespace, to_le(THREE), label="p", ttl=10_000 if how == "expired" else 0))
    house.cache.set_shares({}, {"guest": 1})
    later(house)
    assert on_disk(house, keys) == 10
    if how == "unpinned":
        house.cache.pins.unpin(Unpin(0, label="p"))
    else:
        house.now += 10_000
    later(house, 1)
    [account] = house.cache.accounts()
    assert account.used <= account.limit
    assert not house.cache.pins.rows
    assert house.cache.write() is None  # it waits for nothing


def test_a_purge_that_fails_counts_nothing(house: House) -> None:
    keys = saved(house, ONE)
    disk_of(house).faults.write_error = errno.EIO
    with pytest.raises(StoreError, match="the disk cannot be changed"):
        purge(house.cache, everything=True, now=house.now)
    assert house.cache.counters.purged == 0
    assert on_disk(house, keys) == 10
    assert not house.cache.hidden
    disk_of(house).faults.write_error = 0
    assert purge(house.cache, everything=True, now=house.now).nodes == 10


def test_a_pin_goes_with_what_was_purged_also_where_the_rest_fails(house: House) -> None:
    keys = saved(house, ONE)
    house.cache.pins.pin(Pin(0, house.namespace, to_le(ONE)))
    other = saved(house, TWO)
    note_damage(house, other[0])
    disk_of(house).faults.write_error, disk_of(house).faults.good_writes = errno.EIO, 2  # those of the purge
    with pytest.raises(StoreError, match="not all of it from the disk"):
        purge(house.cache, prefix=keys[0].hex()[:16], now=house.now)
    disk_of(house).faults.write_error = 0
    assert on_disk(house, keys) == 0
    assert not house.cache.pins.rows


def test_verify_counts_as_removed_what_is(house: House) -> None:
    keys = saved(house, ONE)
    with disk_of(house)._env.begin(write=True) as txn:
        table = disk_of(house)._tables[b"payloads"]
        key, piece = next(iter(txn.cursor(table)))
        txn.put(key, bytes([*piece[:100], piece[100] ^ 1, *piece[101:]]), db=table)
    damaged = keys.index(bytes(key)[:32])
    verifier = Verifier(house.cache, lambda job: job())
    disk_of(house).faults.write_error = errno.ENOSPC
    found = verifier.run(repair=True, rate=0)
    assert found is not None
    assert (found.damaged, found.removed, on_disk(house, keys)) == (1, 0, 10)
    disk_of(house).faults.write_error = 0
    later(house)
    assert on_disk(house, keys) == damaged


@pytest.mark.parametrize("table", [b"payloads", b"nodes"])
def test_verify_counts_what_went_before_it_had_to_stop(house: House, table: bytes) -> None:
    """Of a damaged payload, and of a record that cannot be read."""
    keys = saved(house, LONG, 100)
    place = house.namespace + swap(to_le(LONG[:BLOCK_TOKENS])) if table == b"nodes" else keys[0] + bytes(2)
    with disk_of(house)._env.begin(write=True) as txn:
        rows = disk_of(house)._tables[table]
        value = bytearray(txn.get(place, db=rows))
        value[0 if table == b"nodes" else -1] = 0xC1
        txn.put(place, bytes(value), db=rows)
    verifier = Verifier(house.cache, lambda job: job())
    disk_of(house).faults.write_error, disk_of(house).faults.good_writes = errno.EIO, 1
    found = verifier.run(repair=True, rate=0)
    assert found is not None
    assert (found.removed, on_disk(house, keys)) == (FEW, len(keys) - FEW - (table == b"nodes"))
    assert house.cache.counters.errors == 1
    disk_of(house).faults.write_error = 0
    again = verifier.run(repair=True, rate=0)
    assert again is not None
    later(house)
    assert (on_disk(house, keys), house.cache.hidden) == (0, set())


@pytest.mark.parametrize("replies", [0, 60])
def test_the_map_grows_again_where_it_could_not_at_once(
    house: House, monkeypatch: pytest.MonkeyPatch, replies: int
) -> None:
    """A bound write goes well, though others read without a pause after it. `replies` are written before blocks are."""
    disk = disk_of(house)
    saved(house, ONE[:64])
    free = [(10 << 20) + (1 << 20) + (200 << 10)]
    monkeypatch.setattr(disk, "_min_free", 10 << 20)
    monkeypatch.setattr(disk, "free_bytes", lambda: free[0])
    alone, calls = EnvGate.alone, 0

    @contextlib.contextmanager
    def busy_after_the_first(gate: EnvGate, patience: float) -> Iterator[bool]:
        nonlocal calls
        calls += 1
        with alone(gate, patience) as is_free:
            yield is_free and calls == 1

    monkeypatch.setattr(EnvGate, "alone", busy_after_the_first)
    keys = saved(house, TWO[:64])
    assert calls == 2
    assert (on_disk(house, keys), house.cache.warm_state) == (1, "ok")
    assert house.cache.hot.by_key[keys[0]].warm
    assert disk._env.info()["map_size"] < disk._map_size
    monkeypatch.setattr(EnvGate, "alone", alone)
    free[0] = 1 << 40
    for number in range(replies):
        long = random.Random(number).randbytes(20_000)
        house.cache.replies.remember(house.namespace, bytes([number]) * 32, 64, b"", [], long)
    later(house)
    more = saved(house, THREE)
    assert (on_disk(house, more), disk._env.info()["map_size"]) == (10, disk._map_size)


def test_nothing_that_is_only_in_ram_goes_in_vain(make: Callable[..., House]) -> None:
    """Memory is short, so that there is no room for a block whatever goes."""
    house = make(hot=4 * MIB)
    saved(house, ONE, 300_000)
    short = saved(house, TWO[:128], 100_000)
    for key in reversed(short):
        house.cache.forget_hot(house.cache.hot.by_key[key])
    lease = house.session.lookup(house.namespace, to_le(ONE), limit=len(ONE))
    fresh = house.save(THREE[:192], 100_000)
    house.cache.arena.allowance = 2 * MIB
    other = house.session.lookup(house.namespace, to_le(TWO[:128]), limit=128)
    house.cache.taken(other, 0)  # they are wanted now
    with pytest.raises(BlockLostError):
        house.block(other, 0)
    assert all(key in house.cache.hot.by_key for key in fresh)
    house.session.release(other)
    house.session.release(lease)


@pytest.mark.parametrize("meanwhile", ["read", "written"])
def test_a_use_is_known_also_while_it_is_written(house: House, monkeypatch: pytest.MonkeyPatch, meanwhile: str) -> None:
    """A block is read while its last use is written, or written while it is read: in RAM it must not pass for one that
    nobody has used for long, which goes first."""
    [key] = saved(house, ONE[:BLOCK_TOKENS])
    house.cache.forget_hot(house.cache.hot.by_key[key])
    disk = disk_of(house)
    house.now += 1000
    lease = house.session.lookup(house.namespace, to_le(ONE), limit=len(ONE))
    used = house.now
    write, load = disk._write, disk.load
    if meanwhile == "read":

        def read_before(change: Callable[[Any], object]) -> None:
            monkeypatch.setattr(disk, "_write", write)
            house.block(lease, 0)
            write(change)

        monkeypatch.setattr(disk, "_write", read_before)
        later(house, 1)
    else:

        def written_after(*arguments: Any) -> Record:
            record = load(*arguments)
            later(house, 1)
            return record

        monkeypatch.setattr(disk, "load", written_after)
        house.block(lease, 0)
    record = house.cache.hot.by_key[key].node.record
    assert (record.last_use, record.hits) == (pytest.approx(used, abs=1), 1)
    house.session.release(lease)
    house.restore(ONE)
    later(house, 1)
    assert (house.cache.touched, house.cache.touching) == ({}, {})


@pytest.mark.parametrize("when", ["found damaged", "removed meanwhile"])
def test_a_load_ends_also_where_the_tables_cannot_be_read(
    house: House, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Else whoever wants the block next would wait for it for ever, and its room would be lost."""
    [key] = saved(house, ONE[:BLOCK_TOKENS])
    house.cache.forget_hot(house.cache.hot.by_key[key])
    disk = disk_of(house)
    lease = house.session.lookup(house.namespace, to_le(ONE), limit=len(ONE))
    load = disk.load

    def load_and_fail(*arguments: Any) -> Record:
        monkeypatch.setattr(disk, "table", unreadable)
        if when == "removed meanwhile":
            house.cache.removals += 1
        return load(*arguments)

    def unreadable(*_hidden: object) -> WarmTable:
        raise lmdb.ReadersFullError

    disk.faults.flips = 1.0 if when == "found damaged" else 0.0
    monkeypatch.setattr(disk, "load", load_and_fail)
    with pytest.raises(BlockLostError):
        house.block(lease, 0)
    assert (house.cache.loading, lease.coming, house.cache.arena.used) == ({}, set(), 0)
    assert house.cache.counters.errors == 1
    monkeypatch.undo()
    disk.faults.flips = 0.0
    house.session.release(lease)
    assert [tier for tier, _state in house.restore(ONE)] == ["warm"]
