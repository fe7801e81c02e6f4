"""What flash attention costs and gains on this machine: `homeprefixd bench attention`.

The same model and tokens with it on and off, in this process: the prefill of whole chunks, and the small batches that
follow a restored prefix.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from ..engine.bindings import Model
from ..engine.context import Batch, Context, ContextSettings
from ..engine.llama_log import LlamaLog

BATCHES = (1, 4, 11, 32, 64)
DEPTH = 2176
"""Tokens before the measured batches."""


@dataclass(frozen=True)
class Timing:
    """Seconds: of a prefill of DEPTH tokens, and of one more batch of each size of BATCHES after it (medians)."""

    flash_attention: bool
    prefill: float
    batches: dict[int, float]


def measure(path: Path, threads: int, batch: int, rounds: int = 5) -> list[Timing]:
    """Flash attention off, then on. Raises ModelError."""
    model = Model.load(path, LlamaLog())
    tokens = (100 + np.arange(DEPTH + max(BATCHES)) % 1000).astype(np.int32)
    timings: list[Timing] = []
    for flash in (False, True):
        context = Context(model, ContextSettings(4096 + 256, batch, 2, threads, "f16", flash))
        one = Batch(batch)

        def run(start: int, count: int, context: Context = context, one: Batch = one) -> float:
            one.set_prompt(tokens[start : start + count], start, 0)
            begin = time.perf_counter()
            context.decode(one)
            context.synchronize()
            return time.perf_counter() - begin

        prefill = sum(run(at, min(batch, DEPTH - at)) for at in range(0, DEPTH, batch))
        batches: dict[int, float] = {}
        for count in BATCHES:
            times = []
            for _ in range(rounds):
                times.append(run(DEPTH, count))
                context.remove(0, DEPTH)
            batches[count] = median(times)
        timings.append(Timing(flash, prefill, batches))
        context.close()
    model.close()
    return timings
