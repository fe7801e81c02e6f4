"""`homeprefixd demo` as a stranger runs it, and interrupted half way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.processes import alive

pytestmark = pytest.mark.usefixtures("demo_model")


def demo(tmp_path: Path, *flags: str) -> subprocess.Popen[str]:
    """A running demo whose temporary files lie below `tmp_path`, with settings around that must not matter."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environ = {**os.environ, "TMPDIR": str(temporary), "HOMEPREFIXD_CACHE_REUSE": "off"}
    argv = [sys.executable, "-m", "homeprefixd", "demo", *flags]
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # tests in the background (`&`) ignore it, and pass that on
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ)


def test_the_demo_shows_what_it_promises_and_leaves_nothing(tmp_path: Path) -> None:
    process = demo(tmp_path, "--json")
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    cold, hot, restarted = json.loads(out)["steps"]
    assert 2150 <= cold["prompt_tokens"] <= 2300
    assert cold["computed"] == cold["prompt_tokens"]
    assert not any(cold["reused"].values())
    assert list(hot["reused"]) == ["hot"]
    assert hot["reused"]["hot"] > 2150
    assert hot["computed"] < 64
    assert restarted["reused"]["warm"] > 2150
    assert restarted["computed"] < 64
    assert hot["speedup"] > 10
    assert restarted["speedup"] > 10
    assert 0 < cold["stored_bytes"] < hot["stored_bytes"] < restarted["stored_bytes"]
    assert all(step["answer"] for step in (cold, hot, restarted))
    assert "Traceback" not in err
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_demo_ends_its_daemon(tmp_path: Path, number: signal.Signals) -> None:
    process = demo(tmp_path)
    children: list[psutil.Process] = []
    deadline = time.monotonic() + 60
    while len(children) < 3:  # daemon, store and worker: the model loads or the first prompt is computed
        assert time.monotonic() < deadline
        assert process.poll() is None
        children = psutil.Process(process.pid).children(recursive=True)
        time.sleep(0.05)
    time.sleep(1.5)
    process.send_signal(number)
    _out, err = process.communicate(timeout=60)
    if number == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 130
        assert err.endswith("homeprefixd: interrupted\n")
    deadline = time.monotonic() + 10
    while any(alive(child.pid) for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert number == signal.SIGKILL or list((tmp_path / "tmp").iterdir()) == []
