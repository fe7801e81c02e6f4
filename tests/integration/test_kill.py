"""SIGKILL of worker, store or daemon at random moments while requests prefill, save and evict.

The short form runs in CI; `scripts/test -m long tests/integration/test_kill.py` runs the 105 moments of the full form.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from homeprefixd.bench.server import Server, homeprefixd
from homeprefixd.bench.stream import Answer, ask
from homeprefixd.errors import UnavailableError
from tests.processes import alive

SUBJECTS = ["kitchen", "garden", "garage", "cellar", "attic", "library", "hallway", "terrace"]
FLAGS = ["--ctx", "2048", "--parallel", "2", "--threads", "2", "--grace", "5"]
SMALL = ["--hot", "32MiB", "--warm", "40MiB"]  # five of the prompts below: eviction never rests


def prompt(number: int) -> dict[str, Any]:
    """One of the prompts; about 300 tokens, the first 120 shared by all. Each has a secret that its answer must show.

    The secret is there three times, so that the model is sure of it: other batch shapes may round otherwise.
    """
    subject = SUBJECTS[number % len(SUBJECTS)]
    shared = "You look after a house. " + " ".join(f"Rule {i}: be kind and brief." for i in range(12))
    secret = f"The number of the {subject} is {secret_of(number)}."
    lamps = " ".join(f"Lamp {i} of the {subject} is {'on' if (i * 7 + number) % 3 else 'off'}." for i in range(15))
    text = f"{shared} {secret} {lamps} {secret} {secret} The number of the {subject} is"
    return {"prompt": text, "temperature": 0, "max_tokens": 5}


def secret_of(number: int) -> str:
    """Four digits."""
    return str(1000 + (number % len(SUBJECTS) + 1) * 7919 % 9000)


def answer_of(server: Server, number: int) -> Answer:
    return ask(server.url, prompt(number), path="/v1/completions", timeout=120)


def child(server: Server, part: str) -> int | None:
    """The process id of the daemon's worker or store."""
    if server.process is None:
        return None
    for process in psutil.Process(server.process.pid).children():
        if part in " ".join(process.cmdline()):
            return process.pid
    return None


def wait_until(condition: Any, what: str, timeout: float = 60.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"not within {timeout} s: {what}"
        time.sleep(0.05)


class Clients:
    """Two apps that ask at once until told to stop; keeps every answer and every error."""

    def __init__(self, server: Server, seed: int) -> None:
        self.server = server
        self.answers: list[tuple[int, str]] = []
        self.errors: list[str] = []
        self.ending = threading.Event()
        self.threads = [threading.Thread(target=self.work, args=(seed * 10 + i,)) for i in range(2)]

    def work(self, seed: int) -> None:
        numbers = random.Random(seed)
        while not self.ending.is_set():
            number = numbers.randrange(len(SUBJECTS))
            try:
                self.answers.append((number, answer_of(self.server, number).text))
            except (OSError, UnavailableError) as error:
                self.errors.append(f"{type(error).__name__}: {error}")
                time.sleep(0.2)

    def __enter__(self) -> Clients:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.ending.set()
        for thread in self.threads:
            thread.join(120)
            assert not thread.is_alive(), "a client hangs"


@pytest.fixture(scope="module")
def expected(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The answers with the cache off."""
    flags = ["--model", str(demo_model), "--reuse", "off", *FLAGS]
    with homeprefixd(tmp_path_factory.mktemp("off"), *flags) as server:
        answers = {number: answer_of(server, number).text for number in range(len(SUBJECTS))}
    assert all(secret_of(number) in text for number, text in answers.items()), answers
    return answers


def kill_at_random_moments(model: Path, directory: Path, expected: dict[int, str], moments: int, seed: int) -> None:
    choose = random.Random(seed)
    server = homeprefixd(directory, "--model", str(model), *FLAGS, *SMALL)
    server.start()
    try:
        for moment in range(moments):
            victim = ("worker", "store", "daemon")[moment % 3]
            assert server.process is not None
            pid = server.process.pid
            with Clients(server, seed * 1000 + moment) as clients:
                time.sleep(choose.uniform(0.05, 2.5))
                children = [p.pid for p in psutil.Process(pid).children()]
                target = {"worker": child(server, "engine.worker"), "store": child(server, "prefix.service")}.get(
                    victim, pid
                )
                assert target is not None
                os.kill(target, signal.SIGKILL)
                if victim == "daemon":
                    clients.ending.set()
            if victim == "daemon":
                server.process.wait(10)
                wait_until(lambda c=children: not any(map(alive, c)), "children end with the daemon", 10)
                server.start()
            else:
                wait_until(server.healthy, f"healthy after SIGKILL of the {victim}")
            if victim == "store":
                assert not clients.errors, f"moment {moment}: the store's death reached a client"
            if victim == "worker":
                assert all("UnavailableError" in error for error in clients.errors), clients.errors
            for number, text in clients.answers:
                assert text == expected[number], f"moment {moment}: wrong answer after SIGKILL of the {victim}"
            wait_until(lambda: child(server, "prefix.service"), "the store is back")
            wait_until(lambda: store_answers(server), "the store answers")
            number = choose.randrange(len(SUBJECTS))
            assert answer_of(server, number).text == expected[number]
        assert not list(directory.glob("*.damaged-*")), "a store was set aside"
        assert server.stop() == 0
    finally:
        server.__exit__()


def store_answers(server: Server) -> bool:
    try:
        return bool(server.get("/cache/stats")["warm"]["state"] == "ok")
    except OSError:
        return False


@pytest.mark.timeout(600)
def test_sigkill_at_random_moments(demo_model: Path, tmp_path: Path, expected: dict[int, str]) -> None:
    kill_at_random_moments(demo_model, tmp_path / "cache", expected, moments=9, seed=1)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_sigkill_at_105_random_moments(demo_model: Path, tmp_path: Path, expected: dict[int, str]) -> None:
    kill_at_random_moments(demo_model, tmp_path / "cache", expected, moments=105, seed=2)


@pytest.mark.parametrize("victim", ["daemon", "store"])
def test_what_was_saved_survives_sigkill(demo_model: Path, tmp_path: Path, victim: str) -> None:
    env = {"HOMEPREFIXD_CACHE_PRELOAD": "0"}
    with homeprefixd(tmp_path / "cache", "--model", str(demo_model), *FLAGS, env=env) as server:
        first = answer_of(server, 0)
        wait_until(lambda: server.get("/cache/stats")["queue"]["nodes"] == 0, "all is written")
        saved = server.get("/cache/stats")["warm"]["nodes"]
        assert saved >= first.usage["prompt_tokens"] // 64
        pid = server.process.pid if server.process and victim == "daemon" else child(server, "prefix.service")
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        if victim == "daemon":
            assert server.process is not None
            server.process.wait(10)
            server.start()
        wait_until(lambda: store_answers(server), "the store answers")
        assert server.get("/cache/stats")["warm"]["nodes"] == saved
        again = answer_of(server, 0)
        assert again.text == first.text
        assert again.timings["cache_tiers"].get("warm") == first.usage["prompt_tokens"] - 1
