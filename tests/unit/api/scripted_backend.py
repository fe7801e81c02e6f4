"""A deterministic backend for tests of HTTP: it stands in for the engine, and tells what was asked of it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec

from homeprefixd.channel import encode
from homeprefixd.errors import HomeprefixdError, NotFoundError
from homeprefixd.frames.store import (
    Compacted,
    Export,
    Pin,
    PinInfo,
    Pinned,
    Plan,
    PlanNode,
    Prefixes,
    PrefixInfo,
    Purge,
    Purged,
    Transferred,
    Unpin,
    Verified,
)
from homeprefixd.frames.worker import (
    Accepted,
    Account,
    CallPiece,
    Conversion,
    Converted,
    Delta,
    Finished,
    Generate,
    ModelInfo,
    Progress,
    Timings,
)
from homeprefixd.models.backend import Event, KnownModel
from homeprefixd.models.file_facts import FileFacts

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

FACTS = FileFacts(
    arch="llama",
    description="Q4_K_M",
    n_params=135_000_000,
    n_vocab=1000,
    n_embd=576,
    n_ctx=8192,
    ctx_is_set=False,
    template="{{ messages }}",
    only_embeds=False,
)

Step = Event | Account | HomeprefixdError | Exception | Callable[[], Awaitable[None]]
"""What a generation does next: give an event, raise, or wait."""


class ScriptedGeneration:
    """Follows a script; knows how it was used, and insists on being entered."""

    def __init__(self, request: Generate, script: list[Step], whole: bool) -> None:
        self.request = request
        self.whole = whole
        self.script = script
        self.entered = False
        self.finished = False
        self.left = asyncio.Event()
        self.account: Account | None = None

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
            if isinstance(step, Account):
                self.account = step
                continue
            self.finished = isinstance(step, Finished)
            if isinstance(step, Finished) and not self.request.stream and not self.whole:
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
    """Implements `Backend`. `script` is what each generation does; `generations` what was started. With `whole` the
    last event has the whole reply itself; else, where none is streamed, it is made of the `Delta`s' text.
    """

    def __init__(self) -> None:
        self.whole = False
        self.state: dict[str, Any] = {"state": "ok", "progress": 1.0, "reason": "", "model": "demo", "workers": []}
        self.loaded = [MODEL]
        self.aliases = ["demo"]
        self.paths: dict[str, str] = {}
        self.expires: float | None = None
        self.loads: list[tuple[str, float | None]] = []
        self.unloads: list[str] = []
        self.unloads_at_once = True
        self.generations: list[ScriptedGeneration] = []
        self.refusal: HomeprefixdError | None = None
        self.conversions: list[Conversion] = []
        self.converted: Converted | HomeprefixdError = Converted("")
        self.facts: FileFacts | HomeprefixdError = FACTS
        self.usable = True  # whether a model was asked for that can be used
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

    def known(self) -> list[KnownModel]:
        infos = {info.alias: info for info in self.loaded}
        return [
            KnownModel(
                alias=alias,
                path=self.paths.get(alias, f"/models/{alias}.gguf"),
                created=1_700_000_000,
                size=98_000_000,
                state="ok"
                if alias in infos
                else self.state["state"]
                if self.state["state"] in ("loading", "error")
                else "unloaded",
                progress=1.0 if alias in infos else 0.0,
                reason="",
                pinned=False,
                memory=200_000_000,
                requests=0,
                expires=self.expires,
                info=infos.get(alias),
            )
            for alias in self.aliases
        ]

    async def load(self, alias: str, keep_alive: float | None = None) -> None:
        if alias not in self.aliases:
            raise NotFoundError(f"There is no model {alias!r}.", param="model", code="model_not_found")
        self.loads.append((alias, keep_alive))

    async def unload(self, alias: str) -> bool:
        if alias not in self.aliases:
            raise NotFoundError(f"There is no model {alias!r}.", param="model", code="model_not_found")
        self.unloads.append(alias)
        return self.unloads_at_once

    def created(self, alias: str) -> int:
        return 1_700_000_000

    def resolve(self, name: str | None, *, usable: bool = True) -> str:
        self.usable = usable
        if name not in (None, "", "demo"):
            raise NotFoundError(f"There is no model {name!r}; there is demo.", param="model", code="model_not_found")
        return "demo"

    async def file_facts(self, alias: str) -> FileFacts:
        if isinstance(self.facts, HomeprefixdError):
            raise self.facts
        return self.facts

    def generate(self, alias: str, request: Generate) -> ScriptedGeneration:
        assert alias == "demo"
        if self.refusal is not None:
            raise self.refusal
        self.generations.append(ScriptedGeneration(request, self.script, self.whole))
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
        self.matched: list[tuple[Any, ...]] = []
        self.exported = b""
        self.request = ""  # that asked for the prefix
        self.imported = b""
        self.pinned: list[tuple[Pin | Unpin, Any, Any]] = []
        self.plan = Plan(
            0,
            [
                PlanNode(b"a" * 32, 0, 64, 64, "hot", 1000, True, -1),
                PlanNode(b"b" * 32, 64, 64, 20, "warm", 2000, True, -1),
            ],
            warm_rate=1e6,
        )

    async def stats(self) -> dict[str, Any]:
        if self.refusal is not None:
            raise self.refusal
        return self.figures

    async def prefixes(self, limit: int, model: str) -> Prefixes:
        self.listed = (limit, model)
        sizes = 128, 64, 2000, 1000
        info = PrefixInfo("00ff", "demo", *sizes, ["hot", "warm"], 1.0, 2.0, 5, "You are", request=self.request)
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

    async def match(self, description: Any, tokens: Any, limit: int, exact: bool) -> Plan:
        if self.refusal is not None:
            raise self.refusal
        self.matched.append((description, list(tokens), limit, exact))
        return self.plan

    async def pin(self, request: Pin, description: Any, tokens: Any) -> Pinned:
        return self._pin(request, description, tokens)

    async def unpin(self, request: Unpin, description: Any, tokens: Any) -> Pinned:
        return self._pin(request, description, tokens)

    def _pin(self, request: Pin | Unpin, description: Any, tokens: Any) -> Pinned:
        if self.refusal is not None:
            raise self.refusal
        encode(request)
        self.pinned.append((request, description, list(tokens)))
        return Pinned(0, [PinInfo("00ff", "demo", request.label, 80, 1.0, 0.0, "You are", ["warm"])])

    async def compact(self) -> Compacted:
        return Compacted(0, 2000, 1000)

    async def export(self, request: Export, description: Any, tokens: Any, descriptor: int) -> Transferred:
        """Writes `exported`, then fails if there is a refusal."""
        with os.fdopen(descriptor, "wb") as file:
            await asyncio.get_running_loop().run_in_executor(None, file.write, self.exported)
            await asyncio.get_running_loop().run_in_executor(None, file.flush)
        if self.refusal is not None:
            raise self.refusal
        return Transferred(0, 3, 100, 1000)

    async def import_(self, descriptor: int) -> Transferred:
        if self.refusal is not None:
            os.close(descriptor)
            raise self.refusal
        with os.fdopen(descriptor, "rb") as file:
            self.imported = await asyncio.get_running_loop().run_in_executor(None, file.read)
        return Transferred(0, 3, 100, len(self.imported), 1, kept=64, not_kept="the disk is full")
