"""What `api/` sees of models and of the store: two small protocols.

The daemon passes in the real ones (`pool.py`, `store_link.py`); API tests pass in deterministic ones.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

from ..frames import (
    Accepted,
    Conversion,
    Converted,
    Delta,
    Finished,
    Generate,
    ModelInfo,
    Prefixes,
    Progress,
    Purge,
    Purged,
    Verified,
)

Event = Accepted | Progress | Delta | Finished


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
        """Those that are loaded now."""
        ...

    def created(self, alias: str) -> int:
        """Unix time of the model's file, in seconds; 0 if unknown."""
        ...

    def resolve(self, name: str | None) -> str:
        """The alias that a request's `model` means; None or "" is the default model.

        Raises NotFoundError for an unknown one (it lists what there is), UnavailableError while it loads or
        after it failed, with the reason.
        """
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
