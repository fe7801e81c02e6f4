"""What people see of the cache: its figures, and the prefixes in it."""

from __future__ import annotations

import dataclasses
import heapq
from typing import Any

from ..frames.store import PrefixInfo
from .blocks import FORMAT_VERSION, KEY_BYTES
from .cache import Cache
from .pin_reach import PinRow
from .purge import ID_CHARACTERS, children, is_model, model_label
from .tree import NodeTable, Placed, is_covered
from .warm_table import WarmTable

_STEP_NODES = 100  # that are looked at under the lock at once

PREVIEW = 160
"""Characters of a prefix's text: of its beginning, and of its end."""


def stats(cache: Cache, *, store_id: str, uptime: float) -> dict[str, Any]:
    """The figures of `GET /cache/stats`; sizes in bytes, times in seconds, counters since the store's start."""
    disk = cache.disk
    sums = disk.sums if disk is not None else None
    warm: dict[str, Any] = {
        "bytes": disk.used() if disk is not None else 0,
        "payload_bytes": sums.stored if sums is not None else 0,
        "limit": disk.limit if disk is not None else 0,
        "file_bytes": disk.file_bytes() if disk is not None else 0,
        "nodes": disk.nodes() if disk is not None else 0,
    }
    writes: dict[str, Any] = {"today": 0, "total": 0, "nodes": 0, "since": 0.0, "per_day": 0}
    if sums is not None:
        now, written = cache.wall(), sums.written
        writes = {
            "today": written.on(now),
            "total": written.total,
            "nodes": written.nodes,
            "since": written.since,
            "per_day": round(written.a_day(now)),
        }
    writes["daily_limit"] = cache.daily_writes
    shares = [{"kind": one.kind, "name": one.name, "bytes": one.used, "limit": one.limit} for one in cache.accounts()]
    with cache.lock:
        counters = dataclasses.asdict(cache.counters)
        counters["raw_bytes"] = sums.raw if sums is not None else 0
        counters["stored_bytes"] = sums.stored if sums is not None else 0
        in_ram: dict[bytes, int] = {}
        leased = 0
        for hot in cache.hot.by_key.values():
            leased += hot.leases > 0
            if not hot.warm:
                in_ram[hot.node.record.namespace] = in_ram.get(hot.node.record.namespace, 0) + 1
        stale = set(cache.usage.stale(cache.namespaces))
        namespaces = [
            {
                "model": model_label(description),
                "nodes": in_ram.get(key, 0) + (sums.nodes.get(key.hex(), 0) if sums is not None else 0),
                "bytes": sums.sizes.get(key.hex(), 0) if sums is not None else 0,
                "namespace": key.hex(),
                "description": description,
                "usable": key not in stale,
            }
            for key, description in cache.namespaces.items()
        ]
        return {
            "store_id": store_id,
            "uptime_s": round(uptime, 3),
            "format": FORMAT_VERSION,
            "hot": {
                "bytes": cache.arena.used,
                "limit": cache.arena.limit,
                "allowance": cache.arena.allowance,
                "nodes": len(cache.hot),
                "leased": leased,
            },
            "warm": warm | {"state": cache.warm_state, "reason": cache.warm_reason},
            "queue": {"nodes": len(cache.queue), "bytes": cache.queue.bytes, "limit": cache.queue.limit},
            "writes": writes,
            "shares": shares,
            "keys": dict(sums.owners) if sums is not None else {},
            "verified": sums.scrubbed if sums is not None else 0.0,
            "pins": {"count": len(cache.pins.live()), "given_up": cache.pins.given_up},
            "read_rate": round(cache.read_rate.value),
            "replies": cache.replies.stats(),
            "removed": dict(cache.removals_seen.counts),
            "counters": counters,
            "namespaces": namespaces,
        }


def prefixes(cache: Cache, *, limit: int, model: str = "") -> tuple[list[PrefixInfo], int]:
    """Leaves of the tree, last used first, and the number of nodes in it. `model`: its only; "" means all.

    The lock is held for moments only: what changes in between may be missing.
    """
    with cache.lock:
        wanted = {key for key, description in cache.namespaces.items() if not model or is_model(description, model)}
        stored = cache.disk.sums.nodes if cache.disk is not None else {}
        total = sum(stored.get(key.hex(), 0) for key in wanted) + sum(
            not hot.warm and hot.node.record.namespace in wanted for hot in cache.hot.by_key.values()
        )
    leaves = _hot_leaves(cache, wanted) | _warm_leaves(cache, wanted, limit)
    newest = heapq.nlargest(limit, leaves.values(), key=lambda node: _last_use(cache, node))
    nodes: dict[bytes, Placed | None] = {}
    forks: dict[bytes, bool] = {}
    described = []
    with cache.view() as (tables, _warm):
        pins = cache.pins.kept(tables)
    asked = cache.recent.keys()
    for node in newest:
        with cache.view() as (_tables, warm):
            described.append(_Paths(cache, warm, nodes, forks, pins, asked).describe(node))
    return described, total


def _hot_leaves(cache: Cache, wanted: set[bytes]) -> dict[bytes, Placed]:
    leaves: dict[bytes, Placed] = {}
    with cache.lock:
        candidates = [
            hot for hot in cache.hot.by_key.values() if hot.children == 0 and hot.node.record.namespace in wanted
        ]
    for at in range(0, len(candidates), _STEP_NODES):
        with cache.view() as (_tables, warm):
            for hot in candidates[at : at + _STEP_NODES]:
                if hot.indexed and hot.children == 0 and (warm is None or not warm.has_children(hot.key)):
                    leaf = _without_edge(cache, warm, hot.node)
                    if leaf is not None:
                        leaves[leaf.record.key] = leaf
    return leaves


