"""How a model is loaded: its worker's command and environment, what the worker is told, and what memory that takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..config import FULL, GPU_LAYERS_AUTO, KV_TYPES_WITHOUT_FLASH, AppRulesConfig, Config, ModelConfig, StableConfig
from ..frames.worker import AppRules, ControlVector, LoadModel, StableRules
from ..gguf_header import Value, kv_bytes_per_token, read_details, score_bytes_per_cell
from ..supervise import module_command
from .adapters import adapter_files, adapters_bytes
from .catalog import ModelSpec

WORKER_BYTES = 100 << 20
"""Of a worker beside weights and KV state: the interpreter, its libraries and compute buffers."""

_LONGEST_CTX = 32768
"""Tokens that a request may use at most where `model.ctx` is left to the worker (`engine.capacity`)."""
_SHORTEST_CTX = 256


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
    model, cache = spec.settings, config.cache
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
        flash_attention=flash_attention(model),
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
        device=model.device,
        flash_if_gpu=model.flash_attention == "auto",
        replay=cache.replay == "on",
        adapters=adapter_files(model),
        kv_type_v=model.kv_type_v,
        control_vectors=[
            ControlVector(one.path, one.scale, one.first_layer, one.last_layer) for one in model.control_vectors
        ],
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
        move=config.move,
        apps=tuple(name.strip() for name in config.apps.split(",") if name.strip()),
        per_app=tuple(_app_rules(one) for one in config.per_app),
    )


def _app_rules(config: AppRulesConfig) -> AppRules:
    def switch(value: str) -> bool | None:
        return value == "on" if value else None

    return AppRules(
        config.app,
        drop_billing_line=switch(config.drop_billing_line),
        move_volatile_line=switch(config.move_volatile_line),
        sort_tools=switch(config.sort_tools),
        sort_keys=switch(config.sort_keys),
        custom=config.custom,
        move=config.move,
    )


def flash_attention(model: ModelConfig) -> bool:
    """What `auto` means. Depends on settings alone, so that a restart finds what was stored.

    llama.cpp's CPU kernel for it is slow for fewer than 64 tokens, which is what follows a restored prefix: with
    SmolLM2-135M behind 2,176 tokens, 11 tokens take 307 ms with it and 111 ms without, one token 56 and 42 ms,
    while the prefill takes 7.9 s with it and 10.3 s without (2 cores; `homeprefixd bench attention` measures it).
    """
    if model.flash_attention != "auto":
        return model.flash_attention == "on"
    return model.gpu_layers not in (0, GPU_LAYERS_AUTO) or model.type_v not in KV_TYPES_WITHOUT_FLASH


@dataclass(frozen=True)
class Budget:
    """Memory that weights and KV pools of all loaded models may take together, in bytes."""

    total: int
    available: int  # what was free before anything was loaded, the hot tier included
    strict: bool  # it was set by a person, so that even the only model must fit

    def pool(self, spec: ModelSpec) -> int:
        """What a model's pool of cells may take where its size is left to us: a quarter of what its weights leave, and
        not more than is left of all beside its weights, its adapters and its worker.

        At least a sixteenth of all, since a machine may be used that cannot hold its model; where a person has said
        what there is, a smaller pool is better than to be refused, down to where it would hold next to nothing.
        """
        wanted = max(self.available - spec.size, self.available // 4) // 4
        left = self.total - spec.size - adapters_bytes(spec.settings) - WORKER_BYTES
        return min(wanted, max(left, self.total // (64 if self.strict else 16)))


def guess_ctx(details: Mapping[str, Value], settings: ModelConfig, memory: int) -> int:
    """Tokens that one request may use, as the worker chooses (`engine.capacity`). `memory`: bytes for cells; 0: any."""
    if settings.ctx:
        return settings.ctx
    per_token = kv_bytes_per_token(details, settings.kv_type, settings.type_v)
    if not flash_attention(settings):
        per_token += score_bytes_per_cell(details, settings.batch)
    affordable = int(memory / per_token) if memory and per_token else _LONGEST_CTX
    return min(_trained_ctx(details), max(affordable, _SHORTEST_CTX), settings.pool or _LONGEST_CTX)


def _trained_ctx(details: Mapping[str, Value]) -> int:
    trained = details.get("context_length")
    return min(trained if isinstance(trained, int) and trained > 0 else _LONGEST_CTX, _LONGEST_CTX)


def guess_memory(spec: ModelSpec, pool: int) -> int:
    """Bytes that a model will take, from its file's head; `pool`: bytes that its cells may take. Waits for the disk.

    Raises ModelError if the file is damaged.
    """
    details = read_details(spec.path)
    settings = spec.settings
    per_token = kv_bytes_per_token(details, settings.kv_type, settings.type_v)
    ctx = settings.ctx or _trained_ctx(details)
    cells = settings.pool or (settings.parallel or FULL) * ctx
    wanted = int(cells * per_token)
    least = int((settings.pool or settings.ctx) * per_token)  # what was set is not made smaller
    return spec.size + adapters_bytes(settings) + max(least, min(wanted, pool)) + WORKER_BYTES
