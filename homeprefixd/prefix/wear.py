"""How much is written to the disk: in all, today, and how much may be.

Flash wears with what is written to it. The record is kept in the file itself, so that a restart does not begin the day
anew. Bytes are those of payloads as stored; the tree's own tables add a few percent.
"""

from __future__ import annotations

import msgspec

DAY = 86_400.0  # s; days are those of UTC

_JUMP = 365 * DAY
"""Between two writes that are further apart the clock was set: a machine without one of its own starts in 1970."""


class Written(msgspec.Struct):
    """The record. `day` is the number of days since 1970."""

    total: int = 0
    nodes: int = 0
    since: float = 0.0  # Unix time of the first write that counts for the average, s; 0: none yet
    day: int = 0
    today: int = 0
    before: int = 0  # of `total`, were written before `since`, by another clock
    last: float = 0.0  # Unix time of the last write, s

    def add(self, size: int, nodes: int, now: float) -> None:
        """Note that `size` bytes in `nodes` nodes were written at `now` (Unix time, s)."""
        if not self.since or self._jumped(now):
            self.since, self.before = now, self.total
        self.last = now
        self.today = self.on(now) + size
        self.day = int(now // DAY)
        self.total += size
        self.nodes += nodes

    def on(self, now: float) -> int:
        """Bytes written on the day of `now`."""
        return self.today if int(now // DAY) == self.day else 0

    def a_day(self, now: float) -> float:
        """Bytes a day on average since the first write; in the first day, as if it were over.

        It begins anew where the clock was set far forward, or back by more than a day.
        """
        if not self.since:
            return 0.0
        end = (self.last or self.since) if self._jumped(now) else now
        return (self.total - self.before) / max(1.0, (end - self.since) / DAY)

    def _jumped(self, now: float) -> bool:
        return not -DAY <= now - (self.last or self.since) <= _JUMP

    def copy(self) -> Written:
        return msgspec.structs.replace(self)
