"""The hot tier gives memory back while the machine needs it, and takes it again: slowly, and without swinging."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from prefix_testing import MIB, House

from homeprefixd.prefix.memory_pressure import CALM, EVERY, Allowance, Gauge, Reading, Relief

GIB = 1 << 30
FINE = Reading(8 * GIB, 16 * GIB, 0.0)
SHORT = Reading(100 * MIB, 16 * GIB, 0.0)
STALLED = Reading(8 * GIB, 16 * GIB, 0.3)
BETWEEN = Reading(8 * GIB, 16 * GIB, 0.05)


def resident(house: House) -> int:
    """Bytes of memory in the arena's pages."""
    return Path(f"/proc/self/fd/{house.cache.arena.descriptor}").stat().st_blocks * 512


class TestDecision:
    @pytest.mark.parametrize("reading", [SHORT, STALLED])
    def test_down_to_nothing(self, reading: Reading) -> None:
        allowance = Allowance(1000 * MIB)
        values = [allowance.next(reading, 800 * MIB, 2.0 * step) for step in range(12)]
        assert values[0] < 800 * MIB
        assert values == sorted(values, reverse=True)
        assert values[-1] == 0

    def test_as_much_as_is_lacking_at_once(self) -> None:
        allowance = Allowance(8 * GIB)
        assert allowance.next(Reading(0, 100 * GIB, 0.0), 4 * GIB, 0.0) == 3 * GIB

    def test_it_grows_back_when_it_was_calm_for_a_while(self) -> None:
        allowance = Allowance(160 * MIB)
        assert allowance.next(STALLED, 100 * MIB, 0.0) == 80 * MIB
        assert allowance.next(FINE, 80 * MIB, CALM - 1) == 80 * MIB
        assert allowance.next(FINE, 80 * MIB, CALM) == 90 * MIB
        for step in range(20):
            allowance.next(FINE, 80 * MIB, CALM + EVERY * step)
        assert allowance.value == 160 * MIB

    def test_what_lies_between_changes_nothing(self) -> None:
        allowance = Allowance(160 * MIB)
        allowance.next(STALLED, 160 * MIB, 0.0)
        held = [allowance.next(BETWEEN, 140 * MIB, 2.0 * step) for step in range(1, 100)]
        assert set(held) == {140 * MIB}
        assert allowance.next(FINE, 140 * MIB, 200.0 + CALM) == 150 * MIB

    def test_nothing_happens_without_pressure(self) -> None:
        allowance = Allowance(GIB)
        assert {allowance.next(FINE, GIB, float(n)) for n in range(10)} == {GIB}


class TestGauge:
    def test_the_share_of_time_between_two_looks(self, tmp_path: Path) -> None:
        now = 100.0
        file = tmp_path / "memory"
        gauge = Gauge(lambda: now, file)
        line = "some avg10=0.00 avg60=0.00 avg300=0.00 total={}\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=7\n"
        file.write_text(line.format(1_000_000))
        assert gauge().stalled == 0.0
        now, _ = 102.0, file.write_text(line.format(1_500_000))
        assert gauge().stalled == pytest.approx(0.25)
        now, _ = 104.0, file.write_text("nonsense\n")
        assert gauge().stalled == 0.0

    def test_this_machine(self) -> None:
        reading = Gauge(lambda: 1.0)()
        assert 0 < reading.available <= reading.total


class TestRelief:
    def test_memory_is_given_back_and_taken_again(self, make: Callable[..., House]) -> None:
        house = make(hot=16 * MIB)
        reading = FINE
        relief = Relief(house.cache, lambda: reading)
        for number in range(30):
            house.save([number] * 64, 400_000)
        house.cache.write(everything=True)
        relief.look()
        assert house.cache.arena.used > 11 * MIB
        reading = SHORT
        for _step in range(12):
            relief.look()
        assert house.cache.arena.used == 0
        assert resident(house) < MIB
        assert house.known([3] * 64) == 64  # on disk
        assert house.session.reserve([4 * MIB]) == []
        for number in (3, 4, 5, 6, 7, 8):  # through an eighth of it
            assert house.restore([number] * 64)[0][0] == "warm"
            assert house.cache.arena.used <= 2 * MIB
        relief.look()
        assert house.cache.arena.used == 0
        house.cache.check_integrity()
        reading = FINE
        house.now += CALM
        for _step in range(20):
            relief.look()
        assert house.cache.arena.allowance == 16 * MIB
        assert house.restore([3] * 64)[0][0] == "warm"

    def test_what_is_not_on_disk_yet_and_what_is_in_use_stays(self, make: Callable[..., House]) -> None:
        house = make(hot=16 * MIB)
        relief = Relief(house.cache, lambda: SHORT)
        house.save([1] * 64, 400_000)
        house.cache.write(everything=True)
        lease = house.session.lookup(house.namespace, b"\1\0\0\0" * 64, limit=64)
        house.save([2] * 64, 400_000)
        for _step in range(12):
            relief.look()
        assert house.cache.arena.used == 2 * -(-400_000 // 4096) * 4096
        house.session.release(lease)
        house.cache.write(everything=True)
        relief.look()
        assert house.cache.arena.used == 0
        assert house.known([2] * 64) == 64

    def test_another_budget(self, make: Callable[..., House]) -> None:
        house = make(hot=16 * MIB)
        relief = Relief(house.cache, lambda: FINE)
        for number in range(30):
            house.save([number] * 64, 400_000)
        house.cache.write(everything=True)
        assert relief.bound(4 * MIB) == 4 * MIB
        assert house.cache.arena.used <= 4 * MIB
        house.save([50] * 64, 400_000)
        assert house.known([50] * 64) == 64
        assert house.cache.arena.used <= 4 * MIB
        relief.look()
        assert house.cache.arena.allowance == 4 * MIB
        assert relief.bound(1 << 40) == 16 * MIB
        relief.look()
        assert house.cache.arena.allowance == 16 * MIB
        house.cache.check_integrity()
