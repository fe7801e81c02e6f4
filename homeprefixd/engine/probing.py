"""Main of the probe process: load a model, take its state apart, put it together again, compare logits.

    python -m homeprefixd.engine.probing [--whole|--adapters] < LoadModel as msgpack

Layers, their devices and flash attention are as the worker has resolved them. Says `loaded`, then an `Outcome` as JSON,
on stdout. Exit codes: 0 with an outcome, 3 the model cannot be loaded. It may die of anything (`probe.py`).
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ..child import become_child
from ..errors import ModelError
from ..frames.worker import LoadModel
from .probe import ADAPTERS, LOADED, WHOLE, Outcome

if TYPE_CHECKING:
    from .bindings import Model
    from .context import Batch, Context, ContextSettings
    from .slices import Slicer

_BLOCK, _BLOCKS = 16, 3  # tokens, and blocks of them
_SCRATCH, _SEQUENCES = 1, 2
_CELLS = 512

logger = logging.getLogger(__name__)


def main() -> int:
    """Probe the model that stdin names."""
    become_child("probe", "warning")
    load = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=LoadModel)
    from .bindings import Model
    from .context import Context, ContextSettings
    from .devices import choose_devices, list_devices
    from .llama_log import LlamaLog

    try:
        log = LlamaLog()
        devices = choose_devices(load.device, list_devices()) if load.gpu_layers else []
        model = Model.load(Path(load.path), log, gpu_layers=load.gpu_layers, devices=devices)
        types = load.kv_type, load.flash_attention, load.kv_type_v
        settings = ContextSettings(_CELLS, 64, _SEQUENCES, load.threads or 1, *types)
        if ADAPTERS in sys.argv[1:]:
            return _try_adapters(model, settings, load)
        context = Context(model, settings)
    except ModelError as error:
        logger.error("%s", error.message)
        return ModelError.exit_code
    print(LOADED, flush=True)
    print(msgspec.json.encode(_outcome(context, WHOLE in sys.argv[1:])).decode(), flush=True)
    return 0


def _try_adapters(model: Model, settings: ContextSettings, load: LoadModel) -> int:
    """Load each and compute with it."""
    from .adapters import Adapters
    from .context import Batch, Context

    print(LOADED, flush=True)
    batch = Batch(2)
    for file in load.adapters:
        adapters = Adapters.load(model, [file])
        problem = adapters.infos[0].problem
        if not problem:
            context = Context(model, settings)
            adapters.use(context, ((0, 1.0),))
            batch.set_steps([0, 1], [0, 0], [0, 1])
            context.decode(batch)
            context.synchronize()
            context.close()
        print(msgspec.json.encode(problem).decode(), flush=True)
    return 0


def _outcome(context: Context, whole: bool) -> Outcome:
    """In blocks if that works and not `whole`, else as a whole, where `make_slicer` itself has a negative control."""
    from .proving import make_slicer
    from .slices import SliceError
    from .whole import WholeSlicer

    slicer, reason = make_slicer(context, _SCRATCH, "it is not to be cut" if whole else "")
    if slicer is not None and not isinstance(slicer, WholeSlicer):
        try:
            outcome = _Trial(context, slicer).outcome()
        except SliceError as error:
            outcome = Outcome("off", f"its state cannot be restored in blocks: {error}")
        if outcome.mode != "off":
            return outcome
        context.clear()
        slicer, reason = make_slicer(context, _SCRATCH, outcome.reason)
    return Outcome("off" if slicer is None else "whole sequence", reason)


@dataclass(frozen=True)
class _Saved:
    """A prompt's blocks, and the logits of the token after them."""

    blocks: list[tuple[memoryview, memoryview | None]]  # span, edge
    logits: bytes


class _Trial:
    """Two prompts on one context."""

    def __init__(self, context: Context, slicer: Slicer) -> None:
        from .context import Batch
        from .edges import EdgeSlicer

        self._context, self._slicer = context, slicer
        self._edges = slicer if isinstance(slicer, EdgeSlicer) else None
        self._batch: Batch = Batch(64)

    def outcome(self) -> Outcome:
        """Restored blocks must give the same bits, and another prompt's last one or its edge other logits."""
        mine, other = self._computed(3), self._computed(5)
        if self._restored(mine.blocks) != mine.logits:
            return Outcome("off", "restored blocks give other logits")
        (span, _edge), (other_span, other_edge) = mine.blocks[-1], other.blocks[-1]
        wrong = (span, other_edge) if self._edges is not None else (other_span, None)
        if self._restored([*mine.blocks[:-1], wrong]) == mine.logits:
            return Outcome("off", "another prompt's state gives the same logits, so wrong state would go unnoticed")
        return Outcome("blocks" if self._edges is None else "blocks with edges")

    def _computed(self, seed: int) -> _Saved:
        blocks: list[tuple[memoryview, memoryview | None]] = []
        for index in range(_BLOCKS):
            start, end = index * _BLOCK, (index + 1) * _BLOCK
            self._decode(seed, start, end)
            span = memoryview(bytearray(self._slicer.size.of(_BLOCK)))
            edge = None
            if self._edges is not None:
                edge = memoryview(bytearray(self._edges.edge.of(_BLOCK)))
                self._edges.export_node(0, start, end, span, edge)
            else:
                self._slicer.export(0, start, end, span)
            blocks.append((span, edge))
        return _Saved(blocks, self._last())

    def _restored(self, blocks: list[tuple[memoryview, memoryview | None]]) -> bytes:
        for index, (span, edge) in enumerate(blocks):
            start = index * _BLOCK
            if self._edges is not None:
                needed = index == _BLOCKS - 1 or not self._edges.edge.recurrent
                self._edges.import_node(0, start, start, _BLOCK, span, edge if needed else None)
            else:
                self._slicer.import_block(0, start, _BLOCK, _BLOCK, span)
        if self._edges is not None:
            self._edges.check(0, _BLOCK * _BLOCKS)
        return self._last()

    def _last(self) -> bytes:
        """Logits of the token after the blocks, the same for every prompt; empties the context."""
        end = _BLOCK * _BLOCKS
        self._decode(1, end, end + 1)
        logits = self._context.logits(-1).tobytes()
        self._context.clear()
        return logits

    def _decode(self, seed: int, start: int, end: int) -> None:
        import numpy as np

        from .failures import DecodeError

        n_vocab = self._context.model.n_vocab
        tokens = (np.arange(start, end, dtype=np.int64) * 7919 * seed + seed) % n_vocab
        self._batch.set_prompt(tokens.astype(np.int32), start, 0)
        if not self._context.decode(self._batch):
            raise DecodeError(1, "no room in an empty context")
        self._context.synchronize()


if __name__ == "__main__":
    sys.exit(main())
