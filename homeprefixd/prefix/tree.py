"""The ordered table of nodes, and matching.

A node's place is its *tree key*: its parent's key, then its tokens as big-endian u32. Children that share a prefix lie
side by side, so the child with the longest common prefix with some wanted tokens stands next to where they would stand:
one seek, at any fan-out. `NodeTable` is what a table must offer; `MemoryTable` is the one over RAM, `disk.WarmTable`
the one over LMDB, and the functions here work on several at once, as if they were one.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import msgspec

from .blocks import BLOCK_TOKENS, EDGE, KEY_BYTES, BlockKey, TokensBE, common_tokens

BLOCK_BYTES = BLOCK_TOKENS * 4


class Record(msgspec.Struct, array_like=True, gc=False):
    """What is known of a node, apart from its place. Stored as msgpack; a field may be added at the end.

    There may be 100,000, and none holds another: Python's garbage collector need not walk them.
    """

    key: BlockKey
    namespace: bytes
    start: int  # position of its first token
    size: int  # bytes of state
    stored: int  # bytes on disk; 0 while it is in RAM only
    grid: bool
    kind: str
    cost: float  # seconds of prefill
    created: float  # Unix time, s
    last_use: float  # Unix time, s
    hits: int
    preview: str
    level: int = 0  # of its rank when it was stored or used last
    path_cost: float = 0.0  # seconds of prefill from the start of the prompt to its end
    holds_edge: bool = False  # it stays though a longer node covers it
    owner: str = ""  # name of the API key that it was first computed for


class Placed(NamedTuple):
    """A node and its place."""

    tree_key: bytes
    record: Record

    @property
    def parent(self) -> bytes:
        return self.tree_key[:KEY_BYTES]

    @property
    def length(self) -> int:
        """In tokens."""
        return (len(self.tree_key) - KEY_BYTES) // 4

    @property
    def is_edge(self) -> bool:
        """Whether it is the edge of its parent, and stands for no tokens."""
        return self.tree_key[KEY_BYTES:] == EDGE

    @property
    def end(self) -> int:
        """Position after its last token."""
        return self.record.start + self.length

    @property
    def mean_cost(self) -> float:
        """Seconds of prefill for as many tokens as it has, by the mean of all from the prompt's start.

        The end of a prompt costs more than its beginning, but is of no use without it. An edge saves what its
        record says.
        """
        if self.is_edge:
            return self.record.cost
        return self.record.path_cost * self.length / self.end


class Step(NamedTuple):
    """One node of a match."""

    node: Placed
    use: int  # of its tokens match; less than its length only in the last step


class NodeTable(Protocol):
    """Nodes in the byte order of their tree keys. Records are the table's own: only `cache.py` changes them."""

    def get(self, tree_key: bytes) -> Record | None: ...

    def before(self, tree_key: bytes) -> Placed | None:
        """The last node whose tree key is smaller."""
        ...

    def at_or_after(self, tree_key: bytes) -> Placed | None:
        """The first node whose tree key is not smaller."""
        ...

    def children(self, key: bytes) -> Iterator[Placed]:
        """Nodes whose parent is `key` (a node's, or a namespace), in order. The table must not change meanwhile."""
        ...

    def has_children(self, key: bytes) -> bool: ...


class MemoryTable:
    """A NodeTable in RAM: a sorted list of tree keys beside a dict."""

    def __init__(self) -> None:
        self._records: dict[bytes, Record] = {}
        self._keys: list[bytes] = []

    def __len__(self) -> int:
        return len(self._keys)

    def put(self, tree_key: bytes, record: Record) -> None:
        """Add a node, or replace its record."""
        if tree_key not in self._records:
            bisect.insort(self._keys, tree_key)
        self._records[tree_key] = record

    def remove(self, tree_key: bytes) -> None:
        """Raises KeyError if it is not there."""
        del self._records[tree_key]
        del self._keys[bisect.bisect_left(self._keys, tree_key)]

    def get(self, tree_key: bytes) -> Record | None:
        return self._records.get(tree_key)

    def before(self, tree_key: bytes) -> Placed | None:
        at = bisect.bisect_left(self._keys, tree_key)
        return self._placed(at - 1) if at else None

    def at_or_after(self, tree_key: bytes) -> Placed | None:
        at = bisect.bisect_left(self._keys, tree_key)
        return self._placed(at) if at < len(self._keys) else None

    def children(self, key: bytes) -> Iterator[Placed]:
        at = bisect.bisect_left(self._keys, key)
        while at < len(self._keys) and self._keys[at].startswith(key):
            yield self._placed(at)
            at += 1

    def has_children(self, key: bytes) -> bool:
        return next(self.children(key), None) is not None

    def _placed(self, at: int) -> Placed:
        tree_key = self._keys[at]
        return Placed(tree_key, self._records[tree_key])


