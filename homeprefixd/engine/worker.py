"""Main of the worker process: one loaded model, served over the daemon's socket.

    python -m homeprefixd.engine.worker --fd N --log-level LEVEL

Threads: the engine's loop (main), the reader of the daemon's frames, the intake (templates and tokens), the heartbeat,
and for a while the model's hash. Only this file builds things. Exit codes: 0 told to stop or the daemon is gone,
3 the model cannot be served, 4 somebody has written into its file, so that it has to be loaded again.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import socket
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from ..channel import Channel, ChannelClosedError
from ..chat_template import template_text
from ..child import become_child
from ..config import FULL
from ..errors import HomeprefixdError, ModelError
from ..frames import Frame, Stop
from ..frames.store import Traced
from ..frames.worker import (
    ApplyTemplate,
    Cancel,
    DescribeTemplate,
    Detokenize,
    Embed,
    Generate,
    Loading,
    LoadModel,
    ModelInfo,
    NamespaceKnown,
    Ready,
    SetLogLevel,
    SetRules,
    StableRules,
    Tokenize,
    TokenizeRequest,
    ToWorker,
    UseStore,
)
from ..last_loads import LastLoads, Remembering
from ..lora import Space
from ..prefix.blocks import BLOCK_TOKENS, MODEL_NAME
from .failures import failure_of

if TYPE_CHECKING:  # they load llama.cpp, see `build`
    from ..chat import stable
    from .account import Accountant
    from .adapters import Adapters
    from .bindings import Model
    from .embedding import Embedder
    from .embedding_worker import EmbeddingWorker
    from .intake import Intake
    from .model_files import LoadedFiles
    from .namespaces import Namespaces
    from .scheduler import Engine
    from .slices import Slicer

DEBUG_LOGITS = "HOMEPREFIXD_DEBUG_LOGITS"
_HEARTBEAT = 1.0  # seconds
_NAMESPACE_PATIENCE = 2.0  # seconds that `Ready` may wait for the model's hash
_NEIGHBOUR_PATIENCE = 0.05  # seconds that the store may take to say what a new prompt resembles
_LAST_STEP = 10.0  # seconds that a step may still take once the daemon is gone
NO_RULES = StableRules(drop_billing_line=False, freeze_clock=False)
_MAX_PARALLEL = 255  # llama.cpp has 256 sequence ids, one is scratch

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until told to stop."""
    parser = argparse.ArgumentParser(prog="homeprefixd-worker")
    parser.add_argument("--fd", type=int, required=True, help="socket to the daemon")
    parser.add_argument("--log-level", default="info")
    options = parser.parse_args(argv)
    become_child("worker", options.log_level)
    channel: Channel[ToWorker] = Channel(socket.socket(fileno=options.fd), ToWorker)
    try:
        return _serve(channel)
    except ChannelClosedError:
        return 0  # the daemon is gone; nobody is left to tell


def _serve(channel: Channel[ToWorker]) -> int:
    from ..prefix.client import StoreClient

    load = channel.receive()
    try:
        if not isinstance(load, LoadModel):
            raise ModelError(f"The first frame was {type(load).__name__}, not LoadModel.")
        worker = build(load, _remembered(channel.send, load), StoreClient())
    except ChannelClosedError:
        raise
    except Exception as error:
        if not isinstance(error, HomeprefixdError):
            logger.exception("loading the model failed")
        channel.send(failure_of(None, error))
        return ModelError.exit_code
    worker.run(channel)
    return 0


def _remembered(send: Callable[[Frame], None], load: LoadModel) -> Callable[[Frame], None]:
    """`send`, with what is said of the model remembered for when it is not loaded."""
    if not load.probes:
        return send
    remembering = Remembering(LastLoads(Path(load.probes)), Path(load.path))

    def emit(frame: Frame) -> None:
        send(frame)
        remembering.watch(frame)

    return emit


