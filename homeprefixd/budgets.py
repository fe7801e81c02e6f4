"""Budgets that were set and that this machine cannot fill: said at the start, and no reason not to start."""

from __future__ import annotations

from pathlib import Path

from . import machine
from .config import CacheConfig


def warnings(cache: CacheConfig, directory: Path, stored: int) -> list[str]:
    """A line for each of `cache.hot` and `cache.warm` that is larger than what there is; none for what was left to us.

    `stored`: bytes that the cache in `directory` takes already. Raises OSError where its disk cannot be asked.
    """
    found = []
    free, memory = machine.available_memory(), machine.total_memory()
    if cache.hot > free:
        found.append(
            f"cache.hot is {_size(cache.hot)}, but {_size(free)} of memory are free (of {_size(memory)}), models not"
            " loaded yet: it will be filled only as far as memory is left, so choose less (--hot)"
        )
    room = machine.free_disk(directory) + stored
    if cache.warm > room:
        found.append(
            f"cache.warm is {_size(cache.warm)}, but the disk of {directory} has room for {_size(room)}: it will be"
            " filled only as far as the disk is free, so choose less (--warm)"
        )
    return found


def _size(count: int) -> str:
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
