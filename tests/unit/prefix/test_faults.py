"""Faults of the disk: whatever it does, what comes back is right or does not come, and afterwards all is well again."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable
from typing import cast

import pytest
from faulty_disk import FULL, Faults, FaultyDisk, no_file_larger_than
from prefix_testing import MIB, House, payload_of

from homeprefixd.prefix.blocks import to_le
from homeprefixd.prefix.cache import BlockLostError
from homeprefixd.prefix.directory import DATA
from homeprefixd.prefix.disk_file import GoneError

SIZE = 400_000
PROMPT = [*range(64), *range(64, 128), *range(128, 192)]


@pytest.fixture
def house(make: Callable[..., House]) -> House:
    return make(hot=8 * MIB, warm=32 * MIB, kind=FaultyDisk)


def faults(house: House) -> Faults:
    return cast(FaultyDisk, house.cache.disk).faults


def restored(house: House, tokens: list[int]) -> int:
    """Blocks that came, each as it was saved."""
    lease = house.session.lookup(house.namespace, to_le(tokens), limit=len(tokens))
    try:
        for index, node in enumerate(lease.plan):
            try:
                state = house.block(lease, index)
            except BlockLostError:
                return index
            assert state == payload_of(node.key, node.size)[: node.size]
        return len(lease.plan)
    finally:
        house.session.release(lease)


def on_disk_only(house: House) -> None:
    """Save the prompt, write it and let it go from RAM."""
    house.save(PROMPT, SIZE)
    house.cache.write(everything=True)
    house.reopen()


class TestReads:
    def test_errors_are_counted_and_nothing_is_forgotten(self, house: House) -> None:
        on_disk_only(house)
        faults(house).read_error = errno.EIO
        assert restored(house, PROMPT) == 0
        assert house.cache.counters.errors == 1
        assert house.cache.counters.damaged == 0
        faults(house).read_error = 0
        assert restored(house, PROMPT) == 3
        house.cache.check_integrity()

    @pytest.mark.parametrize("kind", ["short", "flip"])
    def test_wrong_bytes_are_never_given_out(self, house: House, kind: str) -> None:
        on_disk_only(house)
        faults(house).short_reads = kind == "short"
        faults(house).flips = float(kind == "flip")
        assert restored(house, PROMPT) == 0
        assert house.cache.counters.damaged == 1
        reads = faults(house).reads
        assert restored(house, PROMPT) == 0  # dropped once, never tried again
        assert faults(house).reads == reads
        faults(house).short_reads, faults(house).flips = False, 0.0
        house.cache.write()
        on_disk_only(house)
        assert restored(house, PROMPT) == 3

    def test_a_slow_disk_is_measured(self, house: House) -> None:
        on_disk_only(house)
        assert restored(house, PROMPT) == 3
        fast = house.cache.read_rate.value
        house.reopen()
        faults(house).bandwidth = 2e6
        assert restored(house, PROMPT) == 3
        assert 0.1e6 < house.cache.read_rate.value < 2e6 < fast
        house.reopen()
        faults(house).latency = 0.02
        assert restored(house, PROMPT) == 3
        assert house.cache.read_rate.value < SIZE / 0.02

    def test_many_prompts_with_bits_that_flip(self, house: House) -> None:
        prompts = [[n] * 64 for n in range(60)]
        for tokens in prompts:
            house.save(tokens, 20_000)
        house.cache.write(everything=True)
        house.reopen()
        faults(house).flips = 0.3
        came = [restored(house, tokens) for tokens in prompts]  # checks each byte
        assert faults(house).flipped == came.count(0) == house.cache.counters.damaged > 5
        house.cache.write()
        house.cache.check_integrity()
        assert house.cache.disk is not None
        assert house.cache.disk.nodes() == came.count(1)


class TestWrites:
    @pytest.mark.parametrize("error", [errno.EIO, *FULL])
    def test_blocks_stay_in_memory_until_it_works_again(self, house: House, error: int) -> None:
        house.save(PROMPT, SIZE)
        faults(house).write_error = error
        house.cache.write(everything=True)
        assert house.cache.warm_state == ("error" if error == errno.EIO else "full")
        assert restored(house, PROMPT) == 3
        assert house.cache.disk is not None
        assert house.cache.disk.nodes() == 0
        house.save([7] * 64, SIZE)
        assert restored(house, [7] * 64) == 1
        faults(house).write_error = 0
        house.now += 700
        house.cache.write()
        assert house.cache.warm_state == "ok"
        assert house.cache.disk.nodes() == 4
        house.cache.check_integrity()

    def test_a_slow_writer_holds_nobody_up(self, house: House) -> None:
        """Look-ups and commits do not wait for the disk."""
        held = faults(house).held = threading.Event()
        house.save(PROMPT, SIZE)
        writer = threading.Thread(target=lambda: house.cache.write(everything=True))
        writer.start()
        try:
            for number in range(20):
                assert house.known(PROMPT) == len(PROMPT)
                house.save([number] * 64, 1000)
            assert writer.is_alive()
        finally:
            held.set()
            writer.join()
        assert house.cache.disk is not None
        assert house.cache.disk.nodes() == 23


class TestFullDisk:
    def test_what_it_has_is_used_and_more_when_there_is_more(self, make: Callable[..., House]) -> None:
        """The store holds at what the disk gave it, evicts and goes on; it neither shrinks further with each failure
        nor stays small when there is room again."""
        house = make(hot=16 * MIB, warm=64 * MIB)
        disk = house.cache.disk
        assert disk is not None
        held = []
        with no_file_larger_than(6 * MIB):
            for cycle in range(12):
                for number in range(20):
                    house.save([1000 * cycle + number] * 64, SIZE)
                    house.cache.write()
                    house.now += 3
                    house.cache.write()
                assert house.known([1000 * cycle + 19] * 64) == 64
                held.append(disk.used())
                house.now += 700  # every time it tries to grow again, and cannot
                house.cache.write()
            assert (house.directory / "data.mdb").stat().st_size <= 6 * MIB
        assert house.cache.counters.evicted_warm > 100
        assert min(held) > 3 * MIB, held
        assert max(held[6:]) > 4.5 * MIB, held  # it does not ratchet down
        house.now += 700
        for number in range(100):
            house.save([50_000 + number] * 64, SIZE)
            house.cache.write(everything=True)
        assert house.cache.warm_state == "ok"
        assert disk.used() > 18 * MIB
        assert sum(house.known([50_000 + n] * 64) == 64 for n in range(100)) == 100
        house.cache.check_integrity()


class TestPlace:
    """Somebody removes the directory, or puts a backup in the file's place, while the store has it open."""

    @pytest.mark.parametrize("change", ["removed", "replaced", "directory removed"])
    def test_a_file_that_is_not_the_one_at_its_path_is_found(self, house: House, change: str) -> None:
        house.save(PROMPT, SIZE)
        house.cache.write(everything=True)
        disk = house.cache.disk
        assert disk is not None
        disk.check_place()
        if change == "directory removed":
            shutil.rmtree(house.directory)
        elif change == "removed":
            (house.directory / DATA).unlink()
        else:
            shutil.copy(house.directory / DATA, house.directory / "copy")
            os.replace(house.directory / "copy", house.directory / DATA)
        with pytest.raises(GoneError, match=change.split()[-1]):
            disk.check_place()

    def test_compaction_is_no_replacement(self, house: House) -> None:
        on_disk_only(house)
        disk = house.cache.disk
        assert disk is not None
        disk.compact()
        disk.check_place()
