"""Caches of prefixes without content, for the simulator: the store's own policy, and those it is measured against.

All keep blocks of a tree and give up leaves only, as the store does; a block of the request that is being served stays.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from ..prefix.arena import Arena
from ..prefix.blocks import BLOCK_TOKENS, BlockKey
from ..prefix.hot import Extent, HotNode, HotTier
from ..prefix.policy import Evicted, LeastRecentlyUsed, Policy, Worth
from ..prefix.tree import Placed, Record
from .traces import Arrival, Block

ROOT = bytes(32)
_NEVER = 1 << 60


class Evictor(Protocol):
    """A cache of a limited size."""

    written: int
    """Tokens stored until now."""

    def serve(self, at: float, blocks: Sequence[Block], seconds: Sequence[float]) -> int:
        """Take a request: how many of its first blocks were there. What was not is stored, as far as there is room.

        `seconds`: of prefill, for each block.
        """
        ...


class _Room(Arena):
    """Counts bytes in place of holding them. Here a byte stands for a token."""

    def __init__(self, limit: int) -> None:
        self.limit = self.allowance = limit
        self.used = 0

    def allocate(self, size: int) -> int | None:
        if self.used + size > self.limit:
            return None
        self.used += size
        return 0

    def free(self, offset: int, size: int, now: float) -> None:
        self.used -= size


class StoreTier:
    """The store's hot tier, its real code, with a policy of it."""

    def __init__(self, limit: int, policy: Policy, evicted: Evicted | None, unit: float) -> None:
        """`unit`: tokens of the trace that stand for one of a node, so that a block is a whole node."""
        self.written = 0
        self._unit = unit
        self._now = 0.0
        self._evicted = evicted
        self._tier = HotTier(_Room(limit), policy, now=self._clock, wall=self._clock, on_evict=self._forget)

    def serve(self, at: float, blocks: Sequence[Block], seconds: Sequence[float]) -> int:
        self._now = at
        held: list[HotNode] = []
        for block in blocks:
            hot = self._tier.by_key.get(block.key)
            if hot is None:
                break
            hot.node.record.last_use = at
            hot.node.record.hits += 1
            self._tier.lease(hot)
            held.append(hot)
        matched = len(held)
        parent = held[-1].key if held else ROOT
        for number in range(matched, len(blocks)):
            block = blocks[number]
            extent = self._tier.allocate(block.tokens)
            if extent is None:
                break
            held.append(self._store(parent, held[-1] if held else None, block, seconds[number], extent))
            self._tier.leave(extent)  # it is the node's own now
            parent = block.key
        for hot in held:
            self._tier.release(hot)
        return matched

    def _store(self, parent: bytes, above: HotNode | None, block: Block, seconds: float, extent: Extent) -> HotNode:
        hits = self._evicted.hits(block.key) if self._evicted is not None else 0
        key = BlockKey(block.key)
        start = above.node.end if above is not None else 0
        record = Record(key, ROOT, start, block.tokens, 0, True, "prompt", seconds, self._now, self._now, hits, "")
        record.path_cost = seconds + (above.node.record.path_cost if above is not None else 0.0)
        length = max(1, round(block.tokens / self._unit))
        hot = HotNode(Placed(parent + (block.key * 8)[: 4 * length], record), extent, warm=False)
        self._tier.insert(hot)
        self._tier.lease(hot)
        self.written += block.tokens
        return hot

    def _clock(self) -> float:
        return self._now

    def _forget(self, hot: HotNode) -> None:
        if self._evicted is not None:
            self._evicted.add(hot.key, hot.node.record.hits)


class _Node:
    __slots__ = ("block", "children", "held", "parent", "turn", "uses")

    def __init__(self, block: Block, parent: _Node | None) -> None:
        self.block = block
        self.parent = parent
        self.children = 0
        self.held = True
        self.uses = 0
        self.turn = 0


class _Leaves:
    """A tree of blocks. What differs is in `_used`, `_stored` and `_victim`."""

    def __init__(self, limit: int) -> None:
        self.written = 0
        self._limit = limit
        self._size = 0
        self._turn = 0
        self._nodes: dict[bytes, _Node] = {}

    def serve(self, at: float, blocks: Sequence[Block], seconds: Sequence[float]) -> int:
        self._turn += 1
        path: list[_Node] = []
        for block in blocks:
            node = self._nodes.get(block.key)
            if node is None:
                break
            node.held = True
            self._used(node)
            path.append(node)
        matched = len(path)
        for block in blocks[matched:]:
            if not self._make_room(block.tokens):
                break
            node = _Node(block, path[-1] if path else None)
            if node.parent is not None:
                node.parent.children += 1
            self._nodes[block.key] = node
            self._size += block.tokens
            self.written += block.tokens
            path.append(node)
        for node in path:
            node.held = False
        self._stored(path[matched:])
        self._let_go(path)
        return matched

    def _make_room(self, tokens: int) -> bool:
        while self._size + tokens > self._limit:
            victim = self._victim()
            if victim is None:
                return False
            del self._nodes[victim.block.key]
            self._size -= victim.block.tokens
            if victim.parent is not None:
                victim.parent.children -= 1
                self._let_go([victim.parent])
        return True

    def _used(self, node: _Node) -> None: ...

    def _stored(self, nodes: Sequence[_Node]) -> None: ...

    def _let_go(self, nodes: Sequence[_Node]) -> None: ...

    def _victim(self) -> _Node | None:
        raise NotImplementedError


