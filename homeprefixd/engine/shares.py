"""What a request's turn is worth: priorities, ageing, fair shares; and how long a refused one should wait. Pure.

Everything is weighed in tokens: what a cached prefix saves, what a second of waiting is worth, how far a class is ahead
of another. So nobody starves: a background request that waits ages past any fresh one.
"""

from __future__ import annotations

import math
from typing import Literal

Priority = Literal["interactive", "normal", "background"]

AGEING = 200.0  # tokens that a second of waiting is worth
_CLASSES: dict[str, float] = {"interactive": 6_000.0, "normal": 0.0, "background": -6_000.0}
"""Tokens that a class is ahead: half a minute of waiting."""

_HALF_LIFE = 60.0  # seconds after which what a client used counts half
_DECODE_WEIGHT = 8.0  # a generated token takes as long as so many of a prompt (a CPU)
_MOST_BEHIND = 3_000.0  # tokens that heavy use sets a client back at most: half a class
_SMOOTH = 0.2  # weight of the newest request in the mean time of service


def head_start(priority: str) -> float:
    """Tokens by which a class is ahead of `normal`; unknown ones are normal."""
    return _CLASSES.get(priority, 0.0)


class Use:
    """What each client has used of something of late. `now` in seconds of one clock."""

    def __init__(self) -> None:
        self._used: dict[str, tuple[float, float]] = {}  # client -> how much, when

    def count(self, client: str, amount: float, now: float) -> None:
        """Note that it used so much more."""
        self._used[client] = (self.of(client, now) + amount, now)
        if len(self._used) > 1000:
            self._used = {name: used for name, used in self._used.items() if now - used[1] < 10 * _HALF_LIFE}

    def of(self, client: str, now: float) -> float:
        """How much of it still counts."""
        used, when = self._used.get(client, (0.0, now))
        return float(used * 0.5 ** (max(0.0, now - when) / _HALF_LIFE))


class Shares:
    """What each client has used of late, and how long a request takes. `now` in seconds of one clock."""

    def __init__(self) -> None:
        self._tokens = Use()  # weighted
        self._service = 0.0

    def count(self, client: str, *, prefilled: int = 0, generated: int = 0, now: float) -> None:
        """Note tokens that were computed for a client."""
        self._tokens.count(client, prefilled + _DECODE_WEIGHT * generated, now)

    def behind(self, client: str, now: float) -> float:
        """Tokens by which a client is set back against one that has used nothing."""
        return min(_MOST_BEHIND, self._tokens.of(client, now))

    def served(self, seconds: float) -> None:
        """Note how long a request took from its admission to its end."""
        self._service = seconds if not self._service else (1 - _SMOOTH) * self._service + _SMOOTH * seconds

    def retry_after(self, waiting: int, parallel: int) -> int:
        """Seconds until one of `waiting` requests will have been served, as far as the last ones tell; at least 1."""
        return max(1, min(600, math.ceil(self._service * (waiting + 1) / max(1, parallel))))