def _without_edge(cache: Cache, warm: WarmTable | None, leaf: Placed) -> Placed | None:
    """A leaf; for one that is an edge its node, if it has nothing else. None for a point on the way of a longer one."""
    node: Placed | None = leaf
    if leaf.is_edge:
        owner = cache.hot.by_key.get(leaf.parent)
        node = owner.node if owner is not None else warm.place(leaf.parent) if warm is not None else None
        if children(cache, warm, leaf.parent).keys() - {leaf.record.key}:
            return None
    if node is None or not node.record.holds_edge:
        return node
    tables: list[NodeTable] = [cache.hot.table, *([warm] if warm is not None else [])]
    return node if not any(is_covered(table, node.tree_key) for table in tables) else None


def _warm_leaves(cache: Cache, wanted: set[bytes], limit: int) -> dict[bytes, Placed]:
    """Up to `limit` of those that are on disk only: the ones that would go last, so as a rule those last used."""
    leaves: dict[bytes, Placed] = {}
    last: bytes | None = None
    more = cache.disk is not None
    while more and len(leaves) < limit:
        with cache.view() as (_tables, warm):
            if warm is None:
                break
            more = False
            for number, row in enumerate(warm.newest(last)):
                last = row
                key = row[-KEY_BYTES:]
                node = warm.place(key) if key not in cache.hot.by_key else None
                if node is not None and node.record.namespace in wanted and not children(cache, warm, key):
                    leaf = _without_edge(cache, warm, node)
                    if leaf is not None:
                        leaves[leaf.record.key] = leaf
                if number >= _STEP_NODES or len(leaves) >= limit:
                    more = True
                    break
    return leaves


def _last_use(cache: Cache, node: Placed) -> float:
    touch = cache.touched.get(node.record.key)
    return max(node.record.last_use, touch.last_use if touch is not None else 0.0)


class _Paths:
    """Ways from leaves to the root; what they share is read once."""

    def __init__(
        self,
        cache: Cache,
        warm: WarmTable | None,
        nodes: dict[bytes, Placed | None],
        forks: dict[bytes, bool],
        pins: dict[bytes, list[tuple[int, PinRow]]],
        asked: dict[bytes, str],
    ) -> None:
        """`nodes`, `forks`: what was read until now. `pins`: as of `Pins.kept`. `asked`: as of `Recent.keys`."""
        self._asked = asked
        self._pins = pins
        self._cache = cache
        self._warm = warm
        self._nodes = nodes
        self._forks = forks

    def describe(self, leaf: Placed) -> PrefixInfo:
        path = [leaf]
        while (above := self._place(path[-1].parent)) is not None:
            path.append(above)
        own = 1
        while own < len(path) and not self._forks_at(path[own].record.key):
            own += 1
        sizes = [node.record.stored or node.record.size for node in path]
        for child in children(self._cache, self._warm, leaf.record.key).values():
            sizes[0] += child.record.stored or child.record.size  # its edge
        pins = [pin for node in path for pin in self._pins.get(node.record.key, ())]
        record = leaf.record
        touch = self._cache.touched.get(record.key)
        hits = record.hits + (touch.hits if touch is not None and record.key not in self._cache.hot.by_key else 0)
        description = self._cache.namespaces.get(record.namespace, {})
        return PrefixInfo(
            id=record.key.hex()[:ID_CHARACTERS],
            model=model_label(description),
            tokens=leaf.end,
            own_tokens=leaf.end - path[own - 1].record.start,
            bytes=sum(sizes),
            own_bytes=sum(sizes[:own]),
            tiers=self._tiers(path),
            created=record.created,
            last_use=_last_use(self._cache, leaf),
            hits=hits,
            preview=_preview(path[-1].record.preview, record.preview if len(path) > 1 else ""),
            pinned=max((end for end, _row in pins), default=0),
            labels=[row.label for _end, row in pins if row.label],
            request=next((self._asked[node.record.key] for node in path if node.record.key in self._asked), ""),
        )

    def _place(self, key: bytes) -> Placed | None:
        if key not in self._nodes:
            hot = self._cache.hot.by_key.get(key)
            self._nodes[key] = (
                hot.node if hot is not None else self._warm.place(key) if self._warm is not None else None
            )
        return self._nodes[key]

    def _forks_at(self, key: bytes) -> bool:
        if key not in self._forks:
            below = children(self._cache, self._warm, key).values()
            self._forks[key] = sum(not child.is_edge for child in below) > 1
        return self._forks[key]

    def _tiers(self, path: list[Placed]) -> list[str]:
        by_key = self._cache.hot.by_key
        hot = [by_key.get(node.record.key) for node in path]
        tiers = []
        if any(node is not None for node in hot):
            tiers.append("hot")
        if any(node is None or node.warm for node in hot):
            tiers.append("warm")
        return tiers


def _preview(first: str, last: str) -> str:
    """The beginning of a prompt's text, and the end of it, on one line."""
    begin, end = " ".join(first.split()), " ".join(last.split())
    if not end:
        return begin[:PREVIEW]
    half = PREVIEW // 2
    return f"{begin[:half]}…{end[-half:]}"