@dataclass
class Worker:
    """The parts of a running worker, and its threads."""

    engine: Engine
    intake: Intake
    namespaces: Namespaces | None  # None: cache mode off
    store: Any  # StoreClient: `engine.store.Store`, and `attach`
    info: ModelInfo
    emit: Callable[[Frame], None]
    embedder: Embedder
    adapters: Adapters
    stabilizer: stable.Stabilizer
    files: LoadedFiles

    def run(self, channel: Channel[ToWorker]) -> None:
        """Serve until `Stop` or the daemon's end. On the calling thread: the engine."""
        self.intake.start()
        threading.Thread(target=self._read, args=(channel,), name="reader", daemon=True).start()
        if self.namespaces is not None:
            self.namespaces.start()
            # After a restart the hash is remembered, and the first request must find what is stored.
            if not self.namespaces.wait(_NAMESPACE_PATIENCE):
                logger.info("%s is being hashed; until then requests are served without the cache", self.info.path)
            self.info = msgspec.structs.replace(
                self.info,
                namespace=self.namespaces.description,
                mismatch=self.namespaces.mismatch,
                adapters=list(self.adapters.infos),
            )
        self.emit(Ready(model=self.info))
        done = threading.Event()
        threading.Thread(target=self._beat, args=(done,), name="heartbeat", daemon=True).start()
        gc.freeze()  # what is there now stays: no collection walks it, which would hold all streams up
        try:
            self.engine.run(channel.together)
        finally:
            done.set()

    def _read(self, channel: Channel[ToWorker]) -> None:
        try:
            while True:
                self._take(channel.receive(), channel)
        except ChannelClosedError:
            self.engine.quit()
            # The engine may be in a long llama_decode; nobody waits for its result.
            timer = threading.Timer(_LAST_STEP, os._exit, args=(0,))
            timer.daemon = True
            timer.start()

    def _take(self, frame: ToWorker, channel: Channel[ToWorker]) -> None:
        match frame:
            case Generate():
                self.files.end_if_changed()
                self.intake.put(frame)
            case Tokenize() | Detokenize() | ApplyTemplate() | DescribeTemplate() | TokenizeRequest():
                self.intake.convert(frame)
            case SetLogLevel():
                logging.getLogger().setLevel(frame.level.upper())
            case SetRules():
                self.stabilizer.rules = frame.rules
            case Embed():
                self.embedder.put(frame)
            case Cancel():
                self.intake.cancel(frame.rid)
                self.embedder.cancel(frame.rid)
            case Stop():
                self.engine.stop(frame.grace)
            case UseStore():
                self._use_store(socket.socket(fileno=channel.take_descriptor()))
            case LoadModel():
                logger.warning("a second LoadModel was ignored: a worker has one model")

    def _use_store(self, sock: socket.socket) -> None:
        if self.namespaces is None:
            sock.close()
            return
        self.store.attach(sock)
        self.namespaces.reset()
        # Told from a thread of its own: the reader must stay free for a Cancel.
        threading.Thread(target=self.namespaces.open_usual, name="open-namespace", daemon=True).start()

    def _beat(self, done: threading.Event) -> None:
        try:
            while not done.wait(_HEARTBEAT):
                self.files.end_if_changed()
                self.emit(self.engine.figures())
        except ChannelClosedError:
            return


