"""A household for a long time: mixed requests, clients that leave, processes that die, a context that is too small.

Every prompt has a secret that its answer must show and no other may. At the end nothing is left: no cells, sequences,
leases, descriptors, processes, and no more memory than after the first tenth.

The short form runs in CI; `scripts/test -m long tests/integration/test_soak.py` is the full form of 10,000 requests,
for which two cores that have nothing else to do need an hour.
`SOAK_REQUESTS` in the environment sets another number for it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from homeprefixd.bench.server import Server, homeprefixd
from homeprefixd.bench.stream import ask
from homeprefixd.errors import UnavailableError
from tests.integration.test_kill import child, wait_until

CLIENTS = 6
HOUSES = 3  # prefixes that are shared
THINGS = ["kitchen", "garden", "garage", "cellar", "attic", "library", "hallway", "terrace", "office", "nursery"]
# four sequences in two contexts of 512 cells: two of the longer prompts fill one, and a long reply finds it full
FLAGS = ["--ctx", "384", "--parallel", "4", "--threads", "2", "--hot", "96MiB", "--warm", "192MiB", "--grace", "5"]
POOL = {"HOMEPREFIXD_MODEL_POOL": "384"}


def secret_of(number: int) -> str:
    """Four digits, another for each number below 9,000."""
    return str(1000 + number * 7919 % 9000)


def body(number: int, chance: random.Random) -> dict[str, Any]:
    """A prompt of 100 to 300 tokens with the secret of `number`, said three times so that the model is sure of it."""
    thing = THINGS[number % len(THINGS)]
    house = number // 7 % HOUSES
    rules = " ".join(f"Rule {i} of house {house}: be kind, brief and honest." for i in range(3))
    secret = f"The number of the {thing} is {secret_of(number)}."
    lamps = " ".join(
        f"Lamp {i} is {'on' if (i * 7 + number) % 3 else 'off'}." for i in range(chance.choice((0, 5, 20)))
    )
    text = f"{rules} {secret} {lamps} {secret} {secret} The number of the {thing} is"
    return {"prompt": text, "temperature": 0, "max_tokens": chance.choice((5, 5, 5, 5, 5, 5, 30, 200))}


class Household:
    """Clients that ask until `requests` have been sent in all, and someone who kills workers and stores."""

    def __init__(self, server: Server, requests: int, seed: int) -> None:
        self.server, self.requests = server, requests
        self.lock = threading.Lock()
        self.sent = self.answered = self.left = self.refused = self.interrupted = 0
        self.wrong: list[str] = []
        self.set_aside: dict[int, float] = {}  # by worker: how often a context was full
        self.threads = [threading.Thread(target=self.work, args=(seed * 100 + i,)) for i in range(CLIENTS)]

    def run(self, kill_every: int) -> None:
        for thread in self.threads:
            thread.start()
        killed = 0
        while any(thread.is_alive() for thread in self.threads):
            if kill_every and self.sent >= (killed + 1) * kill_every and self.server.healthy():
                part = ("engine.worker", "prefix.service")[killed % 2]
                killed += 1
                self.look()
                if pid := child(self.server, part):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        self.look()

    def look(self) -> None:
        """Note what the worker has counted, before it is gone."""
        with contextlib.suppress(OSError):
            for worker in self.server.get("/cache/stats")["daemon"]["workers"]:
                self.set_aside[worker["pid"]] = (worker["counters"] or {}).get("set_aside", 0.0)

    def work(self, seed: int) -> None:
        chance = random.Random(seed)
        while True:
            with self.lock:
                if self.sent >= self.requests:
                    return
                self.sent += 1
            number = chance.randrange(40 if chance.random() < 0.85 else 9000)
            try:
                if chance.random() < 0.15:
                    self.leave(number, chance)
                else:
                    self.stay(number, chance)
            except UnavailableError as error:
                with self.lock:
                    self.refused += "HTTP 429" in str(error)
                    self.interrupted += "HTTP 429" not in str(error)
                time.sleep(0.2)

    def stay(self, number: int, chance: random.Random) -> None:
        text = ask(self.server.url, body(number, chance), path="/v1/completions", timeout=300).text
        with self.lock:
            self.answered += 1
            if not text.strip().startswith(secret_of(number)):
                self.wrong.append(f"{number}: {secret_of(number)} expected, {text!r}")

    def leave(self, number: int, chance: random.Random) -> None:
        parts = urlsplit(self.server.url)
        connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=60)
        payload = json.dumps({**body(number, chance), "stream": chance.random() < 0.7})
        try:
            connection.request("POST", "/v1/completions", payload, {"Content-Type": "application/json"})
            time.sleep(chance.random() ** 3 * 2)
        except OSError as error:
            raise UnavailableError(str(error)) from error
        finally:
            connection.close()
            with self.lock:
                self.left += 1


def figures(server: Server) -> dict[str, Any]:
    """What must not grow: descriptors and memory (MB) of the daemon and its children."""
    assert server.process is not None
    daemon = psutil.Process(server.process.pid)
    found = {}
    for process in (daemon, *daemon.children()):
        line = " ".join(process.cmdline())
        name = next((part for part in ("engine.worker", "prefix.service") if part in line), "daemon")
        found[name] = (process.num_fds(), process.memory_info().rss - process.memory_info().shared >> 20)
    return found


def is_idle(server: Server) -> bool:
    try:
        stats = server.get("/cache/stats")
    except OSError:
        return False
    (worker,) = stats["daemon"]["workers"]
    busy = worker["requests"] or worker["running"] or worker["waiting"] or worker["cells_used"]
    return worker["state"] == "ok" and not busy and stats["hot"]["leased"] == 0


def soak(model: Path, directory: Path, requests: int, kill_every: int, seed: int) -> None:
    with homeprefixd(directory, "--model", str(model), *FLAGS, env=POOL) as server:
        start = Household(server, max(20, requests // 10), seed)
        start.run(0)
        wait_until(lambda: is_idle(server), "the engine is idle", 60)
        before = figures(server)
        main = Household(server, requests - start.sent, seed + 1)
        main.run(kill_every)
        wait_until(server.healthy, "healthy at the end")
        wait_until(lambda: is_idle(server), "the engine is idle", 60)
        after = figures(server)
        stats = server.get("/cache/stats")
        (worker,) = stats["daemon"]["workers"]
        set_aside = sum({**start.set_aside, **main.set_aside}.values())
        print(
            f"{start.sent + main.sent} requests: {start.answered + main.answered} answered, "
            f"{start.left + main.left} left, {start.refused + main.refused} refused, {main.interrupted} interrupted; "
            f"{worker['restarts']} restarts; set aside {set_aside:.0f}; before {before}, after {after}"
        )
        assert not start.wrong
        assert not main.wrong
        assert start.interrupted == 0  # nothing was killed there
        assert start.answered + main.answered > 0.6 * requests
        assert set_aside >= requests // 1000
        assert not worker["counters"].get("integrity_errors")
        assert not worker["counters"].get("position_errors")
        for name, (descriptors, memory) in after.items():
            assert descriptors <= before[name][0] + 8, (name, before, after)
            assert memory <= 1.3 * before[name][1] + 60, (name, before, after)
        assert server.stop() == 0


@pytest.mark.timeout(600)
def test_a_household_leaves_nothing_behind(demo_model: Path, tmp_path: Path) -> None:
    soak(demo_model, tmp_path / "cache", requests=80, kill_every=30, seed=1)


@pytest.mark.long
@pytest.mark.timeout(4 * 3600)
def test_ten_thousand_requests(demo_model: Path, tmp_path: Path) -> None:
    requests = int(os.environ.get("SOAK_REQUESTS", "10000"))
    soak(demo_model, tmp_path / "cache", requests=requests, kill_every=max(50, requests // 40), seed=2)