class LockedTable:
    """A NodeTable for a thread that does not hold the lock of another one: each step takes it for itself.

    So nodes may come and go between two steps.
    """

    def __init__(self, table: MemoryTable, lock: AbstractContextManager[object]) -> None:
        self._table = table
        self._lock = lock

    def get(self, tree_key: bytes) -> Record | None:
        with self._lock:
            return self._table.get(tree_key)

    def before(self, tree_key: bytes) -> Placed | None:
        with self._lock:
            return self._table.before(tree_key)

    def at_or_after(self, tree_key: bytes) -> Placed | None:
        with self._lock:
            return self._table.at_or_after(tree_key)

    def children(self, key: bytes) -> Iterator[Placed]:
        with self._lock:
            return iter(list(self._table.children(key)))

    def has_children(self, key: bytes) -> bool:
        with self._lock:
            return self._table.has_children(key)


def match(
    tables: Sequence[NodeTable], namespace: bytes, tokens: TokensBE, *, limit: int, exact: bool = False
) -> list[Step]:
    """How far the first `limit` of `tokens` are known below `namespace`: the path, in order.

    Whole blocks by their exact key, then the child that has the longest common prefix with what is left. Of equals, the
    earlier table's node is taken, then the smaller one. `exact`: only `grid` nodes, only whole ones.
    """
    tokens = TokensBE(tokens[: max(0, limit) * 4])
    steps: list[Step] = []
    parent = namespace
    at = 0
    while len(tokens) - at >= BLOCK_BYTES:
        tree_key = parent + tokens[at : at + BLOCK_BYTES]
        record = _first(tables, tree_key, exact)
        if record is None or record.start * 4 != at:  # a damaged record
            break
        steps.append(Step(Placed(tree_key, record), BLOCK_TOKENS))
        parent = record.key
        at += BLOCK_BYTES
    wanted = parent + tokens[at : at + BLOCK_BYTES]
    last = _longest_whole(tables, wanted) if exact else _longest_common(tables, wanted)
    if last is not None and last.node.record.start * 4 == at:
        steps.append(last)
    return steps


def _first(tables: Sequence[NodeTable], tree_key: bytes, exact: bool) -> Record | None:
    for table in tables:
        record = table.get(tree_key)
        if record is not None and (record.grid or not exact):
            return record
    return None


def _common(tree_key: bytes, wanted: bytes) -> int:
    """Leading tokens that two children of one parent share; 0 if their parents differ."""
    if tree_key[:KEY_BYTES] != wanted[:KEY_BYTES]:
        return 0
    return common_tokens(tree_key[KEY_BYTES:], wanted[KEY_BYTES:])


def _longest_common(tables: Sequence[NodeTable], wanted: bytes) -> Step | None:
    best: Step | None = None
    best_order = (0, 0, 0)
    for number, table in enumerate(tables):
        for node in (table.at_or_after(wanted), table.before(wanted)):
            use = _common(node.tree_key, wanted) if node is not None else 0
            if node is None or use == 0:
                continue
            order = (-use, number, node.record.size)
            if best is None or order < best_order:
                best, best_order = Step(node, use), order
    return best


def _longest_whole(tables: Sequence[NodeTable], wanted: bytes) -> Step | None:
    best: Step | None = None
    for table in tables:
        record = table.get(wanted)
        here = [Placed(wanted, record)] if record is not None else []
        for node in (*here, *shorter(table, wanted)):
            if node.record.grid and (best is None or node.length > best.use):
                best = Step(node, node.length)
                break
    return best


def shorter(table: NodeTable, tree_key: bytes) -> Iterator[Placed]:
    """Nodes whose tokens are a proper prefix of those of `tree_key`, below the same parent; longest first."""
    wanted = tree_key
    node = table.before(wanted)
    while node is not None:
        common = _common(node.tree_key, tree_key)
        if common == 0:
            return
        if common == node.length:
            yield node
            node = table.before(node.tree_key)
            continue
        # every prefix that is left is at most so long, and nothing lies between it and here
        wanted = tree_key[: KEY_BYTES + common * 4]
        record = table.get(wanted)
        if record is not None:
            yield Placed(wanted, record)
        node = table.before(wanted)


def is_covered(table: NodeTable, tree_key: bytes) -> bool:
    """Whether some longer node below the same parent begins with the tokens of `tree_key`."""
    after = table.at_or_after(tree_key + b"\0")
    return after is not None and after.tree_key.startswith(tree_key)
