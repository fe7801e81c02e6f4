"""When a store shrinks to a budget that was made smaller, and when its file does, which LMDB never does by itself."""

from __future__ import annotations

import logging
from collections.abc import Callable

from .disk import Disk, DiskFullError, DiskTroubleError

_STEP_SECONDS = 5.0  # until what is in the way of the budget is looked at again
_COMPACT_SECONDS = 300.0  # between attempts to make the file smaller
_FILE_SHARE = 1.1  # of the budget that the file may take
_FILE_MUCH = 1.5  # of it: that is left from a larger one

log = logging.getLogger(__name__)


class Shrinking:
    """Writer's thread only. What goes is chosen by `WriteBehind`, a step at a time."""

    def __init__(self, disk: Disk, clock: Callable[[], float]) -> None:
        self._disk = disk
        self._clock = clock
        self._step_at: float | None = 0.0  # when the next step is due; None: the budget is met
        self._was_larger = False  # something went for the budget
        self._compact_at: float | None = None  # when the file is to be made smaller, if it is
        self._told = False

    def begin(self) -> None:
        """The budget may be smaller than it was."""
        self._step_at = 0.0

    def try_again(self) -> None:
        """What the file was not made smaller for may not be so any more."""
        if self._compact_at is not None:
            self._compact_at = self._clock()

    def is_due(self) -> bool:
        """Whether it is time for a step towards the budget."""
        return self._step_at is not None and self._clock() >= self._step_at

    def due_at(self) -> float | None:
        """When there is something to do next, if there is."""
        times = [at for at in (self._step_at, self._compact_at) if at is not None]
        return min(times) if times else None

    def stepped(self, gone: bool, in_use: bool) -> None:
        """A step was taken: `gone` says whether it removed anything. If not, no more can go: the budget is met, or
        what is in use is in the way for a while, which `in_use` says also where it is a share that is not met. One
        that only pins are in the way of waits for `begin`."""
        self._was_larger |= gone
        if gone:
            return
        now, limit = self._clock(), self._disk.limit
        if in_use or self._disk.used() > limit:
            self._step_at = now + _STEP_SECONDS
            return
        compact = self._was_larger or self._disk.file_bytes() > limit * _FILE_MUCH
        self._step_at, self._was_larger = None, False
        self._compact_at = now if compact else self._compact_at  # an attempt may be due later

    def give_back(self, left_today: int | None) -> None:
        """Make the file smaller, too, if it is time: what is stored has met the budget.

        `left_today`: bytes that may be written today; None: any number.
        """
        disk, now = self._disk, self._clock()
        if self._compact_at is None or now < self._compact_at:
            return
        self._compact_at = None
        if disk.file_bytes() <= disk.limit * _FILE_SHARE:
            return
        try:
            if left_today is not None and disk.used() > left_today:
                raise DiskFullError("cache.daily_writes does not allow it")
            before, after = disk.compact()
        except (DiskFullError, DiskTroubleError) as error:
            self._compact_at = self._clock() + _COMPACT_SECONDS
            if not self._told:
                log.warning("the store's file is larger than its budget, and cannot be compacted now: %s", error)
            self._told = True
        else:
            log.info("the store's file was compacted for its smaller budget: %d MiB, now %d", before >> 20, after >> 20)
            self._told = False
