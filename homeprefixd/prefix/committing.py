"""New nodes: which are published, where they stand, what becomes of those they replace or cover.

Works on the state of `cache.py`, under its lock.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..frames.store import NewNode
from .blocks import BLOCK_TOKENS, EDGE, block_key, edges_of, swap
from .disk import Disk
from .hot import Extent, HotNode
from .runs import RUN
from .session import Committed, Session
from .thinning import superfluous
from .tree import BLOCK_BYTES, NodeTable, Placed, Record, is_covered, shorter
from .warm_table import WarmTable

if TYPE_CHECKING:
    from .cache import Cache

log = logging.getLogger(__name__)


class Committing:
    """Commits to a cache."""

    def __init__(self, cache: Cache, disk: Disk | None) -> None:
        self._cache = cache
        self._disk = disk
        self._doomed: dict[bytes, int] = {}  # nodes that go once they are written, and how often they were used

    def commit(self, session: Session, namespace: bytes, nodes: Sequence[NewNode], owner: str = "") -> Committed:
        """See `Session.commit`."""
        cache, counters = self._cache, self._cache.counters
        done = Committed(0, len(nodes))  # of a disk that fails
        self._read_ahead(nodes)
        try:
            with cache.view() as (tables, warm):  # nobody else counts meanwhile
                known, refused = counters.known_nodes, counters.refused_nodes
                for new in nodes:
                    self._commit(session, namespace, new, owner, tables, warm)
                done = Committed(counters.known_nodes - known, counters.refused_nodes - refused)
        except Exception as error:  # of the disk
            cache.trouble("admitting blocks", error)
        session.abandon([new.offset for new in nodes])  # they are the nodes' own now
        cache.wake()
        return done

    def _commit(
        self,
        session: Session,
        namespace: bytes,
        new: NewNode,
        owner: str,
        tables: list[NodeTable],
        warm: WarmTable | None,
    ) -> None:
        cache = self._cache
        extent = session.reserved.get(new.offset)
        if extent is None or not self._fills(namespace, new, extent):
            cache.counters.refused_nodes += 1
            return
        node = self._admit(namespace, new, tables, warm, cache.wall())
        if node is None:
            return
        node.record.owner = owner
        self._publish(node, HotNode(node, extent, warm=False, part=new.part, parts=new.parts), warm)
        if node.is_edge and new.kind != "window":
            self._thin(node, tables, warm)

    def _fills(self, namespace: bytes, new: NewNode, extent: Extent) -> bool:
        """Whether a node's bytes can be what it says; what its slot has beyond them is given back."""
        cache = self._cache
        if new.parts == 1:
            if new.part or not 0 < new.size <= extent.size or extent.holders > 1:
                return False
            cache.arena.shrink(extent.offset, extent.size, new.size, cache.clock())
            extent.size = new.size
            return True
        if not 0 <= new.part < new.parts <= RUN or len(new.tokens) != BLOCK_BYTES:
            return False
        layout = cache.layouts.get(namespace)
        if layout is None:
            layout = cache.layouts.learn(namespace, cache.arena.view(extent.offset, extent.size), new.parts)
        return layout is not None and layout.size(1) == new.size and layout.size(new.parts) == extent.size

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
        self, namespace: bytes, new: NewNode, tables: list[NodeTable], warm: WarmTable | None, now: float
    ) -> Placed | None:
        """The node to publish; None if it is known, covered by a longer one, or not as it should be."""
        cache = self._cache
        count = len(new.tokens) // 4
        sound = len(new.tokens) % 4 == 0 and 0 < count <= BLOCK_TOKENS
        parent = self._place(new.parent, warm)
        if not sound or not self._fits(namespace, new, parent):
            cache.counters.refused_nodes += 1
            return None
        key = block_key(new.parent, new.tokens)
        place = new.parent + swap(new.tokens)
        for table in tables:
            known = table.get(place)
            if known is not None:
                if known.grid or not new.grid:
                    if known.kind == "window":
                        known.kind = new.kind
                    cache.touch(known, cache.hot.by_key.get(key), now)
                    cache.counters.known_nodes += 1
                    return None
                break
        if count < BLOCK_TOKENS and not new.holds_edge and any(is_covered(table, place) for table in tables):
            cache.counters.known_nodes += 1
            return None
        preview, cost, hits = new.preview[:160], _cost(new, parent), cache.evicted.hits(key)
        record = Record(key, namespace, new.start, new.size, 0, new.grid, new.kind, cost, now, now, hits, preview)
        record.holds_edge = new.holds_edge
        before = parent.record.path_cost if parent is not None else 0.0
        record.path_cost = before + cost
        if new.tokens == EDGE and parent is not None:
            record.path_cost = before
            record.cost = before * self._share(namespace, parent)
        return Placed(place, record)

    def _share(self, namespace: bytes, owner: Placed) -> float:
        """Of the seconds that resuming at the end of a path saves, what its edge of `owner` is worth.

        Without the edge all are lost; where a window needs those of several nodes, each counts for its part.
        """
        edges = edges_of(self._cache.namespaces.get(namespace, {}))
        window = edges.window if edges is not None else 0
        return min(1.0, owner.length / window) if window else 1.0

    def _thin(self, edge: Placed, tables: list[NodeTable], warm: WarmTable | None) -> None:
        """Remove what is superfluous now that `edge` is there."""
        cache = self._cache
        edges = edges_of(cache.namespaces.get(edge.record.namespace, {}))
        if edges is None:
            return

        def place_of(key: bytes) -> Placed | None:
            return self._place(key, warm)

        pinned = cache.pins.edges(tables, place_of) if cache.pins.rows else frozenset()
        writing = {hot.key for hot in cache.writing}

        def stays(key: bytes) -> bool:
            hot = cache.hot.by_key.get(key)
            return key in pinned or (hot is not None and hot.leases > (key in writing))

        for node in superfluous(tables, place_of, edge, edges.window, self._uses, stays):
            below = (child.record.key for table in tables for child in table.children(node.record.key))
            if writing.isdisjoint((node.record.key, *below)):
                self._remove(node, warm)
            else:
                self._doomed[node.record.key] = self._uses(node)

    def written(self) -> None:
        """*Writer.* What became superfluous while it was written goes now, unless somebody came for it."""
        if not self._doomed:
            return
        cache = self._cache
        try:
            with cache.view() as (tables, warm):
                doomed, self._doomed = self._doomed, {}
                for key, used in doomed.items():
                    node, hot = self._place(key, warm), cache.hot.by_key.get(key)
                    if node is None or self._uses(node) != used or (hot is not None and hot.leases):
                        continue
                    if node.is_edge or all(child.is_edge for table in tables for child in table.children(key)):
                        self._remove(node, warm)
        except Exception as error:  # of the disk
            cache.trouble("removing edges", error)

    def _uses(self, node: Placed) -> int:
        unseen = self._cache.unseen(node.record) if node.record.key not in self._cache.hot.by_key else []
        return node.record.hits + sum(touch.hits for touch in unseen)

    def _remove(self, node: Placed, warm: WarmTable | None) -> None:
        cache, key = self._cache, node.record.key
        hot = cache.hot.by_key.get(key)
        if warm is not None and warm.place(key) is not None:
            cache.hide([key, *(below.record.key for below in warm.subtree(key))])
            cache.repairs.append(key)
        cache.forget_hot_subtree(key)
        cache.counters.thinned += 1
        if hot is not None:
            cache.touched.pop(key, None)

    def _place(self, key: bytes, warm: WarmTable | None) -> Placed | None:
        hot = self._cache.hot.by_key.get(key)
        return hot.node if hot else warm.place(key) if warm else None

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
            and (parent.length == BLOCK_TOKENS or new.tokens == EDGE)
            and not parent.is_edge
            and parent.end == new.start
        )

    def _publish(self, node: Placed, hot: HotNode, warm: WarmTable | None) -> None:
        cache = self._cache
        old = cache.hot.by_key.get(node.record.key)
        if old is not None:
            cache.forget_hot(old)
        for short in list(shorter(cache.hot.table, node.tree_key)):
            covered = cache.hot.by_key[short.record.key]
            if short.record.holds_edge:
                continue
            if covered.children == 0 and not (covered.warm and warm is not None and warm.has_children(covered.key)):
                cache.forget_hot(covered)
                cache.counters.superseded += not covered.warm  # else it is counted when it leaves the disk
        cache.counters.saved_nodes += 1
        cache.counters.saved_bytes += node.record.size
        given_up: list[HotNode] = []
        if self._disk is not None:
            given_up = cache.queue.add(hot, cache.clock())
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
