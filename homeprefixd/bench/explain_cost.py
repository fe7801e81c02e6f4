"""What it costs to explain requests and to look at the daemon: `homeprefixd bench explain`.

A daemon of its own with the model serves household prompts, with explaining on and off. The worker says how much
processor time it spent on each account, for which no request waits. What the metrics and the page cost is the processor
time that the daemon and the store take for answering them, as a share of the time between two: a scrape each 15 s, an
event of the page each 0.4 s at most.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil  # type: ignore[import-untyped, unused-ignore]

from .household import household_messages
from .rows import Row, at_most
from .server import Server, homeprefixd
from .stream import Answer, ask

MOST_MS = 2.0
"""Milliseconds that an explanation may cost a request."""

MOST_SHARE = 0.01
"""Share of a core that metrics and page may take."""

SCRAPE_SECONDS = 15.0
EVENT_SECONDS = 0.4
_ASKED = 60  # times that metrics and page are asked for
_PATIENCE = 10.0  # seconds until a worker tells its figures
_SIZES = (400, 1200, 2200)  # tokens of prompts


def measure(model: Path, threads: int, requests: int = 12, say: Callable[[str], None] = lambda text: None) -> list[Row]:
    """`requests`: with explaining, and as many without. Raises UnavailableError where the daemon does not serve."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="homeprefixd-bench-") as folder:
        for explain in ("on", "off"):
            say(f"{requests} requests, explaining {explain}")
            flags = ["--model", str(model), "--threads", str(threads), "--ctx", "4096", "--hot", "512MiB"]
            env = {"HOMEPREFIXD_RECORDS_EXPLAIN": explain}
            with homeprefixd(Path(folder) / explain, *flags, "--warm", "1GiB", env=env) as server:
                for number in range(requests):
                    _ask(server, number)
                seconds, count = _spent(server, requests)
                if explain == "off":
                    rows.append(at_most("explaining turned off, ms a request", seconds / requests * 1e3, 0.0, ""))
                    continue
                each = seconds / max(1, count) * 1e3
                note = f"processor time, mean of {count:.0f}; prompts of {_SIZES[0]} to {_SIZES[-1]:,} tokens"
                rows.append(at_most("explaining, ms a request", each if count else None, MOST_MS, note))
                say("metrics and page")
                rows += [
                    _share(server, "/metrics", "metrics", SCRAPE_SECONDS),
                    _share(server, "/cache/overview", "the page", EVENT_SECONDS),
                ]
    return rows


def _ask(server: Server, number: int) -> Answer:
    """Prompts of several lengths, each with a clock that has gone on."""
    size = _SIZES[number % len(_SIZES)]
    messages = household_messages(f"It is {number} past nine. Is the gate shut?", size=size)
    return ask(server.url, {"messages": messages, "max_tokens": 2, "temperature": 0})


def _spent(server: Server, requests: int) -> tuple[float, float]:
    """Seconds, and for how many requests: by the worker's heartbeat after all of them."""
    until = time.monotonic() + _PATIENCE
    while True:
        counters = server.get("/cache/stats")["daemon"]["workers"][0]["counters"]
        if counters.get("decode_tokens", 0.0) >= requests or time.monotonic() > until:
            return counters.get("account_seconds", 0.0), counters.get("accounts", 0.0)
        time.sleep(0.1)


def _share(server: Server, path: str, what: str, between: float) -> Row:
    """Of a core, while `path` is asked for each `between` seconds."""
    processes = _processes(server)
    began = sum(map(_used, processes))
    for _ in range(_ASKED):
        server.read(path)
    seconds = (sum(map(_used, processes)) - began) / _ASKED
    note = f"{seconds * 1e3:.1f} ms of processor time each, one each {between:g} s"
    return at_most(f"{what}, share of a core", seconds / between, MOST_SHARE, note)


def _processes(server: Server) -> list[psutil.Process]:
    if server.process is None:
        return []
    daemon = psutil.Process(server.process.pid)
    return [daemon, *daemon.children(recursive=True)]


def _used(process: psutil.Process) -> float:
    """Seconds of processor time until now."""
    times = process.cpu_times()
    return float(times.user + times.system)
