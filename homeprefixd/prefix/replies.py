"""Which tokens were generated for which text: a memo by the text of prompts, so that a chat's next turn, which repeats
the reply as text, can be made of the very tokens that are stored.

A row is named by its namespace and a BLAKE2b-256 hash of the prompt's text under that namespace, so nothing of one
namespace is ever found for another one, nor for another text. Bounded by rows and by bytes; what was used longest ago
goes first. The text itself is not kept. A row that is not what was written is dropped.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import msgspec
import xxhash

from ..frames.store import Stretch
from .blocks import KEY_BYTES

MOST_ROWS = 4096
MOST_BYTES = 16 << 20
_LEAST_BYTES = 256 << 10
_SHARE = 64
"""Of the disk's budget the memo takes at most one part in so many."""

_MOST_REPLIES = 4  # to one prompt
_OVERHEAD = 160  # bytes of a row beside its contents, roughly
_DELAY = 2.0  # seconds until a row is written
_SUM = 8  # bytes of a checksum

log = logging.getLogger(__name__)


class Row(msgspec.Struct, array_like=True, frozen=True):
    """Of one prompt. A field may be added at the end, with a default."""

    length: int  # of its text, bytes
    tail: bytes  # of its text
    used: float  # Unix time, s
    stretches: list[Stretch]  # of its text that were generated, in order
    replies: list[bytes]  # u32 LE each, last first


_decode = msgspec.msgpack.Decoder(Row).decode


def pack(key: bytes, row: Row) -> bytes:
    """A row as it is stored."""
    body = msgspec.msgpack.encode(row)
    return xxhash.xxh3_64_digest(key + body) + body


def unpack(key: bytes, data: bytes) -> Row | None:
    """None if it is not what was written for this key."""
    if len(key) != 2 * KEY_BYTES or xxhash.xxh3_64_digest(key + data[_SUM:]) != data[:_SUM]:
        return None
    try:
        return _decode(data[_SUM:])
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None


class _Place(msgspec.Struct):
    """What is known of a row without reading it."""

    length: int
    tail: bytes
    size: int
    used: float


