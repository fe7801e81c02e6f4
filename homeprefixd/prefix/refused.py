"""What was not written for want of room, or of the day's bytes, and which of it is tried again once there is some.

Only what would be written now: where there is room for it, or where it is worth more than what would go for it. So what
it displaces does not come back, and trying again comes to an end. What was evicted from the disk is not tried again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from .arena import pages
from .disk import Disk, DiskTroubleError
from .hot import HotNode
from .shares import Account
from .tree import Record

if TYPE_CHECKING:
    from .cache import Cache


def requeue(
    cache: Cache, disk: Disk, accounts: Sequence[Account], is_idle: Callable[[bytes], bool], most: int | None
) -> None:
    """*Writer.* Let those wait to be written.

    `is_idle`: whether nobody needs a node on disk, by its key. `most`: bytes of state that may come, about; None: any
    number.
    """
    with cache.lock:
        worth = {hot: cache.hot.overdue(hot) for hot in cache.queue.refused()}
        wanted = sorted(worth, key=lambda hot: (worth[hot], hot.node.end))
    if not wanted:
        return
    above = {hot.node.parent for hot in wanted}

    def may_go(key: bytes) -> bool:
        return key not in above and is_idle(key)  # what waits to be written holds what is above it

    try:
        for account in accounts:
            own = [hot for hot in wanted if account.holds(hot.node.record)]
            less = _less(disk, own, account.limit - account.used, may_go, account.holds)
            chosen = _outdoing(cache, own, worth, account.limit - account.used, less)
            wanted = [hot for hot in wanted if hot in chosen or not account.holds(hot.node.record)]
        room = -disk.lacks(0)
        chosen = _outdoing(cache, wanted, worth, room, _less(disk, wanted, room, may_go))
    except DiskTroubleError as error:
        cache.trouble("looking for room", error)
        return
    with cache.lock:
        for hot in wanted:
            if most is not None and most <= 0:
                return
            if hot in chosen and hot.indexed and not (hot.warm or hot.queued):
                cache.queue.add(hot, cache.clock())
                most = most - hot.size if most is not None else None


def _less(
    disk: Disk,
    hots: Sequence[HotNode],
    room: int,
    may_go: Callable[[bytes], bool],
    holds: Callable[[Record], bool] | None = None,
) -> list[tuple[float, int]]:
    """What would go if all these were written into `room` bytes, as `Disk.would_go`."""
    need = sum(pages(hot.size) for hot in hots) - room
    return disk.would_go(need, may_go, holds) if need > 0 else []


def _outdoing(
    cache: Cache, hots: Sequence[HotNode], worth: Mapping[HotNode, float], room: int, less: list[tuple[float, int]]
) -> set[HotNode]:
    """Those for which there are `room` bytes, or that are less overdue, by `worth`, than what would go for them."""
    found: set[HotNode] = set()
    going = iter(less)
    following = next(going, None)
    with cache.lock:
        for hot in hots:
            above = cache.hot.by_key.get(hot.node.parent)
            if above is not None and not (above.warm or above.queued or above in found):
                continue  # it would take along what was evicted
            while room < pages(hot.size) and following is not None and following[0] > worth[hot]:
                room += following[1]
                following = next(going, None)
            if pages(hot.size) <= room:
                room -= pages(hot.size)
                found.add(hot)
    return found
