"""A store in this process: dictionaries, exact and partial matches, counts of what it was asked.

Fulfils `homeprefixd.engine.store.Store`. Its faults are set by attributes, so that tests can break it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from homeprefixd.frames.store import NewNode, PlanNode, Recalled, Remember, Traced
from homeprefixd.prefix.blocks import block_key, common_tokens, namespace_of
from homeprefixd.prefix.replies import Replies
from homeprefixd.prefix.runs import layout_of


@dataclass
class Opened:
    key: bytes
    mismatch: list[str] = field(default_factory=list)


@dataclass
class MemorySlot:
    offset: int
    size: int
    view: memoryview


@dataclass
class MemoryRun:
    offset: int
    part: int
    parts: int
    view: memoryview


class MemoryLookup:
    def __init__(self, store: MemoryStore, plan: tuple[PlanNode, ...]) -> None:
        self._store, self._plan = store, plan
        self.warm_rate = 0.0
        self.known = sum(node.use for node in plan)
        self.released = False
        store.leases += 1

    def wait_plan(self, timeout: float) -> tuple[PlanNode, ...] | None:
        return None if self._store.silent else self._plan

    def wait_block(self, index: int, timeout: float) -> memoryview | None:
        assert not self.released
        if self.state(index) != "ready":
            return None
        return self._store.change(index, self._store.payloads[self._plan[index].key])

    def run(self, index: int) -> MemoryRun | None:
        if self.state(index) != "ready" or self._store.change is not _as_it_is:
            return None
        return self._store.runs.get(self._plan[index].key)

    def state(self, index: int) -> Literal["pending", "ready", "lost"]:
        if self._store.lost_from is not None and index >= self._store.lost_from:
            return "lost"
        return "pending" if index >= self._store.ready_up_to else "ready"

    def taken(self, count: int) -> None:
        """All of it stays in memory."""

    def release(self) -> None:
        if not self.released:
            self.released = True
            self._store.leases -= 1


def _as_it_is(index: int, view: memoryview) -> memoryview:
    return view


class MemoryStore:
    def __init__(self) -> None:
        self.connected = True
        self.room = 1 << 30
        self.silent = False  # no plan ever comes
        self.full = False  # no slot is given
        self.scattered = False  # none for a run
        self.lost_from: int | None = None
        self.ready_up_to = 10**9
        self.change: Callable[[int, memoryview], memoryview] = _as_it_is  # of single blocks: no runs are told of then
        self.nodes: dict[bytes, NewNode] = {}
        self.children: dict[bytes, list[bytes]] = {}
        self.payloads: dict[bytes, memoryview] = {}
        self.runs: dict[bytes, MemoryRun] = {}  # where nodes lie that were saved as one state
        self.hashes: dict[tuple[int, int, int, int], str] = {}
        self.namespaces: dict[bytes, dict[str, Any]] = {}
        self.replies = Replies()
        self.owners: dict[bytes, str] = {}  # by node's key
        self.leases = 0
        self.lookups = 0
        self.orphans = 0
        self.refused: list[tuple[bytes, str]] = []  # keys, and why
        self.abandoned = 0
        self._slots: dict[int, MemorySlot] = {}
        self._next = 0
        self._lock = threading.Lock()

    def open_namespace(self, description: dict[str, Any], timeout: float) -> Opened | None:
        key = namespace_of(description)
        self.namespaces[key] = description
        return Opened(key) if self.connected else None

    def lookup(
        self,
        namespace: bytes,
        tokens_le: bytes,
        limit: int,
        exact: bool,
        on_update: Callable[[], None] | None = None,
        *,
        request: str = "",
    ) -> MemoryLookup:
        with self._lock:
            self.lookups += 1
            plan: list[PlanNode] = []
            parent, at = namespace, 0
            while at < limit:
                wanted = tokens_le[at * 4 : limit * 4]
                best, use = b"", 0
                for key in self.children.get(parent, []):
                    common = common_tokens(self.nodes[key].tokens, wanted)
                    node = self.nodes[key]
                    if exact and not (node.grid and common == 64 == len(node.tokens) // 4):
                        continue
                    if common > use:
                        best, use = key, common
                if not use:
                    break
                node = self.nodes[best]
                count = len(node.tokens) // 4
                plan.append(PlanNode(best, at, count, use, "hot", node.size, node.grid, node.offset))
                parent, at = best, at + use
                if use < 64:
                    break
            return MemoryLookup(self, tuple(plan))

    def reserve(
        self, sizes: Sequence[int], timeout: float = 0.25, *, runs: bool = False, after: bytes = b""
    ) -> list[MemorySlot]:
        if self.full or not self.connected or (runs and self.scattered):
            return []
        with self._lock:
            slots = []
            for size in sizes:
                slot = MemorySlot(self._next, size, memoryview(bytearray(size)))
                self._slots[self._next] = slot
                self._next += size
                slots.append(slot)
            return slots

    def commit(self, namespace: bytes, nodes: list[NewNode], owner: str = "") -> None:
        with self._lock:
            slots = {offset: self._slots.pop(offset) for offset in {node.offset for node in nodes}}
            for node in nodes:
                key = block_key(node.parent, node.tokens)
                slot = slots[node.offset]
                if node.parent != namespace and node.parent not in self.nodes:
                    self.orphans += 1
                    continue
                if key not in self.nodes:
                    self.children.setdefault(node.parent, []).append(key)
                elif not node.grid or self.nodes[key].grid:
                    continue
                self.nodes[key] = node
                self.owners[key] = owner
                self.runs.pop(key, None)
                if node.parts == 1:
                    self.payloads[key] = slot.view[: node.size].toreadonly()
                    continue
                layout = layout_of(slot.view, 64, node.parts)
                assert layout is not None
                self.payloads[key] = memoryview(bytearray(node.size))
                layout.take(slot.view, node.part, 1, node.parts, self.payloads[key])
                self.runs[key] = MemoryRun(node.offset, node.part, node.parts, slot.view.toreadonly())

    def abandon(self, slots: Sequence[Any]) -> None:
        self.abandoned += len(slots)

    def refuse(self, namespace: bytes, key: bytes, reason: str) -> None:
        with self._lock:
            self.refused.append((key, reason))
            going = [key]
            while going:
                at = going.pop()
                node = self.nodes.pop(at, None)
                if node is not None:
                    self.children.get(node.parent, [at]).remove(at)
                self.payloads.pop(at, None)
                self.runs.pop(at, None)
                going += self.children.pop(at, [])

    def trace(self, namespace: bytes, tokens_le: bytes, timeout: float) -> Traced | None:
        return None

    def recall(self, namespace: bytes, text: bytes, timeout: float) -> Recalled | None:
        row = self.replies.recall(namespace, text)
        return Recalled(0, row.length, row.stretches, row.replies) if row is not None else None

    def remember(self, frame: Remember) -> None:
        self.replies.remember(frame.namespace, frame.digest, frame.length, frame.tail, frame.stretches, frame.reply)

    def file_hash(self, device: int, inode: int, size: int, mtime_ns: int, timeout: float) -> str | None:
        return self.hashes.get((device, inode, size, mtime_ns))

    def remember_file_hash(self, device: int, inode: int, size: int, mtime_ns: int, sha256: str) -> None:
        self.hashes[(device, inode, size, mtime_ns)] = sha256

    def neighbour(self, namespace: bytes, tokens_le: bytes, beyond: int, timeout: float) -> bytes:
        with self._lock:
            path, parent, at = b"", namespace, 0
            while children := self.children.get(parent):
                wanted = tokens_le[at * 4 :]
                parent = max(children, key=lambda key: common_tokens(self.nodes[key].tokens, wanted))
                if not path and not common_tokens(self.nodes[parent].tokens, wanted):
                    return b""
                path += self.nodes[parent].tokens
                at = len(path) // 4
            return path

    def attach(self, sock: Any) -> None:
        self.connected = True

    def forget(self) -> None:
        """Everything, as after a purge."""
        with self._lock:
            self.nodes.clear()
            self.children.clear()
            self.payloads.clear()
            self.runs.clear()
