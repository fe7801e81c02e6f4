"""What `api/` sees of models and of the store: two small protocols.

The daemon passes in the real ones (`pool.py`, `store_link.py`); API tests pass in deterministic ones.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from ..frames.store import Compacted, Export, Pin, Pinned, Plan, Prefixes, Purge, Purged, Transferred, Unpin, Verified
from ..frames.worker import Accepted, Conversion, Converted, Delta, Finished, Generate, ModelInfo, Progress
from .file_facts import FileFacts

Event = Accepted | Progress | Delta | Finished

ModelState = Literal["unloaded", "loading", "ok", "error"]


@dataclass(frozen=True)
class KnownModel:
    """A model that can be asked for, loaded or not."""

    alias: str
    path: str
    created: int  # Unix time of its file, s; 0 if unknown
    size: int  # of its files, bytes
    state: ModelState
    progress: float  # of loading, 0 to 1
    reason: str  # why it cannot be used, or is loaded again
    pinned: bool  # loaded at the start, never unloaded
    memory: int  # bytes that it takes while it is loaded, as measured or else guessed; 0 if not known
    requests: int  # that run on it or wait for it
    expires: float | None  # seconds until it is unloaded if nobody asks for it; None: never, or it is in use
    info: ModelInfo | None  # where it is loaded
    of: str = ""  # the model that it is with an adapter; "" for a model itself


class Generation(Protocol):
    """One running request. An async context manager: leaving it before `Finished` cancels the request."""

    async def __aenter__(self) -> Generation: ...

    async def __aexit__(self, *exc: object) -> None: ...

    def __aiter__(self) -> AsyncIterator[Event]:
        """`Accepted`, then any `Progress` and `Delta`, last `Finished`; or it raises HomeprefixdError."""
        ...


class Backend(Protocol):
    """The models of this daemon."""

    def models(self) -> list[ModelInfo]:
        """Those that are loaded now; one with adapters also under its names with each of them."""
        ...

    def known(self) -> list[KnownModel]:
        """All that can be asked for, loaded or not, the default one first; with adapters as in `models`."""
        ...

    async def load(self, alias: str, keep_alive: float | None = None) -> None:
        """Load a model that `known` or `resolve` names, and wait until it is; nothing if it is loaded already.

        `keep_alive`: seconds that it stays loaded unused, until it is unloaded, whatever its setting says; negative:
        for ever. Raises NotFoundError, ModelError (it cannot be loaded, or does not fit), UnavailableError.
        """
        ...

    async def unload(self, alias: str) -> bool:
        """Unload it. False: requests run on it, it is unloaded when the last one ends. Raises NotFoundError."""
        ...

    def created(self, alias: str) -> int:
        """Unix time of the model's file, in seconds; 0 if unknown."""
        ...

    def resolve(self, name: str | None, *, usable: bool = True) -> str:
        """The alias that a request's `model` means; None or "" is the default model.

        Raises NotFoundError for an unknown one (it lists what there is), UnavailableError after it failed to load,
        with the reason, unless it need not be `usable`. One that is not loaded is loaded by the request.
        """
        ...

    async def file_facts(self, alias: str) -> FileFacts:
        """What a model that `resolve` returned is by its file, loaded or not; loads nothing. Raises ModelError."""
        ...

    def generate(self, alias: str, request: Generate) -> Generation:
        """Start a request on a model that `resolve` returned. Raises UnavailableError, BusyError."""
        ...

    async def convert(self, alias: str, conversion: Conversion) -> Converted:
        """Ask a model that `resolve` returned. Raises RequestError, UnavailableError, WorkerDiedError."""
        ...

    def status(self) -> dict[str, Any]:
        """For `/health` and `/cache/stats`: state (`ok`, `loading`, `error`, `no model`), progress, reason, workers."""
        ...


class CacheAdmin(Protocol):
    """The store as the admin routes see it. All raise UnavailableError while the store is away."""

    async def stats(self) -> dict[str, Any]: ...

    async def prefixes(self, limit: int, model: str) -> Prefixes: ...

    async def purge(self, request: Purge) -> Purged:
        """`request.ticket` is ignored. Raises NotFoundError for an unknown prefix."""
        ...

    async def verify(self, repair: bool, rate: float) -> Verified:
        """Read and check all that is stored, at most `rate` bytes a second (0: no bound), one at a time."""
        ...

    async def match(self, description: Mapping[str, Any], tokens: Sequence[int], limit: int, exact: bool) -> Plan:
        """How far is a prompt known in the namespace of this description? A dry run: nothing is loaded or touched."""
        ...

    async def pin(self, request: Pin, description: Mapping[str, Any] | None, tokens: Sequence[int]) -> Pinned:
        """Keep a prefix on disk; without a name, list what is pinned. `request.ticket` is ignored.

        `tokens`: the prompt, in the namespace of `description`, where it is named so. Raises NotFoundError.
        """
        ...

    async def unpin(self, request: Unpin, description: Mapping[str, Any] | None, tokens: Sequence[int]) -> Pinned:
        """Keep it no longer; named as in `pin`. Raises NotFoundError."""
        ...

    async def export(
        self, request: Export, description: Mapping[str, Any] | None, tokens: Sequence[int], descriptor: int
    ) -> Transferred:
        """Write a prefix, named as in `pin`, into a pipe whose end is `descriptor`; it is closed here."""
        ...

    async def compact(self) -> Compacted:
        """Give the disk back what the store's file does not need."""
        ...

    async def import_(self, descriptor: int) -> Transferred:
        """Read a prefix from a pipe whose end is `descriptor`; it is closed here."""
        ...
