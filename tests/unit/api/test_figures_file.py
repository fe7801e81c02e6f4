"""The day's figures over restarts: what is kept, what is not taken for it, and what a full disk does: nothing."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from pathlib import Path

import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer
from scripted_backend import TIMINGS, MemoryAdmin, ScriptedBackend

from homeprefixd.api.app import create_app
from homeprefixd.api.figures_file import MOST_MODELS, Day, Figures, FiguresFile, Rate
from homeprefixd.api.record_file import recorded
from homeprefixd.config import ServerConfig
from homeprefixd.frames.worker import Accepted, Finished, Timings

CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
ALL_HOT = msgspec.structs.replace(TIMINGS, cache_n=99, prompt_n=1, prompt_ms=5.0, cache_tiers={"hot": 99})
SECONDS_A_TOKEN = 0.018 / 36  # of TIMINGS


async def day_of(path: Path, timings: list[Timings], model_file: str = "/m.gguf") -> dict[str, float]:
    """One life of a daemon, which answers requests that go so: the figures of the day."""
    backend = ScriptedBackend()
    app = create_app(
        backend,
        MemoryAdmin(),
        ServerConfig(),
        records=recorded(None, FiguresFile(path, 60.0), lambda model: model_file),
    )
    async with TestClient(TestServer(app)) as client:
        for one in timings:
            backend.script = [Accepted("", 100), Finished("", "stop", "x", None, one)]
            assert (await client.post("/v1/chat/completions", json=CHAT)).status == 200
        found: dict[str, float] = (await (await client.get("/cache/overview")).json())["today"]
    return found


async def test_the_day_goes_on_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    first = await day_of(path, [TIMINGS])
    assert path.stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / "figures.json.part").exists()
    again = await day_of(path, [])
    assert (first["requests"], again) == (1, first)
    third = await day_of(path, [ALL_HOT])  # nothing is computed here, but it is known how long it took
    assert (third["requests"], third["unmeasured"]) == (2, 0)
    assert third["saved_s"] == pytest.approx(first["saved_s"] + 99 * SECONDS_A_TOKEN - 0.0015)


async def test_what_is_not_known_is_counted(tmp_path: Path) -> None:
    found = await day_of(tmp_path / "figures.json", [ALL_HOT, ALL_HOT])
    assert (found["requests"], found["saved_s"], found["unmeasured"]) == (2, 0.0, 2)


async def test_another_file_of_that_name_has_another_rate(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    await day_of(path, [TIMINGS], "/small.gguf")
    assert (await day_of(path, [ALL_HOT], "/large.gguf"))["unmeasured"] == 1


async def test_what_is_measured_counts_more_than_what_was(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    kept = FiguresFile(path)
    kept.put(Figures(rates={"demo": Rate(1.0, "/m.gguf")}))
    kept.close()
    assert (await day_of(path, [TIMINGS]))["saved_s"] == pytest.approx(64 * SECONDS_A_TOKEN - 0.0015)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"version": 2, "day": {"requests": 7}}',
        '{"day": {"requests": -7}}',
        '{"day": {"saved_s": 1e999}}',
        '{"rates": {"demo": {"tokens_per_s": 0}}}',
        '{"day": {"requests": 7}}' + " " * 70_000,
        "[" * 60_000,
    ],
)
def test_a_damaged_or_foreign_file(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "figures.json"
    path.write_text(text)
    assert FiguresFile(path).read() == Figures()
    [line] = caplog.records
    assert str(path) in line.message


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_no_file(tmp_path: Path, make: object, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "figures.json"
    assert callable(make)
    make(path)
    assert FiguresFile(path).read() == Figures()
    assert len(caplog.records) == 1


def test_there_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert FiguresFile(tmp_path / "none" / "figures.json").read() == Figures()
    assert caplog.records == []  # so it is at the first start


def test_a_directory_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    file = FiguresFile(tmp_path / "none" / "figures.json", 0.0)
    for number in range(3):
        file.put(Figures(day=Day(requests=number)))
        for thread in threading.enumerate():
            if thread.name == "figures":
                thread.join(10)  # it has tried
    file.close()
    assert len(caplog.records) == 1  # told once
    assert list(tmp_path.iterdir()) == []


def test_it_is_written_from_time_to_time(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    file = FiguresFile(path, 0.2)
    deadline = time.monotonic() + 10
    written = set()
    for number in range(1, 1000):
        file.put(Figures(day=Day(requests=number)))
        if path.exists():
            written.add(json.loads(path.read_bytes())["day"]["requests"])
        if len(written) == 2 or time.monotonic() > deadline:
            break
        time.sleep(0.005)
    file.close()
    assert len(written) == 2
    assert max(written) > 4  # not with each request
    assert FiguresFile(path).read().day.requests == number  # the last one by the end


async def test_the_file_stays_small(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    kept = FiguresFile(path)
    kept.put(Figures(rates={f"m{number}": Rate(5.0) for number in range(MOST_MODELS)}))
    kept.close()
    await day_of(path, [TIMINGS])
    rates = list(FiguresFile(path).read().rates)
    assert (rates[0], rates[-1], len(rates)) == ("m1", "demo", MOST_MODELS)
