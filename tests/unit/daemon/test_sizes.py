"""Sizes that are left to the machine, and how the daemon logs."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from homeprefixd import budgets, logs, machine
from homeprefixd.config import CacheConfig
from homeprefixd.models.catalog import Catalog, ModelSpec

GIB = 1 << 30
MIB = 1 << 20


def machine_with(monkeypatch: pytest.MonkeyPatch, memory: int, disk: int) -> None:
    monkeypatch.setattr(machine, "available_memory", lambda: memory)
    monkeypatch.setattr(machine, "free_disk", lambda path: disk)
    monkeypatch.setattr(machine, "total_disk", lambda path: 100 * GIB)


def test_shares_of_memory_and_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with(monkeypatch, 16 * GIB, 100 * GIB)
    chosen = budgets.store_settings(CacheConfig(), tmp_path, "info", machine.available_memory())
    assert (chosen.hot, chosen.warm, chosen.write_queue) == (2 * GIB, 20 * GIB, 1 * GIB)
    given = budgets.store_settings(
        CacheConfig(hot=7, warm=8, write_queue=9), tmp_path, "info", machine.available_memory()
    )
    assert (given.hot, given.warm, given.write_queue) == (7, 8, 9)


def test_memory_that_the_model_will_fill_is_not_spare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with(monkeypatch, 16 * GIB, GIB)
    assert budgets.spare_memory(Catalog(())) == 16 * GIB
    assert budgets.spare_memory(Catalog((ModelSpec("a", tmp_path, 0, 6 * GIB),))) == 10 * GIB
    assert budgets.spare_memory(Catalog((ModelSpec("a", tmp_path, 0, 90 * GIB),))) == 4 * GIB


def test_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with(monkeypatch, 100 << 20, 1000 * GIB)
    chosen = budgets.store_settings(CacheConfig(), tmp_path, "info", machine.available_memory())
    assert (chosen.hot, chosen.warm) == (64 << 20, 64 * GIB)


def test_what_the_cache_holds_already_counts_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with(monkeypatch, 16 * GIB, 1 * GIB)
    with (tmp_path / "data.mdb").open("wb") as file:
        file.write(b"x" * (50 << 20))
        file.truncate(100 * GIB)  # sparse: only what is allocated counts
    chosen = budgets.store_settings(CacheConfig(), tmp_path, "info", machine.available_memory())
    assert chosen.warm == pytest.approx((GIB + (50 << 20)) / 5, rel=0.01)


def test_budgets_that_the_machine_cannot_fill_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with(monkeypatch, 20 * GIB, 50 * GIB)
    monkeypatch.setattr(machine, "total_memory", lambda: 23 * GIB)
    hot, warm = budgets.warnings(CacheConfig(hot=900 * GIB, warm=60 << 40), tmp_path, 6 * GIB)
    assert hot.startswith("cache.hot is 900 GiB, but 20.0 GiB of memory are free (of 23.0 GiB)")
    assert warm.startswith(f"cache.warm is 60.0 TiB, but the disk of {tmp_path} has room for 55.0 GiB")
    assert "min_free" not in warm
    assert budgets.warnings(CacheConfig(hot=20 * GIB, warm=55 * GIB), tmp_path, 6 * GIB) == []
    assert len(budgets.warnings(CacheConfig(hot=21 * GIB, warm=57 * GIB), tmp_path, 6 * GIB)) == 2
    machine_with(monkeypatch, 1, 1)
    assert budgets.warnings(CacheConfig(), tmp_path, 0) == []


def test_a_floor_that_leaves_no_room_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with(monkeypatch, 20 * GIB, 60 * MIB)
    for config in (CacheConfig(), CacheConfig(warm=40 * MIB, min_free=100 * MIB), CacheConfig(min_free=59 * MIB)):
        [line] = budgets.warnings(config, tmp_path, 0)
        assert line.startswith("nothing can be kept on disk: cache.min_free is ")
        assert f"the disk of {tmp_path} has 60.0 MiB" in line
        assert budgets.warnings(config, tmp_path, 50 * MIB) == []  # that stays, and can be replaced
    [line] = budgets.warnings(CacheConfig(warm=40 * MIB, min_free=30 * MIB), tmp_path, 0)
    assert line.startswith(f"cache.warm is 40.0 MiB, but the disk of {tmp_path} has room for 30.0 MiB")
    assert "cache.min_free leaves 30.0 MiB of it to others" in line
    assert budgets.warnings(CacheConfig(warm=40 * MIB, min_free=20 * MIB), tmp_path, 0) == []


def test_lines_for_the_journal_carry_their_priority() -> None:
    formatter = logs.JournalFormatter("%(message)s")
    said = {
        level: formatter.format(logging.LogRecord("x", level, "", 0, "a\nb", None, None))
        for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)
    }
    assert list(said.values()) == ["<7>a\n<7>b", "<6>a\n<6>b", "<4>a\n<4>b", "<3>a\n<3>b", "<3>a\n<3>b"]
