"""New nodes: which are published, where they stand, what becomes of those they replace or cover.

Works on the state of `cache.py`, under its lock.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..frames import NewNode
from .blocks import BLOCK_TOKENS, block_key, swap
from .disk import Disk
from .hot import HotNode
from .session import Session
from .tree import NodeTable, Placed, Record, is_covered, shorter
from .warm_table import WarmTable

if TYPE_CHECKING:
    from .cache import Cache

log = logging.getLogger(__name__)


class Committing:
    """Commits to a cache."""

    def __init__(self, cache: Cache, disk: Disk | None) -> None:
        self._cache = cache
        self._disk = disk

    def commit(self, session: Session, namespace: bytes, nodes: Sequence[NewNode]) -> None:
        """See `Session.commit`."""
        cache = self._cache
        self._read_ahead(nodes)
        try:
            with cache.view() as (tables, warm):
                for new in nodes:
                    self._commit(session, namespace, new, tables, warm)
        except Exception as error:  # of the disk
            cache.trouble("admitting blocks", error)
            session.abandon([new.offset for new in nodes])
        cache.wake()

    def _commit(
        self, session: Session, namespace: bytes, new: NewNode, tables: list[NodeTable], warm: WarmTable | None
    ) -> None:
        cache = self._cache
        room = session.reserved.get(new.offset)
        if room is None:
            cache.counters.refused_nodes += 1
            return
        node = self._admit(namespace, new, room, tables, warm, cache.wall())
        if node is None:
            session.abandon([new.offset])
            return
        del session.reserved[new.offset]
        cache.arena.shrink(new.offset, room, new.size, cache.clock())
        self._publish(node, new.offset, warm)

    def _read_ahead(self, nodes: Sequence[NewNode]) -> None:
        """Have in memory what admitting them reads of the disk, so that the lock is not held while it is read."""
        if self._disk is None:
            return
        try:
            with self._disk.table() as warm:
                for new in nodes[:1]:
                    warm.place(new.parent)
                for new in nodes:
                    warm.at_or_after(new.parent + swap(new.tokens[: BLOCK_TOKENS * 4]))
        except Exception as error:
            log.debug("reading ahead failed: %s", error)

    def _admit(
        self, namespace: bytes, new: NewNode, room: int, tables: list[NodeTable], warm: WarmTable | None, now: float
    ) -> Placed | None:
        """The node to publish; None if it is known, covered by a longer one, or not as it should be."""
        cache = self._cache
        count = len(new.tokens) // 4
        sound = len(new.tokens) % 4 == 0 and 0 < count <= BLOCK_TOKENS and 0 < new.size <= room
        parent = self._parent(new, warm)
        if not sound or not self._fits(namespace, new, parent):
            cache.counters.refused_nodes += 1
            return None
        key = block_key(new.parent, new.tokens)
        place = new.parent + swap(new.tokens)
        for table in tables:
            known = table.get(place)
            if known is not None:
                if known.grid or not new.grid:
                    cache.touch(known, cache.hot.by_key.get(key), now)
                    cache.counters.known_nodes += 1
                    return None
                break
        if count < BLOCK_TOKENS and any(is_covered(table, place) for table in tables):
            cache.counters.known_nodes += 1
            return None
        preview, cost, hits = new.preview[:160], _cost(new, parent), cache.evicted.hits(key)
        record = Record(key, namespace, new.start, new.size, 0, new.grid, new.kind, cost, now, now, hits, preview)
        record.path_cost = cost + (parent.record.path_cost if parent is not None else 0.0)
        return Placed(place, record)

    def _parent(self, new: NewNode, warm: WarmTable | None) -> Placed | None:
        cache = self._cache
        hot = cache.hot.by_key.get(new.parent)
        return hot.node if hot else warm.place(new.parent) if warm else None

    def _fits(self, namespace: bytes, new: NewNode, parent: Placed | None) -> bool:
        """Whether the node's parent is known, and ends as a whole block where the node starts."""
        cache = self._cache
        if namespace not in cache.namespaces:
            return False
        if new.parent == namespace:
            return new.start == 0
        return (
            parent is not None
            and parent.record.namespace == namespace
            and parent.length == BLOCK_TOKENS
            and parent.end == new.start
        )

    def _publish(self, node: Placed, offset: int, warm: WarmTable | None) -> None:
        cache = self._cache
        old = cache.hot.by_key.get(node.record.key)
        if old is not None:
            cache.forget_hot(old)
        for short in list(shorter(cache.hot.table, node.tree_key)):
            hot = cache.hot.by_key[short.record.key]
            if hot.children == 0 and not (hot.warm and warm is not None and warm.has_children(hot.key)):
                cache.forget_hot(hot)
                cache.counters.superseded += not hot.warm  # else it is counted when it leaves the disk
        hot = HotNode(node, offset, warm=False)
        cache.counters.saved_nodes += 1
        cache.counters.saved_bytes += node.record.size
        given_up: list[HotNode] = []
        if self._disk is not None:
            given_up = cache.queue.add(hot, cache.clock())
            cache.counters.dropped_nodes += len(given_up)
        cache.hot.insert(hot)
        for other in given_up:
            if other is not hot:
                cache.hot.offer(other)


def _cost(new: NewNode, parent: Placed | None) -> float:
    """Seconds of prefill that a node saves.

    A reply's own seconds are those of decoding, and those of a node that was computed in part are too few: then it is
    what its parent costs for as many tokens.
    """
    count = len(new.tokens) // 4
    usual = parent.record.cost / parent.length * count if parent is not None else 0.0
    return usual if usual > 0 and (new.kind == "reply" or new.cost < usual / 2) else new.cost
