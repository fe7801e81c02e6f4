"""A daemon with the demo model: warm, match, pin and SIGHUP, as a person uses them."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from homeprefixd.bench.server import Server, homeprefixd
from homeprefixd.bench.stream import ask
from homeprefixd.cli.main import run

FLAGS = ["--ctx", "2048", "--parallel", "2", "--threads", "2", "--grace", "5"]


def request_of(subject: str, question: str = "Is lamp 3 on?") -> dict[str, Any]:
    """About 450 tokens."""
    lamps = " ".join(f"Lamp {i} of the {subject} is {'on' if i % 3 else 'off'}." for i in range(35))
    rules = f"You look after the {subject}. {lamps}"
    messages = [{"role": "system", "content": rules}, {"role": "user", "content": question}]
    return {"messages": messages, "temperature": 0, "max_tokens": 3}


def wait_until(condition: Callable[[], Any], what: str, timeout: float = 60.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"not within {timeout} s: {what}"
        time.sleep(0.05)


class Cli:
    """`homeprefixd ARGS --json` in this process, against one daemon."""

    def __init__(self, server: Server, capsys: pytest.CaptureFixture[str]) -> None:
        self._url = server.url
        self._capsys = capsys

    def __call__(self, *arguments: str) -> Any:
        self._capsys.readouterr()
        code = run([*arguments, "--json", "--url", self._url])
        said = self._capsys.readouterr()
        assert code == 0, said.err
        return json.loads(said.out)


def is_written(server: Server) -> bool:
    figures = server.get("/cache/stats")
    return bool(figures["queue"]["nodes"] == 0 and figures["warm"]["nodes"] > 0)


def is_another(server: Server, store_id: str) -> bool:
    try:
        return bool(server.get("/cache/stats")["store_id"] != store_id)
    except OSError:
        return False


def test_warm_match_and_pin(demo_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "house.json"
    file.write_text(json.dumps(request_of("house")))
    env = {"HOMEPREFIXD_CACHE_PRELOAD": "0"}
    flags = ["--model", str(demo_model), *FLAGS, "--hot", "64MiB", "--warm", "24MiB"]
    with homeprefixd(tmp_path / "cache", *flags, env=env) as server:
        cli = Cli(server, capsys)
        before = cli("match", str(file))
        assert (before["cached_tokens"], before["computed_tokens"]) == (0, before["prompt_tokens"])

        warmed = cli("warm", str(file))
        total = warmed["prompt_tokens"]
        assert (warmed["cached_tokens"], warmed["computed_tokens"]) == (0, total)
        assert total == before["prompt_tokens"]
        assert cli("warm", str(file))["cached_tokens"] == total - 1

        # what match says is what then happens
        found = cli("match", str(file))
        assert found["cache_tiers"] == {"hot": total - 1}
        answer = ask(server.url, request_of("house"), timeout=120)
        assert answer.timings["cache_n"] == total - 1
        other = request_of("house", "Is the door of the house closed?")
        said = server.post("/cache/match", other)
        answer = ask(server.url, other, timeout=120)
        assert answer.timings["cache_n"] == said["cached_tokens"] > total - 30

        pinned = cli("pin", str(file), "--label", "house")
        assert [one["tokens"] for one in pinned["pins"]] == [total]
        assert [one["labels"] for one in cli("ls")["prefixes"] if one["pinned"] == total] == [["house"]]
        wait_until(lambda: is_written(server), "all is written")

        # eviction pressure: more than what fits
        for subject in ("garden", "cellar", "attic"):
            ask(server.url, request_of(subject), timeout=120)
            wait_until(lambda: is_written(server), "all is written")
        figures = server.get("/cache/stats")
        assert figures["counters"]["evicted_warm"] > 5
        assert figures["pins"] == {"count": 1, "given_up": 0}
        assert server.get("/cache/stats")["daemon"]["workers"][0]["rates"]["token"] >= 0
        cold = server.post("/cache/match", request_of("moon"))
        began = time.monotonic()
        ask(server.url, {**request_of("moon"), "max_tokens": 1}, timeout=120)
        took = 1e3 * (time.monotonic() - began)
        assert took / 10 < cold["predicted_ttft_ms"] < 10 * took

        assert server.stop() == 0
        server.start()
        cli = Cli(server, capsys)
        [kept] = cli("pin")["pins"]
        assert (kept["label"], kept["tiers"]) == ("house", ["warm"])
        assert server.post("/cache/match", request_of("garden"))["cached_tokens"] < total / 2  # it was evicted
        found = cli("match", str(file))
        assert found["cache_tiers"] == {"warm": total - 1}
        answer = ask(server.url, request_of("house"), timeout=120)
        assert answer.timings["cache_tiers"] == {"warm": total - 1}

        assert len(cli("unpin", "--label", "house")["pins"]) == 1
        assert cli("pin")["pins"] == []
        reply = server.post("/v1/chat/completions", request_of("house"))
        assert cli("pin", "--request", reply["id"])["pins"][0]["tokens"] == total


@pytest.fixture
def hangup() -> Iterator[None]:
    """SIGHUP is not ignored by children, also where these tests were started with nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_sighup(demo_model: Path, tmp_path: Path, hangup: None) -> None:
    config = tmp_path / "config.toml"
    config.write_text("[cache]\nwarm = '40MiB'\nhot = '32MiB'\n")
    flags = ["--model", str(demo_model), "--config", str(config), *FLAGS]
    with homeprefixd(tmp_path / "cache", *flags) as server:
        assert server.process is not None

        def reload(text: str) -> None:
            config.write_text(text)
            assert server.process is not None
            os.kill(server.process.pid, signal.SIGHUP)

        def limits() -> tuple[float, float]:
            figures = server.get("/cache/stats")
            return figures["warm"]["limit"] / (1 << 20), figures["hot"]["allowance"] / (1 << 20)

        assert limits() == (40, 32)
        others = "daily_writes = '1GB'\n[model]\nmax_queue = 7\n[log]\nlevel = 'debug'\n"
        reload(f"[cache]\nwarm = '20MiB'\nhot = '16MiB'\n{others}")
        wait_until(lambda: limits() == (20, 16), "the budgets are smaller")
        assert server.get("/cache/stats")["writes"]["daily_limit"] == 10**9
        assert "model.max_queue" in server.log.read_text()
        reload("[cache]\nworm = 5\n")
        wait_until(lambda: "the old one stays" in server.log.read_text(), "the file is refused")
        assert limits() == (20, 16)
        reload("[cache]\nwarm = '30MiB'\nhot = '16MiB'\n")
        wait_until(lambda: limits() == (30, 16), "one of them is larger again")
        # the store that comes after a crash has them, too
        store = next(
            c for c in psutil.Process(server.process.pid).children() if "prefix.service" in " ".join(c.cmdline())
        )
        before = server.get("/cache/stats")["store_id"]
        store.kill()
        wait_until(lambda: is_another(server, before), "the store is back")
        assert limits() == (30, 16)
        reload("[cache]\nwarm = '40MiB'\nhot = '32MiB'\n")
        wait_until(lambda: limits() == (40, 32), "they are what they were at first")
        assert "until the next start" not in server.log.read_text()
        assert server.stop() == 0
