"""The warm tier: nodes and payloads in LMDB.

One process has the file open. One thread writes, by the methods here (marked *writer*); any thread reads, in short
transactions (`disk_file.py`). A node and its payload appear, and go, in one transaction, and a parent is never missing
while a child is there.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import lmdb
import msgspec

from ..sizes import size_text
from .codec import PIECE, piece_count
from .directory import PART, sync_names
from .disk_file import (
    PAGE,
    REMOVALS_KEY,
    SUMS_KEY,
    BudgetError,
    DiskFile,
    DiskFullError,
    DiskTroubleError,
    GrowthError,
    MissingError,
    OtherFormatError,
    Sums,
    UnreadableError,
    disk_error,
    piece_key,
)
from .policy import ORDER_BYTES, Rank, order_key, overdue, rank_of
from .tree import Placed, Record, is_covered, shorter
from .usage import choose_stale
from .warm_table import FILES, KEYS, META, NAMESPACES, NODES, ORDER, PAYLOADS, PINS, REPLIES, WarmTable, decode_record

__all__ = [
    "BudgetError",
    "Disk",
    "DiskFullError",
    "DiskTroubleError",
    "GrowthError",
    "MissingError",
    "OtherFormatError",
    "Pending",
    "Stored",
    "Sums",
    "Touch",
    "UnreadableError",
]

FEW = 256
"""Nodes that are removed in one transaction."""
_LEAST_GAIN = 1 << 20  # bytes that a copy of the file must be smaller
_GAIN_SHARE = 32  # of the file
_PATIENCE = 10.0  # s that an exchange of the file waits for a moment without a reader
_OTHER_ROWS = 1 << 20  # bytes by which the file may grow for what is no payload
_KEPT_SHARE = 4  # of the file: no more is kept free so that it need not grow


class Touch(NamedTuple):
    """Uses of a node that its record does not show yet."""

    last_use: float
    hits: int


class Pending(NamedTuple):
    """A node to be stored. `payload` gives its state; what it gave before may be invalid then."""

    node: Placed
    payload: Callable[[], memoryview]


class Stored(NamedTuple):
    """What a `store` did, by node keys."""

    written: dict[bytes, int]  # key -> bytes on disk
    orphans: list[bytes]  # not written: their parent is not there
    covered: list[bytes]  # not written, or removed: a longer node begins with their tokens


class Disk(DiskFile):
    """The open file, with what its one writer does."""

    def put_namespace(self, namespace: bytes, description: Mapping[str, Any]) -> None:
        """*Writer.* Keep a description. Raises DiskFullError, DiskTroubleError."""

        def put(txn: Any) -> None:
            txn.put(namespace, json.dumps(description, sort_keys=True).encode(), db=self._tables[NAMESPACES])

        self._write(put)
        self.namespaces[namespace] = dict(description)

    def put_file_hash(self, identity: bytes, sha256: str) -> None:
        """*Writer.* Remember a file's hash. Raises DiskFullError, DiskTroubleError."""
        self._write(lambda txn: txn.put(identity, sha256.encode(), db=self._tables[FILES]))

    def compact(self) -> tuple[int, int]:
        """*Writer.* Copy what is there beside the file and put it in its place: bytes on disk before and after.

        A copy that would gain next to nothing is not made. Others read meanwhile, but for the moment of the exchange.
        Raises DiskFullError where there is no room for the copy, DiskTroubleError; then nothing was changed.
        """
        before = self.file_bytes()
        need = self.used() + PAGE * len(self._tables)
        if before - need < max(_LEAST_GAIN, before // _GAIN_SHARE):
            return before, before
        if self.free_bytes() < need + max(self._min_free, need // 16):
            lack = self._lack(need, by_floor=self._min_free > need // 16)
            raise DiskFullError(f"a copy of {size_text(need)} has no room beside it: {lack}")
        part = self._file.with_name(PART)
        try:
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                self._env.copyfd(descriptor, compact=True)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            with self._gate.alone(_PATIENCE) as free:
                if not free:
                    raise DiskTroubleError("the file is in use without a pause: try again")
                self._env.close()
                try:
                    os.replace(part, self._file)
                    sync_names(self._file.parent)  # what is written from now on must not be lost with the new name
                finally:
                    self._env = self._open()
                    self._tables = self._open_tables()
        except (lmdb.Error, OSError) as error:
            raise disk_error(error, self._file) from error
        finally:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
        sums = self.sums.copy()
        sums.written.add(self.file_bytes(), 0, self._wall())
        with contextlib.suppress(DiskFullError, DiskTroubleError):
            self._write(lambda txn: self._put_sums(txn, sums))
        self.sums = sums
        return before, self.file_bytes()

    def put_pin(self, place: bytes, row: bytes | None) -> None:
        """*Writer.* Keep a row of PINS, or remove it (None). Raises DiskFullError, DiskTroubleError."""
        table = self._tables[PINS]
        self._write(lambda txn: txn.delete(place, db=table) if row is None else txn.put(place, row, db=table))

    def put_removals(self, data: bytes) -> None:
        """*Writer.* Keep what `Removals.pack` gave. Raises DiskFullError, DiskTroubleError."""
        self._write(lambda txn: txn.put(REMOVALS_KEY, data, db=self._tables[META]))

    def put_replies(self, rows: Mapping[bytes, bytes | None]) -> None:
        """*Writer.* Keep rows of REPLIES, or remove them (None). Raises DiskFullError, DiskTroubleError."""
        table = self._tables[REPLIES]

        def put(txn: Any) -> None:
            for key, data in sorted(rows.items()):
                if data is None:
                    txn.delete(key, db=table)
                else:
                    txn.put(key, data, db=table)

        self._write(put)

    def store(self, pending: Sequence[Pending], touches: Mapping[bytes, Touch]) -> Stored:
        """*Writer.* Put nodes (parents before children) and note uses, in one transaction.

        Call `make_room` before. A node that is there already is replaced; shorter ones that the new one covers go.
        Raises DiskFullError (GrowthError: see `keep_more_free`), DiskTroubleError: then nothing was changed.
        """
        sums = self.sums.copy()
        stored = Stored({}, [], [])

        def put(txn: Any) -> None:
            for node, payload in pending:
                self._put_node(txn, node, payload, sums, stored)
            for key, touch in touches.items():
                self._touch(txn, key, touch)
            if stored.written:
                sums.written.add(sum(stored.written.values()), len(stored.written), self._wall())
            self._put_sums(txn, sums)

        with self._within_floor(sum(node.record.size for node, _payload in pending)) as bound:
            try:
                self._write(put)
            except DiskFullError as error:
                if not bound or not isinstance(error.__cause__, lmdb.MapFullError):
                    raise
                need = sum(node.record.size for node, _payload in pending)
                lack = self._lack(max(need, _OTHER_ROWS), by_floor=True)
                raise GrowthError(f"{lack}; what is free in the file is too little, or lies scattered") from error
            self.sums = sums
        return stored

    def _put_node(
        self, txn: Any, node: Placed, payload_of: Callable[[], memoryview], sums: Sums, stored: Stored
    ) -> None:
        table = self._view(txn)
        key = node.record.key
        parent = node.parent
        if (
            parent not in self.namespaces
            and parent not in stored.written
            and not txn.get(parent, db=self._tables[KEYS])
        ):
            stored.orphans.append(key)
            return
        if not node.record.holds_edge and is_covered(table, node.tree_key):
            stored.covered.append(key)
            return
        old = table.get(node.tree_key)
        if old is not None:
            self._delete(txn, Placed(node.tree_key, old), sums)
        above = table.place(parent)
        if above is not None:
            txn.delete(self._order_row(above), db=self._tables[ORDER])  # it is no leaf any more
        size, payload = 0, payload_of()
        for number in range(piece_count(len(payload))):
            piece = self._encoder.encode(key, number, payload[number * PIECE : (number + 1) * PIECE])
            txn.put(piece_key(key, number), piece, db=self._tables[PAYLOADS])
            size += len(piece)
        record = msgspec.structs.replace(node.record, stored=size)
        placed = Placed(node.tree_key, record)
        self._put_record(txn, placed)
        if not table.has_children(key):
            txn.put(self._order_row(placed), b"", db=self._tables[ORDER])
        txn.put(key, node.tree_key, db=self._tables[KEYS])
        sums.add(record)
        stored.written[key] = size
        for short in list(shorter(table, node.tree_key)):
            if not short.record.holds_edge and not table.has_children(short.record.key):
                self._delete(txn, short, sums)
                stored.covered.append(short.record.key)

    def _touch(self, txn: Any, key: bytes, touch: Touch) -> None:
        node = self._view(txn).place(key)
        if node is None or touch.last_use <= node.record.last_use:
            return
        is_leaf = txn.delete(self._order_row(node), db=self._tables[ORDER])
        node.record.last_use = touch.last_use
        node.record.hits += touch.hits
        self._put_record(txn, node)
        if is_leaf:
            txn.put(self._order_row(node), b"", db=self._tables[ORDER])

    @property
    def batch_bytes(self) -> int:
        """As of the whole budget, but of what `min_free` leaves of it: a batch must not take all that there is."""
        whole, floor = super().batch_bytes, self._above_floor()
        return whole if floor is None or floor >= self.limit else max(1 << 20, min(whole, floor // 16))

    def lacks(self, need: int) -> int:
        """Bytes that must go before `need` more bytes of payload fit the budget, with a reserve; at most 0 if none."""
        limit = self.limit_now()
        return self.used() + need + self._reserve(limit) - limit

    def _reserve(self, limit: int) -> int:
        """Bytes of a budget that are kept free: what is removed is free only after its transaction."""
        return min(2 * self.batch_bytes, limit // 8)

    def limit_now(self) -> int:
        """The budget, or less where the disk has no more, or what it has is left to others."""
        limit = self.limit if self._ceiling is None else min(self.limit, self._ceiling)
        floor = self._above_floor()
        return limit if floor is None else min(limit, floor)

    def _above_floor(self) -> int | None:
        """Bytes that the file may have, so that `min_free` stays free; None without such a bound."""
        if not self._min_free:
            return None
        return self.file_bytes() + max(0, self.free_bytes() - self._min_free) - self._kept_free

    def bound_text(self) -> str:
        """What bounds that which can be kept, for people."""
        floor = self._above_floor()
        if floor is not None and floor < self.limit:
            return "what `cache.min_free` leaves of the disk"
        return "`cache.warm` (or a share of it)"

    def _lack(self, need: int, *, by_floor: bool) -> str:
        """Why `need` more bytes cannot be had from the disk, for people: it has them, but for others, or not at all.

        `by_floor`: there is less than that above the floor.
        """
        free = self.free_bytes()
        if by_floor and self._min_free and need <= free:
            return (
                f"`cache.min_free` leaves {size_text(self._min_free)} of the disk to others, {size_text(free)} are free"
            )
        return f"only {size_text(free)} of the disk are free"

    def keep_more_free(self) -> bool:
        """*Writer.* After GrowthError: the budget is less from now on, until the disk has room again. False: it is so
        much less already that this does not help."""
        more = max(self.batch_bytes // 2, 2 * self._kept_free)
        if more > self.file_bytes() // _KEPT_SHARE:
            return False
        self._kept_free = more
        return True

    @contextlib.contextmanager
    def _within_floor(self, need: int) -> Iterator[bool]:
        """For a transaction of `need` bytes of payload: LMDB cannot make the file larger than leaves others what is
        theirs. It may need more than that, as what is free in the file lies scattered. Yields whether it is bound so.

        Raises DiskTroubleError where it cannot be, as others read without a pause.
        """
        room = self.free_bytes() - self._min_free - _OTHER_ROWS if self._min_free else 0
        if not self._min_free or room >= need + need // 8 + _OTHER_ROWS:
            self._kept_free = 0
            yield False
            return
        self._set_map((int(self._env.info()["last_pgno"]) + 1) * PAGE + max(0, room // PAGE * PAGE))
        self._is_small = False
        try:
            yield True
        finally:
            self._is_small = True
            with contextlib.suppress(DiskTroubleError):  # what was written is; the next transaction tries it again
                self._widen()

    def _widen(self) -> None:
        """Let the file grow again as far as its map goes. Raises DiskTroubleError."""
        if self._is_small:
            self._set_map(self._map_size)
            self._is_small = False

    def _set_map(self, size: int) -> None:
        """Let the file grow to `size` at most."""
        with self._gate.alone(_PATIENCE) as free:
            if not free:
                raise DiskTroubleError("the file is in use without a pause: try again")
            self._env.set_mapsize(min(size, self._map_size))

    def make_room(
        self, need: int, may_evict: Callable[[bytes], bool], gone: list[Placed], stale: Sequence[bytes] = ()
    ) -> None:
        """*Writer.* Evict until `need` more bytes of payload fit the budget; what went is added to `gone`.

        `may_evict` is asked for each node that would go; those of the namespaces `stale` go first.
        Raises BudgetError if what may go is not enough, DiskFullError if the disk has no more, DiskTroubleError.
        """
        while (excess := self.lacks(need)) > 0:
            victims = self._victims(min(max(excess, need), self.batch_bytes * 4), may_evict, stale)
            if not victims:
                least = f"{size_text(need)} do not fit beside what must stay, {size_text(excess)} too many"
                if self.limit_now() == self.limit:
                    raise BudgetError(least)
                by_floor = self.free_bytes() - self._min_free < need + self._reserve(self.limit)
                raise DiskFullError(f"{self._lack(need, by_floor=by_floor)}; {least}")
            self._remove_few(victims)
            gone += victims

    def shrink(self, may_evict: Callable[[bytes], bool], stale: Sequence[bytes] = ()) -> list[Placed]:
        """*Writer.* One step towards the budget: what went; nothing once it is met. Raises as `remove`."""
        excess = self.used() - self.limit
        victims = self._victims(min(excess, self.batch_bytes * 4), may_evict, stale) if excess > 0 else []
        if victims:
            self._remove_few(victims)
        return victims

    def evict_of(
        self, holds: Callable[[Record], bool], need: int, may_evict: Callable[[bytes], bool], gone: list[Placed]
    ) -> bool:
        """*Writer.* Evict some of the nodes that `holds` says, about `need` bytes or as many as go in one step.

        False if none may go. The others are looked through for them: with 100,000 leaves about half a second, which
        holds up nobody. Raises as `remove`.
        """
        victims = self._victims(min(need, self.batch_bytes * 4), may_evict, holds=holds)
        if victims:
            self._remove_few(victims)
            gone += victims
        return bool(victims)

    def would_go(
        self, need: int, may_evict: Callable[[bytes], bool], holds: Callable[[Record], bool] | None = None
    ) -> list[tuple[float, int]]:
        """How overdue (`policy.overdue`) that is which would go for about `need` bytes, and its bytes, in the order
        of going; of those that `holds` says. Nothing goes. Raises DiskTroubleError.
        """
        try:
            victims = self._victims(need, may_evict, holds=holds)
        except lmdb.Error as error:
            raise disk_error(error, self._file) from error
        now = self._wall()
        return [(overdue(rank_of(self._order_row(node)), now), _on_pages(node)) for node in victims]

    def _victims(
        self,
        need: int,
        may_evict: Callable[[bytes], bool],
        stale: Sequence[bytes] = (),
        holds: Callable[[Record], bool] | None = None,
    ) -> list[Placed]:
        """Leaves, and nodes that become leaves by their going, in the order of going; with `holds` only such."""
        now = self._wall()
        with self._begin() as txn:
            table = self._view(txn)
            chosen, size = choose_stale(table, stale, need, FEW, may_evict)
            first: list[tuple[float, int, bytes, Iterator[bytes] | None]] = []  # a heap
            count = itertools.count()

            def wait(order_key: bytes, rows: Iterator[bytes] | None) -> None:
                heapq.heappush(first, (-overdue(rank_of(order_key), now), next(count), order_key, rows))

            for rows in table.leaves_by_level():
                wait(next(rows), rows)
            while first and size < need and len(chosen) < FEW:
                _overdue, _number, row, more = heapq.heappop(first)
                if more is not None and (following := next(more, None)) is not None:
                    wait(following, more)
                node = table.place(row[ORDER_BYTES:])
                if node is None or node.record.key in chosen or (holds is not None and not holds(node.record)):
                    continue
                if not may_evict(node.record.key):
                    continue
                chosen[node.record.key] = node
                size += _on_pages(node)
                above = table.place(node.parent)
                if above is not None and all(c.record.key in chosen for c in table.children(above.record.key)):
                    wait(self._order_row(above), None)
        return list(chosen.values())

    def remove(self, nodes: Sequence[Placed]) -> None:
        """*Writer.* Remove nodes, children before parents. Raises DiskFullError, DiskTroubleError."""
        for at in range(0, len(nodes), FEW):
            self._remove_few(nodes[at : at + FEW])

    def _remove_few(self, nodes: Sequence[Placed]) -> None:
        sums = self.sums.copy()
        going = {node.record.key for node in nodes}

        def delete(txn: Any) -> None:
            for node in nodes:
                self._delete(txn, node, sums, going)
            self._put_sums(txn, sums)

        self._write(delete)
        self.sums = sums

    def note_scrub(self, now: float) -> None:
        """*Writer.* A pass over all has ended at `now` (Unix time, s). Raises DiskFullError, DiskTroubleError."""
        sums = self.sums.copy()
        sums.scrubbed = now
        self._write(lambda txn: self._put_sums(txn, sums))
        self.sums = sums

    def discard(self, nodes: Mapping[bytes, bytes]) -> None:
        """*Writer.* Remove what there is of nodes that are not as they should be, in all tables, and count all anew.

        `nodes`: tree key -> key by its tokens. Raises DiskFullError, DiskTroubleError.
        """
        sums = self.sums.copy()

        def delete(txn: Any) -> None:
            for tree_key, key in nodes.items():
                if txn.get(key, db=self._tables[KEYS]) == tree_key:
                    txn.delete(key, db=self._tables[KEYS])
                    self._delete_pieces(txn, key)
            cursor = txn.cursor(self._tables[NODES])
            there = cursor.first()
            while there:  # where a key was damaged, searching does not find it
                there = cursor.delete() if cursor.key() in nodes else cursor.next()
            sums.clear()
            txn.drop(self._tables[ORDER], delete=False)
            table = self._view(txn)
            for place, value in txn.cursor(self._tables[NODES]):
                with contextlib.suppress(msgspec.DecodeError):  # another damaged one, to be discarded yet
                    self._count(txn, table, Placed(place, decode_record(value)), sums)
            self._put_sums(txn, sums)

        self._write(delete)
        self.sums = sums

    def _count(self, txn: Any, table: WarmTable, node: Placed, sums: Sums) -> None:
        sums.add(node.record)
        if not table.has_children(node.record.key):
            txn.put(self._order_row(node), b"", db=self._tables[ORDER])

    def _delete_pieces(self, txn: Any, key: bytes) -> None:
        cursor = txn.cursor(self._tables[PAYLOADS])
        there = cursor.set_range(key)
        while there and cursor.key().startswith(key):
            there = cursor.delete()

    def hold_at(self, ceiling: int | None) -> None:
        """*Writer.* Do not grow beyond `ceiling` bytes, because the disk has no more; None: as the budget says."""
        self._ceiling = ceiling

    # ------------------------------------------------------------------------------------------------ internals

    def _write(self, change: Callable[[Any], object]) -> None:
        try:
            self._widen()
            with self._begin(write=True) as txn:
                change(txn)
        except (lmdb.Error, OSError) as error:
            raise disk_error(error, self._file) from error

    def _order_row(self, node: Placed) -> bytes:
        record = node.record
        return order_key(Rank(record.level, max(0.0, record.last_use), -node.end)) + record.key

    def _put_record(self, txn: Any, node: Placed) -> None:
        """Its level is written with it, so that its row in ORDER is found whatever the policy is by then."""
        record = node.record
        rank = self._policy.rank(
            last_use=record.last_use, end=node.end, size=record.stored, cost=node.mean_cost, hits=record.hits
        )
        record.level = rank.level
        txn.put(node.tree_key, msgspec.msgpack.encode(record), db=self._tables[NODES])

    def _put_sums(self, txn: Any, sums: Sums) -> None:
        txn.put(SUMS_KEY, msgspec.msgpack.encode(sums), db=self._tables[META])

    def _delete(self, txn: Any, node: Placed, sums: Sums, going: AbstractSet[bytes] = frozenset()) -> None:
        """Remove a node as it is stored now (its record may be older than that). `going`: nodes that go next."""
        table = self._view(txn)
        current = table.get(node.tree_key)
        if current is None:
            return
        node = Placed(node.tree_key, current)
        key = current.key
        self._delete_pieces(txn, key)
        txn.delete(self._order_row(node), db=self._tables[ORDER])
        txn.delete(key, db=self._tables[KEYS])
        txn.delete(node.tree_key, db=self._tables[NODES])
        if node.parent not in going and not table.has_children(node.parent):
            above = table.place(node.parent)
            if above is not None:
                txn.put(self._order_row(above), b"", db=self._tables[ORDER])
        sums.remove(current)


def _on_pages(node: Placed) -> int:
    """Bytes that a node's payload takes in the file."""
    return -(-node.record.stored // PAGE) * PAGE
