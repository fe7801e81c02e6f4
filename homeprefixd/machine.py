"""Facts about this machine that defaults are made of: cores, memory, disk. Bytes everywhere.

Looks at control groups (v2 and v1), so that a container or a systemd slice with a limit is not taken for the whole
machine. Knows nothing of settings: which share of what is taken is decided by who asks.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped, unused-ignore]

_ROOT = Path("/")


def physical_cores() -> int:
    """Cores that this process may use, hyper-threads not counted; at least 1. Obeys affinity and CPU quota."""
    usable = len(os.sched_getaffinity(0))
    physical = psutil.cpu_count(logical=False) or usable
    quota = cpu_quota()
    return max(1, min(physical, usable, usable if quota is None else int(quota + 0.5)))


def total_memory() -> int:
    """RAM of the machine, or the limit of this process's control group where that is less."""
    limits = [limit for limit, _used in _memory_limits(_ROOT)]
    return int(min([psutil.virtual_memory().total, *limits]))


def available_memory(root: Path = _ROOT) -> int:
    """What can be allocated without swapping and without meeting a control group's limit."""
    rooms = [max(0, limit - used) for limit, used in _memory_limits(root)]
    return int(min([psutil.virtual_memory().available, *rooms]))


def free_disk(path: Path) -> int:
    """What an unprivileged user may still write on the filesystem of `path` or of its nearest existing parent."""
    return shutil.disk_usage(_existing(path)).free


def total_disk(path: Path) -> int:
    """Size of the filesystem of `path` or of its nearest existing parent."""
    return shutil.disk_usage(_existing(path)).total


def cpu_quota(root: Path = _ROOT) -> float | None:
    """CPUs' worth of time that the control groups allow; None: no limit."""
    quotas: list[float] = []
    for directory in _groups(root, ""):
        quota, _, period = _read(directory / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit() and int(period):
            quotas.append(int(quota) / int(period))
    for directory in _groups(root, "cpu"):
        quota, period = _read(directory / "cpu.cfs_quota_us"), _read(directory / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, used) of each control group around this process. Page cache that can be dropped counts as unused."""
    for controller, limit_name, usage_name, cache_key in (
        ("", "memory.max", "memory.current", "inactive_file"),
        ("", "memory.high", "memory.current", "inactive_file"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        for directory in _groups(root, controller):
            limit, usage = _read(directory / limit_name), _read(directory / usage_name)
            if limit.isdigit() and usage.isdigit() and int(limit) < 1 << 60:  # v1 says "no limit" with a huge number
                stat = dict(line.partition(" ")[::2] for line in _read(directory / "memory.stat").splitlines())
                cached = stat.get(cache_key, "0")
                yield int(limit), max(0, int(usage) - (int(cached) if cached.isdigit() else 0))


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Directories of this process's group of a v1 controller ("": of v2) and of the groups around it."""
    mount = root / "sys/fs/cgroup"
    bases = [mount / controller] if controller else [mount, mount / "unified"]
    for line in _read(root / "proc/self/cgroup").splitlines():
        _number, controllers, path = line.split(":", 2)
        if controller not in controllers.split(","):
            continue
        for base in bases:
            inner = base / path.strip("/")
            for directory in (inner, *inner.parents):
                if directory.is_dir():  # in a container the path is the host's, and only the mount itself is there
                    yield directory
                if directory == base:
                    break


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
