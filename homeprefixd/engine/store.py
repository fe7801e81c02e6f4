"""What the engine needs of the store: a protocol that `prefix.client.StoreClient` fulfils.

All of it is safe from any thread and never raises: a store that is away knows nothing and takes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..frames.store import NewNode, PlanNode, Recalled, Remember, Traced


class OpenedNamespace(Protocol):
    @property
    def key(self) -> bytes: ...

    @property
    def mismatch(self) -> Sequence[str]:
        """What differs from stored namespaces of the same model file, each as a sentence."""
        ...


class Slot(Protocol):
    """Room in the arena for one block, or for a run."""

    @property
    def offset(self) -> int: ...

    @property
    def view(self) -> memoryview:
        """Writable, at least as long as was asked for."""
        ...


class Run(Protocol):
    """Blocks that lie in the arena as one state (`prefix/runs.py`); and which of them is meant."""

    @property
    def offset(self) -> int:
        """Names the run."""
        ...

    @property
    def part(self) -> int: ...

    @property
    def parts(self) -> int: ...

    @property
    def view(self) -> memoryview:
        """The whole run."""
        ...


class Lookup(Protocol):
    """A running match. Its blocks stay in memory until `release`."""

    @property
    def known(self) -> int:
        """Leading tokens that are known, whether they can be resumed or not; 0 while there is no plan."""
        ...

    @property
    def warm_rate(self) -> float:
        """Bytes a second that come from disk, once the plan is there; 0: not known."""
        ...

    def wait_plan(self, timeout: float) -> tuple[PlanNode, ...] | None:
        """The plan, () if nothing is known; None if it is not there after `timeout` seconds."""
        ...

    def wait_block(self, index: int, timeout: float) -> memoryview | None:
        """State of a node of the plan, None if it is not ready after `timeout` seconds."""
        ...

    def run(self, index: int) -> Run | None:
        """The run that a node of the plan is a part of, None if it is not there or lies alone."""
        ...

    def state(self, index: int) -> str:
        """`ready`, `lost`, or else it may still come."""
        ...

    def taken(self, count: int) -> None:
        """The first `count` nodes were imported: they are not looked at again. Others may only come then."""
        ...

    def release(self) -> None: ...


class Store(Protocol):
    @property
    def connected(self) -> bool: ...

    @property
    def room(self) -> int:
        """Bytes that blocks in RAM can take."""
        ...

    def open_namespace(self, description: dict[str, Any], timeout: float) -> OpenedNamespace | None: ...

    def lookup(
        self,
        namespace: bytes,
        tokens_le: bytes,
        limit: int,
        exact: bool,
        on_update: Callable[[], None] | None = None,
        *,
        request: str = "",
    ) -> Lookup:
        """Begin a match; returns at once. `on_update` is called, from another thread, when plan or blocks come.

        `request`: id by which the prompt can be named later.
        """
        ...

    def reserve(
        self, sizes: Sequence[int], timeout: float = 0.25, *, runs: bool = False, after: bytes = b""
    ) -> Sequence[Slot]:
        """Slots in the order of `sizes` (bytes); fewer where there is no room or no time.

        `runs`: of several blocks each, which may be had one by one where this finds no room. `after`: key of the node
        that they continue, which must not make way for them.
        """
        ...

    def commit(self, namespace: bytes, nodes: list[NewNode], owner: str = "") -> None:
        """Publish blocks. `owner`: name of the API key that they were computed for."""
        ...

    def abandon(self, slots: Sequence[Slot]) -> None: ...

    def refuse(self, namespace: bytes, key: bytes, reason: str) -> None:
        """The state of node `key` cannot be imported, for a reason of its own: it is not to be found again."""
        ...

    def neighbour(self, namespace: bytes, tokens_le: bytes, beyond: int, timeout: float) -> bytes:
        """Tokens (u32 LE) of the stored prompt that begins as `tokens_le`, to `beyond` tokens behind the first that
        differs; b"" if there is none, or no answer within `timeout` seconds."""
        ...

    def trace(self, namespace: bytes, tokens_le: bytes, timeout: float) -> Traced | None:
        """What keeps `tokens_le` (u32 LE) from being found; None without an answer within `timeout` seconds."""
        ...

    def recall(self, namespace: bytes, text: bytes, timeout: float) -> Recalled | None:
        """What is remembered of the longest prompt that `text` begins with; None if that is nothing, or not known."""
        ...

    def remember(self, frame: Remember) -> None:
        """What was generated after a prompt."""
        ...

    def file_hash(self, device: int, inode: int, size: int, mtime_ns: int, timeout: float) -> str | None: ...

    def remember_file_hash(self, device: int, inode: int, size: int, mtime_ns: int, sha256: str) -> None: ...
