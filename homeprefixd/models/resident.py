"""One model of the catalog while the daemon runs: its worker while it is loaded, and who uses it.

Decides nothing: when it is loaded and unloaded is the pool's business.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

import msgspec

from ..errors import HomeprefixdError, UnavailableError
from ..frames.worker import Account, Generate, LoraChoice, ModelInfo
from ..lora import choose, described
from ..prefix.blocks import ADAPTER_NAMES
from .backend import Event, KnownModel, ModelState
from .catalog import ModelSpec
from .loading import WORKER_BYTES
from .request import Request
from .worker_link import WorkerLink


@dataclass(eq=False)
class Ticket:
    """Somebody who waits for a model. `granted`: it is loaded, and held for them."""

    granted: bool = False


class Resident:
    """Everything runs on the event loop. Times are the loop's, in seconds."""

    def __init__(self, spec: ModelSpec, keep_alive: Callable[[ModelSpec], float | None]) -> None:
        """`keep_alive`: seconds that a model stays loaded unused; None: for ever."""
        self.spec = spec
        self.link: WorkerLink | None = None
        self.loading: asyncio.Task[None] | None = None
        self.first_start = False  # it is loaded because the daemon starts: requests do not wait long for it
        self.closing = False  # it is or will be unloaded: new requests wait for their turn
        self.memory = 0  # bytes that it takes of RAM; 0: not known
        self.on_devices: Mapping[str, int] = {}  # bytes that it takes of devices' own memory; {} also if not known
        self.failure: HomeprefixdError | None = None  # of the last attempt to load it
        self.failed = 0.0  # when that was
        self.used = 0.0  # when it was asked for or a request ended last
        self.requests = 0  # that run or wait
        self.waiters: list[Ticket] = []
        self.holds = 0  # requests and questions that its worker has: it may not be unloaded meanwhile
        self.override: float | None = None  # of `keep_alive`, until it is unloaded; negative: for ever
        self.unload_when_idle = False
        self._keep_alive = keep_alive
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def alias(self) -> str:
        return self.spec.alias

    def renew(self, spec: ModelSpec) -> None:
        """Another file has its name now. It is not loaded; who waits for it, or is about to, gets that one."""
        self.spec = spec
        self.memory = 0
        self.on_devices = {}
        self.failure = None

    def hold(self) -> None:
        """Somebody uses its worker."""
        self.holds += 1
        self.used = asyncio.get_running_loop().time()
        self._idle.clear()

    def release(self) -> None:
        """The end of a `hold`."""
        self.holds -= 1
        self.used = asyncio.get_running_loop().time()
        if not self.holds:
            self._idle.set()

    def grant(self) -> None:
        """It is loaded: hold it for all who wait, so that it is not unloaded before they are served."""
        for ticket in self.waiters:
            if not ticket.granted:
                ticket.granted = True
                self.hold()

    async def idle(self) -> None:
        """Returns when nobody uses it."""
        await self._idle.wait()

    @property
    def starting(self) -> bool:
        """Has its worker been started, and not yet loaded it?"""
        return self.link is not None and not self.link.first.done()

    @property
    def in_use(self) -> bool:
        return bool(self.holds or self.waiters)

    @property
    def expires(self) -> float | None:
        """The time at which it is to be unloaded if nobody asks for it; None: never, or it is in use or not loaded."""
        if self.in_use or self.link is None or self.loading is not None:
            return None
        if self.unload_when_idle:
            return self.used
        if self.spec.pinned:
            return None
        seconds = self.override if self.override is not None else self._keep_alive(self.spec)
        return None if seconds is None or seconds < 0 else self.used + seconds

    @property
    def state(self) -> ModelState:
        if self.link is not None:
            return self.link.state
        if self.loading is not None:
            return "loading"
        return "error" if self.failure is not None or self.spec.problem else "unloaded"

    @property
    def progress(self) -> float:
        """Of loading, 0 to 1."""
        return self.link.progress if self.link is not None else 0.0

    @property
    def reason(self) -> str:
        """Why it cannot be used, or is loaded again; else ""."""
        if self.link is not None:
            return self.link.reason
        return self.failure.message if self.failure is not None else self.spec.problem

    def measure(self) -> None:
        """`memory` and `on_devices` by what its worker has told."""
        info = self.link.info if self.link is not None else None
        if info is not None:
            adapters = sum(adapter.size for adapter in info.adapters if not adapter.problem)
            self.on_devices = info.on_devices
            elsewhere = (
                info.size + adapters + int(info.n_pool * info.kv_bytes_per_token) - sum(info.on_devices.values())
            )
            self.memory = max(0, elsewhere) + WORKER_BYTES

    def check(self, retry_after: float) -> None:
        """Raises UnavailableError if it could not be loaded less than `retry_after` seconds ago."""
        if self.link is not None:
            if not self.closing:
                self.link.check_open()
            return
        if self.failure is None or self.loading is not None:
            return
        left = self.failed + retry_after - asyncio.get_running_loop().time()
        if left > 0:
            raise UnavailableError(
                f"the model {self.alias} cannot be used now: {self.failure.message}",
                code=self.failure.code or "model_failed",
                retry_after=max(1, int(left)),
            )

    def describe(self) -> KnownModel:
        """For `/v1/models` and `model ls`."""
        expires = self.expires
        return KnownModel(
            alias=self.alias,
            path=str(self.spec.path),
            created=self.spec.created,
            size=self.spec.size,
            state=self.state,
            progress=round(self.progress, 3),
            reason=self.reason,
            pinned=self.spec.pinned,
            memory=self.memory,
            requests=self.requests,
            expires=None if expires is None else max(0.0, expires - asyncio.get_running_loop().time()),
            info=self.link.info if self.link is not None else None,
        )

    def adapted(self) -> list[KnownModel]:
        """The same with each of its adapters, by the names that it has then."""
        base = self.describe()
        found = []
        for name, adapter in self.spec.adapted.items():
            info = base.info and _adapted_info(base.info, name, adapter)
            problem = next((one.problem for one in info.adapters if one.id == adapter), "") if info else ""
            found.append(
                replace(
                    base,
                    alias=name,
                    of=base.alias,
                    info=info,
                    reason=problem or base.reason,
                    state="error" if problem else base.state,
                )
            )
        return found


