"""Facts about the machine, with made-up control groups around this process."""

from __future__ import annotations

from pathlib import Path

import psutil

from homeprefixd import machine


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def test_this_machine() -> None:
    assert 1 <= machine.physical_cores() <= (psutil.cpu_count() or 1)
    assert 0 < machine.available_memory() <= machine.total_memory() <= psutil.virtual_memory().total


def test_version_2_limits_of_all_groups_around_count(tmp_path: Path) -> None:
    base = "sys__fs__cgroup__"
    write(tmp_path, proc__self__cgroup="0::/box/inner")
    write(
        tmp_path,
        **{
            f"{base}box__memory_dot_max": "1000000",
            f"{base}box__memory_dot_current": "700000",
            f"{base}box__memory_dot_stat": "anon 1\ninactive_file 200000",
            f"{base}box__inner__memory_dot_max": "max",
            f"{base}box__inner__memory_dot_current": "5",
            f"{base}box__cpu_dot_max": "150000 100000",
            f"{base}box__inner__cpu_dot_max": "max 100000",
        },
    )
    assert machine.available_memory(tmp_path) == 500_000
    assert machine.cpu_quota(tmp_path) == 1.5


def test_version_1_and_a_path_that_only_the_host_has(tmp_path: Path) -> None:
    base = "sys__fs__cgroup__"
    write(tmp_path, proc__self__cgroup="4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n0::/")
    write(
        tmp_path,
        **{
            f"{base}memory__memory_dot_limit_in_bytes": "3000",
            f"{base}memory__memory_dot_usage_in_bytes": "1000",
            f"{base}cpu__cpu_dot_cfs_quota_us": "-1",
            f"{base}cpu__cpu_dot_cfs_period_us": "100000",
        },
    )
    assert machine.available_memory(tmp_path) == 2000
    assert machine.cpu_quota(tmp_path) is None


def test_no_limits(tmp_path: Path) -> None:
    write(tmp_path, proc__self__cgroup="4:memory:/\n0::/")
    write(tmp_path, sys__fs__cgroup__memory__memory_dot_limit_in_bytes="9223372036854771712")
    assert machine.available_memory(tmp_path) > 10 << 20


def test_disk_of_a_directory_that_is_not_there_yet(tmp_path: Path) -> None:
    missing = tmp_path / "a" / "b"
    assert 0 < machine.free_disk(missing) <= machine.total_disk(missing)
    assert not missing.exists()
