"""Streams that cannot encode everything: what they lack is replaced, JSON is escaped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from test_cli_cache import PREFIXES
from test_cli_see import OVERVIEW

TEXT = "Gr\u00fc\u00dfe \u2026 \u6f22\u5b57 \ud800"


def said(encoding: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    environ = {**os.environ, "PYTHONIOENCODING": encoding}
    command = [sys.executable, "-m", "homeprefixd", *arguments]
    return subprocess.run(command, capture_output=True, env=environ, check=False, timeout=60)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "ascii:surrogateescape", "utf-8"])
def test_what_an_encoding_lacks_is_replaced(daemon: Any, encoding: str) -> None:
    listed = {"prefixes": [{**PREFIXES["prefixes"][0], "preview": TEXT}], "total": 1}  # type: ignore[index]
    daemon.answers["GET /cache/prefixes"] = 200, listed
    daemon.answers["GET /cache/overview"] = 200, OVERVIEW
    name = encoding.partition(":")[0]
    done = said(encoding, "ls", "--url", daemon.url)
    assert (done.returncode, done.stderr) == (0, b"")
    assert "Gr\u00fc\u00dfe \u2026 \u6f22\u5b57 \ufffd".encode(name, "replace") in done.stdout
    done = said(encoding, "top", "--once", "--url", daemon.url)
    assert (done.returncode, done.stderr) == (0, b"")
    assert ("\u2588" * 10).encode(name, "replace") in done.stdout
    done = said(encoding, "ls", "--url", daemon.url, "--json")
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout.decode(name)) == listed


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_errors_are_told_in_any_encoding(encoding: str) -> None:
    done = said(encoding, "ls", "--cache-dir", "/nowhere/\u2026")
    assert (done.returncode, done.stdout) == (4, b"")
    assert b"there is no cache in /nowhere/" in done.stderr
