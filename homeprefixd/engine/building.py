"""From a `LoadModel` frame to a worker: only this file puts the parts of one together."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from ..chat.prompt import PromptBuilder
from ..chat.stable import Stabilizer
from ..chat_template import template_text
from ..config import FULL
from ..errors import ModelError
from ..frames import Frame
from ..frames.store import Traced
from ..frames.worker import Loading, LoadModel, ModelInfo, NamespaceKnown, StableRules
from ..lora import Space
from ..prefix.blocks import BLOCK_TOKENS, MODEL_NAME
from . import capacity
from .account import BEYOND, Accountant
from .adapters import Adapters
from .bindings import Model
from .compiling import Probe
from .constraint import Constraints
from .context import Context, ContextSettings
from .control_vectors import ControlVectors
from .devices import FOR_CELLS, Device, choose_devices, list_devices, resolve_layers, taken
from .edge_restoring import EdgeRestorer
from .edge_saving import EdgeSaver
from .edges import EdgeSlicer
from .embedding import Embedder, only_embeds
from .embedding_worker import EmbeddingWorker
from .fingerprint import describe, library_hashes
from .intake import Intake
from .llama_log import LlamaLog
from .model_files import LoadedFiles, model_files
from .namespaces import Namespaces
from .places import PlacedSlicer, Places
from .probe import Outcome, probe, probe_adapters
from .proving import make_slicer, warm_up
from .replay import Replay
from .restoring import Restorer
from .saving import Saver
from .scheduler import Engine, EngineSettings
from .shaping import Shaper
from .sharing import LEAST
from .slices import Slicer
from .text_worker import TextWorker
from .whole import WholeSlicer

DEBUG_LOGITS = "HOMEPREFIXD_DEBUG_LOGITS"
NO_RULES = StableRules(drop_billing_line=False, freeze_clock=False)
_NEIGHBOUR_PATIENCE = 0.05  # seconds that the store may take to say what a new prompt resembles
_MAX_PARALLEL = 255  # llama.cpp has 256 sequence ids, one is scratch

Counters = defaultdict[str, float]
Emit = Callable[[Frame], None]


def build(load: LoadModel, emit: Emit, store: Any) -> TextWorker | EmbeddingWorker:
    """Load the model and make everything that serves it. `store`: fulfils `Store`. Raises ModelError."""
    if not 0 <= load.parallel <= _MAX_PARALLEL:
        raise ModelError(
            f"`model.parallel` is {load.parallel}: it must be 1 to {_MAX_PARALLEL}, or 0 for what suits the model."
        )
    path = Path(load.path)
    log = LlamaLog()  # before anything is loaded, or it would be told on stderr
    hardware = _Hardware.choose(load)
    load = hardware.resolved(load)
    probed = probe(load, Path(load.probes)) if load.probes and load.reuse != "off" else None
    files = LoadedFiles(model_files(path))  # before it is loaded, so that nothing is missed
    model = Model.load(path, log, gpu_layers=load.gpu_layers, devices=hardware.devices, progress=_progress(emit))
    embedder = Embedder(model, load.threads, emit)
    if only_embeds(model):
        return EmbeddingWorker(embedder, _embedding_info(load, model, embedder, hardware), emit, files)
    tried = probe_adapters(load, Path(load.probes)) if load.probes else load.adapters
    adapters = Adapters.load(model, tried)
    vectors = ControlVectors(model, load.control_vectors)
    pool = _Pool.make(load, model, hardware, vectors, probed)
    load = msgspec.structs.replace(load, parallel=pool.parallel)
    counters: Counters = defaultdict(float)
    reuse = _Reuse.make(load, model, pool, hardware, adapters, vectors, files, store, counters, emit)
    stabilizer = Stabilizer(load.stable or NO_RULES)
    accountant = _accountant(load, model, emit, store, reuse, counters, stabilizer) if load.explain else None
    tell = emit if accountant is None else accountant.watch
    settings = EngineSettings(
        ctx=pool.ctx,
        parallel=load.parallel,
        batch=pool.batch,
        max_queue=load.max_queue,
        max_stall=load.max_stall,
        debug_logits=os.environ.get(DEBUG_LOGITS) == "1",
    )
    engine = Engine(model, pool.places, settings, tell, counters, reuse.saver, reuse.restorer, adapters, reuse.replay)
    prompts = _prompts(load, model, stabilizer)
    intake = Intake(
        model,
        prompts,
        engine,
        tell,
        pool.ctx,
        load.max_queue,
        Shaper(model, prompts.layout, Constraints(model, Probe())),
        stabilizer,
        accountant,
        points=reuse.edged is not None,
        adapters=adapters.infos,
        replay=reuse.replay,
    )
    info = _model_info(
        load,
        model,
        n_ctx=pool.ctx,
        n_pool=pool.places.cells,
        kv_bytes_per_token=pool.cell_bytes,
        has_template=prompts.has_template,
        cache_mode=_mode(reuse.slicer),
        cache_reason=reuse.reason,
        exact=load.reuse == "exact",
        least=LEAST,
        adapters=list(adapters.infos),
        control_vectors=vectors.applied,
        on_devices=hardware.taken(),
    )
    return TextWorker(engine, intake, reuse.namespaces, store, info, tell, embedder, adapters, stabilizer, files)


# -------------------------------------------------------------------------------------------------------- hardware


@dataclass(frozen=True)
class _Hardware:
    """What the model is to lie on. `names`: of the devices that get layers; none of them where it lies in RAM."""

    devices: list[Device]
    names: list[str]
    gpu_layers: int
    flash_attention: bool
    threads: int

    @classmethod
    def choose(cls, load: LoadModel) -> _Hardware:
        """Raises ModelError where a device is asked for that is not there."""
        devices = choose_devices(load.device, list_devices()) if load.gpu_layers or load.device else []
        gpu_layers = resolve_layers(load.gpu_layers, Path(load.path), devices)
        names = [device.name for device in devices] if gpu_layers else []
        return cls(
            devices,
            names,
            gpu_layers,
            load.flash_attention or (load.flash_if_gpu and bool(names)),
            load.threads or len(os.sched_getaffinity(0)),
        )

    def resolved(self, load: LoadModel) -> LoadModel:
        """`load` as it is carried out, which is what is probed, and what a probe is remembered by."""
        return msgspec.structs.replace(
            load,
            gpu_layers=self.gpu_layers,
            device=",".join(self.names),
            flash_attention=self.flash_attention,
            threads=self.threads,
        )

    def room(self) -> int:
        """Bytes for cells that are free on the devices, beside the weights once those are loaded."""
        return sum(int(device.free * FOR_CELLS) for device in list_devices() if device.name in self.names)

    def taken(self) -> dict[str, int]:
        """Bytes of each device that are in use since `choose`."""
        return taken(self.devices, list_devices()) if self.names else {}


# -------------------------------------------------------------------------------------------------------- contexts


@dataclass(frozen=True)
class _Pool:
    """The pool of cells, as one context or several, and how states of sequences are cut in them.

    `slicer` None: no state can be put back, for the reason `why`. `cell_bytes`: of K and V of one token.
    """

    places: Places
    slicer: Slicer | None
    why: str
    ctx: int
    parallel: int
    batch: int
    cell_bytes: float

    @property
    def first(self) -> Context:
        """All others are as it is."""
        return self.places.all[0].context

    @classmethod
    def make(
        cls, load: LoadModel, model: Model, hardware: _Hardware, vectors: ControlVectors, probed: Outcome | None
    ) -> _Pool:
        """Raises ModelError if they do not fit, or do not compute."""
        on_gpu = bool(hardware.names)
        batch = max(BLOCK_TOKENS, load.batch // BLOCK_TOKENS * BLOCK_TOKENS)
        score_bytes = 0.0 if load.flash_attention else capacity.score_bytes_per_cell(model, batch)
        size = capacity.choose(
            model,
            ctx=load.ctx,
            pool=load.pool,
            memory=min(load.memory, hardware.room()) if on_gpu else load.memory,
            parallel=load.parallel or FULL,
            kv_type=load.kv_type,
            kv_type_v=load.kv_type_v,
            score_bytes=score_bytes,
        )
        parallel = load.parallel or capacity.at_once(model, on_gpu=on_gpu)
        not_blocks = (probed.reason or "the probe said so") if probed and probed.mode == "whole sequence" else ""
        counts = capacity.split(model, size, parallel, on_gpu=on_gpu, has_scores=score_bytes > 0)
        if not_blocks:
            counts = [size.pool]
        settings = ContextSettings(
            counts[0],
            max(batch, parallel),
            parallel + 1,
            load.threads,
            load.kv_type,
            load.flash_attention,
            load.kv_type_v,
        )
        setting_name = "`model.pool`" if load.pool else "`model.ctx`"
        contexts = [Context(model, replace(settings, n_ctx=count), setting_name) for count in counts]
        for context in contexts:
            vectors.apply(context)
        vectors.try_out(contexts[0])
        slicer: Slicer | None = None
        if probed and probed.mode == "off":
            why = probed.reason
            warm_up(contexts[0])
        else:
            slicer, why = make_slicer(contexts[0], parallel, not_blocks)
        if isinstance(slicer, EdgeSlicer):  # which is of one context
            while len(contexts) > 1:
                contexts.pop().close()
        for context in contexts[1:]:
            warm_up(context)
        if slicer is not None and len(contexts) > 1:
            slicer = PlacedSlicer(slicer, contexts, parallel)
        cell_bytes = float(
            slicer.size.per_token
            if slicer is not None
            else capacity.kv_bytes_per_token(model, settings.kv_type, settings.type_v)
        )
        places = Places(contexts, parallel, cell_bytes=cell_bytes, weight_bytes=model.size)
        return cls(places, slicer, why, size.ctx, parallel, batch, cell_bytes)


# ----------------------------------------------------------------------------------------------------------- reuse


@dataclass(frozen=True)
class _Reuse:
    """What saves and restores states; all None where none is reused. `reason`: why that is so, or not in blocks.

    `grain`: see `Accountant`.
    """

    slicer: Slicer | None
    reason: str
    namespaces: Namespaces | None = None
    saver: Saver | EdgeSaver | None = None
    restorer: Restorer | None = None
    replay: Replay | None = None
    grain: int = 0

    @property
    def edged(self) -> EdgeSlicer | None:
        """The slicer, if states have edges."""
        return self.slicer if isinstance(self.slicer, EdgeSlicer) else None

    @classmethod
    def make(
        cls,
        load: LoadModel,
        model: Model,
        pool: _Pool,
        hardware: _Hardware,
        adapters: Adapters,
        vectors: ControlVectors,
        files: LoadedFiles,
        store: Any,
        counters: Counters,
        emit: Emit,
    ) -> _Reuse:
        slicer = pool.slicer
        if slicer is None:
            return cls(None, f"No prefix is reused for this model: {pool.why}.")
        if load.reuse == "off":
            return cls(None, "`cache.reuse` is off.")
        edged = slicer if isinstance(slicer, EdgeSlicer) else None

        def description(sha256: str, salt: str, adapted: dict[str, Any]) -> dict[str, Any]:
            found = describe(
                model,
                pool.first,
                sha256=sha256,
                libraries=library_hashes(),
                gpu_layers=load.gpu_layers,
                salt=salt,
                edges=edged.edge.needs if edged is not None else None,
                adapters=adapted,
                control_vectors=vectors.applied,
            )
            whole = {"state": "whole sequence"} if isinstance(slicer, WholeSlicer) else {}
            devices = {"devices": hardware.names} if hardware.names else {}
            return {**found, **whole, **devices, MODEL_NAME: load.alias}

        namespaces = Namespaces(
            store,
            files,
            load.salt,
            description,
            lambda known, mismatch: emit(NamespaceKnown(known, mismatch, list(adapters.infos))),
            adapters,
        )
        exact = load.reuse == "exact"
        saver: Saver | EdgeSaver
        restorer: Restorer
        if edged is not None:
            saver = EdgeSaver(store, edged, model, namespaces, counters)
            restorer = EdgeRestorer(store, edged, namespaces, exact, counters)
        else:
            saver = Saver(store, slicer, model, namespaces, counters)
            restorer = Restorer(store, slicer, namespaces, exact, counters)
        replay = None
        if load.replay and load.reuse == "token":
            replay = Replay(model, store, namespaces.key, namespaces.opened, counters)
        grain = 0 if edged is not None else BLOCK_TOKENS if exact else 1
        return cls(slicer, pool.why, namespaces, saver, restorer, replay, grain)


def _mode(slicer: Slicer | None) -> Literal["blocks", "blocks with edges", "whole sequence", "off"]:
    if slicer is None:
        return "off"
    edged = isinstance(slicer, EdgeSlicer)
    return "whole sequence" if isinstance(slicer, WholeSlicer) else "blocks with edges" if edged else "blocks"


# ----------------------------------------------------------------------------------------------------- what is told


def _prompts(load: LoadModel, model: Model, stabilizer: Stabilizer) -> PromptBuilder:
    """Raises ModelError for a template that cannot be used."""
    template = template_text(load.chat_template, model.chat_template)
    stabilizer.clock_in_template = "strftime_now" in template
    try:
        return PromptBuilder(
            template,
            model.bos_text,
            model.eos_text,
            load.template_timeout,
            now=stabilizer.now,
            tool_source="" if load.chat_template else model.tool_template,
        )
    except ModelError as error:
        raise ModelError(f"{load.path}: {error.message}", code=error.code) from error


def _accountant(
    load: LoadModel,
    model: Model,
    emit: Emit,
    store: Any,
    reuse: _Reuse,
    counters: Counters,
    stabilizer: Stabilizer,
) -> Accountant:
    namespaces = reuse.namespaces

    def stored(space: Space, tokens: bytes) -> bytes:
        namespace = namespaces.opened(space) if namespaces is not None else None
        return b"" if namespace is None else store.neighbour(namespace, tokens, BEYOND, _NEIGHBOUR_PATIENCE)

    def traced(space: Space, tokens: bytes) -> Traced | None:
        namespace = namespaces.opened(space) if namespaces is not None else None
        return None if namespace is None else store.trace(namespace, tokens, _NEIGHBOUR_PATIENCE)

    return Accountant(
        model.pieces,
        emit,
        stored,
        reuse.grain,
        trace=traced,
        counters=counters,
        in_force=lambda: stabilizer.rules,
        replay=load.replay,
    )


def _embedding_info(load: LoadModel, model: Model, embedder: Embedder, hardware: _Hardware) -> ModelInfo:
    return _model_info(
        load,
        model,
        n_ctx=embedder.longest,
        n_pool=0,
        kv_bytes_per_token=0.0,
        has_template=False,
        cache_mode="off",
        cache_reason="It makes embeddings, of which nothing is reused.",
        on_devices=hardware.taken(),
    )


def _model_info(load: LoadModel, model: Model, **of_serving: Any) -> ModelInfo:
    """What the model is, and `of_serving` how it is served; its namespace is not known yet."""
    return ModelInfo(
        alias=load.alias,
        path=load.path,
        arch=model.arch,
        description=model.description,
        n_params=model.n_params,
        size=model.size,
        n_vocab=model.n_vocab,
        n_embd=model.n_embd,
        n_ctx_train=model.n_ctx_train,
        parallel=load.parallel,
        threads=load.threads,
        namespace={},
        **of_serving,
    )


def _progress(emit: Emit) -> Callable[[float], None]:
    """Loading frames, at most a hundred."""
    sent = -1.0

    def report(progress: float) -> None:
        nonlocal sent
        if progress >= sent + 0.01 or (progress >= 1 > sent):
            sent = progress
            emit(Loading(progress=progress))

    return report