class Replies:
    """The memo. Any thread may call it; `put` belongs to the writer. Without a disk it is in RAM only."""

    def __init__(
        self,
        disk: Any | None = None,
        *,
        limit: int = 0,
        most_rows: int = MOST_ROWS,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """`disk`: a `disk.Disk`. `limit`: bytes of its budget, of which the memo takes a part; 0: no bound by it."""
        self._disk = disk
        self._most_rows = most_rows
        self.limit = max(_LEAST_BYTES, min(MOST_BYTES, limit // _SHARE)) if limit else MOST_BYTES
        self._wall, self._clock, self._wake = wall, clock, wake
        self._lock = threading.Lock()
        self._places: OrderedDict[bytes, _Place] = OrderedDict()  # by namespace and digest, used longest ago first
        self._lengths: dict[bytes, Counter[tuple[int, bytes]]] = {}  # by namespace: length and tail of its texts
        self._waiting: dict[bytes, bytes | None] = {}  # rows that are not on disk yet, or to be removed from it
        self._since: float | None = None  # when the first of these came, by `clock`; None: none waits
        self.bytes = 0
        self.recalled = 0
        self.damaged = 0
        self.evicted = 0
        if disk is not None:
            try:
                self._load(disk.reply_rows())
            except Exception as error:
                log.warning("what was generated before cannot be read: %s", error)

    def __len__(self) -> int:
        return len(self._places)

    def _load(self, rows: Iterable[tuple[bytes, bytes]]) -> None:
        found: list[tuple[float, bytes, Row, int]] = []
        for key, data in rows:
            row = unpack(key, data)
            if row is None:
                self._drop_damaged(key)
            else:
                found.append((row.used, key, row, len(data)))
        for _used, key, row, size in sorted(found, key=lambda one: one[0]):
            self._note(key, row, size)
        self._shrink()

    # ------------------------------------------------------------------------------------------------- any thread

    def remember(
        self, namespace: bytes, digest: bytes, length: int, tail: bytes, stretches: Sequence[Stretch], reply: bytes
    ) -> None:
        """What was generated after a prompt; without `reply`, what was remembered of it is wrong, and forgotten."""
        if len(namespace) != KEY_BYTES or len(digest) != KEY_BYTES or length <= 0:
            return
        key = namespace + digest
        with self._lock:
            old = self._read(key) if key in self._places else None
            if not reply:
                self._forget(key)
                return
            replies = [reply, *(other for other in (old.replies if old is not None else []) if other != reply)]
            row = Row(length, tail, self._wall(), list(stretches), replies[:_MOST_REPLIES])
            data = pack(key, row)
            if len(data) + _OVERHEAD > self.limit // 4 or len(self._waiting) > 2 * self._most_rows:
                return  # too long, or the disk takes nothing
            self._note(key, row, len(data))
            self._wait(key, data)
            self._shrink()

    def recall(self, namespace: bytes, text: bytes) -> Row | None:
        """The row of the longest prompt that `text` begins with."""
        with self._lock:
            key = self._longest(namespace, text)
            while key is not None:
                row = self._read(key)
                if row is not None:
                    place = self._places[key]
                    place.used = self._wall()
                    self._places.move_to_end(key)
                    self.recalled += 1
                    return row
                key = self._longest(namespace, text)
        return None

    def forget(self, namespaces: Collection[bytes] | None = None, before: float | None = None) -> int:
        """Forget what is of these namespaces (None: of all) and was last used before a moment (None: whenever)."""
        with self._lock:
            gone = [
                key
                for key, place in self._places.items()
                if (namespaces is None or key[:KEY_BYTES] in namespaces) and (before is None or place.used < before)
            ]
            for key in gone:
                self._forget(key)
        return len(gone)

    def stats(self) -> dict[str, int]:
        """Figures for `GET /cache/stats`."""
        with self._lock:
            return {
                "rows": len(self._places),
                "bytes": self.bytes,
                "limit": self.limit,
                "recalled": self.recalled,
                "damaged": self.damaged,
                "evicted": self.evicted,
            }

    # ----------------------------------------------------------------------------------------------------- writer

    def due_in(self, now: float) -> float | None:
        """Seconds until what waits is to be written; None if nothing waits. `now`: by `clock`."""
        since = self._since
        return max(0.0, since + _DELAY - now) if since is not None else None

    def put(self, disk: Any) -> None:
        """*Writer.* Write what waits. Raises DiskFullError, DiskTroubleError: then it waits on."""
        with self._lock:
            rows = dict(self._waiting)
        if not rows:
            return
        disk.put_replies(rows)
        with self._lock:
            for key, data in rows.items():
                if self._waiting.get(key, b"") is data:
                    del self._waiting[key]
            if not self._waiting:
                self._since = None

    # -------------------------------------------------------------------------------------------------- internals

    def _longest(self, namespace: bytes, text: bytes) -> bytes | None:
        """Key of the row whose text is the longest beginning of `text`."""
        lengths = self._lengths.get(namespace)
        if not lengths:
            return None
        size = len(text)
        ends = sorted(
            {length for length, tail in lengths if length <= size and text[max(0, length - len(tail)) : length] == tail}
        )
        found: bytes | None = None
        hashed = hashlib.blake2b(digest_size=KEY_BYTES, key=namespace)
        at = 0
        for end in ends:
            hashed.update(text[at:end])
            at = end
            key = namespace + hashed.copy().digest()
            if key in self._places:
                found = key
        return found

    def _read(self, key: bytes) -> Row | None:
        """A row; None if it cannot be had, and then it is gone."""
        data = self._waiting.get(key)
        if data is None and self._disk is not None:
            try:
                data = self._disk.reply_row(key)
            except Exception as error:
                log.warning("what was generated cannot be looked up: %s", error)
        row = unpack(key, data) if data is not None else None
        if row is None:
            self._drop_damaged(key)
        return row

    def _drop_damaged(self, key: bytes) -> None:
        self.damaged += 1
        log.warning("a row of the memo of replies is damaged; it is dropped")
        self._forget(key)

    def _note(self, key: bytes, row: Row, size: int) -> None:
        self._remove(key)
        self._places[key] = _Place(row.length, row.tail, size + _OVERHEAD, row.used)
        self.bytes += size + _OVERHEAD
        self._lengths.setdefault(key[:KEY_BYTES], Counter())[row.length, row.tail] += 1

    def _remove(self, key: bytes) -> None:
        place = self._places.pop(key, None)
        if place is None:
            return
        self.bytes -= place.size
        namespace = key[:KEY_BYTES]
        lengths = self._lengths[namespace]
        lengths[place.length, place.tail] -= 1
        if not lengths[place.length, place.tail]:
            del lengths[place.length, place.tail]
        if not lengths:
            del self._lengths[namespace]

    def _forget(self, key: bytes) -> None:
        self._remove(key)
        if self._disk is None:
            self._waiting.pop(key, None)
        else:
            self._wait(key, None)

    def _wait(self, key: bytes, data: bytes | None) -> None:
        """Have a row written, or removed. Without a disk it stays here."""
        self._waiting[key] = data
        if self._disk is not None and self._since is None:
            self._since = self._clock()
            self._wake()

    def _shrink(self) -> None:
        while len(self._places) > self._most_rows or self.bytes > self.limit:
            self.evicted += 1
            self._forget(next(iter(self._places)))