def _adapted_info(info: ModelInfo, name: str, adapter: str) -> ModelInfo:
    chosen = choose(info.adapters, [LoraChoice(adapter)], damaged=True)
    found = described(info.adapters, chosen) if info.namespace else None
    kept = {key: value for key, value in info.namespace.items() if key != ADAPTER_NAMES}
    return msgspec.structs.replace(info, alias=name, namespace={**kept, **found} if found is not None else {})


class Visit:
    """A request to a model that may have to be loaded first: implements `backend.Generation`."""

    def __init__(
        self,
        resident: Resident,
        generate: Generate,
        ready: Callable[[Resident], Awaitable[WorkerLink]],
        release: Callable[[Resident], None],
    ) -> None:
        """`ready`: gives the worker once it is there, held until `release`."""
        self._resident = resident
        self._generate = generate
        self._ready = ready
        self._release = release
        self._request: Request | None = None

    @property
    def account(self) -> Account | None:
        """What the worker told of the prompt."""
        return self._request.account if self._request is not None else None

    @property
    def waited(self) -> float:
        """Seconds until the worker had it: the model was loaded first."""
        return self._request.waited if self._request is not None else 0.0

    async def __aenter__(self) -> Visit:
        """Wait for the model, then hand the request to its worker. Raises UnavailableError, ModelError, BusyError."""
        resident = self._resident
        resident.requests += 1
        began = time.monotonic()
        try:
            link = await self._ready(resident)
            try:
                request = link.request(self._generate)
                await request.__aenter__()
                request.waited = time.monotonic() - began
                self._request = request
            except BaseException:
                self._release(resident)
                raise
        except BaseException:
            resident.requests -= 1
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        request, self._request = self._request, None
        if request is not None:
            try:
                await request.__aexit__(*exc)
            finally:
                self._resident.requests -= 1
                self._release(self._resident)

    def __aiter__(self) -> AsyncIterator[Event]:
        if self._request is None:
            raise RuntimeError("a request is read before it was entered")
        return self._request
