"""Where the time of steps that generate goes, by function: `homeprefixd bench profile`.

The engine of one worker in this process, without a store, under Python's profiler, while several streams decode. The
profiler makes each call of Python slower and llama.cpp not, so the shares of Python are upper bounds; what it costs
without a profiler says `homeprefixd bench streams`.
"""

from __future__ import annotations

import cProfile
import pstats
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..engine.building import build
from ..engine.text_worker import TextWorker
from ..errors import UnavailableError
from ..frames import Frame
from ..frames.worker import Delta, Failure, Finished, Generate, LoadModel, Sampling
from ..prefix.client import StoreClient

NATIVE = frozenset({("context.py", "decode"), ("sampling.py", "sample")})
"""Functions that call llama.cpp in a step that generates: file and name."""

_SHOWN = 12  # functions
_MOMENT = 0.001  # seconds
_PROMPT = 64  # tokens
_MEMORY = 1 << 30  # bytes that the pool of cells may take


@dataclass(frozen=True)
class Row:
    """Of one token of one stream: calls, and seconds within the function itself. `share` of all that was spent."""

    function: str
    calls: float
    seconds: float
    share: float


def measure(path: Path, threads: int, streams: int, tokens: int) -> list[Row]:
    """First llama.cpp, then Python's functions, the most expensive first; the last row is all of Python.

    Raises ModelError, UnavailableError where a stream ended early.
    """
    begun, ended, failed = set[str](), list[str](), list[str]()

    def emit(frame: Frame) -> None:
        match frame:
            case Failure():
                failed.append(frame.message)
            case Finished():
                ended.append(frame.rid)
            case Delta():
                begun.add(frame.rid)

    worker = build(_load(path, threads, streams, tokens), emit, StoreClient())
    if not isinstance(worker, TextWorker):
        raise UnavailableError(f"{path}: a model of embeddings generates nothing.")
    engine = worker.engine
    worker.intake.start()
    for number in range(streams):
        worker.intake.put(_request(str(number), tokens))

    def run(until: Callable[[], bool]) -> None:
        while not (failed or ended or until()):
            if not engine.step():
                time.sleep(_MOMENT)

    run(lambda: len(begun) == streams)  # what is prefilled is none of it
    before = dict(engine.counters)
    profile = cProfile.Profile()
    profile.runcall(run, lambda: False)
    if failed or len(begun) < streams:
        raise UnavailableError(failed[0] if failed else "A stream ended before the others began: ask for more tokens.")
    native, whole, count = (
        engine.counters[name] - before.get(name, 0.0)
        for name in ("decode_native_seconds", "decode_step_seconds", "decode_tokens")
    )
    return _rows(pstats.Stats(profile), native, whole, count)


def _load(path: Path, threads: int, streams: int, tokens: int) -> LoadModel:
    ctx = (_PROMPT + tokens) // 256 * 256 + 512
    return LoadModel(
        path=str(path),
        alias="profile",
        ctx=ctx,
        pool=4 * streams * ctx,  # room for each, however they are spread over contexts
        memory=_MEMORY,
        parallel=streams,
        threads=threads,
        batch=256,
        kv_type="f16",
        flash_attention=False,
        gpu_layers=0,
        chat_template="",
        template_timeout=5.0,
        reuse="off",
        salt="",
        max_queue=streams,
        max_stall=0.5,
        explain=False,
    )


def _request(rid: str, tokens: int) -> Generate:
    """A text of its own, streamed, that does not end before `tokens`."""
    prompt = [100 + (7 * int(rid) + at) % 1000 for at in range(_PROMPT)]
    sampling = Sampling(seed=1, ignore_eos=True)
    return Generate(rid, None, prompt, None, {}, tokens, [], sampling, True, cache=False)


def _rows(stats: Any, native: float, whole: float, tokens: float) -> list[Row]:
    """`native` and `whole`: seconds of the steps that generate, within llama.cpp and all."""

    def row(function: str, calls: float, seconds: float) -> Row:
        return Row(function, calls / tokens, seconds / tokens, seconds / whole)

    rows: list[Row] = []
    calling, beyond = 0, -native
    for (file, _line, name), (_direct, calls, own, _all, _callers) in stats.stats.items():
        place = Path(file)
        if (place.name, name) in NATIVE:
            calling, beyond = calling + calls, beyond + own
        elif "acquire" not in name:  # of a lock: waiting
            rows.append(row(f"{place.stem}: {name}" if place.suffix else name, calls, own))
    rows.append(row("calling llama.cpp", calling, max(0.0, beyond)))
    rows.sort(key=lambda row: row.seconds, reverse=True)
    return [row("within llama.cpp", calling, native), *rows[:_SHOWN], row("all of Python", 0, whole - native)]
