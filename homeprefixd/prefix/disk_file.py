"""The file of the warm tier: opening it, and what any thread may read.

What changes it is in `disk.py`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb
import msgspec

from .blocks import KEY_BYTES, block_key, swap
from .codec import PIECE, DamagedError, Decoder, Encoder, piece_count
from .directory import DATA
from .env_gate import EnvGate
from .policy import Policy
from .tree import Record
from .warm_table import (
    FILE_FORMAT,
    FILES,
    LATER,
    META,
    NAMESPACES,
    NODES,
    PAYLOADS,
    PINS,
    REPLIES,
    TABLES,
    WarmTable,
    decode_record,
)
from .wear import Written

_FORMAT_KEY = b"format"
SUMS_KEY = b"sums"
REMOVALS_KEY = b"removals"
_PIECE_NUMBER = struct.Struct(">H")
PAGE = 4096
_BATCH = 8 << 20  # bytes of payload in one transaction, which holds them in memory
_SPARE = 64 << 20  # bytes of the map beyond the budget
log = logging.getLogger(__name__)

_FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


class MissingError(Exception):
    """The node is not in the store (any more)."""


class DiskFullError(Exception):
    """There is no room: on the disk, in the budget or in the map. Nothing was changed."""


class GrowthError(DiskFullError):
    """The free pages of the file were not enough, and it must not grow: what the disk has left is for others."""


class BudgetError(DiskFullError):
    """The budget has no room, and nothing that may be evicted is left."""


class DiskTroubleError(Exception):
    """The disk or the file failed. Nothing was changed."""


class CountsError(DiskTroubleError):
    """What the file says of its own size cannot be: its pages are damaged."""


class GoneError(DiskTroubleError):
    """The file that is open is no longer the one at its path."""


class UnreadableError(Exception):
    """The file is damaged, or of another format."""


class OtherFormatError(UnreadableError):
    """The file is a store of another version."""


class Sums(msgspec.Struct):
    """Sums over all nodes, kept with them so that nothing is scanned at start."""

    raw: int = 0  # bytes of state
    stored: int = 0  # bytes of piece records
    nodes: dict[str, int] = {}  # by namespace, hex
    written: Written = msgspec.field(default_factory=Written)
    scrubbed: float = 0.0  # Unix time of the end of the last pass over all, s
    sizes: dict[str, int] = {}  # bytes of piece records, by namespace, hex
    owners: dict[str, int] = {}  # likewise, by API key
    by_owner: bool = False  # whether the two before are there: files of earlier versions lack them

    def copy(self) -> Sums:
        return msgspec.structs.replace(
            self,
            nodes=dict(self.nodes),
            written=self.written.copy(),
            sizes=dict(self.sizes),
            owners=dict(self.owners),
        )

    def add(self, record: Record) -> None:
        """A node is stored."""
        self._change(record, 1)

    def remove(self, record: Record) -> None:
        """A node is stored no longer."""
        self._change(record, -1)

    def clear(self) -> None:
        """No node is stored."""
        self.raw = self.stored = 0
        self.nodes, self.sizes, self.owners = {}, {}, {}

    def _change(self, record: Record, times: int) -> None:
        self.raw = max(0, self.raw + times * record.size)  # what a damaged record says may be anything
        self.stored = max(0, self.stored + times * record.stored)
        name = record.namespace.hex()
        _add(self.nodes, name, times)
        _add(self.sizes, name, times * record.stored)
        if record.owner:
            _add(self.owners, record.owner, times * record.stored)


def _add(sums: dict[str, int], name: str, value: int) -> None:
    """Those that come to nothing are left out."""
    sums[name] = sums.get(name, 0) + value
    if sums[name] <= 0:
        del sums[name]


class DiskFile:
    """The open file. `limit`: bytes that its tables may take. `level`: zstd's, 0 for none. `min_free`: bytes of the
    filesystem that it does not grow into.

    Raises UnreadableError if the file must be set aside, DiskFullError or DiskTroubleError if it cannot be opened now.
    `read_only`: no writer's method may be called, and opening changes nothing. `recount`: do not believe its own sums.
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
        recount: bool = False,
    ) -> None:
        self.limit = limit
        self._min_free = min_free
        self._wall = wall
        self.read_only = read_only
        self._file = directory / DATA
        self._policy = policy
        self._encoder = Encoder(level)
        self._ceiling: int | None = None
        self._kept_free = 0  # bytes of the file, so that it need not grow
        self._is_small = False  # the map is still what bound an earlier transaction
        try:
            size = self._file.stat().st_size if self._file.exists() else 0
            # Larger than the budget, so that the budget is met by evicting and never by a full map; and larger than the
            # file, which may have no free page: what is removed is free only after its transaction, which needs some.
            map_size = max(limit + limit // 8, size + size // 8) // PAGE * PAGE + _SPARE
            self.most = (map_size - _SPARE) * 8 // 9
            """What `limit` can be at most while it is open."""
            self._map_size = map_size
            self._gate = EnvGate()
            self._env = self._open()
            if not read_only:
                self._env.reader_check()
            self._check_format(size == 0)
            self._tables = self._open_tables()
        except lmdb.NotFoundError as error:
            raise UnreadableError("it lacks a table") from error
        except (lmdb.InvalidError, lmdb.VersionMismatchError, lmdb.CorruptedError, lmdb.PageNotFoundError) as error:
            raise UnreadableError(str(error)) from error
        except (lmdb.Error, OSError) as error:
            raise disk_error(error, self._file) from error
        self.namespaces: dict[bytes, dict[str, Any]] = {}
        """Descriptions by namespace; changed by the writer only."""
        try:
            with self._begin() as txn:
                self.sums = self._read_sums(txn, recount)
                for key, text in txn.cursor(self._tables[NAMESPACES]):
                    self.namespaces[key] = _description(text)
        except (lmdb.Error, ValueError) as error:
            raise UnreadableError(f"what it says of itself cannot be read: {error}") from error

    def _read_sums(self, txn: Any, recount: bool) -> Sums:
        """As they are stored. Counted anew, 0.3 s for 100,000 nodes, where they may be wrong or an earlier version has
        stored less."""
        data = txn.get(SUMS_KEY, db=self._tables[META])
        try:
            sums = msgspec.msgpack.decode(data, type=Sums) if data else Sums(by_owner=True)
        except msgspec.DecodeError as error:
            log.warning("the store's sums are damaged and counted anew: %s", error)
            sums = Sums()
        if recount or not sums.by_owner:
            sums.clear()
            sums.by_owner = True
            for _place, value in txn.cursor(self._tables[NODES]):
                with contextlib.suppress(msgspec.DecodeError):  # damaged: it goes when it is verified
                    sums.add(decode_record(value))
        return sums

    def _check_format(self, new: bool) -> None:
        with self._begin() as txn:
            names = [key for key, _value in txn.cursor()]
        if META not in names:
            if not new and names:
                raise UnreadableError("it is not a store of homeprefixd")
            if self.read_only:
                raise UnreadableError("it is empty")
            with self._begin(write=True) as txn:
                meta = self._env.open_db(META, txn=txn)
                txn.put(_FORMAT_KEY, FILE_FORMAT, db=meta)
            return
        meta = self._env.open_db(META)
        with self._begin() as txn:
            found = txn.get(_FORMAT_KEY, db=meta)
        if found != FILE_FORMAT:
            raise OtherFormatError(
                f"its format is {(found or b'unknown').decode(errors='replace')}, not {FILE_FORMAT.decode()}"
            )

    def _open(self) -> Any:
        """LMDB's environment. Raises lmdb.Error, OSError."""
        opened = lmdb.open(
            str(self._file.parent),
            map_size=self._map_size,
            mode=0o600,
            max_dbs=len(TABLES),
            max_spare_txns=8,
            sync=True,
            metasync=False,
            writemap=False,
            readonly=self.read_only,
            lock=not self.read_only,  # the directory's owner is alone anyway
        )
        self._inode = self._file.stat().st_ino
        return opened

    def check_place(self) -> None:
        """*Writer.* Raises GoneError if somebody has removed the file or put another in its place."""
        try:
            there = self._file.stat().st_ino
        except FileNotFoundError:
            raise GoneError(f"{self._file} was removed while it was open") from None
        except OSError as error:
            log.warning("%s: %s", self._file, error.strerror or error)
            return
        if there != self._inode:
            raise GoneError(f"{self._file} was replaced by another file while it was open")

    def _open_tables(self) -> dict[bytes, Any]:
        create = not self.read_only
        return {name: self._env.open_db(name, create=create) for name in TABLES if self._opens(name)}

    @contextmanager
    def _begin(self, *, write: bool = False, buffers: bool = False) -> Iterator[Any]:
        """A transaction. The file is not exchanged while it lasts."""
        with self._gate.use(), self._env.begin(write=write, buffers=buffers) as txn:
            yield txn

    def _opens(self, name: bytes) -> bool:
        """False for a table that files made by earlier versions lack, where it must not be made."""
        if name not in LATER or not self.read_only:
            return True
        with self._begin() as txn:
            return txn.get(name) is not None

    def close(self) -> None:
        """No other thread may use it any more."""
        self._env.close()

    # ----------------------------------------------------------------------------------------------- any thread

    @contextmanager
    def table(self, hidden: AbstractSet[bytes] = frozenset()) -> Iterator[WarmTable]:
        """A view of the nodes as they are now. Keep it open for moments only."""
        with self._begin() as txn:
            yield self._view(txn, hidden)

    def load(self, tree_key: bytes, out: memoryview, decoder: Decoder) -> Record:
        """Read a node's payload into `out`, checked. `decoder` is the calling thread's own.

        Raises MissingError if it is not there or not of `len(out)` bytes, DamagedError if it is not what was written,
        DiskTroubleError.
        """
        try:
            with self._begin(buffers=True) as txn:
                value = txn.get(tree_key, db=self._tables[NODES])
                try:
                    record = decode_record(value) if value is not None else None
                except msgspec.DecodeError as error:
                    raise DamagedError(f"what is known of it cannot be read: {error}") from error
                if record is None or record.size != len(out):
                    raise MissingError
                if record.key != block_key(tree_key[:KEY_BYTES], swap(tree_key[KEY_BYTES:])):
                    raise DamagedError("its tokens are not those that it is named by")
                for number in range(piece_count(record.size)):
                    piece = txn.get(piece_key(record.key, number), db=self._tables[PAYLOADS])
                    if piece is None:
                        raise DamagedError(f"piece {number} is missing")
                    decoder.decode(record.key, number, piece, out[number * PIECE : (number + 1) * PIECE])
                return record
        except lmdb.Error as error:
            raise disk_error(error, self._file) from error

    @contextmanager
    def reading(self) -> Iterator[tuple[Any, Mapping[bytes, Any]]]:
        """A transaction whose values are views, and the tables: for `checking`. Keep it open for moments only.

        Raises DiskTroubleError.
        """
        try:
            with self._begin(buffers=True) as txn:
                yield txn, self._tables
        except lmdb.Error as error:
            raise disk_error(error, self._file) from error

    def nodes(self) -> int:
        with self._begin() as txn:
            return int(txn.stat(self._tables[NODES])["entries"])

    @property
    def batch_bytes(self) -> int:
        """Of state that is written in one transaction, about: it needs as much room beside what it replaces."""
        return max(1 << 20, min(_BATCH, self.limit // 16))

    def used(self) -> int:
        """Bytes in the pages of all tables. Raises DiskTroubleError; CountsError if what LMDB says cannot be."""
        try:
            with self._begin() as txn:
                stats = {name: txn.stat(table) for name, table in self._tables.items()}
                stored = self.sums.stored  # may be of an earlier transaction, or a later one
                if data := txn.get(SUMS_KEY, db=self._tables[META]):
                    with contextlib.suppress(msgspec.DecodeError):
                        stored = max(stored, msgspec.msgpack.decode(data, type=Sums).stored)
                return plausible_use(stats, self._env.stat(), self._env.info()["last_pgno"] + 1, stored)
        except lmdb.Error as error:
            raise disk_error(error, self._file) from error

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
        with self._begin() as txn:
            return (txn.get(identity, db=self._tables[FILES]) or b"").decode()

    def pin_rows(self) -> list[tuple[bytes, bytes]]:
        """All rows of PINS."""
        if PINS not in self._tables:
            return []
        with self._begin() as txn:
            return [(bytes(key), bytes(value)) for key, value in txn.cursor(self._tables[PINS])]

    def removals(self) -> bytes:
        """What was put last; b"" if nothing was."""
        with self._begin() as txn:
            return bytes(txn.get(REMOVALS_KEY, db=self._tables[META]) or b"")

    def reply_rows(self) -> list[tuple[bytes, bytes]]:
        """All rows of REPLIES."""
        if REPLIES not in self._tables:
            return []
        with self._begin() as txn:
            return [(bytes(key), bytes(value)) for key, value in txn.cursor(self._tables[REPLIES])]

    def reply_row(self, key: bytes) -> bytes | None:
        """None if there is none. Raises lmdb.Error."""
        if REPLIES not in self._tables:
            return None
        with self._begin() as txn:
            found = txn.get(key, db=self._tables[REPLIES])
            return bytes(found) if found is not None else None

    def _view(self, txn: Any, hidden: AbstractSet[bytes] = frozenset()) -> WarmTable:
        return WarmTable(txn, self._tables, hidden)


def plausible_use(stats: Mapping[bytes, Any], main: Any, pages: int, stored: int) -> int:
    """Bytes in the pages of all tables, by what LMDB says of them. Raises CountsError if that cannot be.

    `stats`: LMDB's of each table, `main`: of the table of tables; `pages`: of the file; `stored`: bytes of payloads.
    LMDB keeps these counts beside each table's root and never checks them; the budget is kept by them.
    """
    counts = [
        table["branch_pages"] + table["leaf_pages"] + table["overflow_pages"] for table in (*stats.values(), main)
    ]
    used: int = sum(counts)
    rows = sum(table["entries"] for table in (*stats.values(), main))
    # at least one row to a leaf, no more branches than leaves, and a page begun for each payload
    if used > pages or used > stored // PAGE + 3 * rows + 64:
        raise CountsError(f"its tables say that they have {used} pages, for {rows} rows in {pages} pages")
    return used * PAGE


def _description(text: bytes) -> dict[str, Any]:
    """Of a namespace; {} where it is damaged: it is written again when a model opens it."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        log.warning("what is stored of a model's description is damaged")
        return {}
    return found


def is_corruption(error: BaseException) -> bool:
    """Whether an error means that the file's own structure is damaged, so that it must be checked and set aside.

    A damaged page can show as a transaction that LMDB has given up, by whatever call comes next.
    """
    kinds = (
        lmdb.CorruptedError,
        lmdb.PageNotFoundError,
        lmdb.PanicError,
        lmdb.InvalidError,
        lmdb.BadTxnError,
        CountsError,
        GoneError,
    )
    return isinstance(error, kinds) or isinstance(error.__cause__, kinds)


def is_certain(error: BaseException) -> bool:
    """Whether such an error says that the file is damaged even where its check finds nothing.

    Counts may be wrong in its own sums, which are made anew; a transaction is given up for less than damage, too.
    """
    doubtful = (CountsError, GoneError, lmdb.BadTxnError)
    return not isinstance(error, doubtful) and not isinstance(error.__cause__, doubtful)


def piece_key(key: bytes, number: int) -> bytes:
    """Of a piece in PAYLOADS."""
    return key + _PIECE_NUMBER.pack(number)


def disk_error(error: Exception, file: Path) -> DiskFullError | DiskTroubleError:
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
