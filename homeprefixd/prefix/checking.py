"""Whether nodes on disk are what was written: record, place in the tree, every piece of the payload.

Pure reading, a few nodes at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from .blocks import BLOCK_TOKENS, KEY_BYTES, block_key, swap
from .codec import PIECE, DamagedError, check, piece_count
from .disk_file import piece_key
from .tree import Placed, Record
from .warm_table import KEYS, LARGEST, NAMESPACES, NODES, PAYLOADS, decode_record

_BYTES = 8 << 20  # of payload that are read in one transaction
_NODES = 256


class Problem(NamedTuple):
    """A node that is not what was written."""

    tree_key: bytes
    key: bytes  # by its tokens, whatever its record says
    readable: bool  # so that it can be removed in the usual way
    reason: str


class Checked(NamedTuple):
    """Some nodes, in the order of the table."""

    nodes: int
    size: int  # of pieces, in bytes
    problems: list[Problem]
    following: bytes | None  # where to go on; None: that was all


def check_some(txn: Any, tables: Mapping[bytes, Any], begin: bytes) -> Checked:
    """Check the nodes from tree key `begin` on. `txn`: one whose values are views."""
    nodes = size = 0
    problems: list[Problem] = []
    cursor = txn.cursor(tables[NODES])
    there = cursor.set_range(begin) if begin else cursor.first()
    while there:
        tree_key = bytes(cursor.key())
        if nodes >= _NODES or size >= _BYTES:
            return Checked(nodes, size, problems, tree_key)
        read, problem = _check(txn, tables, tree_key, cursor.value())
        size += read
        if problem is not None:
            problems.append(problem)
        nodes += 1
        there = cursor.next()
    return Checked(nodes, size, problems, None)


def is_still(txn: Any, tables: Mapping[bytes, Any], problem: Problem) -> bool:
    """Whether a problem is there in this transaction, too: the node may have been replaced or removed since."""
    cursor = txn.cursor(tables[NODES])
    there = cursor.set_range(problem.tree_key)
    if there and bytes(cursor.key()) == problem.tree_key:
        return _check(txn, tables, problem.tree_key, cursor.value())[1] is not None
    there = cursor.first()
    while there:  # where a key was damaged, searching does not find it
        if bytes(cursor.key()) == problem.tree_key:
            return True
        there = cursor.next()
    return False


def _check(txn: Any, tables: Mapping[bytes, Any], tree_key: bytes, value: memoryview) -> tuple[int, Problem | None]:
    """Bytes of pieces that were read, and what is wrong with a node."""
    key = block_key(tree_key[:KEY_BYTES], swap(tree_key[KEY_BYTES:]))
    readable = False
    try:
        record = _record(txn, tables, tree_key, key, value)
        readable = True
        return _pieces(txn, tables, record), None
    except DamagedError as error:
        return 0, Problem(tree_key, key, readable, str(error))


def _record(txn: Any, tables: Mapping[bytes, Any], tree_key: bytes, key: bytes, value: memoryview) -> Record:
    """A node's record. Raises DamagedError if it does not fit its place."""
    try:
        record = decode_record(value)
    except msgspec.DecodeError as error:
        raise DamagedError(f"its record cannot be read: {error}") from error
    if not 0 < record.size <= LARGEST:
        raise DamagedError(f"its record says that it has {record.size} bytes")
    if record.key != key:
        raise DamagedError("its tokens are not those that it is named by")
    place = txn.get(key, db=tables[KEYS])
    if place is None or bytes(place) != tree_key or txn.get(tree_key, db=tables[NODES]) is None:
        raise DamagedError("it cannot be found")
    parent = tree_key[:KEY_BYTES]
    if txn.get(parent, db=tables[NAMESPACES]) is not None:
        end = 0
    else:
        above = txn.get(parent, db=tables[KEYS])
        found = txn.get(bytes(above), db=tables[NODES]) if above is not None else None
        if above is None or found is None:
            raise DamagedError("its parent is missing")
        try:
            end = Placed(bytes(above), decode_record(found)).end
        except msgspec.DecodeError as error:
            raise DamagedError("its parent is damaged") from error
    if record.start != end or Placed(tree_key, record).length > BLOCK_TOKENS:
        raise DamagedError(f"it starts at {record.start}, its parent ends at {end}")
    return record


def _pieces(txn: Any, tables: Mapping[bytes, Any], record: Record) -> int:
    """Bytes of a node's pieces. Raises DamagedError if one is not what was written."""
    total = 0
    for number in range(piece_count(record.size)):
        piece = txn.get(piece_key(record.key, number), db=tables[PAYLOADS])
        if piece is None:
            raise DamagedError(f"piece {number} is missing")
        check(record.key, number, piece, min(PIECE, record.size - number * PIECE))
        total += len(piece)
    return total
