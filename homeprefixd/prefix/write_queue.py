"""Which hot nodes wait to be written, within a bound of bytes.

Whole blocks are written soon, tails only once they have stopped growing. Not thread-safe: `cache.py` calls it under its
lock.
"""

from __future__ import annotations

from collections.abc import Iterator

from .blocks import BLOCK_TOKENS
from .hot import HotNode

LINGER = 0.25
"""Seconds that a block waits for others, so that they share a transaction."""


class WriteQueue:
    """`limit`: bytes of state. `tail_delay`: seconds that a tail must not have been superseded."""

    def __init__(self, limit: int, tail_delay: float) -> None:
        self.limit = limit
        self.bytes = 0
        self._tail_delay = tail_delay
        self._due: dict[HotNode, float] = {}  # in the order of coming, so parents before children

    def __len__(self) -> int:
        return len(self._due)

    def __contains__(self, hot: HotNode) -> bool:
        return hot in self._due

    def __iter__(self) -> Iterator[HotNode]:
        return iter(self._due)

    def add(self, hot: HotNode, now: float) -> list[HotNode]:
        """Let `hot` wait; returns those that must not wait because of it: the oldest tails, or `hot` itself."""
        given_up: list[HotNode] = []
        if self.bytes + hot.size > self.limit:
            for tail in [other for other in self._due if other.node.length < BLOCK_TOKENS]:
                if self.bytes + hot.size <= self.limit:
                    break
                self.remove(tail)
                given_up.append(tail)
        if self._due and self.bytes + hot.size > self.limit:
            return [*given_up, hot]
        whole = hot.node.length == BLOCK_TOKENS
        self._due[hot] = now + (min(LINGER, self._tail_delay) if whole else self._tail_delay)
        self.bytes += hot.size
        hot.queued = True
        return given_up

    def remove(self, hot: HotNode) -> None:
        """It waits no longer. Those that do not wait are ignored."""
        if self._due.pop(hot, None) is not None:
            self.bytes -= hot.size
            hot.queued = False

    def due(self, now: float) -> list[HotNode]:
        """Those whose time has come, in the order of coming."""
        return [hot for hot, moment in self._due.items() if moment <= now]

    def next_due(self) -> float | None:
        """When the next one's time comes; None if none waits."""
        return min(self._due.values(), default=None)

    def check(self) -> None:
        """Raises ValueError if the sums do not agree."""
        if self.bytes != sum(hot.size for hot in self._due) or not all(hot.queued and hot.indexed for hot in self._due):
            raise ValueError(f"the write queue's {self.bytes} bytes do not add up")
