"""How much is written, and how much room the store takes: in a day, of a disk that others fill, of a smaller budget."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence

import msgspec
import pytest
from prefix_testing import MIB, House

from homeprefixd.frames.store import Pin
from homeprefixd.prefix import listing
from homeprefixd.prefix.blocks import to_le
from homeprefixd.prefix.tree import Placed
from homeprefixd.prefix.wear import DAY, Written

SIZE = 400_000  # of a block; half of it as stored


def fill(house: House, prompts: range) -> None:
    for number in prompts:
        house.save([number] * 64, SIZE)
        house.cache.write(everything=True)


def there(house: House, prompts: range) -> int:
    return sum(house.known([number] * 64) == 64 for number in prompts)


class TestWear:
    def test_the_record(self) -> None:
        written = Written()
        assert written.a_day(5.0) == 0
        for day in range(10):
            for hour in (1, 20):
                written.add(100, 2, day * DAY + hour * 3600)
        assert (written.total, written.nodes, written.today) == (2000, 40, 200)
        assert written.on(9 * DAY + 80_000) == 200
        assert written.on(10 * DAY) == 0
        assert 200 <= written.a_day(9 * DAY + 20 * 3600) < 220

    @pytest.mark.parametrize("first", [1_000.0, 30_000 * DAY])
    def test_the_average_of_a_clock_that_was_wrong_first(self, first: float) -> None:
        """As of a machine without a battery: 1970, until somebody tells it the time."""
        written, now = Written(), 20_700 * DAY
        written.add(7_000, 1, first)
        assert written.a_day(first) == written.a_day(now) == 7_000  # not by thousands of days
        old = msgspec.msgpack.decode(msgspec.msgpack.encode(written), type=Written)
        old.last = 0.0  # as earlier versions have stored it
        for record in (written, old):
            for day in range(10):
                record.add(500, 1, now + day * DAY)
            assert record.a_day(now + 10 * DAY) == 500
            assert (record.total, record.since) == (12_000, now)

    def test_no_more_than_may_be_in_a_day(self, make: Callable[..., House]) -> None:
        house = make(hot=32 * MIB, daily_writes=2 * MIB)
        fill(house, range(30))
        assert house.cache.disk is not None
        writes = listing.stats(house.cache, store_id="", uptime=0)["writes"]
        assert 2 * MIB <= writes["today"] < 2 * MIB + SIZE
        assert writes["today"] == writes["total"] == house.cache.disk.sums.stored
        assert writes["daily_limit"] == 2 * MIB
        assert house.cache.counters.spared_nodes == 30 - writes["nodes"] > 0
        assert len(house.cache.queue) == 0
        assert there(house, range(30)) == 30  # in RAM
        house.cache.check_integrity()

    @pytest.mark.parametrize("pinned", [False, True])
    def test_nor_by_one_long_prompt(self, make: Callable[..., House], pinned: bool) -> None:
        house = make(hot=32 * MIB, daily_writes=2 * MIB)
        long = [number for number in range(3000, 3040) for _ in range(64)]
        house.save(long, SIZE)
        if pinned:
            house.cache.pins.pin(Pin(0, house.namespace, to_le(long)))
        house.cache.write(everything=True)
        written = listing.stats(house.cache, store_id="", uptime=0)["writes"]["today"]
        assert 2 * MIB <= written < 2 * MIB + SIZE

    def test_a_restart_begins_no_new_day(self, make: Callable[..., House]) -> None:
        house = make(hot=32 * MIB, daily_writes=2 * MIB)
        fill(house, range(15))
        house.reopen()
        before = there(house, range(15))
        fill(house, range(20, 25))
        house.reopen()
        assert there(house, range(20, 25)) == 0
        assert there(house, range(15)) == before

    def test_the_next_day_what_was_left_out_is_written(self, make: Callable[..., House]) -> None:
        house = make(hot=32 * MIB, daily_writes=2 * MIB)
        fill(house, range(15))
        house.now += DAY
        house.cache.write()
        house.cache.write(everything=True)
        house.reopen()
        assert there(house, range(15)) == 15

    def test_a_chat_that_grows_is_written_about_once(self, make: Callable[..., House]) -> None:
        """What each turn adds, and the end of it that is no whole block yet: not the whole chat every time."""
        house = make(hot=64 * MIB)
        a_token = 2_000  # bytes
        tokens: list[int] = []
        for turn in range(60):
            begin = len(tokens) // 64
            for part in range(4):  # its reply comes piece by piece
                tokens += [turn * 1000 + part * 25 + n for n in range(25)]
                whole = len(tokens) // 64 * 64
                house.save(tokens[:whole], 64 * a_token, skip=begin)
                if len(tokens) > whole:
                    house.save(tokens, (len(tokens) - whole) * a_token, skip=whole // 64)
                house.now += 0.5
                house.cache.write()
            house.now += 60
            house.cache.write()
        assert house.cache.disk is not None
        sums = house.cache.disk.sums
        assert house.known(tokens) == len(tokens)
        assert sums.raw == len(tokens) * a_token
        assert sums.written.total <= 1.4 * sums.stored


class TestBudget:
    def test_a_smaller_one_is_met_in_steps(self, make: Callable[..., House]) -> None:
        house = make(hot=8 * MIB, warm=32 * MIB)
        fill(house, range(100))
        house.restore([0] * 64)
        house.restore([0] * 64)
        disk = house.cache.disk
        assert disk is not None
        assert disk.used() > 12 * MIB
        assert house.cache.resize(6 * MIB) == 6 * MIB
        really, steps = disk._remove_few, []

        def remove_few(nodes: Sequence[Placed]) -> None:
            found: list[int] = []
            other = threading.Thread(target=lambda: found.append(house.known([0] * 64)))
            other.start()
            other.join(10)
            assert found == [64]  # a look-up does not wait for it, and what was used is there
            steps.append(len(nodes))
            really(nodes)

        disk._remove_few = remove_few  # type: ignore[method-assign]
        house.cache.write()
        assert len(steps) > 1
        assert disk.used() <= 6 * MIB
        assert disk.file_bytes() <= 1.1 * 6 * MIB
        assert house.restore([0] * 64)[0][0] == "hot"
        house.cache.check_integrity()
        house.reopen()
        assert there(house, range(1)) == 1

    def test_a_smaller_one_where_all_was_just_used(self, make: Callable[..., House]) -> None:
        house = make(hot=32 * MIB, warm=32 * MIB)
        fill(house, range(60))
        for number in range(60):
            house.restore([number] * 64)
        disk = house.cache.disk
        assert disk is not None
        house.cache.resize(4 * MIB)
        house.cache.write()
        assert disk.used() <= 4 * MIB
        assert disk.file_bytes() <= 1.1 * 4 * MIB
        house.cache.check_integrity()

    def test_a_smaller_one_where_all_is_in_use(self, make: Callable[..., House]) -> None:
        """It is looked at again a little later, and meanwhile nobody waits for it."""
        house = make(hot=32 * MIB, warm=32 * MIB)
        fill(house, range(40))
        disk = house.cache.disk
        assert disk is not None
        held = [
            house.session.lookup(house.namespace, to_le([number] * 64), limit=64, exact=False) for number in range(40)
        ]
        house.cache.resize(4 * MIB)
        wait = house.cache.write()
        assert disk.used() > 6 * MIB
        assert wait is not None
        assert 0 < wait <= 5
        for lease in held:
            house.session.release(lease)
        house.now += 60.0
        house.cache.write()
        assert disk.used() <= 4 * MIB
        assert disk.file_bytes() <= 1.1 * 4 * MIB

    def test_a_smaller_one_is_kept_to(self, make: Callable[..., House]) -> None:
        """Also by what is written at a time; and a file that could not be made smaller is, as soon as it can be."""
        house = make(hot=8 * MIB, warm=160 * MIB, daily_writes=100 * MIB)
        disk = house.cache.disk
        assert disk is not None
        fill(house, range(300))
        before = disk.file_bytes()
        assert before > 50 * MIB
        house.cache.bound_writes(MIB)
        house.cache.resize(24 * MIB)
        house.cache.write()
        assert disk.used() <= 24 * MIB
        assert disk.file_bytes() >= before
        house.cache.bound_writes(0)
        house.now += 301
        house.cache.write()
        assert disk.file_bytes() <= 24 * MIB
        for step in range(6):
            for number in range(20):
                house.save([1000 + step * 20 + number] * 64, SIZE)
            house.cache.write(everything=True)
        assert disk.file_bytes() <= 1.1 * 24 * MIB

    def test_a_smaller_one_at_the_start(self, make: Callable[..., House]) -> None:
        house = make(hot=8 * MIB, warm=32 * MIB)
        fill(house, range(60))
        house.warm = 4 * MIB
        house.reopen()
        house.cache.write()
        assert house.cache.disk is not None
        assert house.cache.disk.used() <= 4 * MIB
        assert 0 < there(house, range(60)) < 20

    def test_a_much_smaller_one_at_the_start(self, make: Callable[..., House], monkeypatch: pytest.MonkeyPatch) -> None:
        """The file has no free page, and what is removed needs some before it gives any."""
        house = make(hot=8 * MIB, warm=32 * MIB)
        fill(house, range(100))
        monkeypatch.setattr("homeprefixd.prefix.disk_file._SPARE", MIB)
        house.warm = 2 * MIB
        house.reopen()
        disk = house.cache.disk
        assert disk is not None
        assert disk.file_bytes() > 5 * MIB
        house.cache.write()
        assert house.cache.warm_state == "ok"
        assert disk.used() <= 2 * MIB
        fill(house, range(100, 110))
        house.reopen()
        assert there(house, range(105, 110)) == 5

    def test_a_larger_one_is_taken_as_far_as_the_map_goes(self, make: Callable[..., House]) -> None:
        house = make(warm=8 * MIB)
        assert 8 * MIB <= house.cache.resize(1 << 40) <= 9 * MIB
        assert house.cache.resize(0) == 1 * MIB

    @pytest.mark.parametrize("looked_again", [False, True])
    def test_the_file_follows_once_it_may_be_written(self, make: Callable[..., House], looked_again: bool) -> None:
        """It was not compacted, as that would have been more than `daily_writes`: another bound makes it due.

        Also where it was looked for what is over a share meanwhile.
        """
        house = make(hot=32 * MIB, warm=64 * MIB, daily_writes=60 * MIB)
        fill(house, range(160))
        disk = house.cache.disk
        assert disk is not None
        house.cache.bound_writes(disk.sums.written.total + MIB // 2)
        house.cache.resize(24 * MIB)
        for _ in range(20):
            house.cache.write()
            house.now += 1
        before = disk.file_bytes()
        assert before > 26.4 * MIB > disk.used()
        if looked_again:
            house.cache.set_shares({}, {"guest": 50})
            house.cache.write()
        house.cache.bound_writes(disk.sums.written.total + 60 * MIB)
        house.cache.write()
        assert disk.file_bytes() <= 26.4 * MIB

    def test_space_is_used_again(self, make: Callable[..., House]) -> None:
        """The file is no larger than budget + 10 % after 20 x turnover."""
        house = make(hot=8 * MIB, warm=8 * MIB)
        fill(house, range(20 * 8 * MIB // (SIZE // 2)))
        disk = house.cache.disk
        assert disk is not None
        assert disk.sums.written.total > 19 * 8 * MIB
        assert disk.used() <= 8 * MIB
        assert disk.file_bytes() <= 1.1 * 8 * MIB


class TestFloor:
    def test_what_others_need_is_left_to_them(self, make: Callable[..., House]) -> None:
        house = make(hot=8 * MIB, warm=64 * MIB, min_free=100 * MIB)
        disk = house.cache.disk
        assert disk is not None
        disk.free_bytes = lambda: 110 * MIB - disk.file_bytes()  # type: ignore[method-assign]
        fill(house, range(100))
        assert disk.file_bytes() <= 10 * MIB
        assert house.cache.warm_state == "ok"  # as with any full budget: what is worth least went
        assert house.cache.counters.evicted_warm > 0
        assert there(house, range(95, 100)) == 5
        disk.free_bytes = lambda: 1 << 40  # type: ignore[method-assign]
        fill(house, range(100, 160))
        assert disk.file_bytes() > 12 * MIB

    @pytest.mark.parametrize("sizes", [(1 * MIB,), (1 * MIB, 50_000, 300_000)])
    def test_the_file_does_not_grow_into_it(self, make: Callable[..., House], sizes: tuple[int, ...]) -> None:
        """Nor where what is free in it lies scattered."""
        house = make(hot=16 * MIB, warm=200 * MIB, min_free=100 * MIB)
        disk = house.cache.disk
        assert disk is not None
        disk.free_bytes = lambda: 140 * MIB - disk.file_bytes()  # type: ignore[method-assign]
        least = 1 << 40
        for number in range(160):
            size = sizes[number % len(sizes)]
            parent = [number] * 64 * (1 + number % 5)
            house.save(parent, size)
            for hot in house.cache.hot.by_key.values():
                if not hot.warm:  # so that it does not compress
                    state = random.Random(hot.key).randbytes(size)
                    house.cache.arena.view(hot.offset, size)[:] = state
            house.cache.write(everything=True)
            least = min(least, disk.free_bytes())
        assert house.cache.warm_state == "ok"
        assert least >= 100 * MIB
        assert disk.used() > 20 * MIB
        assert house.known([159] * 64 * 5) == 64 * 5

    def test_little_room_under_a_large_budget_is_used(self, make: Callable[..., House]) -> None:
        """Batches are as large as what there is room for allows, so that not all goes for one of them."""
        house = make(hot=24 * MIB, warm=200 * MIB, min_free=100 * MIB)
        disk = house.cache.disk
        assert disk is not None
        disk.free_bytes = lambda: 112 * MIB - disk.file_bytes()  # type: ignore[method-assign]
        for number in range(60):
            house.save([number] * 64 * (1 + number % 9), 50_000)
            for hot in house.cache.hot.by_key.values():
                if not hot.warm:
                    house.cache.arena.view(hot.offset, 50_000)[:] = random.Random(hot.key).randbytes(50_000)
            if number % 20 == 19:  # much at a time
                house.cache.write(everything=True)
        assert house.cache.warm_state == "ok"
        assert disk.free_bytes() >= 100 * MIB
        assert disk.used() > 5 * MIB

    def test_without_any_room_it_says_so(self, make: Callable[..., House]) -> None:
        house = make(hot=8 * MIB, warm=64 * MIB, min_free=100 * MIB)
        disk = house.cache.disk
        assert disk is not None
        disk.free_bytes = lambda: 50 * MIB  # type: ignore[method-assign]
        fill(house, range(3))
        assert house.cache.warm_state == "full"
        assert "`cache.min_free` leaves 100 MiB of the disk to others, 50.0 MiB are free" in house.cache.warm_reason
        assert there(house, range(3)) == 3  # in RAM
        [pinned] = house.cache.pins.pin(Pin(0, house.namespace, to_le([0] * 64)))
        assert "`cache.min_free`" in pinned.not_kept
        disk.free_bytes = lambda: 1 << 40  # type: ignore[method-assign]
        house.now += 3
        house.cache.write()
        assert house.cache.warm_state == "ok"
        assert disk.nodes() == 3

    @pytest.mark.parametrize(
        ("free", "says"), [(101.5, "`cache.min_free` leaves 100 MiB"), (0.2, "only 205 KiB of the disk are free")]
    )
    def test_too_little_room_is_told_from_a_full_disk(self, make: Callable[..., House], free: float, says: str) -> None:
        house = make(hot=8 * MIB, warm=64 * MIB, min_free=100 * MIB)
        disk = house.cache.disk
        assert disk is not None
        disk.free_bytes = lambda: int(free * MIB)  # type: ignore[method-assign]
        house.save([1] * 64, 2 * MIB)
        house.cache.write(everything=True)
        assert house.cache.warm_state == "full"
        assert says in house.cache.warm_reason

    def test_what_does_not_fit_is_told_from_the_budget(self, make: Callable[..., House]) -> None:
        """Where what there is room for is full of what must stay, and the disk can be written."""
        house = make(hot=8 * MIB, warm=64 * MIB, min_free=100 * MIB)
        disk = house.cache.disk
        assert disk is not None
        assert disk.bound_text() == "`cache.warm` (or a share of it)"
        disk.free_bytes = lambda: 110 * MIB - disk.file_bytes()  # type: ignore[method-assign]
        assert disk.bound_text() == "what `cache.min_free` leaves of the disk"
