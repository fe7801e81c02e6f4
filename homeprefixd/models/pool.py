"""The models that run, each in a worker process: implements `backend.Backend`.

A model is loaded when it is first asked for, and unloaded when it was not used for a while or when another one needs
its memory: the least recently used first, never one that is pinned or in use. Its hot blocks stay with the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ..config import AT_ONCE
from ..errors import HomeprefixdError, ModelError, NotFoundError, RequestError, UnavailableError
from ..frames.worker import (
    Conversion,
    Converted,
    Embed,
    Generate,
    LoadModel,
    LoraChoice,
    ModelInfo,
    StableRules,
    TokenizeRequest,
)
from ..supervise import Backoff
from .backend import KnownModel
from .catalog import Catalog, ModelSpec
from .file_facts import FactsReader, FileFacts
from .loading import Budget, worker_environment
from .resident import Resident, Ticket, Visit
from .space import PATIENCE, Space
from .store_link import StoreLink
from .worker_link import Limits, WorkerLink, full, stopping

KEEP_ALIVE = 300.0
"""Seconds that a model which is not the only one stays loaded unused, where its settings leave that to us."""

RETRY_AFTER = 30.0
"""Seconds in which a model that could not be loaded is not tried again by a request."""

LOOK_EVERY = 5.0
"""Seconds between two looks into `models.dir`."""

STOP_GRACE = 5.0
"""Seconds that a worker gets to end when its model is unloaded."""

logger = logging.getLogger(__name__)


class Pool:
    """All workers of this daemon. Everything runs on the event loop."""

    def __init__(
        self,
        catalog: Catalog,
        load: Callable[[ModelSpec], LoadModel],
        command: Callable[[int], list[str]],
        environ: Mapping[str, str],
        store: StoreLink | None,
        *,
        budget: Budget | None = None,
        limits: Limits | None = None,
        backoff: Callable[[], Backoff] = Backoff,
        changed: Callable[[], None] = lambda: None,
        room_patience: float = PATIENCE,
    ) -> None:
        """`load` makes the first frame for a model's worker; `changed` is called when `status()` is new.

        `budget`: None lets every model be loaded.
        """
        self._catalog = catalog
        self._load_frame = load
        self._command = command
        self._environ = worker_environment(environ)
        self._store = store
        self._limits = limits or Limits()
        self._backoff = backoff
        self._changed = changed
        self._facts = FactsReader()
        self._rules: StableRules | None = None  # those that were changed since the start
        self._draining = asyncio.Event()
        self._room = asyncio.Lock()  # held by who decides what is loaded and unloaded, in the order of asking
        self._looking = asyncio.Lock()
        self._residents: dict[str, Resident] = {}
        self._space: Space | None = None
        if budget is not None:
            everyone = lambda: list(self._residents.values())  # noqa: E731
            self._space = Space(budget, self._environ, everyone, self._unload, room_patience)
        self._take_specs()
        self._eager = [resident for resident in self._residents.values() if self._is_eager(resident.spec)]
        for resident in self._eager:
            resident.first_start = True
        self._keeper: asyncio.Task[None] | None = None
        self._attention = asyncio.Event()  # set when a model may have to be unloaded earlier than was thought

    def _take_specs(self) -> None:
        """What the catalog has now. One that is loaded stays, whatever became of its file."""
        old = self._residents
        self._residents = {}
        for spec in self._catalog.specs:
            resident = old.pop(spec.alias, None) or Resident(spec, self._keep_alive)
            if resident.spec != spec and resident.link is None and resident.loading is None:
                resident.renew(spec)
            self._residents[spec.alias] = resident
        self._residents |= {r.alias: r for r in old.values() if r.link is not None or r.loading is not None}

    def _is_eager(self, spec: ModelSpec) -> bool:
        """Is it loaded at the start?"""
        return spec.alias == self._catalog.main or spec.pinned or len(self._catalog.specs) == 1

    def _keep_alive(self, spec: ModelSpec) -> float | None:
        seconds = spec.settings.keep_alive
        if seconds:
            return None if seconds < 0 else seconds
        return None if len(self._residents) == 1 else KEEP_ALIVE

    # ------------------------------------------------------------------------------------------------- life

    def start(self) -> None:
        """Load what is loaded at the start."""
        for resident in self._residents.values():
            if resident.spec.problem and not resident.first_start:
                logger.error("the model %s cannot be used: %s", resident.alias, resident.spec.problem)
        for resident in self._eager:
            self._begin_loading(resident)
        self._keeper = asyncio.create_task(self._keep(), name="models")

    async def first_loads(self) -> None:
        """Returns when each of these was tried. Raises ModelError if the only model that there is cannot be loaded."""
        await asyncio.gather(*(r.loading for r in self._eager if r.loading is not None), return_exceptions=True)
        if len(self._residents) == 1:
            for resident in self._residents.values():
                if resident.failure is not None:
                    raise resident.failure

    def drain(self) -> None:
        """No new requests from now on: they get UnavailableError."""
        self._draining.set()
        for link in self._links():
            link.drain()
        self._changed()

    async def idle(self) -> None:
        """Returns when no request runs or waits."""
        await asyncio.gather(*(link.idle() for link in self._links()))

    async def stop(self, grace: float) -> None:
        """End all workers; running requests get `grace` seconds."""
        self._draining.set()
        tasks = [task for task in (self._keeper, *(r.loading for r in self._residents.values())) if task is not None]
        if self._keeper is not None:
            self._keeper.cancel()
        await asyncio.gather(*(link.stop(grace) for link in self._links()))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(link.stop(0.0) for link in self._links()))  # what a load had begun meanwhile

    def kill(self) -> None:
        """SIGKILL all workers, at once."""
        for link in self._links():
            link.kill()

    def set_log_level(self, level: str) -> None:
        """Of all workers: debug, info, warning or error."""
        for link in self._links():
            link.set_log_level(level)

    def set_rules(self, rules: StableRules) -> None:
        """Which rules keep prompts stable, in all workers, also those that start later."""
        self._rules = rules
        for link in self._links():
            link.set_rules(rules)

    def fresh(self, within: float) -> bool:
        """Has every loaded worker been heard in the last `within` seconds?"""
        return all(link.fresh(within) for link in self._links())

    def _links(self) -> list[WorkerLink]:
        return [r.link for r in self._residents.values() if r.link is not None]

    # ------------------------------------------------------------------------------------------------- backend

    def models(self) -> list[ModelInfo]:
        """Those that are loaded, and those whose worker is starting again, with each of their adapters, too."""
        return [known.info for known in self.known() if known.info is not None]

    def known(self) -> list[KnownModel]:
        """All that can be asked for, the default one first."""
        return [known for resident in self._residents.values() for known in (resident.describe(), *resident.adapted())]

    def created(self, alias: str) -> int:
        """Unix time of the model's file, s; 0 if unknown."""
        try:
            return self._find(alias)[0].spec.created
        except (NotFoundError, UnavailableError):
            return 0

    def resolve(self, name: str | None, *, usable: bool = True) -> str:
        """The alias that a request's `model` means. Raises NotFoundError, UnavailableError.

        A model that is not loaded, or loads, is no error here: `generate` waits for it.
        """
        resident, adapter = self._find(name)
        if usable:
            self._check_open()
            resident.check(RETRY_AFTER)
        return resident.spec.name_with(adapter) if adapter else resident.alias

    async def file_facts(self, alias: str) -> FileFacts:
        """What a model is by its file; nothing is loaded. Raises ModelError."""
        resident = self._find(alias)[0]
        memory = self._space.cells(resident) if self._space is not None else 0
        return await asyncio.to_thread(self._facts.read, resident.spec, memory)

    def generate(self, alias: str, request: Generate) -> Visit:
        """A request; entering it (`async with`) hands it to the worker. Raises UnavailableError, BusyError."""
        resident, adapter = self._find(alias)
        self._check_open()
        resident.check(RETRY_AFTER)
        request = _with_adapter(request, alias, adapter)
        settings = resident.spec.settings
        if resident.requests >= settings.max_queue + (settings.parallel or AT_ONCE):
            raise full(resident.requests, resident.link)
        return Visit(resident, request, self._ready, self._release)

    async def convert(self, alias: str, conversion: Conversion) -> Converted:
        """Text to tokens and the like, by a model's worker. Raises RequestError, UnavailableError, WorkerDiedError."""
        resident, adapter = self._find(alias)
        if isinstance(conversion, TokenizeRequest):
            request = _with_adapter(conversion.request, alias, adapter)
            conversion = msgspec.structs.replace(conversion, request=request)
        elif adapter and isinstance(conversion, Embed):
            raise RequestError(f"embeddings are made without adapters: ask the model {resident.alias}", param="model")
        link = await self._ready(resident)
        try:
            return await link.convert(conversion)
        finally:
            self._release(resident)

    async def load(self, alias: str, keep_alive: float | None = None) -> None:
        """Load a model and wait until it is. Raises NotFoundError, ModelError, UnavailableError."""
        try:
            resident, _ = self._find(alias)
        except NotFoundError:
            await self._look()  # it may have come a moment ago
            resident, _ = self._find(alias)
        if resident.link is None and resident.loading is None:
            resident.failure = None  # whoever asks in person wants another try
        link = await self._ready(resident)
        try:
            await asyncio.wait({link.first})
            if link.first.cancelled():
                raise stopping()
            link.first.result()
            resident.unload_when_idle = False
            if keep_alive is not None:
                resident.override = keep_alive
        finally:
            self._release(resident)

    async def unload(self, alias: str) -> bool:
        """Unload a model. False: it is in use, and unloaded when the last request ends. Raises NotFoundError."""
        resident, _ = self._find(alias)
        if not resident.in_use:
            async with self._room:
                if not resident.in_use:
                    await self._unload(resident, "it was asked for")
                    return True
        resident.unload_when_idle = True
        return False

    def status(self) -> dict[str, Any]:
        """state (`ok`, `loading`, `error`, `no model`, `stopping`), progress 0 to 1, reason, model, workers, models."""
        residents = list(self._residents.values())
        first = next(iter(self._eager or residents), None)
        state, reason, progress = "ok", "", 1.0
        if first is None:
            state, reason, progress = "no model", "this daemon has no model", 0.0
        elif len(residents) == 1 or (self._eager and first.first_start and first.state != "error"):
            state = "loading" if first.state == "unloaded" and self._keeper is None else first.state
            state = "ok" if state == "unloaded" else state
            reason, progress = first.reason, first.progress if state != "ok" else 1.0
        if self._draining.is_set():
            state, reason = "stopping", "the daemon is stopping"
        return {
            "state": state,
            "progress": round(progress, 3),
            "reason": reason,
            "model": first.alias if first is not None else "",
            "workers": [link.status() for link in self._links()],
            "models": [
                {
                    "alias": known.alias,
                    "state": known.state,
                    "progress": known.progress,
                    "reason": known.reason,
                    "memory": known.memory,
                    "requests": known.requests,
                }
                for known in self.known()
                if not known.of
            ],
        }

    def _find(self, name: str | None) -> tuple[Resident, str]:
        """And the adapter that its name means, if any. Raises NotFoundError, UnavailableError (there is no model)."""
        known = self._residents.get(name) if name else None
        if known is not None or not name:
            return known or self._residents[self._catalog.resolve(name).alias], ""
        spec = self._catalog.resolve(name)
        return self._residents[spec.alias], spec.adapter(name)

    def _check_open(self) -> None:
        if self._draining.is_set():
            raise stopping()

    # ------------------------------------------------------------------------------------------------- loading

    async def _ready(self, resident: Resident) -> WorkerLink:
        """The worker of a model, loaded if need be, and held: `_release` it. Raises UnavailableError, ModelError."""
        ticket = Ticket()
        resident.waiters.append(ticket)
        try:
            while True:
                self._check_open()
                resident.check(RETRY_AFTER)
                link = resident.link
                if link is not None and ticket.granted:
                    return link
                if link is not None and not resident.closing and (resident.loading is None or resident.first_start):
                    resident.hold()
                    ticket.granted = True
                    return link
                await self._loaded_or_drained(resident)
        except BaseException:
            if ticket.granted:
                self._release(resident)
            raise
        finally:
            resident.waiters.remove(ticket)

    async def _loaded_or_drained(self, resident: Resident) -> None:
        """Load it, unless somebody does already, and wait. Raises what loading raises."""
        loading = resident.loading or self._begin_loading(resident)
        drained = asyncio.create_task(self._draining.wait())
        try:
            await asyncio.wait({loading, drained}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            drained.cancel()
        if loading.done() and not loading.cancelled():
            loading.result()

    def _begin_loading(self, resident: Resident) -> asyncio.Task[None]:
        resident.loading = loading = asyncio.create_task(self._load(resident), name=f"load {resident.alias}")
        loading.add_done_callback(_seen)
        return loading

    async def _load(self, resident: Resident) -> None:
        """Make room and load. Raises ModelError, UnavailableError; what it is, is remembered for those who ask next."""
        try:
            async with self._room:
                if resident.link is not None:  # it was to be unloaded, and was not
                    resident.grant()
                    return
                if resident.spec.problem:
                    raise ModelError(resident.spec.problem, code="model_load_failed")
                if self._space is not None:
                    await self._space.make(resident)
                self._check_open()
                resident.link = link = self._new_link(resident)
                resident.failure = None
                link.start()
            self._changed()
            await self._first(resident, link)
            resident.grant()
        except HomeprefixdError as error:
            if isinstance(error, ModelError):
                resident.failure, resident.failed = error, asyncio.get_running_loop().time()
                if len(self._residents) > 1 or not resident.first_start:  # else that is the daemon's end, and its error
                    logger.error("the model %s cannot be used: %s", resident.alias, error.message)
            raise
        finally:
            resident.loading = None
            resident.first_start = False
            self._attention.set()
            self._changed()

    async def _first(self, resident: Resident, link: WorkerLink) -> None:
        """Wait for a worker's first load. One that fails is ended."""
        await asyncio.wait({link.first})
        if link.first.cancelled():
            resident.link = None
            raise UnavailableError(f"the model {resident.alias} was unloaded while it was loading", retry_after=1)
        error = link.first.exception()
        if error is not None:
            resident.link = None
            await link.stop(0.0)
            raise error
        resident.measure()
        resident.used = asyncio.get_running_loop().time()

    def _new_link(self, resident: Resident) -> WorkerLink:
        load = self._load_frame(resident.spec)
        if self._space is not None:
            load = msgspec.structs.replace(load, memory=self._space.cells(resident))
        return WorkerLink(
            load if self._rules is None else msgspec.structs.replace(load, stable=self._rules),
            self._command,
            self._environ,
            self._store,
            limits=self._limits,
            backoff=self._backoff(),
            changed=self._changed,
        )

    # ------------------------------------------------------------------------------------------------- unloading

    def _loaded(self) -> list[Resident]:
        return [r for r in self._residents.values() if r.link is not None]

    async def _unload(self, resident: Resident, why: str) -> None:
        """End its worker. The caller holds `_room`, and nobody holds the model."""
        link = resident.link
        if link is None:
            return
        logger.info("unloading %s: %s", resident.alias, why)
        resident.closing = True
        try:
            await link.stop(STOP_GRACE)
        finally:
            resident.link = None
            resident.closing = resident.unload_when_idle = False
            resident.override = None
            self._changed()

    def _release(self, resident: Resident) -> None:
        resident.release()
        self._attention.set()

    # ------------------------------------------------------------------------------------------------- time

    async def _keep(self) -> None:
        """Unload what was not used for its time; look for new files."""
        loop = asyncio.get_running_loop()
        look = loop.time() + LOOK_EVERY
        while True:
            self._attention.clear()
            deadlines = [r.expires for r in self._loaded() if r.expires is not None]
            wait = min([look, *deadlines, loop.time() + 1.0]) - loop.time()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._attention.wait(), max(0.0, wait))
            try:
                if loop.time() >= look:
                    look = loop.time() + LOOK_EVERY
                    await self._look()
                await self._unload_expired()
            except Exception:  # or nothing would ever be unloaded again
                logger.exception("looking after the models failed")
                await asyncio.sleep(1.0)

    async def _unload_expired(self) -> None:
        now = asyncio.get_running_loop().time
        for resident in self._loaded():
            if resident.expires is not None and resident.expires <= now():
                async with self._room:
                    if resident.expires is not None and resident.expires <= now():
                        await self._unload(resident, "nobody has asked for it")

    async def _look(self) -> None:
        """One at a time, or an older look would be the last word. What it found, the catalog and we know at once."""
        if self._catalog.folder is None:
            return
        async with self._looking:
            changed = self._catalog.take(await asyncio.to_thread(self._catalog.search))
            self._take_specs()  # also where nothing is new: one whose file is gone may have been unloaded
        if changed:
            self._changed()


def _with_adapter(request: Generate, name: str, adapter: str) -> Generate:
    """`request` to a model that is called `name` with this adapter. Raises RequestError."""
    if not adapter:
        return request
    if request.lora is not None:
        raise RequestError(
            f"`lora` and the model {name!r}, which is one with an adapter, exclude each other.",
            param="lora",
            code="conflict",
        )
    return msgspec.structs.replace(request, lora=[LoraChoice(adapter)])


def _seen(task: asyncio.Task[None]) -> None:
    """Its error is told to those who wait for it; there may be none."""
    if not task.cancelled():
        task.exception()
