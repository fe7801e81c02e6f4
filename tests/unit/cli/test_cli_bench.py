"""What `bench` prints: tables, and where a run stands."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest

from homeprefixd.bench.load import ERROR, Snapshot
from homeprefixd.bench.page import RUN_HEAD, TABLE_HEAD
from homeprefixd.bench.report import as_document
from homeprefixd.bench.rows import Row
from homeprefixd.cli.bench_workloads import _LEFT_OUT, Progress, progress_text, show
from homeprefixd.cli.output import Output, ProgressLine
from tests.unit.bench.measured import record, run_of


def test_the_tables() -> None:
    failed = record(2.0, None, outcome=ERROR, error="HTTP 500: no")
    run = run_of(record(0.0, 0.25), record(1.0, 2.0, app="chat"), failed)
    rows = [Row("cold: TTFT p95 / llama-server's", 0.4, "<= 0.5", True, "1 s and 2.5 s")]
    stream = io.StringIO()
    show(Output(stream=stream), as_document([run], rows, {}), rows)
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("household, 10 s, seed 0, scale 1, rate 1: 2 sessions, plan ")
    assert lines[2] == "homeprefixd, cold"
    assert lines[3].split() == " ".join(TABLE_HEAD).split()
    together = lines[4].split()
    assert together[:3] == ["all", "3", "1"]
    assert together[3:5] == ["1.12", "s"]
    assert "1,500 hot, 300 warm" in lines[4]
    assert "error, 1 x: HTTP 500: no" in lines
    assert " ".join(lines[-1].split()) == "cold: TTFT p95 / llama-server's 0.4 <= 0.5 met 1 s and 2.5 s"


def test_narrow_terminals_go_without_columns_that_are_there() -> None:
    assert set(_LEFT_OUT) < {*TABLE_HEAD, *RUN_HEAD}


def snapshot(**more: Any) -> Snapshot:
    fields: dict[str, Any] = {"target": "homeprefixd", "phase": "cold", "elapsed": 23.4, "duration": 60.0}
    fields |= {"sent": 14, "running": 2, "done": 12, "errors": 0, "ttft_p50": 0.31, "ttft_p95": 2.1, "state": ""}
    return Snapshot(**{**fields, **more})


def test_where_a_run_stands() -> None:
    text = "homeprefixd, cold: 23 of 60 s, 14 sent, 2 running, 12 done, TTFT p50 310 ms, p95 2.10 s"
    assert progress_text(snapshot()) == text
    waiting = progress_text(snapshot(errors=3, ttft_p50=None, state="stopping"))
    assert waiting.endswith("12 done, 3 errors, restart: stopping")


def test_in_a_pipe_a_line_each_ten_seconds() -> None:
    now = [100.0]
    stream = io.StringIO()
    progress = Progress(ProgressLine(stream), lambda: now[0])
    progress.say("starting")
    for step in range(1, 51):
        now[0] = 100.0 + step / 2
        progress.show(snapshot(elapsed=step / 2))
    assert stream.getvalue().splitlines() == ["starting", *(progress_text(snapshot(elapsed=t)) for t in (10.0, 20.0))]


@pytest.mark.parametrize(
    "line",
    [
        ["run", "kitchen", "--serve"],
        ["burst", "--requests", "0"],
        ["run", "--scale", "0"],
        ["turnover", "--size", "1MiB"],
        ["turnover", "--size", "big"],
        ["turnover", "--rate", "fast"],
        ["turnover", "--rate", "0"],
        ["turnover", "--times", "0"],
        ["turnover", "--dir", "/nowhere"],
    ],
)
def test_wrong_arguments(command: Callable[..., Any], line: list[str]) -> None:
    result = command("bench", *line)
    assert (result.code, result.out) == (2, "")
    assert "Traceback" not in result.err
