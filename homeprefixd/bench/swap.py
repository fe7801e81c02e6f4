"""Two models with memory for one, asked in turn, A, B, A: `homeprefixd bench swap`.

What the second A's first request waits for beside the loading itself, against a hot hit on a model that stays loaded,
in the same round. The time of loading is the daemon's own (`load_ms` of the request's record): from when the request
came until the worker had it, with the other model's unloading.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from ..config import ModelConfig
from ..errors import UnavailableError
from ..models.catalog import Catalog
from ..models.loading import guess_memory
from .household import household_messages, household_question
from .rows import Row, at_least, at_most
from .server import Server, homeprefixd
from .stream import Answer, ask

BAR = 1.3
"""Of the time to first token beyond the load time, by that of a hot hit; as after a restart."""

PREFIX_TOKENS = 2200

_CTX, _POOL, _PARALLEL = 4096, 8192, 2
_HOT = 512 << 20  # bytes
_LEAST_LOAD = 0.02  # s
_HASH_PATIENCE = 600.0  # s


class Round(NamedTuple):
    """Seconds. `back`: A's first request after B was asked; `hot`: those before B and after it."""

    back: float
    load: float
    hot: tuple[float, float]
    reused: int  # tokens of `back` that came from RAM
    wanted: int  # of the hot hit before

    @property
    def beyond(self) -> float:
        """What loading does not explain."""
        return self.back - self.load


def measure(
    model: Path,
    other: Path | None,
    threads: int,
    rounds: int,
    say: Callable[[str], None],
    *,
    size: int = PREFIX_TOKENS,
) -> list[Row]:
    """The rows. `other`: B; None: the same file under another name. `size`: of A's prefix, in tokens.

    Raises UnavailableError, ModelError.
    """
    with tempfile.TemporaryDirectory(prefix="homeprefixd-swap-") as folder:
        names = [Path(folder) / "a.gguf", Path(folder) / "b.gguf"]
        for name, target in zip(names, (model, other or model), strict=True):
            name.symlink_to(target)
        config = Path(folder) / "config.toml"
        config.write_text(_settings(names, threads))
        server = homeprefixd(Path(folder) / "cache", "--config", str(config))
        with server:
            return rows_of([*_rounds(server, rounds, size, say)], other is None)


def _settings(models: list[Path], threads: int) -> str:
    """A configuration with memory for the larger of the two, and not for both."""
    settings = [ModelConfig(path=str(path), ctx=_CTX, pool=_POOL, parallel=_PARALLEL) for path in models]
    needs = [guess_memory(Catalog.from_config(one).specs[0], 0) for one in settings]
    listed = "".join(
        f"[[models.list]]\nalias = '{alias}'\npath = '{path}'\n" for alias, path in zip("ab", models, strict=True)
    )
    return f"""
[model]
path = "none"
ctx = {_CTX}
pool = {_POOL}
parallel = {_PARALLEL}
threads = {threads}
[models]
memory = {_HOT + max(needs) + min(needs) // 2}
{listed}
[cache]
hot = {_HOT}
warm = "1GiB"
"""


def _rounds(server: Server, rounds: int, size: int, say: Callable[[str], None]) -> Iterator[Round]:
    numbers = iter(range(1, 1_000_000))

    def asked(alias: str, **more: Any) -> Answer:
        messages = household_messages(household_question(next(numbers)), size=size)
        return ask(server.url, {"model": alias, "messages": messages, "temperature": 0, "max_tokens": 2, **more})

    def other() -> None:
        messages = [{"role": "user", "content": f"Say {next(numbers)}."}]
        asked("b", messages=messages)

    say("A is asked cold")
    asked("a", max_tokens=1)
    _wait_until_known(server, "a")
    asked("a")
    for number in range(1, rounds + 1):
        say(f"round {number} of {rounds}")
        before = asked("a")
        other()
        back = asked("a")
        after = asked("a")
        tiers = back.timings.get("cache_tiers", {})
        yield Round(
            back.ttft,
            _load_seconds(server, back.id),
            (before.ttft, after.ttft),
            tiers.get("hot", 0) + tiers.get("shared", 0),
            before.timings["cache_n"],
        )


def _load_seconds(server: Server, request: str) -> float:
    load = float(server.get(f"/cache/explain/{request}")["record"]["load_ms"]) / 1e3
    if load < _LEAST_LOAD:
        raise UnavailableError("the model was not swapped: both fit into memory at once")
    return load


def _wait_until_known(server: Server, alias: str) -> None:
    """Until the file is hashed: before that nothing is kept. Raises UnavailableError."""
    deadline = time.monotonic() + _HASH_PATIENCE
    while True:
        [found] = [one for one in server.get("/models/details")["models"] if one["id"] == alias]
        if found["namespace"]:
            return
        if time.monotonic() > deadline:
            raise UnavailableError(f"{found['path']} was not hashed within {_HASH_PATIENCE:.0f} s")
        time.sleep(0.1)


def rows_of(rounds: list[Round], same: bool) -> list[Row]:
    """`same`: both models were one file, of which the system keeps one copy."""
    hot = median(seconds for one in rounds for seconds in one.hot)
    beyond = median(one.beyond for one in rounds)
    ratio = median(2 * one.beyond / sum(one.hot) for one in rounds)
    reused = min(one.reused / one.wanted for one in rounds)
    load = median(one.load for one in rounds)
    note = f"{beyond * 1e3:.0f} ms beyond the load, hot {hot * 1e3:.0f} ms; {len(rounds)} rounds"
    loaded = f"with {'the same file under another name' if same else 'another model'}"
    return [
        at_most("TTFT of the second A's first request beyond the load / hot", ratio, BAR, note),
        at_least("its tokens from RAM / a hot hit's tokens", reused, 0.99, "the least of all rounds"),
        at_most("load of A with B's unloading, s", load, None, loaded),
    ]
