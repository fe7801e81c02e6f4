"""What single models and API keys may take of the disk's budget."""

from __future__ import annotations

from collections.abc import Callable

import lmdb
import msgspec
import pytest
from prefix_testing import DESCRIPTION, MIB, House, Store, Worker

from homeprefixd.frames import store as frames
from homeprefixd.frames.store import Pin
from homeprefixd.prefix import listing
from homeprefixd.prefix.blocks import to_le
from homeprefixd.prefix.disk_file import Sums
from homeprefixd.prefix.shares import Shares

SIZE = 200_000  # of a block; half of it as stored
SMALL = {**DESCRIPTION, "model": "small"}
LARGE = {**DESCRIPTION, "model": "large", "model_sha256": "cd" * 32}


def fill(house: House, prompts: range, owner: str = "") -> None:
    for number in prompts:
        house.save([number] * 64, SIZE, owner=owner)
        if number % 4 == 0:
            house.cache.write(everything=True)
    house.cache.write(everything=True)


def there(house: House, prompts: range) -> int:
    """On disk."""
    return sum(house.cache.is_stored(house.namespace + number.to_bytes(4, "big") * 64) for number in prompts)


def sums(house: House) -> Sums:
    assert house.cache.disk is not None
    return house.cache.disk.sums


def test_which_have_one() -> None:
    shares = Shares()
    assert shares.set({"small": 30, "large": 0, "all": 100}, {"guest": 10})
    assert not shares.set({"small": 30}, {"guest": 10})  # no news
    known = {b"a" * 32: SMALL, b"b" * 32: {**SMALL, "salt": "x"}, b"c" * 32: LARGE}
    counted = Sums(sizes={(b"a" * 32).hex(): 5, (b"b" * 32).hex(): 7, (b"c" * 32).hex(): 100}, owners={"guest": 3})
    found = {(one.kind, one.name): (one.limit, one.used) for one in shares.accounts(1000, counted, known)}
    assert found == {("model", "small"): (300, 12), ("key", "guest"): (100, 3)}


