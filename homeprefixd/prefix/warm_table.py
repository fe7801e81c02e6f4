"""The warm tier's tables, and the view of its nodes that one transaction gives.

Only names and reading: what changes the file is in `disk.py`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import msgspec

from .policy import LAST_USE_END, LEVELS, ORDER_BYTES
from .tree import Placed, Record

META = b"meta"
NAMESPACES = b"namespaces"  # namespace -> description as JSON
NODES = b"nodes"  # tree key -> Record
KEYS = b"keys"  # node's key -> tree key
ORDER = b"order"  # policy.order_key || node's key -> nothing; of leaves only: those that may go
PAYLOADS = b"payloads"  # node's key || piece number, u16 BE -> piece record
FILES = b"files"  # device, inode, size, mtime -> SHA-256
PINS = b"pins"  # tree key, of a node or of a part of one -> pins.PinRow
REPLIES = b"replies"  # namespace || digest of a prompt's text -> a row of replies.py
FILE_FORMAT = b"2"
"""In META. A file of another one is not opened."""

LARGEST = 1 << 40
"""Bytes of a node's state: a record that says more is damaged."""

TABLES = (META, NAMESPACES, NODES, KEYS, ORDER, PAYLOADS, FILES, PINS, REPLIES)

LATER = frozenset((PINS, REPLIES))
"""Tables that files made by earlier versions lack."""

decode_record = msgspec.msgpack.Decoder(Record).decode


class WarmTable:
    """A `tree.NodeTable` over one transaction. `hidden`: keys of nodes that are as good as gone."""

    def __init__(self, txn: Any, tables: Mapping[bytes, Any], hidden: AbstractSet[bytes]) -> None:
        self._txn = txn
        self._nodes = tables[NODES]
        self._keys = tables[KEYS]
        self._order = tables[ORDER]
        self._hidden = hidden

    def get(self, tree_key: bytes) -> Record | None:
        value = self._txn.get(tree_key, db=self._nodes)
        return self._decode(value) if value is not None else None

    def before(self, tree_key: bytes) -> Placed | None:
        cursor = self._txn.cursor(self._nodes)
        found = cursor.prev() if cursor.set_range(tree_key) else cursor.last()
        while found:
            record = self._decode(cursor.value())
            if record is not None:
                return Placed(cursor.key(), record)
            found = cursor.prev()
        return None

    def at_or_after(self, tree_key: bytes) -> Placed | None:
        cursor = self._txn.cursor(self._nodes)
        found = cursor.set_range(tree_key)
        while found:
            record = self._decode(cursor.value())
            if record is not None:
                return Placed(cursor.key(), record)
            found = cursor.next()
        return None

    def children(self, key: bytes) -> Iterator[Placed]:
        cursor = self._txn.cursor(self._nodes)
        found = cursor.set_range(key)
        while found and cursor.key().startswith(key):
            record = self._decode(cursor.value())
            if record is not None:
                yield Placed(cursor.key(), record)
            found = cursor.next()

    def has_children(self, key: bytes) -> bool:
        return next(self.children(key), None) is not None

    def place(self, key: bytes) -> Placed | None:
        """The node with this key."""
        tree_key = self._txn.get(key, db=self._keys)
        record = self.get(tree_key) if tree_key is not None else None
        return Placed(tree_key, record) if record is not None else None

    def find(self, prefix: bytes, limit: int) -> list[Placed]:
        """Up to `limit` nodes whose keys begin with `prefix`."""
        found: list[Placed] = []
        cursor = self._txn.cursor(self._keys)
        there = cursor.set_range(prefix) if prefix else cursor.first()
        while there and cursor.key().startswith(prefix) and len(found) < limit:
            node = self.place(cursor.key())
            if node is not None:
                found.append(node)
            there = cursor.next()
        return found

    def keys_from(self, key: bytes) -> Iterator[bytes]:
        """Keys of all nodes that are not smaller than `key`, in order."""
        cursor = self._txn.cursor(self._keys)
        there = cursor.set_range(key) if key else cursor.first()
        while there:
            yield cursor.key()
            there = cursor.next()

    def leaves_by_level(self) -> Iterator[Iterator[bytes]]:
        """Rows of ORDER (they end with nodes' keys): those of each level, in the order of going."""
        for level in self._used_levels():
            yield self._rows(level)

    def newest(self, before: bytes | None = None) -> Iterator[bytes]:
        """Rows of ORDER (they end with nodes' keys), those used last first; `before`: only those after this one."""
        rows = (self._rows_back(level, before) for level in self._used_levels())
        yield from heapq.merge(*rows, key=_newness, reverse=True)

    def _used_levels(self) -> Iterator[int]:
        cursor = self._txn.cursor(self._order)
        level = 0
        while level < LEVELS and cursor.set_range(bytes((level,))):
            level = cursor.key()[0]
            yield level
            level += 1

    def _rows(self, level: int) -> Iterator[bytes]:
        cursor = self._txn.cursor(self._order)
        there = cursor.set_range(bytes((level,)))
        while there and cursor.key()[0] == level:
            yield cursor.key()
            there = cursor.next()

    def _rows_back(self, level: int, before: bytes | None) -> Iterator[bytes]:
        cursor = self._txn.cursor(self._order)
        end = bytes((level + 1,))
        if before is not None and level > before[0]:
            end = bytes((level,)) + before[1:LAST_USE_END]
        elif before is not None and level < before[0]:  # of equal times the higher level comes first
            end = bytes((level,)) + before[1:LAST_USE_END] + b"\xff" * ORDER_BYTES
        elif before is not None:
            end = before
        there = cursor.prev() if cursor.set_range(end) else cursor.last()
        while there and cursor.key()[0] == level:
            yield cursor.key()
            there = cursor.prev()

    def subtree(self, key: bytes) -> list[Placed]:
        """All nodes below `key` (a node's or a namespace), children before their parents."""
        found: list[Placed] = []
        waiting = [key]
        while waiting:
            children = list(self.children(waiting.pop()))
            found += children
            waiting += [child.record.key for child in children]
        return found[::-1]

    def _decode(self, value: bytes) -> Record | None:
        try:
            record = decode_record(value)
        except msgspec.DecodeError:
            return None  # damaged: as good as gone, until it is verified
        return None if record.key in self._hidden or not 0 < record.size <= LARGEST else record


def _newness(row: bytes) -> tuple[bytes, bytes]:
    return row[1:LAST_USE_END], row
