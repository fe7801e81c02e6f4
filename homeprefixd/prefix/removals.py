"""When and why blocks left the store for good: the last ones, so that somebody can be told why a prompt is slow again.

By the keys of nodes, which name all tokens up to their ends. In RAM, bounded, and kept over a clean restart; not
thread-safe: the cache's lock guards it.
"""

from __future__ import annotations

import itertools
import struct
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple, get_args

import msgspec

Why = Literal[
    "budget",  # others were worth more
    "smaller",  # the budget on disk was
    "stale",  # of a model or settings that are not in use any more
    "unwritten",  # RAM was full before it could be written
    "no_disk",  # RAM was full, and nothing is kept on disk
    "disk_full",
    "disk_error",
    "daily_writes",  # RAM was full, and as much was written that day as may be
    "share",  # of its model or API key
    "purged",  # by hand
    "damaged",
]

MOST = 16_384
_SHORT = 16  # bytes of a key that are kept
_ROW = struct.Struct(f"<{_SHORT}sdB")  # key, when, number of why
ROW_BYTES = _ROW.size


class Removal(NamedTuple):
    when: float  # Unix time, s
    why: Why


class Removals:
    """The last `most` nodes that went."""

    def __init__(self, most: int = MOST, wall: Callable[[], float] = time.time) -> None:
        self._most, self._wall = most, wall
        self._found: OrderedDict[bytes, Removal] = OrderedDict()
        self.counts: Counter[str] = Counter(dict.fromkeys(get_args(Why), 0))
        """By why, since the start."""

    def __len__(self) -> int:
        return len(self._found)

    def add(self, keys: Iterable[bytes], why: Why) -> None:
        """Nodes are in no tier any more."""
        removal = Removal(self._wall(), why)
        for key in keys:
            short = key[:_SHORT]
            self._found[short] = removal
            self._found.move_to_end(short)
            self.counts[why] += 1
        while len(self._found) > self._most:
            self._found.popitem(last=False)

    def get(self, key: bytes) -> Removal | None:
        """None if it did not go, or too many went after it. A node that came back may still be here."""
        return self._found.get(key[:_SHORT])

    def pack(self, most: int) -> bytes:
        """The last `most`, to be kept."""
        names = list(get_args(Why))
        last = itertools.islice(self._found.items(), max(0, len(self._found) - most), None)
        rows = b"".join(_ROW.pack(key, found.when, names.index(found.why)) for key, found in last)
        return msgspec.msgpack.encode((names, rows))

    def unpack(self, data: bytes) -> None:
        """Take what was packed; what cannot be read is left out."""
        try:
            names, rows = msgspec.msgpack.decode(data, type=tuple[list[Why], bytes])
            for key, when, number in _ROW.iter_unpack(rows):
                self._found[key] = Removal(when, names[number])
        except (msgspec.DecodeError, struct.error, IndexError):
            return
