"""What the log says of a request, and of API keys that are read again."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from homeprefixd.api.keyring import KeyRing
from homeprefixd.config import Config
from homeprefixd.daemon import Daemon
from homeprefixd.frames.worker import Finished, Timings
from homeprefixd.models.request import log_request


def line(caplog: pytest.LogCaptureFixture, queue_ms: float, waited: float) -> str:
    caplog.set_level(logging.INFO)
    caplog.clear()
    timings = Timings(64, 36, 80.0, 100.0, queue_ms, 3, 60.0, {"hot": 64}, 100)
    log_request(Finished("r1", "stop", "", None, timings), waited)
    [record] = caplog.records
    return record.message


def test_what_a_request_waited_for_is_named(caplog: pytest.LogCaptureFixture) -> None:
    assert line(caplog, 0.0, 0.0) == (
        "r1: 100 tokens (reused: 64 hot), first token after 0.18 s, 3 generated in 0.06 s, stop"
    )
    assert "first token after 2.78 s (2.60 s of it: the model was loaded first), 3" in line(caplog, 0.0, 2.6)
    both = line(caplog, 31_600.0, 2.6)
    assert "after 34.38 s (2.60 s of it: the model was loaded first; 31.60 s of it: it waited for its turn)" in both


def test_keys_that_there_are_not_are_not_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    daemon = Daemon(Config(), {})
    daemon.reload_keys()
    assert caplog.records == []
    file = tmp_path / "keys.toml"
    file.write_text('[[key]]\nname = "phone"\nkey = "a-long-random-text-or-so"\n')
    daemon._keys = KeyRing(file)
    daemon.reload_keys()
    assert caplog.messages[-1] == "1 API key"
