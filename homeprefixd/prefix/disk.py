"""The warm tier: nodes and payloads in LMDB.

One process has the file open. One thread writes (methods marked *writer*); any thread reads, in short transactions. A
node and its payload appear, and go, in one transaction, and a parent is never missing while a child is there.
"""

from __future__ import annotations

import errno
import heapq
import itertools
import json
import os
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
import msgspec

from .codec import PIECE, DamagedError, Decoder, Encoder, piece_count
from .directory import DATA
from .policy import ORDER_BYTES, Policy, Rank, order_key, overdue, rank_of
from .tree import Placed, Record, is_covered, shorter
from .warm_table import (
    FILE_FORMAT,
    FILES,
    KEYS,
    META,
    NAMESPACES,
    NODES,
    ORDER,
    PAYLOADS,
    TABLES,
    WarmTable,
    decode_record,
)
from .wear import Written

_FORMAT_KEY = b"format"
_SUMS_KEY = b"sums"
_PIECE_NUMBER = struct.Struct(">H")
_PAGE = 4096
_BATCH = 8 << 20  # bytes of payload in one transaction, which holds them in memory
_SPARE = 64 << 20  # bytes of the map beyond the budget
_FEW = 256  # nodes removed in one transaction
_FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


class MissingError(Exception):
    """The node is not in the store (any more)."""


class DiskFullError(Exception):
    """There is no room: on the disk, in the budget or in the map. Nothing was changed."""


class BudgetError(DiskFullError):
    """The budget has no room, and nothing that may be evicted is left."""


class DiskTroubleError(Exception):
    """The disk or the file failed. Nothing was changed."""


class UnreadableError(Exception):
    """The file is damaged, or of another format."""


class Sums(msgspec.Struct):
    """Sums over all nodes, kept with them so that nothing is scanned at start."""

    raw: int = 0  # bytes of state
    stored: int = 0  # bytes of piece records
    nodes: dict[str, int] = {}  # by namespace, hex
    written: Written = msgspec.field(default_factory=Written)

    def copy(self) -> Sums:
        return Sums(self.raw, self.stored, dict(self.nodes), self.written.copy())


class Touch(NamedTuple):
    """Uses of a node that its record does not show yet."""

    last_use: float
    hits: int


class Pending(NamedTuple):
    """A node to be stored."""

    node: Placed
    payload: memoryview


class Stored(NamedTuple):
    """What a `store` did, by node keys."""

    written: dict[bytes, int]  # key -> bytes on disk
    orphans: list[bytes]  # not written: their parent is not there
    covered: list[bytes]  # not written, or removed: a longer node begins with their tokens


