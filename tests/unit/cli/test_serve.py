"""What `serve` says while a model loads: one changing line on a terminal, a few lines elsewhere, last the URL."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import pytest

from homeprefixd import daemon
from homeprefixd.cli.serve import JsonReporter, Reporter
from homeprefixd.config import Config
from homeprefixd.daemon import DaemonState
from homeprefixd.errors import StoreError

URL = "http://127.0.0.1:8080"
STATES = [
    DaemonState("starting", "starting"),
    *(DaemonState("loading", "loading smol", progress / 100, URL) for progress in range(100)),
    DaemonState("ready", f"smol is ready at {URL}", 1.0, URL),
    DaemonState("stopping", "stopping", 0.0, URL),
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_in_a_log_a_few_lines() -> None:
    stream = io.StringIO()
    reporter = Reporter(stream)
    for state in STATES:
        reporter(state)
    assert stream.getvalue().splitlines() == [
        "homeprefixd: starting",
        "homeprefixd: loading smol 0%",
        "homeprefixd: loading smol 25%",
        "homeprefixd: loading smol 50%",
        "homeprefixd: loading smol 75%",
        f"homeprefixd: smol is ready at {URL}",
        "homeprefixd: stopping",
    ]


def test_on_a_terminal_one_line_that_changes() -> None:
    stream = Terminal()
    reporter = Reporter(stream)
    for state in STATES[:-1]:
        reporter(state)
    assert stream.getvalue().count("\n") == 1
    assert "loading smol 43%" in stream.getvalue()
    assert stream.getvalue().endswith(f"\x1b[Khomeprefixd: smol is ready at {URL}\n")


def test_what_changes_is_told_and_what_does_not_is_not() -> None:
    stream = io.StringIO()
    reporter = Reporter(stream)
    ready = DaemonState("ready", "ready", 1.0, URL)
    failed = DaemonState("loading", "cannot load smol: out of memory", 0.0, URL)
    for state in (ready, ready, DaemonState("loading", "loading smol", 0.0, URL), failed, ready):
        reporter(state)
    assert [line.removeprefix("homeprefixd: ") for line in stream.getvalue().splitlines()] == [
        "ready",
        "loading smol 0%",
        "cannot load smol: out of memory",
        "ready",
    ]


def test_json_is_a_line_for_each_state() -> None:
    stream = io.StringIO()
    reporter = JsonReporter(stream)
    for state in STATES:
        reporter(state)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["progress"] for line in lines if line["phase"] == "loading"] == [0.0, 0.25, 0.5, 0.75]
    assert lines[-2] == {"phase": "ready", "message": f"smol is ready at {URL}", "progress": 1.0, "url": URL}


def test_serve_hands_settings_to_the_daemon_and_its_code_back(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Config] = []

    def run(
        config: Config,
        *,
        on_state: Callable[[DaemonState], None],
        log: TextIO,
        load: Callable[[], Config],
        settings_file: Callable[[], Path | None],
    ) -> int:
        assert load() == config
        assert settings_file() == Path(os.environ["HOME"]) / ".config/homeprefixd/config.toml"
        seen.append(config)
        on_state(STATES[0])
        if config.server.port == 1:
            raise StoreError("another daemon uses this directory")
        return 7

    monkeypatch.setattr(daemon, "run", run)
    result = command("serve", "--port", "9000", "--kv-type", "q8_0", "--json")
    assert result.code == 7
    assert json.loads(result.out)["phase"] == "starting"
    assert (seen[0].server.port, seen[0].model.kv_type) == (9000, "q8_0")
    refused = command("serve", "--port", "1")
    assert refused.code == 6
    assert refused.err.endswith("homeprefixd: error: another daemon uses this directory\n")
