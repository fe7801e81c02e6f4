"""The daemon with the real store, API and worker: its size, its start, and all of it under the unit's rules."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from homeprefixd.bench.main_job import rss_anon

HERE = Path(__file__).parent
ROOT = HERE.parent.parent.parent
SANDBOX = [sys.executable, str(HERE / "sandbox.py"), str(ROOT / "systemd" / "homeprefixd.service")]
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
MAX_ANONYMOUS = 60 << 20
MAX_START = 1.0


@contextlib.contextmanager
def serve(directory: Path, model: str, *before: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any], float]]:
    """`homeprefixd serve --json`; the process, its "ready" state, and the seconds until that."""
    command = [*before, sys.executable, "-m", "homeprefixd", "serve", "--json", "--port", "0", "--model", model]
    begin = time.monotonic()
    with (
        (directory / "log").open("w") as log,
        subprocess.Popen(
            [*command, "--cache-dir", str(directory / "cache"), "--ctx", "2048"],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        ) as process,
    ):
        try:
            assert process.stdout is not None
            for line in process.stdout:
                state = json.loads(line)
                if state["phase"] == "ready":
                    break
            else:
                if process.wait() == 77:
                    pytest.skip("this kernel or container does not let a process be restricted so")
                pytest.fail(f"ended: {(directory / 'log').read_text()}")
            yield process, state, time.monotonic() - begin
        finally:
            process.kill()


def stop(process: subprocess.Popen[str]) -> int:
    process.send_signal(signal.SIGTERM)
    return process.wait(30)


def ask(url: str, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    with OPENER.open(request, timeout=60) as reply:
        return json.load(reply)


def test_size_and_start_without_a_model(tmp_path: Path) -> None:
    starts = []
    for _ in range(3):  # the best of three: the machine may be busy
        with serve(tmp_path, "none") as (process, state, seconds):
            starts.append(seconds)
            ask(state["url"], "/cache/stats")
            with OPENER.open(state["url"] + "/metrics", timeout=60) as reply:  # loads the library
                assert b"homeprefixd_store_up 1.0" in reply.read()
            with pytest.raises(urllib.error.HTTPError) as caught:
                ask(state["url"], "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]})
            with caught.value as refused:
                assert refused.code == 503
                assert "model.path" in refused.read().decode()
            sizes = {p.name(): rss_anon(p.pid) for p in psutil.Process(process.pid).children()}
            sizes["daemon"] = rss_anon(process.pid)
            assert stop(process) == 0
        if seconds < MAX_START:
            break
    print(f"ready after {min(starts):.2f} s; RssAnon in MB: { ({n: round(s / 1e6, 1) for n, s in sizes.items()}) }")
    assert min(starts) < MAX_START
    assert set(sizes) == {"daemon", "hpd-store"}
    assert max(sizes.values()) < MAX_ANONYMOUS


def test_a_model_is_served_under_the_units_rules(tmp_path: Path, demo_model: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "Name a colour. " * 20}], "max_tokens": 4, "temperature": 0}
    with serve(tmp_path, str(demo_model), *SANDBOX) as (process, state, _seconds):
        first = ask(state["url"], "/v1/chat/completions", chat)
        deadline = time.monotonic() + 60
        again = first
        while again["timings"]["cache_n"] == 0:  # the model's hash becomes known behind the first request
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            again = ask(state["url"], "/v1/chat/completions", chat)
        assert again["choices"][0]["message"] == first["choices"][0]["message"]
        assert rss_anon(process.pid) < MAX_ANONYMOUS
        today = ask(state["url"], "/cache/overview")["today"]
        assert today["requests"] >= 2
        assert stop(process) == 0
    assert "Traceback" not in (tmp_path / "log").read_text()
    with serve(tmp_path, str(demo_model), *SANDBOX) as (process, state, _seconds):
        kept = ask(state["url"], "/cache/overview")["today"]
        assert kept == today or kept["date"] > today["date"]  # midnight
        deadline = time.monotonic() + 60
        while not ask(state["url"], "/v1/chat/completions", chat)["timings"]["cache_tiers"]:
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
        assert stop(process) == 0