class Disk:
    """The open file. `limit`: bytes that its tables may take. `level`: zstd's, 0 for none. `min_free`: bytes of the
    filesystem that it does not grow into.

    Raises UnreadableError if the file must be set aside, DiskFullError or DiskTroubleError if it cannot be opened now.
    `read_only`: no writer's method may be called, and opening changes nothing.
    """

    def __init__(
        self,
        directory: Path,
        *,
        limit: int,
        level: int,
        policy: Policy,
        read_only: bool = False,
        min_free: int = 0,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.limit = limit
        self._min_free = min_free
        self._wall = wall
        self.read_only = read_only
        self.batch_bytes = max(1 << 20, min(_BATCH, limit // 16))
        self._file = directory / DATA
        self._policy = policy
        self._encoder = Encoder(level)
        self._ceiling: int | None = None
        try:
            size = self._file.stat().st_size if self._file.exists() else 0
            # larger than the budget, so that the budget is met by evicting and never by a full map
            map_size = max(limit + limit // 8 + _SPARE, size) // _PAGE * _PAGE
            self.most = (map_size - _SPARE) * 8 // 9
            """What `limit` can be at most while it is open."""
            self._env = lmdb.open(
                str(directory),
                map_size=map_size,
                mode=0o600,
                max_dbs=len(TABLES),
                max_spare_txns=8,
                sync=True,
                metasync=False,
                writemap=False,
                readonly=read_only,
                lock=not read_only,  # the directory's owner is alone anyway
            )
            if not read_only:
                self._env.reader_check()
            self._check_format(size == 0)
            self._tables = {name: self._env.open_db(name, create=not read_only) for name in TABLES}
        except lmdb.NotFoundError as error:
            raise UnreadableError("it lacks a table") from error
        except (lmdb.InvalidError, lmdb.VersionMismatchError, lmdb.CorruptedError, lmdb.PageNotFoundError) as error:
            raise UnreadableError(str(error)) from error
        except (lmdb.Error, OSError) as error:
            raise _disk_error(error, self._file) from error
        self.namespaces: dict[bytes, dict[str, Any]] = {}
        """Descriptions by namespace; changed by the writer only."""
        try:
            with self._env.begin() as txn:
                sums = txn.get(_SUMS_KEY, db=self._tables[META])
                self.sums = msgspec.msgpack.decode(sums, type=Sums) if sums else Sums()
                for key, text in txn.cursor(self._tables[NAMESPACES]):
                    self.namespaces[key] = json.loads(text)
        except (lmdb.Error, ValueError) as error:
            raise UnreadableError(f"what it says of itself cannot be read: {error}") from error

    def _check_format(self, new: bool) -> None:
        with self._env.begin() as txn:
            names = [key for key, _value in txn.cursor()]
        if META not in names:
            if not new and names:
                raise UnreadableError("it is not a store of homeprefixd")
            if self.read_only:
                raise UnreadableError("it is empty")
            with self._env.begin(write=True) as txn:
                meta = self._env.open_db(META, txn=txn)
                txn.put(_FORMAT_KEY, FILE_FORMAT, db=meta)
            return
        meta = self._env.open_db(META)
        with self._env.begin() as txn:
            found = txn.get(_FORMAT_KEY, db=meta)
        if found != FILE_FORMAT:
            raise UnreadableError(
                f"its format is {(found or b'unknown').decode(errors='replace')}, not {FILE_FORMAT.decode()}"
            )

    def close(self) -> None:
        """No other thread may use it any more."""
        self._env.close()

    # ----------------------------------------------------------------------------------------------- any thread

    @contextmanager
    def table(self, hidden: AbstractSet[bytes] = frozenset()) -> Iterator[WarmTable]:
        """A view of the nodes as they are now. Keep it open for moments only."""
        with self._env.begin() as txn:
            yield self._view(txn, hidden)

    def load(self, tree_key: bytes, out: memoryview, decoder: Decoder) -> Record:
        """Read a node's payload into `out`, checked. `decoder` is the calling thread's own.

        Raises MissingError if it is not there or not of `len(out)` bytes, DamagedError if it is not what was written,
        DiskTroubleError.
        """
        try:
            with self._env.begin(buffers=True) as txn:
                value = txn.get(tree_key, db=self._tables[NODES])
                record = decode_record(value) if value is not None else None
                if record is None or record.size != len(out):
                    raise MissingError
                for number in range(piece_count(record.size)):
                    piece = txn.get(_piece_key(record.key, number), db=self._tables[PAYLOADS])
                    if piece is None:
                        raise DamagedError(f"piece {number} is missing")
                    decoder.decode(record.key, number, piece, out[number * PIECE : (number + 1) * PIECE])
                return record
        except lmdb.Error as error:
            raise _disk_error(error, self._file) from error

    def nodes(self) -> int:
        with self._env.begin() as txn:
            return int(txn.stat(self._tables[NODES])["entries"])

    def used(self) -> int:
        """Bytes in the pages of all tables."""
        with self._env.begin() as txn:
            stats = [txn.stat(table) for table in self._tables.values()]
        stats.append(self._env.stat())
        return sum(s["psize"] * (s["branch_pages"] + s["leaf_pages"] + s["overflow_pages"]) for s in stats)

    def file_bytes(self) -> int:
        """Bytes that the file takes on the disk."""
        try:
            return os.stat(self._file).st_blocks * 512
        except OSError:
            return 0

    def free_bytes(self) -> int:
        """Bytes that the filesystem has left for this user; as much as there can be where it does not say."""
        try:
            space = os.statvfs(self._file.parent)
        except OSError:
            return 1 << 62
        return space.f_bavail * space.f_frsize

    def file_hash(self, identity: bytes) -> str:
        """The remembered SHA-256; "" if there is none."""
        with self._env.begin() as txn:
            return (txn.get(identity, db=self._tables[FILES]) or b"").decode()

    # --------------------------------------------------------------------------------------------------- writer

    def put_namespace(self, namespace: bytes, description: Mapping[str, Any]) -> None:
        """*Writer.* Keep a description. Raises DiskFullError, DiskTroubleError."""

        def put(txn: Any) -> None:
            txn.put(namespace, json.dumps(description, sort_keys=True).encode(), db=self._tables[NAMESPACES])

        self._write(put)
        self.namespaces[namespace] = dict(description)

    def put_file_hash(self, identity: bytes, sha256: str) -> None:
        """*Writer.* Remember a file's hash. Raises DiskFullError, DiskTroubleError."""
        self._write(lambda txn: txn.put(identity, sha256.encode(), db=self._tables[FILES]))

    def store(self, pending: Sequence[Pending], touches: Mapping[bytes, Touch]) -> Stored:
        """*Writer.* Put nodes (parents before children) and note uses, in one transaction.

        Call `make_room` before. A node that is there already is replaced; shorter ones that the new one covers go.
        Raises DiskFullError, DiskTroubleError: then nothing was changed.
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

        self._write(put)
        self.sums = sums
        return stored

    def _put_node(self, txn: Any, node: Placed, payload: memoryview, sums: Sums, stored: Stored) -> None:
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
        if is_covered(table, node.tree_key):
            stored.covered.append(key)
            return
        old = table.get(node.tree_key)
        if old is not None:
            self._delete(txn, Placed(node.tree_key, old), sums)
        above = table.place(parent)
        if above is not None:
            txn.delete(self._order_row(above), db=self._tables[ORDER])  # it is no leaf any more
        size = 0
        for number in range(piece_count(len(payload))):
            piece = self._encoder.encode(key, number, payload[number * PIECE : (number + 1) * PIECE])
            txn.put(_piece_key(key, number), piece, db=self._tables[PAYLOADS])
            size += len(piece)
        record = msgspec.structs.replace(node.record, stored=size)
        placed = Placed(node.tree_key, record)
        self._put_record(txn, placed)
        if not table.has_children(key):
            txn.put(self._order_row(placed), b"", db=self._tables[ORDER])
        txn.put(key, node.tree_key, db=self._tables[KEYS])
        sums.raw += record.size
        sums.stored += size
        name = record.namespace.hex()
        sums.nodes[name] = sums.nodes.get(name, 0) + 1
        stored.written[key] = size
        for short in list(shorter(table, node.tree_key)):
            if not table.has_children(short.record.key):
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

    def lacks(self, need: int) -> int:
        """Bytes that must go before `need` more bytes of payload fit the budget, with a reserve; at most 0 if none."""
        limit = self.limit_now()
        return self.used() + need + min(2 * self.batch_bytes, limit // 8) - limit

    def limit_now(self) -> int:
        """The budget, or less where the disk has no more, or what it has is left to others."""
        limit = self.limit if self._ceiling is None else min(self.limit, self._ceiling)
        if self._min_free:
            limit = min(limit, self.file_bytes() + max(0, self.free_bytes() - self._min_free))
        return limit

    def make_room(self, need: int, may_evict: Callable[[bytes], bool], gone: list[Placed]) -> None:
        """*Writer.* Evict until `need` more bytes of payload fit the budget; what went is added to `gone`.

        `may_evict` is asked for each node that would go. Raises BudgetError if what may go is not enough,
        DiskFullError if the disk has no more, DiskTroubleError.
        """
        while (excess := self.lacks(need)) > 0:
            victims = self._victims(min(max(excess, need), self.batch_bytes * 4), may_evict)
            if not victims:
                kind = BudgetError if self.limit_now() == self.limit else DiskFullError
                raise kind(f"{need} bytes do not fit beside what must stay, {excess} too many")
            self._remove_few(victims)
            gone += victims

    def shrink(self, may_evict: Callable[[bytes], bool]) -> list[Placed]:
        """*Writer.* One step towards the budget: what went; nothing once it is met. Raises as `remove`."""
        excess = self.used() - self.limit
        victims = self._victims(min(excess, self.batch_bytes * 4), may_evict) if excess > 0 else []
        if victims:
            self._remove_few(victims)
        return victims

    def _victims(self, need: int, may_evict: Callable[[bytes], bool]) -> list[Placed]:
        """Leaves, and nodes that become leaves by their going, in the order of going."""
        chosen: dict[bytes, Placed] = {}
        size = 0
        now = self._wall()
        with self._env.begin() as txn:
            table = self._view(txn)
            first: list[tuple[float, int, bytes, Iterator[bytes] | None]] = []  # a heap
            count = itertools.count()

            def wait(order_key: bytes, rows: Iterator[bytes] | None) -> None:
                heapq.heappush(first, (-overdue(rank_of(order_key), now), next(count), order_key, rows))

            for rows in table.leaves_by_level():
                wait(next(rows), rows)
            while first and size < need and len(chosen) < _FEW:
                _overdue, _number, row, more = heapq.heappop(first)
                if more is not None and (following := next(more, None)) is not None:
                    wait(following, more)
                node = table.place(row[ORDER_BYTES:])
                if node is None or node.record.key in chosen or not may_evict(node.record.key):
                    continue
                chosen[node.record.key] = node
                size += -(-node.record.stored // _PAGE) * _PAGE
                above = table.place(node.parent)
                if above is not None and all(c.record.key in chosen for c in table.children(above.record.key)):
                    wait(self._order_row(above), None)
        return list(chosen.values())

    def remove(self, nodes: Sequence[Placed]) -> None:
        """*Writer.* Remove nodes, children before parents. Raises DiskFullError, DiskTroubleError."""
        for at in range(0, len(nodes), _FEW):
            self._remove_few(nodes[at : at + _FEW])

    def _remove_few(self, nodes: Sequence[Placed]) -> None:
        sums = self.sums.copy()
        going = {node.record.key for node in nodes}

        def delete(txn: Any) -> None:
            for node in nodes:
                self._delete(txn, node, sums, going)
            self._put_sums(txn, sums)

        self._write(delete)
        self.sums = sums

    def hold_at(self, ceiling: int | None) -> None:
        """*Writer.* Do not grow beyond `ceiling` bytes, because the disk has no more; None: as the budget says."""
        self._ceiling = ceiling

    # ------------------------------------------------------------------------------------------------ internals

    def _view(self, txn: Any, hidden: AbstractSet[bytes] = frozenset()) -> WarmTable:
        return WarmTable(txn, self._tables, hidden)

    def _write(self, change: Callable[[Any], object]) -> None:
        try:
            with self._env.begin(write=True) as txn:
                change(txn)
        except (lmdb.Error, OSError) as error:
            raise _disk_error(error, self._file) from error

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
        txn.put(_SUMS_KEY, msgspec.msgpack.encode(sums), db=self._tables[META])

    def _delete(self, txn: Any, node: Placed, sums: Sums, going: AbstractSet[bytes] = frozenset()) -> None:
        """Remove a node as it is stored now (its record may be older than that). `going`: nodes that go next."""
        table = self._view(txn)
        current = table.get(node.tree_key)
        if current is None:
            return
        node = Placed(node.tree_key, current)
        key = current.key
        for number in range(piece_count(current.size)):
            txn.delete(_piece_key(key, number), db=self._tables[PAYLOADS])
        txn.delete(self._order_row(node), db=self._tables[ORDER])
        txn.delete(key, db=self._tables[KEYS])
        txn.delete(node.tree_key, db=self._tables[NODES])
        if node.parent not in going and not table.has_children(node.parent):
            above = table.place(node.parent)
            if above is not None:
                txn.put(self._order_row(above), b"", db=self._tables[ORDER])
        sums.raw -= current.size
        sums.stored -= current.stored
        name = current.namespace.hex()
        sums.nodes[name] = sums.nodes.get(name, 0) - 1
        if sums.nodes[name] <= 0:
            del sums.nodes[name]


def _piece_key(key: bytes, number: int) -> bytes:
    return key + _PIECE_NUMBER.pack(number)


def _disk_error(error: Exception, file: Path) -> DiskFullError | DiskTroubleError:
    code = getattr(error, "code", 0) or getattr(error, "errno", 0)
    full = isinstance(error, (lmdb.MapFullError, lmdb.TxnFullError)) or code in _FULL
    if full or (code == errno.EIO and _is_full(file.parent)):  # LMDB says EIO where a write was cut short
        return DiskFullError(str(error) if full else "the disk is full")
    return DiskTroubleError(str(error))


def _is_full(directory: Path) -> bool:
    try:
        space = os.statvfs(directory)
    except OSError:
        return False
    return space.f_bavail * space.f_frsize < _BATCH