class TestKeys:
    def test_a_guest_does_not_displace_the_house(self, make: Callable[..., House]) -> None:
        house = make(hot=8 * MIB, warm=16 * MIB)
        house.cache.set_shares({}, {"guest": 25})
        fill(house, range(60), "phone")  # 6 MB
        fill(house, range(1000, 1200), "guest")  # 20 MB
        assert sums(house).owners["guest"] <= 4 * MIB
        assert sums(house).owners["guest"] > 3 * MIB  # it has what it may
        assert there(house, range(60)) == 60
        assert there(house, range(1195, 1200)) == 5  # of its own the newest
        assert house.cache.counters.evicted_warm > 100
        assert house.cache.counters.over_share == 0  # there was always something of its own to go
        house.cache.check_integrity()

    def test_without_a_share_it_would(self, make: Callable[..., House]) -> None:
        house = make(hot=8 * MIB, warm=16 * MIB)
        fill(house, range(60), "phone")
        fill(house, range(1000, 1200), "guest")
        assert there(house, range(60)) < 20

    def test_what_it_uses_stays_and_what_it_does_not_use_goes(self, make: Callable[..., House]) -> None:
        house = make(hot=8 * MIB, warm=16 * MIB)
        house.cache.set_shares({}, {"guest": 25})
        fill(house, range(10), "guest")
        for _again in range(3):
            for number in range(10):
                house.restore([number] * 64)
        fill(house, range(1000, 1100), "guest")
        assert there(house, range(10)) == 10

    def test_one_prompt_larger_than_the_share_is_kept_as_far_as_it_goes(self, make: Callable[..., House]) -> None:
        house = make(hot=32 * MIB, warm=16 * MIB)
        house.cache.set_shares({}, {"guest": 10})
        tokens = [n // 64 for n in range(64 * 60)]  # 6 MB of 1.6
        house.save(tokens, SIZE, owner="guest")
        house.cache.write(everything=True)
        assert 0 < sums(house).owners["guest"] <= 1.6 * MIB
        assert house.cache.counters.over_share > 30
        assert house.known(tokens) == len(tokens)  # the rest in RAM
        house.cache.check_integrity()
        house.reopen()
        assert 5 * 64 < house.known(tokens) < 20 * 64
        assert len(house.cache.queue) == 0

    def test_a_block_is_counted_where_it_was_computed_first(self, make: Callable[..., House]) -> None:
        house = make()
        fill(house, range(3), "phone")
        fill(house, range(3), "guest")  # known by then
        fill(house, range(3, 5))
        assert set(sums(house).owners) == {"phone"}
        house.reopen()
        assert sums(house).owners == {"phone": sum(sums(house).sizes.values()) * 3 // 5}

    def test_pinned_blocks_stay_in_it(self, make: Callable[..., House]) -> None:
        house = make(hot=8 * MIB, warm=16 * MIB)
        house.cache.set_shares({}, {"guest": 25})
        fill(house, range(5), "guest")
        for number in range(5):
            house.cache.pins.pin(Pin(0, house.namespace, to_le([number] * 64)))
        fill(house, range(1000, 1100), "guest")
        assert there(house, range(5)) == 5
        assert sums(house).owners["guest"] <= 4 * MIB


class TestModels:
    def test_one_leaves_the_rest_to_the_other(self, make: Callable[..., House]) -> None:
        house = make(hot=8 * MIB, warm=16 * MIB)
        house.cache.set_shares({"small": 40}, {})
        large = house.cache.open_namespace(LARGE)[0]
        small = house.cache.open_namespace(SMALL)[0]
        house.namespace = large
        fill(house, range(60))
        house.namespace = small
        fill(house, range(200))
        assert 5 * MIB < sums(house).sizes[small.hex()] <= 6.4 * MIB
        house.namespace = large
        assert there(house, range(60)) == 60

    def test_a_smaller_share_is_met_at_once_and_with_a_smaller_budget(self, make: Callable[..., House]) -> None:
        house = make(hot=8 * MIB, warm=16 * MIB)
        house.namespace = house.cache.open_namespace(SMALL)[0]
        fill(house, range(100))
        name = house.namespace.hex()
        assert sums(house).sizes[name] > 8 * MIB
        house.cache.set_shares({"small": 25}, {})
        house.cache.write()
        assert 3 * MIB < sums(house).sizes[name] <= 4 * MIB
        house.cache.resize(8 * MIB)
        house.cache.write()
        assert 1 * MIB < sums(house).sizes[name] <= 2 * MIB
        house.cache.check_integrity()


def test_a_file_of_before_there_were_shares(make: Callable[..., House]) -> None:
    house = make()
    fill(house, range(4), "phone")
    before = sums(house).copy()
    house.close()
    env = lmdb.open(str(house.directory), max_dbs=8)
    meta = env.open_db(b"meta")
    with env.begin(write=True) as txn:
        old = msgspec.msgpack.decode(txn.get(b"sums", db=meta))
        for name in ("sizes", "owners", "by_owner"):
            del old[name]
        txn.put(b"sums", msgspec.msgpack.encode(old), db=meta)
    env.close()
    house.open()
    assert (sums(house).sizes, sums(house).owners) == (before.sizes, before.owners)
    assert sums(house).by_owner


def test_figures(make: Callable[..., House]) -> None:
    house = make(warm=16 * MIB)
    house.cache.set_shares({}, {"guest": 25})
    fill(house, range(3), "guest")
    found = listing.stats(house.cache, store_id="", uptime=0)
    used = sums(house).owners["guest"]
    assert found["shares"] == [{"kind": "key", "name": "guest", "bytes": used, "limit": 4 * MIB}]
    assert found["keys"] == {"guest": used}
    assert [one["bytes"] for one in found["namespaces"]] == [used]


@pytest.mark.parametrize("owner", ["", "guest"])
def test_a_real_store(
    start_store: Callable[..., Store], start_worker: Callable[[Store], Worker], tmp_path: object, owner: str
) -> None:
    store = start_store(tmp_path, warm=16 * MIB)
    store.channel.send(frames.UseModels(["a"], {}, {"guest": 10}))
    worker = start_worker(store)
    for number in range(60):
        worker.save([number] * 64, SIZE, owner=owner)
        if number % 10 == 0:
            assert store.flush() == 0
    assert store.flush() == 0
    figures = store.stats()
    assert figures["shares"][0]["limit"] == 16 * MIB // 10
    stored = figures["warm"]["payload_bytes"]
    assert stored <= 16 * MIB // 10 if owner else stored > 5 * MIB
    assert store.stop()[0] == 0
