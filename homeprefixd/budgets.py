"""Budgets that were set and that this machine cannot fill: said at the start, and no reason not to start."""

from __future__ import annotations

from pathlib import Path

from . import machine
from .config import CacheConfig
from .sizes import size_text


def warnings(cache: CacheConfig, directory: Path, stored: int) -> list[str]:
    """A line for each of `cache.hot` and `cache.warm` that is larger than what there is; none for what was left to us.

    `stored`: bytes that the cache in `directory` takes already. Raises OSError where its disk cannot be asked.
    """
    found = []
    free, memory = machine.available_memory(), machine.total_memory()
    if cache.hot > free:
        found.append(
            f"cache.hot is {size_text(cache.hot)}, but {size_text(free)} of memory are free (of {size_text(memory)}),"
            " models not loaded yet: it will be filled only as far as memory is left, so choose less (--hot)"
        )
    room = machine.free_disk(directory) + stored
    if cache.warm > room:
        found.append(
            f"cache.warm is {size_text(cache.warm)}, but the disk of {directory} has room for {size_text(room)}: it"
            " will be filled only as far as the disk is free, so choose less (--warm)"
        )
    return found
