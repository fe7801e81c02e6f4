"""The file by which commands find the daemon."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from homeprefixd import daemon_file
from homeprefixd.daemon_file import DAEMON_FILE, DaemonFile

URL = "http://127.0.0.1:1"


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("not within 5 s")


async def test_is_written_once_that_is_possible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What another daemon left is not kept for its own either; one warning, however often it fails."""
    monkeypatch.setattr(daemon_file, "LOOK_EVERY", 0.01)
    shown = tmp_path / DAEMON_FILE
    shown.write_text('{"pid": 1, "url": "http://127.0.0.1:2"}')
    in_the_way = tmp_path / f"{DAEMON_FILE}.{os.getpid()}"
    in_the_way.mkdir()
    file = DaemonFile(tmp_path, URL)
    with caplog.at_level(logging.WARNING):
        file.write()
        keeper = asyncio.create_task(file.keep())
        await asyncio.sleep(0.1)
        assert json.loads(shown.read_text())["url"] != URL
        assert len(caplog.records) == 1
        in_the_way.rmdir()
        await until(lambda: bool(json.loads(shown.read_text())["url"] == URL))
        shown.unlink()
        await until(shown.exists)
    keeper.cancel()
    assert len(caplog.records) == 1
    file.remove()
    assert os.listdir(tmp_path) == []
