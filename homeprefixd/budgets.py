"""Budgets of memory and disk: what those become that are left to the machine, and which it cannot fill."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

from . import machine
from .config import CacheConfig, ModelsConfig
from .errors import ConfigError
from .models.catalog import Catalog
from .models.loading import Budget
from .models.store_link import StoreSettings
from .sizes import size_text

GIB = 1 << 30
MIB = 1 << 20

_LEAST_ROOM = 2 * MIB
"""Bytes of disk below which there is no room for a block beside the store's own rows, and what they may grow by."""


class DiskBudget(NamedTuple):
    """What the store may do to its disk, in bytes, all resolved."""

    warm: int
    min_free: int
    daily_writes: int  # 0: no bound


def spare_memory(catalog: Catalog, memory: int = 0) -> int:
    """Bytes of memory beyond the largest model's file, which llama.cpp maps: it counts as available until used.

    At least a quarter of it, since a machine may be used that cannot hold its model. `memory`: `models.memory`.
    """
    available = memory or machine.available_memory()
    return max(available - max((spec.size for spec in catalog.specs), default=0), available // 4)


def model_budget(models: ModelsConfig, hot: int) -> Budget:
    """What models may take beside the hot tier. Where it was left to the machine, a tenth is left to others.

    Raises ConfigError if the hot tier takes it all.
    """
    available = models.memory or machine.available_memory()
    total = models.memory or available * 9 // 10
    if models.memory and hot >= models.memory:
        raise ConfigError(
            f"cache.hot takes {hot} bytes and models.memory gives {models.memory} to it and all models together:"
            " raise models.memory, or lower cache.hot",
            param="models.memory",
        )
    return Budget(max(0, total - hot), available, strict=bool(models.memory))


def disk_budget(cache: CacheConfig, directory: Path) -> DiskBudget:
    """What was left to the machine is chosen here: a fifth of free disk, and a fiftieth of it all for others.

    Raises OSError where the disk cannot be asked.
    """
    warm = cache.warm or max(64 * MIB, min(64 * GIB, (machine.free_disk(directory) + size_on_disk(directory)) // 5))
    min_free = cache.min_free or min(GIB, machine.total_disk(directory) // 50)
    return DiskBudget(warm, min_free, cache.daily_writes)


def store_settings(cache: CacheConfig, directory: Path, log_level: str, spare: int) -> StoreSettings:
    """Sizes that were left to the machine are chosen here: an eighth of `spare` memory; see `disk_budget`."""
    hot = cache.hot or max(64 * MIB, spare // 8)
    disk = disk_budget(cache, directory)
    return StoreSettings(
        directory=directory,
        hot=hot,
        warm=disk.warm,
        compression=cache.compression,
        tail_delay=cache.tail_delay,
        write_queue=cache.write_queue or hot // 2,
        daily_writes=disk.daily_writes,
        preload=cache.preload,
        scrub_rate=cache.scrub_rate,
        min_free=disk.min_free,
        log_level=log_level,
    )


def size_on_disk(directory: Path) -> int:
    """Bytes that the store's files take, so that a full cache does not make the next start's budget smaller."""
    total = 0
    with contextlib.suppress(OSError):
        for path in directory.glob("data.mdb*"):
            total += path.stat().st_blocks * 512
    return total


def warnings(cache: CacheConfig, directory: Path, stored: int) -> list[str]:
    """A line for each of `cache.hot` and `cache.warm` that is larger than what there is; none for what was left to us.
    One where `cache.min_free` leaves nothing to the cache.

    Said at the start; no reason not to start.

    `stored`: bytes that the cache in `directory` takes already. Raises OSError where its disk cannot be asked.
    """
    found = []
    free, memory = machine.available_memory(), machine.total_memory()
    if cache.hot > free:
        found.append(
            f"cache.hot is {size_text(cache.hot)}, but {size_text(free)} of memory are free (of {size_text(memory)}),"
            " models not loaded yet: it will be filled only as far as memory is left, so choose less (--hot)"
        )
    there, min_free = machine.free_disk(directory) + stored, disk_budget(cache, directory).min_free
    room = max(stored, there - min_free)  # what is stored already stays
    if room < _LEAST_ROOM <= there:
        found.append(
            f"nothing can be kept on disk: cache.min_free is {size_text(min_free)}, but the disk of {directory} has"
            f" {size_text(there)} for it and the cache together, so choose less"
        )
    elif cache.warm > room:
        floor = f", and cache.min_free leaves {size_text(min_free)} of it to others" if cache.warm <= there else ""
        found.append(
            f"cache.warm is {size_text(cache.warm)}, but the disk of {directory} has room for {size_text(room)}: it"
            f" will be filled only as far as the disk is free{floor}, so choose less (--warm)"
        )
    return found
