"""Which hot nodes wait to be written, within a bound of bytes.

Whole blocks are written once no others have come for a while: while a prompt is prefilled, compressing would take a
core from it. Tails are written once they have stopped growing. Not thread-safe: `cache.py` calls it under its lock.
"""

from __future__ import annotations

from collections.abc import Iterator

from .blocks import BLOCK_TOKENS
from .hot import HotNode

QUIET = 2.0
"""Seconds without a new whole block after which the waiting ones are written."""

PATIENCE = 30.0
"""Seconds after which a whole block is written anyway. So is every one while half of the bound is used."""


class WriteQueue:
    """`limit`: bytes of state. `tail_delay`: seconds that a tail must not have been superseded."""

    def __init__(self, limit: int, tail_delay: float) -> None:
        self.limit = limit
        self.bytes = 0
        self._tail_delay = tail_delay
        self._quiet = min(QUIET, tail_delay)
        self._came: dict[HotNode, float] = {}  # when; in this order, so parents before children
        self._left: dict[HotNode, None] = {}  # those for which there was no room, which may wait once there is
        self._refused: dict[HotNode, None] = {}
        self._last_whole = 0.0

    def __len__(self) -> int:
        return len(self._came)

    def __contains__(self, hot: HotNode) -> bool:
        return hot in self._came

    def __iter__(self) -> Iterator[HotNode]:
        return iter(self._came)

    def add(self, hot: HotNode, now: float) -> list[HotNode]:
        """Let `hot` wait; returns those for which there is no room because of it: the oldest tails, or `hot` itself.

        See `take_back`.
        """
        given_up: list[HotNode] = []
        if self.bytes + hot.size > self.limit:
            for tail in [other for other in self._came if other.node.length < BLOCK_TOKENS]:
                if self.bytes + hot.size <= self.limit:
                    break
                self.remove(tail)
                given_up.append(tail)
        if self._came and self.bytes + hot.size > self.limit:
            given_up.append(hot)
            self._left.update(dict.fromkeys(given_up))
            return given_up
        self._left.update(dict.fromkeys(given_up))
        self._refused.pop(hot, None)
        self._came[hot] = now
        if hot.node.length == BLOCK_TOKENS:
            self._last_whole = now
        self.bytes += hot.size
        hot.queued = True
        return given_up

    def remove(self, hot: HotNode) -> None:
        """It waits no longer, nor for room to wait, nor is it refused. Those that do not wait are ignored."""
        self._left.pop(hot, None)
        self._refused.pop(hot, None)
        if self._came.pop(hot, None) is not None:
            self.bytes -= hot.size
            hot.queued = False

    def refuse(self, hot: HotNode) -> None:
        """It waits no longer, as it cannot be written now: see `refused`. Those that do not wait are ignored."""
        waited = hot.queued or hot in self._left or hot in self._refused
        self.remove(hot)
        if waited:
            self._refused[hot] = None

    def refused(self) -> list[HotNode]:
        """Those that were to be written, and may be tried once there is room: they have never been on disk.

        What was written, and evicted from the disk for its worth, is not among them: it would go round in circles.
        """
        return [hot for hot in self._refused if hot.indexed and not (hot.warm or hot.queued)]

    def lacks_room_for(self, hot: HotNode) -> bool:
        """Whether it is to be written, but must wait for room to wait in."""
        return hot in self._left

    def take_back(self, now: float) -> bool:
        """Let those wait for which there was no room, as far as there is by now; whether there are any."""
        found = False
        for hot in list(self._left):
            if hot.indexed and not (hot.warm or hot.queued):
                if self._came and self.bytes + hot.size > self.limit:
                    break
                found = True
                self.add(hot, now)
            self._left.pop(hot, None)
        return found

    def due(self, now: float) -> list[HotNode]:
        """Those whose time has come, in the order of coming."""
        return [hot for hot in self._came if self._moment(hot) <= now]

    def next_due(self) -> float | None:
        """When the next one's time comes; None if none waits."""
        return min(map(self._moment, self._came), default=None)

    def _moment(self, hot: HotNode) -> float:
        came = self._came[hot]
        if hot.node.length < BLOCK_TOKENS:
            return came + self._tail_delay
        if self.bytes > self.limit // 2:
            return came
        return min(came + PATIENCE, self._last_whole + self._quiet)

    def check(self) -> None:
        """Raises ValueError if the sums do not agree."""
        if self.bytes != sum(hot.size for hot in self._came) or not all(
            hot.queued and hot.indexed for hot in self._came
        ):
            raise ValueError(f"the write queue's {self.bytes} bytes do not add up")
