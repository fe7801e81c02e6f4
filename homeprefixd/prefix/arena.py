"""Shared memory slots: the hot tier's memory, a memfd that the store and every worker map.

`Arena` hands out page-aligned extents and gives memory back to the system when it has been free for a while. It does
not know what lies in them. Not thread-safe: `cache.py` calls it under its lock, `populate` and `view` excepted.
"""

from __future__ import annotations

import bisect
import fcntl
import logging
import mmap
import os
from dataclasses import dataclass

PAGE = 4096
"""Granularity of extents, bytes."""

_MADV_POPULATE_WRITE = 23  # Linux 5.14; not named by Python's mmap
_STEP = 1 << 20
"""Bytes of memory that are asked for, or given back, in one call, which holds everything else up."""

_F_ADD_SEALS = getattr(fcntl, "F_ADD_SEALS", 1033)
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 1, 2, 4

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Free:
    size: int
    resident: bool  # its pages hold memory: filling it costs no page faults
    since: float


def pages(size: int) -> int:
    """`size` rounded up to whole pages, in bytes."""
    return -(-size // PAGE) * PAGE


class Arena:
    """`limit` bytes of shared memory, as one mapping. `descriptor` is sent to those who map it too."""

    def __init__(self, limit: int) -> None:
        self.limit = max(PAGE, limit // PAGE * PAGE)
        self.allowance = self.limit
        """Bytes that extents may take now: less than `limit` while others need the memory."""
        self.used = 0
        """Bytes in extents, rounded up to pages."""
        self.descriptor = os.memfd_create("homeprefixd-hot", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, self.limit)
        # nobody can make it shorter, so nobody who maps it can be killed by SIGBUS
        fcntl.fcntl(self.descriptor, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL)
        self._map = mmap.mmap(self.descriptor, self.limit)
        self._memory = memoryview(self._map)
        self._starts: list[int] = [0]  # of free extents, sorted
        self._free: dict[int, _Free] = {0: _Free(self.limit, False, 0.0)}
        self._recent: list[int] = []  # starts of resident free extents, freed last comes last; may be stale
        self._unfilled: set[int] = set()  # allocated extents that may lack memory
        self._can_remove = True
        self._can_populate = True

    def close(self) -> None:
        """Unmap; views must be gone (else the memory goes with the last of them)."""
        self._memory.release()
        try:
            self._map.close()
        except BufferError:
            log.debug("the arena is still in use; it goes with its last view")
        os.close(self.descriptor)

    @property
    def fragments(self) -> int:
        """Free extents: 1 while all that is free lies together (and has memory, or has none)."""
        return len(self._starts)

    def view(self, offset: int, size: int) -> memoryview:
        """Writable bytes [offset, offset + size)."""
        return self._memory[offset : offset + size]

    # ------------------------------------------------------------------------------------------------- extents

    def allocate(self, size: int) -> int | None:
        """An extent of at least `size` > 0 bytes: its offset, or None if no free run is that long.

        Extents that were in use lately come first: their pages are there already.
        """
        need = pages(size)
        start = self._find(need) if self.used + need <= self.allowance else None
        if start is None:
            return None
        if not self._take(start, need):
            self._unfilled.add(start)
        self.used += need
        return start

    def free(self, offset: int, size: int, now: float) -> None:
        """Give back [offset, offset + size), as allocated. `now`: any clock in seconds, the same in `give_back`."""
        size = pages(size)
        self.used -= size
        resident = offset not in self._unfilled
        self._unfilled.discard(offset)
        self._insert(offset, _Free(size, resident, now))

    def shrink(self, offset: int, size: int, new_size: int, now: float) -> None:
        """Give back what an extent of `size` bytes has beyond `new_size` > 0 bytes."""
        old, new = pages(size), pages(new_size)
        if new < old:
            self.free(offset + new, old - new, now)

    def _find(self, need: int) -> int | None:
        for at in range(len(self._recent) - 1, -1, -1):
            start = self._recent[at]
            extent = self._free.get(start)
            if extent is None or not extent.resident:
                del self._recent[at]
            elif extent.size >= need:
                return start
        for start in self._starts:
            if self._free[start].size >= need:
                return start
        return self._find_run(need)

    def _find_run(self, need: int) -> int | None:
        """Neighbours of both kinds (with and without memory) that together are long enough."""
        first = end = -1
        for start in self._starts:
            if start != end:
                first = start
            end = start + self._free[start].size
            if end - first >= need:
                return first
        return None

    def _take(self, start: int, need: int) -> bool:
        """Whether all of it has memory."""
        resident = True
        while need:
            extent = self._remove(start)
            resident = resident and extent.resident
            part = min(extent.size, need)
            if part < extent.size:
                self._insert(start + part, _Free(extent.size - part, extent.resident, extent.since))
            start += part
            need -= part
        return resident

    def _remove(self, start: int) -> _Free:
        del self._starts[bisect.bisect_left(self._starts, start)]
        return self._free.pop(start)

    def _insert(self, start: int, extent: _Free) -> None:
        at = bisect.bisect_left(self._starts, start)
        if at < len(self._starts):
            after = self._free[self._starts[at]]
            if self._starts[at] == start + extent.size and after.resident == extent.resident:
                self._remove(self._starts[at])
                extent = _Free(extent.size + after.size, extent.resident, max(extent.since, after.since))
        if at > 0:
            before_start = self._starts[at - 1]
            before = self._free[before_start]
            if before_start + before.size == start and before.resident == extent.resident:
                self._remove(before_start)
                at -= 1
                extent = _Free(before.size + extent.size, extent.resident, max(before.since, extent.since))
                start = before_start
        self._starts.insert(at, start)
        self._free[start] = extent
        if extent.resident:
            self._recent.append(start)
            if len(self._recent) > 64 + 2 * len(self._starts):
                self._recent = [s for s in dict.fromkeys(reversed(self._recent)) if s in self._free][::-1]

    # -------------------------------------------------------------------------------------------------- memory

    def populate(self, offset: int, size: int) -> bool:
        """Have the pages of an allocated extent filled in now. False: the system has no memory for them.

        Without it the first to write there would be killed by SIGBUS where memory is out. Thread-safe.
        """
        if offset in self._unfilled and not self._fill(offset, size):
            return False
        self._unfilled.discard(offset)
        return True

    def _fill(self, offset: int, size: int) -> bool:
        if not self._can_populate:
            return True
        try:
            self._map.madvise(_MADV_POPULATE_WRITE, offset, pages(size))
        except OSError as error:
            if error.errno in (22, 38):  # EINVAL, ENOSYS: the kernel does not know it
                self._can_populate = False
                return True
            log.warning("no memory for %d bytes of the hot tier: %s", size, error)
            return False
        return True

    def prepare(self, target: int, now: float) -> bool:
        """Fill in the pages of free extents, one step of them, until `target` bytes of free memory are there.

        So the first blocks after a start find memory. Returns whether there is more to do.
        """
        if not self._can_populate or self._resident() >= target:
            return False
        start = next((start for start in self._starts if not self._free[start].resident), None)
        if start is None:
            return False
        size = min(self._free[start].size, _STEP)
        self._take(start, size)
        filled = self._fill(start, size) and self._can_populate
        self._insert(start, _Free(size, filled, now))
        return filled

    def give_back(self, before: float, keep: int) -> int:
        """Give memory of extents that were freed earlier than `before` back to the system, but for `keep` bytes.

        One step of it; returns the bytes given back, 0 if there is no more to do.
        """
        excess = self._resident() - keep
        if not self._can_remove or excess < PAGE:
            return 0
        for start in self._starts:
            extent = self._free[start]
            if extent.resident and extent.since < before:
                break
        else:
            return 0
        size = min(extent.size, excess // PAGE * PAGE, _STEP)
        try:
            self._map.madvise(mmap.MADV_REMOVE, start, size)
        except OSError as error:
            log.warning("free memory of the hot tier cannot be given back: %s", error)
            self._can_remove = False
            return 0
        self._take(start, size)
        self._insert(start, _Free(size, False, extent.since))
        return size

    def _resident(self) -> int:
        """Bytes of memory in free extents."""
        return sum(extent.size for extent in self._free.values() if extent.resident)

    def check(self) -> None:
        """Raises ValueError if the free extents and `used` do not add up."""
        end = -1
        total = 0
        for start in self._starts:
            extent = self._free[start]
            if start < end or extent.size <= 0 or start % PAGE or extent.size % PAGE:
                raise ValueError(f"free extent at {start} overlaps or is not whole pages")
            end = start + extent.size
            total += extent.size
        if len(self._free) != len(self._starts) or end > self.limit or total + self.used != self.limit:
            raise ValueError(f"{self.used} bytes used and {total} free of {self.limit}")
