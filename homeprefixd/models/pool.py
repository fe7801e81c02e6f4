"""The models that run, each in a worker process: implements `backend.Backend`.

One model now. What comes later (residency, a memory budget over several models) decides here which links exist.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from ..config import KV_TYPES_WITHOUT_FLASH, Config, StableConfig
from ..frames import Conversion, Converted, Generate, LoadModel, ModelInfo, StableRules
from ..supervise import Backoff, module_command
from .catalog import Catalog, ModelSpec
from .store_link import StoreLink
from .worker_link import Limits, Request, WorkerLink


def worker_command(log_level: str) -> Callable[[int], list[str]]:
    """The command line of a worker, given the number of its end of the daemon's connection."""
    return lambda fd: module_command("homeprefixd.engine.worker", "--fd", str(fd), "--log-level", log_level)


def worker_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ`, with settings of the C libraries that suit a machine that has other things to do, too.

    GOMP_SPINCOUNT: how often OpenMP's threads look before they sleep. By default they spin long at each barrier: as
    soon as another program wants a core, everything waits for a thread that is not running (a cold prompt of 915
    tokens took 19 to 30 s beside two busy programs, 5.5 s without spinning). Not to spin at all cost two thirds of the
    decode speed on an idle machine; with this count it was that of the default.

    GLIBC_TUNABLES: huge pages for large allocations, where the kernel gives them to those who ask.
    Without flash attention V lies transposed: a block is scattered over one row per dimension, and with 4 KiB pages
    each row misses the TLB. Restoring is a third faster so (measured: 2.1 -> 2.8 GB/s). glibc >= 2.35; else ignored.
    """
    tunables = [text for text in (environ.get("GLIBC_TUNABLES", ""), "glibc.malloc.hugetlb=1") if text]
    return {"GOMP_SPINCOUNT": "10000", **environ, "GLIBC_TUNABLES": ":".join(tunables)}


def load_frame(spec: ModelSpec, config: Config, *, cores: int, memory: int, probes: str = "") -> LoadModel:
    """What the worker is told to load. `memory`: bytes that the pool of cells may take. `probes`: see LoadModel."""
    model, cache = config.model, config.cache
    return LoadModel(
        path=str(spec.path),
        alias=spec.alias,
        ctx=model.ctx,
        pool=model.pool,
        memory=memory,
        parallel=model.parallel,
        threads=model.threads or cores,
        batch=model.batch,
        kv_type=model.kv_type,
        flash_attention=flash_attention(config),
        gpu_layers=model.gpu_layers,
        chat_template=model.chat_template,
        template_timeout=model.template_timeout,
        reuse=cache.reuse,
        salt=cache.salt,
        max_queue=model.max_queue,
        max_stall=model.max_stall,
        probes=probes,
        explain=config.records.explain == "on",
        stable=stable_rules(config.stable),
    )


def stable_rules(config: StableConfig) -> StableRules:
    """What the worker is told of `[stable]`."""
    return StableRules(
        drop_billing_line=config.drop_billing_line == "on",
        freeze_clock=config.freeze_clock == "on",
        move_volatile_line=config.move_volatile_line == "on",
        sort_tools=config.sort_tools == "on",
        sort_keys=config.sort_keys == "on",
        custom=config.custom,
        apps=tuple(name.strip() for name in config.apps.split(",") if name.strip()),
    )


def flash_attention(config: Config) -> bool:
    """What `auto` means. Depends on settings alone, so that a restart finds what was stored.

    llama.cpp's CPU kernel for it is slow for fewer than 64 tokens, which is what follows a restored prefix: with
    SmolLM2-135M behind 2,176 tokens, 11 tokens take 307 ms with it and 111 ms without, one token 56 and 42 ms,
    while the prefill takes 7.9 s with it and 10.3 s without (2 cores; `homeprefixd bench attention` measures it).
    """
    if config.model.flash_attention != "auto":
        return config.model.flash_attention == "on"
    return config.model.gpu_layers != 0 or config.model.kv_type not in KV_TYPES_WITHOUT_FLASH


class Pool:
    """All workers of this daemon."""

    def __init__(
        self,
        catalog: Catalog,
        load: Callable[[ModelSpec], LoadModel],
        command: Callable[[int], list[str]],
        environ: Mapping[str, str],
        store: StoreLink | None,
        *,
        limits: Limits | None = None,
        backoff: Callable[[], Backoff] = Backoff,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """`load` makes the first frame for a model's worker; `changed` is called when `status()` is new."""
        self._catalog = catalog
        self._draining = False
        self._links = {
            spec.alias: WorkerLink(
                load(spec),
                command,
                worker_environment(environ),
                store,
                limits=limits,
                backoff=backoff(),
                changed=changed,
            )
            for spec in catalog.specs
        }

    # ------------------------------------------------------------------------------------------------- life

    def start(self) -> None:
        """Start a worker for each model; they load side by side."""
        for link in self._links.values():
            link.start()

    async def first_loads(self) -> None:
        """Returns when each model was loaded once. Raises ModelError for the first that cannot be."""
        await asyncio.gather(*(asyncio.shield(link.first) for link in self._links.values()))

    def drain(self) -> None:
        """No new requests from now on: they get UnavailableError."""
        self._draining = True
        for link in self._links.values():
            link.drain()

    async def idle(self) -> None:
        """Returns when no request runs or waits."""
        await asyncio.gather(*(link.idle() for link in self._links.values()))

    async def stop(self, grace: float) -> None:
        """End all workers; running requests get `grace` seconds."""
        self._draining = True
        await asyncio.gather(*(link.stop(grace) for link in self._links.values()))

    def kill(self) -> None:
        """SIGKILL all workers, at once."""
        for link in self._links.values():
            link.kill()

    def set_log_level(self, level: str) -> None:
        """Of all workers: debug, info, warning or error."""
        for link in self._links.values():
            link.set_log_level(level)

    def fresh(self, within: float) -> bool:
        """Has every loaded worker been heard in the last `within` seconds?"""
        return all(link.fresh(within) for link in self._links.values())

    # ------------------------------------------------------------------------------------------------- backend

    def models(self) -> list[ModelInfo]:
        """Those that are loaded, and those whose worker is starting again."""
        return [link.info for link in self._links.values() if link.info is not None]

    def created(self, alias: str) -> int:
        """Unix time of the model's file, s; 0 if unknown."""
        return next((spec.created for spec in self._catalog.specs if spec.alias == alias), 0)

    def resolve(self, name: str | None) -> str:
        """The alias that a request's `model` means. Raises NotFoundError, UnavailableError.

        A model that loads is no error here: `generate` waits for it some seconds.
        """
        spec = self._catalog.resolve(name)
        self._links[spec.alias].check_open()
        return spec.alias

    def generate(self, alias: str, request: Generate) -> Request:
        """A request; entering it (`async with`) hands it to the worker. Raises UnavailableError, BusyError."""
        return self._links[self._catalog.resolve(alias).alias].request(request)

    async def convert(self, alias: str, conversion: Conversion) -> Converted:
        """Text to tokens and the like, by a model's worker. Raises RequestError, UnavailableError, WorkerDiedError."""
        return await self._links[self._catalog.resolve(alias).alias].convert(conversion)

    def status(self) -> dict[str, Any]:
        """state (`ok`, `loading`, `error`, `no model`, `stopping`), progress 0 to 1, reason, model, workers."""
        links = list(self._links.values())
        workers = [link.status() for link in links]
        if not links:
            state, reason = "no model", "this daemon has no model"
        else:
            first = links[0]
            state, reason = first.state, first.reason
        if self._draining:
            state, reason = "stopping", "the daemon is stopping"
        progress = min((link.progress for link in links), default=0.0)
        model = links[0].alias if links else ""
        return {"state": state, "progress": round(progress, 3), "reason": reason, "model": model, "workers": workers}
