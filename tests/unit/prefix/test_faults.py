"""Faults of the disk: whatever it does, what comes back is right or does not come, and afterwards all is well again."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
from faulty_disk import FULL, Faults, FaultyDisk, no_file_larger_than
from prefix_testing import MIB, SHAPED, House, Store, Worker, payload_of

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


class TestRefused:
    """A worker says that a block's state is none of its model."""

    PROMPT = tuple(range(300))

    def test_one_on_disk_goes_with_what_follows_it(self, house: House) -> None:
        keys = house.save(self.PROMPT)
        house.cache.write(everything=True)
        assert house.cache.refused(house.namespace, keys[2], "another size") == 3
        assert house.known(self.PROMPT) == 128
        assert house.cache.counters.damaged == 1
        assert house.cache.refused(house.namespace, keys[2], "another size") == 0
        house.save(self.PROMPT)
        house.cache.write(everything=True)
        house.reopen()
        assert len(house.restore(self.PROMPT)) == 5

    def test_one_in_ram_only(self, house: House) -> None:
        keys = house.save(self.PROMPT)
        assert house.cache.refused(house.namespace, keys[1], "another size") == 4
        assert house.known(self.PROMPT) == 64
        house.cache.check_integrity()
        house.save(self.PROMPT)
        assert house.known(self.PROMPT) == 300

    def test_where_only_the_copy_in_ram_is_wrong(self, house: House) -> None:
        keys = house.save(self.PROMPT)
        house.cache.write(everything=True)
        hot = house.cache.hot.by_key[keys[2]]
        house.cache.arena.view(hot.offset, 8)[:] = b"\xff" * 8
        assert house.cache.refused(house.namespace, keys[2], "another size") == 1
        found = house.restore(self.PROMPT)
        assert [tier for tier, _state in found] == ["hot", "hot", "warm", "hot", "hot"]
        assert found[2][1] == payload_of(keys[2], 3000)[:3000]
        house.cache.check_integrity()

    def test_what_is_not_of_its_namespace_stays(self, house: House) -> None:
        keys = house.save(self.PROMPT)
        assert house.cache.refused(bytes(32), keys[1], "another size") == 0
        assert house.cache.refused(house.namespace, bytes(32), "another size") == 0
        assert house.known(self.PROMPT) == 300

    def test_through_a_real_store(
        self, start_store: Callable[..., Store], start_worker: Callable[[Store], Worker], tmp_path: Path
    ) -> None:
        store = start_store(tmp_path)
        store.greet()
        worker = start_worker(store)
        keys = worker.save(self.PROMPT)
        assert store.flush() == 0
        worker.client.refuse(worker.namespace, keys[3], "another size")
        assert len(worker.restore(self.PROMPT)[1]) == 3
        assert store.stats()["counters"]["damaged"] == 1
        assert store.stop()[0] == 0


def test_a_state_that_is_none_teaches_no_layout(house: House) -> None:
    """What is loaded may be anything: what comes from a worker later is taken as it is."""
    house.save([1] * 64, 3000)
    house.cache.write(everything=True)
    house.reopen()
    house.restore([1] * 64)
    assert house.save([2] * 256, SHAPED)
    assert house.known([2] * 256) == 256
