"""A deterministic backend for tests of HTTP: it stands in for the engine, and tells what was asked of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec

from homeprefixd.errors import HomeprefixdError, NotFoundError
from homeprefixd.frames import (
    Accepted,
    CallPiece,
    Conversion,
    Converted,
    Delta,
    Finished,
    Generate,
    ModelInfo,
    Prefixes,
    PrefixInfo,
    Progress,
    Purge,
    Purged,
    Timings,
    Verified,
)
from homeprefixd.models.backend import Event

TIMINGS = Timings(
    cache_n=64,
    prompt_n=36,
    prompt_ms=18.0,
    restore_ms=1.5,
    queue_ms=0.5,
    predicted_n=3,
    predicted_ms=60.0,
    cache_tiers={"hot": 64},
    total_prompt_n=100,
)

MODEL = ModelInfo(
    alias="demo",
    path="/models/demo.gguf",
    arch="llama",
    description="a model",
    n_params=135_000_000,
    size=98_000_000,
    n_vocab=1000,
    n_embd=576,
    n_ctx_train=8192,
    n_ctx=2048,
    n_pool=4096,
    kv_bytes_per_token=23040.0,
    parallel=4,
    threads=2,
    has_template=True,
    cache_mode="blocks",
    cache_reason="",
    namespace={},
)

Step = Event | HomeprefixdError | Exception | Callable[[], Awaitable[None]]
"""What a generation does next: give an event, raise, or wait."""


class ScriptedGeneration:
    """Follows a script; knows how it was used, and insists on being entered."""

    def __init__(self, request: Generate, script: list[Step]) -> None:
        self.request = request
        self.script = script
        self.entered = False
        self.finished = False
        self.left = asyncio.Event()

    async def __aenter__(self) -> ScriptedGeneration:
        self.entered = True
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.left.set()

    async def __aiter__(self) -> AsyncIterator[Event]:
        assert self.entered
        assert not self.left.is_set()
        for step in self.script:
            if isinstance(step, Exception):
                raise step
            if callable(step):
                await step()
                continue
            if isinstance(step, Delta) and not self.request.stream:
                continue
            self.finished = isinstance(step, Finished)
            if isinstance(step, Finished) and not self.request.stream:
                deltas = [part for part in self.script if isinstance(part, Delta)]
                calls: dict[int, CallPiece] = {}
                for piece in (piece for part in deltas for piece in part.calls):
                    first = calls.setdefault(piece.index, CallPiece(piece.index, "", piece.id, piece.name))
                    first.arguments += piece.arguments
                step = msgspec.structs.replace(
                    step,
                    text="".join(part.text for part in deltas),
                    reasoning="".join(part.reasoning for part in deltas),
                    calls=list(calls.values()),
                )
            yield step


class ScriptedBackend:
    """Implements `Backend`. `script` is what each generation does; `generations` what was started."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"state": "ok", "progress": 1.0, "reason": "", "model": "demo", "workers": []}
        self.loaded = [MODEL]
        self.generations: list[ScriptedGeneration] = []
        self.refusal: HomeprefixdError | None = None
        self.conversions: list[Conversion] = []
        self.converted: Converted | HomeprefixdError = Converted("")
        self.script: list[Step] = [
            Accepted("", 100),
            Progress("", 64, 100, 100),
            Delta("", "Hel", 1),
            Delta("", 'lo "wörld"\n', 2),
            Delta("", "!", 3),
            Finished("", "stop", "", None, TIMINGS),
        ]

    def models(self) -> list[ModelInfo]:
        return self.loaded

    def created(self, alias: str) -> int:
        return 1_700_000_000

    def resolve(self, name: str | None) -> str:
        if name not in (None, "", "demo"):
            raise NotFoundError(f"There is no model {name!r}; there is demo.", param="model", code="model_not_found")
        return "demo"

    def generate(self, alias: str, request: Generate) -> ScriptedGeneration:
        assert alias == "demo"
        if self.refusal is not None:
            raise self.refusal
        self.generations.append(ScriptedGeneration(request, self.script))
        return self.generations[-1]

    async def convert(self, alias: str, conversion: Conversion) -> Converted:
        assert alias == "demo"
        self.conversions.append(conversion)
        if isinstance(self.converted, HomeprefixdError):
            raise self.converted
        return self.converted

    def status(self) -> dict[str, Any]:
        return self.state

    @property
    def asked(self) -> Generate:
        """The last request."""
        return self.generations[-1].request


class MemoryAdmin:
    """Implements `CacheAdmin` over nothing."""

    def __init__(self) -> None:
        self.purged: list[Purge] = []
        self.verified: tuple[bool, float] | None = None
        self.refusal: HomeprefixdError | None = None
        self.listed: tuple[int, str] | None = None
        self.figures: dict[str, Any] = {"nodes": 3, "warm": {"bytes": 1000}}

    async def stats(self) -> dict[str, Any]:
        if self.refusal is not None:
            raise self.refusal
        return self.figures

    async def prefixes(self, limit: int, model: str) -> Prefixes:
        self.listed = (limit, model)
        info = PrefixInfo("00ff", "demo", 128, 64, 2000, 1000, ["hot", "warm"], 1.0, 2.0, 5, "You are")
        return Prefixes(0, [info], 3)

    async def purge(self, request: Purge) -> Purged:
        if self.refusal is not None:
            raise self.refusal
        self.purged.append(request)
        return Purged(0, 3, 1000)

    async def verify(self, repair: bool, rate: float) -> Verified:
        if self.refusal is not None:
            raise self.refusal
        self.verified = (repair, rate)
        return Verified(0, 3, 1000, 1, int(repair), ["00ff: piece 0 has a wrong checksum"], 0.5, True)