class Ranked(_Leaves):
    """The leaf with the lowest rank goes: first in, first out, or least frequently used."""

    def __init__(self, limit: int, rank: Callable[[_Node], tuple[int, int]]) -> None:
        super().__init__(limit)
        self._rank = rank
        self._heap: list[tuple[tuple[int, int], int, _Node]] = []
        self._count = itertools.count()

    def _used(self, node: _Node) -> None:
        node.uses += 1

    def _stored(self, nodes: Sequence[_Node]) -> None:
        for node in nodes:
            node.turn = self._turn

    def _let_go(self, nodes: Sequence[_Node]) -> None:
        for node in reversed(nodes):
            if not node.children and not node.held:
                heapq.heappush(self._heap, (self._rank(node), next(self._count), node))

    def _victim(self) -> _Node | None:
        while self._heap:
            rank, _number, node = heapq.heappop(self._heap)
            there = self._nodes.get(node.block.key) is node
            if there and not node.children and not node.held and rank == self._rank(node):
                return node
        return None


class S3Fifo(_Leaves):
    """S3-FIFO (Yang and others, 2023): a small queue for what is new, a main one, and keys of what left the small."""

    _SMALL = 0.1

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self._small: OrderedDict[bytes, _Node] = OrderedDict()
        self._main: OrderedDict[bytes, _Node] = OrderedDict()
        self._ghosts: OrderedDict[bytes, int] = OrderedDict()
        self._small_size = 0
        self._ghost_size = 0

    def _used(self, node: _Node) -> None:
        node.uses = min(3, node.uses + 1)

    def _stored(self, nodes: Sequence[_Node]) -> None:
        for node in reversed(nodes):  # the end of a path first, so that it goes first
            ghost = self._ghosts.pop(node.block.key, 0)
            self._ghost_size -= ghost
            if ghost:
                self._main[node.block.key] = node
            else:
                self._small[node.block.key] = node
                self._small_size += node.block.tokens

    def _victim(self) -> _Node | None:
        for _try in range(5 * len(self._nodes) + 1):
            if self._small and (self._small_size > self._SMALL * self._limit or not self._main):
                key, node = self._small.popitem(last=False)
                self._small_size -= node.block.tokens
                if node.uses <= 1 and not node.children and not node.held:
                    self._remember(node.block)
                    return node
                node.uses = 0 if node.uses > 1 else node.uses
                self._main[key] = node
            elif self._main:
                key, node = self._main.popitem(last=False)
                if not node.uses and not node.children and not node.held:
                    return node
                node.uses = max(0, node.uses - 1)
                self._main[key] = node
        return None

    def _remember(self, block: Block) -> None:
        self._ghosts[block.key] = block.tokens
        self._ghost_size += block.tokens
        while self._ghost_size > self._limit:
            self._ghost_size -= self._ghosts.popitem(last=False)[1]


class Clairvoyant:
    """The bound: what is used again last, or never, goes, or is not stored at all."""

    def __init__(self, limit: int, trace: Sequence[Arrival]) -> None:
        self.written = 0
        self._limit = limit
        self._size = 0
        self._kept: dict[bytes, tuple[int, int]] = {}  # next use, tokens
        self._heap: list[tuple[int, int, bytes]] = []
        self._turn = 0
        self._next = _next_uses(trace)

    def serve(self, at: float, blocks: Sequence[Block], seconds: Sequence[float]) -> int:
        following = self._next[self._turn]
        self._turn += 1
        matched = next((n for n, block in enumerate(blocks) if block.key not in self._kept), len(blocks))
        new: list[bytes] = []
        for number, (block, use) in enumerate(zip(blocks, following, strict=True)):
            if block.key not in self._kept:
                if use == _NEVER:
                    continue
                self._size += block.tokens
                new.append(block.key)
            self._kept[block.key] = (use, block.tokens)
            heapq.heappush(self._heap, (-use, -number, block.key))
        while self._size > self._limit:
            use, _number, key = heapq.heappop(self._heap)
            if key in self._kept and self._kept[key][0] == -use:
                self._size -= self._kept.pop(key)[1]
        self.written += sum(self._kept[key][1] for key in new if key in self._kept)  # what had no room was not stored
        return matched


def _next_uses(trace: Sequence[Arrival]) -> list[list[int]]:
    """For each block of each request: the number of the next request that has it."""
    last: dict[bytes, int] = {}
    found: list[list[int]] = []
    for turn in range(len(trace) - 1, -1, -1):
        blocks = trace[turn].blocks
        found.append([last.get(block.key, _NEVER) for block in blocks])
        last.update((block.key, turn) for block in blocks)
    return found[::-1]


def _unit(trace: Sequence[Arrival]) -> float:
    return max(block.tokens for arrival in trace for block in arrival.blocks) / BLOCK_TOKENS


OURS = "worth"
BOUND = "clairvoyant"

EVICTORS: Mapping[str, Callable[[int, Sequence[Arrival]], Evictor]] = {
    OURS: lambda limit, trace: StoreTier(limit, Worth(), Evicted(), _unit(trace)),
    "lru": lambda limit, trace: StoreTier(limit, LeastRecentlyUsed(), None, _unit(trace)),
    "fifo": lambda limit, _trace: Ranked(limit, lambda node: (node.turn, 0)),
    "lfu": lambda limit, _trace: Ranked(limit, lambda node: (node.uses, node.turn)),
    "s3-fifo": lambda limit, _trace: S3Fifo(limit),
    BOUND: Clairvoyant,
}
"""By name: makes one of a size in tokens, for a trace."""

SIMPLE = ("lru", "fifo", "lfu", "s3-fifo")
