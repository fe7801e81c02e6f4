"""`homeprefixd bench run` as a person runs it: a small household against a real daemon, restarted in the middle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import psutil
import pytest

from homeprefixd.bench.server import homeprefixd
from tests.processes import alive

pytestmark = pytest.mark.usefixtures("demo_model")

SMALL = ["--scale", "0.08", "--rate", "6", "--ctx", "2048", "--threads", "2"]


def bench(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    """A running `homeprefixd bench` whose files lie in `tmp_path`, with settings around that must not matter."""
    environ = {**os.environ, "HOMEPREFIXD_CACHE_REUSE": "off", "TMPDIR": str(tmp_path)}
    argv = [sys.executable, "-m", "homeprefixd", "bench", *arguments]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored, and passed on
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ)


def finished(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    out, err = process.communicate(timeout=280)
    assert process.returncode == code, out + err
    assert "Traceback" not in err
    return out, err


def test_a_household_from_cold_and_hot(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    files = ["--json", str(tmp_path / "run.json"), "--html", str(tmp_path / "run.html")]
    what = ["run", "household", "--serve", "--duration", "4", "--phases", "hot,cold", *SMALL, *files]
    out, err = finished(bench(tmp_path / "work", *what))
    document: dict[str, Any] = json.loads((tmp_path / "run.json").read_text())
    cold, hot = document["runs"]
    assert (cold["phase"], hot["phase"]) == ("cold", "hot")
    assert cold["errors"] == hot["errors"] == {}
    assert set(cold["summaries"]) >= {"all", "voice", "chat", "camera", "agent", "documents", "titles"}
    for run in (cold, hot):
        summary = run["summaries"]["all"]
        assert summary["ok"] == summary["requests"] == len(run["requests"]) >= 10
        assert summary["ttft"]["p50"] > 0
        assert summary["gap"]["p99"] > 0
        assert summary["output_rate"] > 0
        assert summary["prefill_rate"] > 0
        assert sum(summary["tiers"].values()) == summary["cached_tokens"]
        assert run["memory"]["peak_pss"] > 100 << 20
        assert run["evictions"] == {"hot": 0, "warm": 0}
        for request in run["requests"]:
            assert request["prompt_tokens"] == request["cached_tokens"] + request["timings"]["prompt_n"]
    assert hot["summaries"]["all"]["reuse"] > 0.8 > cold["summaries"]["all"]["reuse"]
    first = [(r["app"], r["session"], r["planned"]) for r in cold["requests"] if r["turn"] == 0]
    assert first == [(r["app"], r["session"], r["planned"]) for r in hot["requests"] if r["turn"] == 0]

    ElementTree.fromstring((tmp_path / "run.html").read_text())
    assert "homeprefixd, cold" in out
    assert "homeprefixd: starting, with nothing cached" in err
    assert list((tmp_path / "work").iterdir()) == []


def test_a_restart_in_the_middle(tmp_path: Path) -> None:
    what = ["run", "camera", "--serve", "--duration", "5", "--restart-at", "0.4", "--json", "-", *SMALL]
    out, _err = finished(bench(tmp_path, *what))
    (run,) = json.loads(out)["runs"]
    restart = run["restart"]
    assert restart["at"] == pytest.approx(2.0, abs=0.5)
    assert restart["requests"] >= 1
    late = [request for request in run["requests"] if request["sent"] > restart["at"] + restart["stop"]]
    assert late
    assert all(request["after_restart"] and request["outcome"] == "ok" for request in late)
    tiers = [request["tiers"] for request in run["requests"] if request["after_restart"]]
    assert sum(sum(each.values()) for each in tiers) > 0  # from the disk, or loaded from there at the start


def test_a_url_and_its_errors(demo_model: Path, tmp_path: Path) -> None:
    """Prompts do not fit the context of this daemon: nearly all fail, which the exit code says."""
    what = ["run", "voice", "--duration", "3", "--rate", "20", "--scale", "0.3", "--json", str(tmp_path / "run.json")]
    with homeprefixd(tmp_path / "cache", "--model", str(demo_model), "--ctx", "256", "--threads", "2") as server:
        out, err = finished(bench(tmp_path, *what, "--url", server.url), 1)
        assert server.healthy()
    (run,) = json.loads((tmp_path / "run.json").read_text())["runs"]
    assert run["summaries"]["all"]["errors"] == run["summaries"]["all"]["requests"] > 0
    assert "context" in next(iter(run["errors"]))
    assert "error, " in out
    assert "100.0 % of the requests failed" in err


def test_an_interrupted_run_ends_its_daemon(tmp_path: Path) -> None:
    what = ["run", "camera", "--serve", "--duration", "2", "--phases", "cold,hot", "--rate", "20", "--ctx", "2048"]
    process = bench(tmp_path, *what)
    deadline = time.monotonic() + 120
    children: list[psutil.Process] = []
    while len(children) < 3:
        assert time.monotonic() < deadline
        assert process.poll() is None
        children = psutil.Process(process.pid).children(recursive=True)
        time.sleep(0.05)
    time.sleep(1.0)
    process.send_signal(signal.SIGTERM)
    _out, err = process.communicate(timeout=90)
    assert process.returncode == 130
    assert err.endswith("homeprefixd: interrupted\n")
    assert not any(alive(child.pid) for child in children)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "kitchen", "--serve"], "no workload 'kitchen'"),
        (["run", "voice"], "Name whom to measure"),
        (["run", "voice", "--serve", "--phases", "hot"], "name cold too"),
        (["run", "voice", "--serve", "--html", "/nowhere/page.html"], "/nowhere/page.html cannot be written"),
        (["run", "voice", "--llama-server", "/nowhere/llama-server"], "is no file"),
        (["streams", "--counts", "1,x"], "--counts must be whole numbers"),
    ],
)
def test_what_is_wrong_is_said_at_once(tmp_path: Path, arguments: list[str], message: str) -> None:
    out, err = finished(bench(tmp_path, *arguments), 2)
    assert out == ""
    assert message in err
    assert err.startswith("homeprefixd: error: ")
    assert list(tmp_path.iterdir()) == []


def test_a_burst(tmp_path: Path) -> None:
    process = bench(tmp_path, "burst", "--requests", "2", "--prefix", "150", "--ctx", "2048", "--json")
    out, err = process.communicate(timeout=200)
    assert process.returncode in (0, 1), err  # the bar is the scheduler's, and 150 tokens are two blocks
    tokens = json.loads(out)[0]
    assert 0.9 < tokens["value"] < 2.0
    assert tokens["bar"] == "<= 1.05"
    assert list(tmp_path.iterdir()) == []


def test_streams_and_pythons_share(tmp_path: Path) -> None:
    what = ["streams", "--counts", "2,4", "--pairs", "1", "--tokens", "32", "--ctx", "2048", "--threads", "2", "--json"]
    process = bench(tmp_path, *what)
    out, err = process.communicate(timeout=200)
    assert process.returncode in (0, 1), err  # 1: a figure misses its bar, as it may on a busy machine
    rows = {row["what"]: row["value"] for row in json.loads(out)}
    assert set(rows) == {
        "decode throughput, 2 streams, tokens/s",
        "decode throughput, 4 streams, tokens/s",
        "Python's share of decode, 4 streams",
    }
    assert rows["decode throughput, 4 streams, tokens/s"] > 0
    assert 0 < rows["Python's share of decode, 4 streams"] < 0.5