def build(load: LoadModel, emit: Callable[[Frame], None], store: Any) -> Worker | EmbeddingWorker:
    """Load the model and make everything that serves it. `store`: fulfils `Store`. Raises ModelError."""
    # Imported here: llama.cpp is loaded into this process only after it is tied to its parent.
    from ..chat import stable
    from ..chat.prompt import PromptBuilder
    from . import capacity
    from .adapters import Adapters
    from .bindings import Model
    from .compiling import Probe
    from .constraint import Constraints
    from .context import Context, ContextSettings
    from .control_vectors import ControlVectors
    from .devices import FOR_CELLS, choose_devices, list_devices, resolve_layers, taken
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
    from .probe import probe, probe_adapters
    from .proving import make_slicer, warm_up
    from .replay import Replay
    from .restoring import Restorer
    from .saving import Saver
    from .scheduler import Engine, EngineSettings
    from .shaping import Shaper
    from .sharing import LEAST
    from .whole import WholeSlicer

    if not 0 <= load.parallel <= _MAX_PARALLEL:
        raise ModelError(
            f"`model.parallel` is {load.parallel}: it must be 1 to {_MAX_PARALLEL}, or 0 for what suits the model."
        )
    path = Path(load.path)
    devices = choose_devices(load.device, list_devices()) if load.gpu_layers or load.device else []
    log = LlamaLog()  # before anything is loaded, or it would be told on stderr
    gpu_layers = resolve_layers(load.gpu_layers, path, devices)
    names = [device.name for device in devices] if gpu_layers else []
    flash_attention = load.flash_attention or (load.flash_if_gpu and bool(names))
    resolved = msgspec.structs.replace(
        load, gpu_layers=gpu_layers, device=",".join(names), flash_attention=flash_attention
    )
    probed = probe(resolved, Path(load.probes)) if load.probes and load.reuse != "off" else None
    files = LoadedFiles(model_files(path))  # before it is loaded, so that nothing is missed
    model = Model.load(path, log, gpu_layers=gpu_layers, devices=devices, progress=_progress(emit))
    on_devices = sum(int(device.free * FOR_CELLS) for device in list_devices() if device.name in names)
    threads = load.threads or len(os.sched_getaffinity(0))
    embedder = Embedder(model, threads, emit)
    if only_embeds(model):
        info = _model_info(
            load,
            model,
            threads,
            n_ctx=embedder.longest,
            n_pool=0,
            kv_bytes_per_token=0.0,
            has_template=False,
            cache_mode="off",
            cache_reason="It makes embeddings, of which nothing is reused.",
            on_devices=taken(devices, list_devices()) if names else {},
        )
        return EmbeddingWorker(embedder, info, emit, files)
    batch = max(64, load.batch // 64 * 64)
    score_bytes = 0.0 if flash_attention else capacity.score_bytes_per_cell(model, batch)
    tried = probe_adapters(resolved, Path(load.probes)) if load.probes else load.adapters
    adapters = Adapters.load(model, tried)
    vectors = ControlVectors(model, load.control_vectors)
    size = capacity.choose(
        model,
        ctx=load.ctx,
        pool=load.pool,
        memory=min(load.memory, on_devices) if names else load.memory,
        parallel=load.parallel or FULL,
        kv_type=load.kv_type,
        kv_type_v=load.kv_type_v,
        score_bytes=score_bytes,
    )
    load = msgspec.structs.replace(load, parallel=load.parallel or capacity.at_once(model, on_gpu=bool(names)))
    not_blocks = (probed.reason or "the probe said so") if probed and probed.mode == "whole sequence" else ""
    cells = capacity.split(model, size, load.parallel, on_gpu=bool(names), has_scores=score_bytes > 0)
    if not_blocks:
        cells = [size.pool]
    own_settings = ContextSettings(
        cells[0], max(batch, load.parallel), load.parallel + 1, threads, load.kv_type, flash_attention, load.kv_type_v
    )
    contexts = [
        Context(model, replace(own_settings, n_ctx=own), "`model.pool`" if load.pool else "`model.ctx`")
        for own in cells
    ]
    context = contexts[0]
    for one in contexts:
        vectors.apply(one)
    vectors.try_out(context)
    slicer: Slicer | None = None
    if probed and probed.mode == "off":
        why = probed.reason
        warm_up(context)
    else:
        slicer, why = make_slicer(context, load.parallel, not_blocks)
    if isinstance(slicer, EdgeSlicer):  # which is of one context
        while len(contexts) > 1:
            contexts.pop().close()
    for other in contexts[1:]:
        warm_up(other)
    if slicer is not None and len(contexts) > 1:
        slicer = PlacedSlicer(slicer, contexts, load.parallel)
    reason = f"No prefix is reused for this model: {why}." if slicer is None else why
    if slicer is not None and load.reuse == "off":
        slicer, reason = None, "`cache.reuse` is off."
    counters: defaultdict[str, float] = defaultdict(float)
    settings = EngineSettings(
        ctx=size.ctx,
        parallel=load.parallel,
        batch=batch,
        max_queue=load.max_queue,
        max_stall=load.max_stall,
        debug_logits=os.environ.get(DEBUG_LOGITS) == "1",
    )
    edged = slicer if isinstance(slicer, EdgeSlicer) else None
    namespaces = None
    saver: Saver | EdgeSaver | None = None
    restorer: Restorer | None = None
    if slicer is not None:

        def description(sha256: str, salt: str, adapted: dict[str, Any]) -> dict[str, Any]:
            found = describe(
                model,
                context,
                sha256=sha256,
                libraries=library_hashes(),
                gpu_layers=gpu_layers,
                salt=salt,
                edges=edged.edge.needs if edged is not None else None,
                adapters=adapted,
                control_vectors=vectors.applied,
            )
            whole = {"state": "whole sequence"} if isinstance(slicer, WholeSlicer) else {}
            return {**found, **whole, **({"devices": names} if names else {}), MODEL_NAME: load.alias}

        namespaces = Namespaces(
            store,
            files,
            load.salt,
            description,
            lambda known, mismatch: emit(NamespaceKnown(known, mismatch, list(adapters.infos))),
            adapters,
        )
        if isinstance(slicer, EdgeSlicer):
            saver = EdgeSaver(store, slicer, model, namespaces, counters)
            restorer = EdgeRestorer(store, slicer, namespaces, load.reuse == "exact", counters)
        else:
            saver = Saver(store, slicer, model, namespaces, counters)
            restorer = Restorer(store, slicer, namespaces, load.reuse == "exact", counters)
    grain = 0 if slicer is None or edged is not None else BLOCK_TOKENS if load.reuse == "exact" else 1
    stabilizer = stable.Stabilizer(load.stable or NO_RULES)
    accountant = (
        _accountant(model, emit, store, namespaces, grain, counters, stabilizer, load.replay) if load.explain else None
    )
    emit = emit if accountant is None else accountant.watch
    cell_bytes = float(
        slicer.size.per_token
        if slicer
        else capacity.kv_bytes_per_token(model, own_settings.kv_type, own_settings.type_v)
    )
    places = Places(contexts, load.parallel, cell_bytes=cell_bytes, weight_bytes=model.size)
    replay = None
    if namespaces is not None and load.replay and load.reuse == "token":
        replay = Replay(model, store, namespaces.key, namespaces.opened, counters)
    engine = Engine(model, places, settings, emit, counters, saver, restorer, adapters, replay)
    template = template_text(load.chat_template, model.chat_template)
    stabilizer.clock_in_template = "strftime_now" in template
    try:
        prompts = PromptBuilder(
            template,
            model.bos_text,
            model.eos_text,
            load.template_timeout,
            now=stabilizer.now,
            tool_source="" if load.chat_template else model.tool_template,
        )
    except ModelError as error:
        raise ModelError(f"{path}: {error.message}", code=error.code) from error
    shaper = Shaper(model, prompts.layout, Constraints(model, Probe()))
    intake = Intake(
        model,
        prompts,
        engine,
        emit,
        size.ctx,
        load.max_queue,
        shaper,
        stabilizer,
        accountant,
        points=edged is not None,
        adapters=adapters.infos,
        replay=replay,
    )
    info = _model_info(
        load,
        model,
        threads,
        n_ctx=size.ctx,
        n_pool=places.cells,
        kv_bytes_per_token=cell_bytes,
        has_template=prompts.has_template,
        cache_mode=_mode(slicer),
        cache_reason=reason,
        exact=load.reuse == "exact",
        least=LEAST,
        adapters=list(adapters.infos),
        control_vectors=vectors.applied,
        on_devices=taken(devices, list_devices()) if names else {},
    )
    return Worker(engine, intake, namespaces, store, info, emit, embedder, adapters, stabilizer, files)


def _mode(slicer: Slicer | None) -> Literal["blocks", "blocks with edges", "whole sequence", "off"]:
    from .edges import EdgeSlicer
    from .whole import WholeSlicer

    if slicer is None:
        return "off"
    edged = isinstance(slicer, EdgeSlicer)
    return "whole sequence" if isinstance(slicer, WholeSlicer) else "blocks with edges" if edged else "blocks"


def _model_info(load: LoadModel, model: Model, threads: int, **of_serving: Any) -> ModelInfo:
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
        threads=threads,
        namespace={},
        **of_serving,
    )


def _accountant(
    model: Model,
    emit: Callable[[Frame], None],
    store: Any,
    namespaces: Namespaces | None,
    grain: int,
    counters: defaultdict[str, float],
    stabilizer: stable.Stabilizer,
    replay: bool,
) -> Accountant:
    from .account import BEYOND, Accountant

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
        grain,
        trace=traced,
        counters=counters,
        in_force=lambda: stabilizer.rules,
        replay=replay,
    )


def _progress(emit: Callable[[Frame], None]) -> Callable[[float], None]:
    """Loading frames, at most a hundred."""
    sent = -1.0

    def report(progress: float) -> None:
        nonlocal sent
        if progress >= sent + 0.01 or (progress >= 1 > sent):
            sent = progress
            emit(Loading(progress=progress))

    return report


if __name__ == "__main__":
    sys.exit(main())
