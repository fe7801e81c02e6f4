"""`stats`, `ls`, `purge`: which cache they find, what they ask it, what they print."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from homeprefixd.cli import reach
from homeprefixd.cli.cache import age_seconds, summary
from homeprefixd.errors import UnavailableError

STATS: dict[str, Any] = {
    "uptime_s": 7300.0,
    "hot": {"bytes": 1536, "limit": 1 << 20, "nodes": 12},
    "warm": {"bytes": 2 << 20, "limit": 1 << 30, "nodes": 34, "state": "full", "reason": "no space"},
    "queue": {"nodes": 2, "bytes": 3072},
    "counters": {
        "lookups": 4,
        "hits": 3,
        "tokens_matched_hot": 2200,
        "tokens_matched_warm": 64,
        "written_bytes": 2048,
        "evicted_hot": 5,
        "evicted_warm": 6,
        "damaged": 7,
        "lost": 8,
        "errors": 9,
    },
    "daemon": {"workers": [{"alias": "smol", "state": "ok", "reason": ""}]},
}
PREFIXES = {
    "total": 40,
    "prefixes": [
        {
            "id": "0123456789abcdef",
            "model": "smol",
            "tokens": 2210,
            "own_tokens": 34,
            "bytes": 50 << 20,
            "own_bytes": 1 << 20,
            "tiers": ["hot", "warm"],
            "created": 1.0,
            "last_use": 0.0,
            "hits": 3,
            "preview": "You are the\nassistant",
        }
    ],
}


def running(directory: Path, url: str, pid: int | None = None) -> list[str]:
    """The flags for a cache directory with the entry of a running daemon."""
    directory.mkdir(exist_ok=True)
    (directory / "daemon.json").write_text(json.dumps({"pid": os.getpid() if pid is None else pid, "url": url}))
    return ["--cache-dir", str(directory)]


def ended_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_stats_of_the_daemon_on_the_directory(command: Callable[..., Any], daemon: Any, tmp_path: Path) -> None:
    daemon.answers["GET /cache/stats"] = 200, STATS
    flags = running(tmp_path / "c", daemon.url)
    rows = [" ".join(line.split()) for line in command("stats", *flags).out.splitlines()]
    assert "hot, in RAM 1.5 KiB of 1.0 MiB, 12 blocks" in rows
    assert json.loads(command("stats", *flags, "--json").out) == STATS
    assert ("GET /cache/stats", None) in daemon.asked


def test_stats_of_wear_shares_and_the_idle_check() -> None:
    more: dict[str, Any] = {
        "writes": {"today": 3 << 20, "total": 9 << 20, "nodes": 5, "since": 1.0, "per_day": 2 << 20, "daily_limit": 0},
        "shares": [{"kind": "key", "name": "guest", "bytes": 1 << 20, "limit": 4 << 20}],
        "scrub": {"rate": 8, "running": False, "last": 0.0, "nodes": 0, "bytes": 0, "damaged": 0, "removed": 0},
    }
    rows = dict(summary({**STATS, **more}))
    assert rows["disk writes"] == "3.0 MiB today, 2.0 MiB a day on average"
    assert rows["share of key guest"] == "1.0 MiB of 4.0 MiB"
    assert rows["checked by itself"] == "never to the end"
    more["writes"] = {**more["writes"], "daily_limit": 20 << 20}
    more["scrub"] = {**more["scrub"], "running": True, "nodes": 7, "bytes": 5 << 20, "damaged": 1}
    rows = dict(summary({**STATS, **more}))
    assert "3.0 MiB of 20.0 MiB today" in rows["disk writes"]
    assert rows["checked by itself"].startswith("running: 7 blocks, 5.0 MiB, 1 damaged and removed")


def test_stats_of_a_hot_tier_that_was_lowered() -> None:
    for allowance, text in ((100 << 20, "100 MiB (2.0 GiB at the start)"), (2 << 30, "2.0 GiB")):
        hot = {"bytes": 79 << 20, "limit": 2 << 30, "allowance": allowance, "nodes": 1}
        assert dict(summary({**STATS, "hot": hot}))["hot, in RAM"] == f"79.0 MiB of {text}, 1 block"


def test_the_url_needs_no_directory(command: Callable[..., Any], daemon: Any) -> None:
    daemon.answers["GET /cache/stats"] = 200, STATS
    assert json.loads(command("stats", "--url", daemon.url + "/", "--json").out) == STATS


def test_ls(command: Callable[..., Any], daemon: Any, tmp_path: Path) -> None:
    daemon.answers["GET /cache/prefixes"] = 200, PREFIXES
    flags = running(tmp_path / "c", daemon.url)
    header, row = command("ls", *flags, "--limit", "7", "--model", "smol x").out.splitlines()
    assert header.split() == ["id", "model", "tokens", "own", "size", "tiers", "last", "use", "hits", "preview"]
    words = ["0123456789abcdef", "smol", "2,210", "34", "50.0", "MiB", "hot+warm", "never", "3"]
    assert row.split() == [*words, "You", "are", "the", "assistant"]
    assert daemon.asked[-1] == ("GET /cache/prefixes?limit=7&model=smol+x", None)
    assert json.loads(command("ls", *flags, "--json").out) == PREFIXES
    assert daemon.asked[-1] == ("GET /cache/prefixes?limit=50", None)
    daemon.answers["GET /cache/prefixes"] = 200, {"prefixes": [], "total": 0}
    assert command("ls", *flags).out == f"no prefixes in {daemon.url}\n"


def test_ls_of_an_unknown_model_ends_as_a_purge_of_it(command: Callable[..., Any], daemon: Any) -> None:
    namespaces = [{"model": "old", "nodes": 0, "description": {"model_sha256": "abcdef012345"}}]
    daemon.answers["GET /cache/prefixes"] = 200, {"prefixes": [], "total": 0}
    daemon.answers["GET /cache/stats"] = 200, {**STATS, "namespaces": namespaces}
    for flags in ([], ["--json"]):
        unknown = command("ls", "--model", "nope", "--url", daemon.url, *flags)
        assert (unknown.code, unknown.out) == (4, "")
        assert unknown.err == "homeprefixd: error: nothing is stored of a model 'nope'; known: old, smol\n"
    for model in ("old", "smol", "abcd", "ABCDEF01"):  # known, though nothing is stored of it now
        assert command("ls", "--model", model, "--url", daemon.url).code == 0
    assert command("ls", "--model", "abc", "--url", daemon.url).code == 4


@pytest.mark.parametrize(
    ("flags", "body"),
    [
        (["--all"], {"all": True}),
        (["--prefix", "0123"], {"prefix": "0123"}),
        (["--older-than", "30d"], {"older_than": 2592000.0}),
        (["--model", "smol"], {"model": "smol"}),
    ],
)
def test_purge_sends_one_filter(
    command: Callable[..., Any], daemon: Any, flags: list[str], body: dict[str, Any]
) -> None:
    daemon.answers["POST /cache/purge"] = 200, {"nodes": 1234, "bytes": 3 << 20}
    result = command("purge", "--yes", "--url", daemon.url, *flags)
    assert result.out == "removed 1,234 blocks, 3.0 MiB\n"
    assert daemon.asked == [("POST /cache/purge", body)]
    assert json.loads(command("purge", "--yes", "--json", "--url", daemon.url, *flags).out)["nodes"] == 1234


@pytest.mark.parametrize(
    "flags", [[], ["--all", "--model", "x"], ["--prefix", " "], ["--prefix", "zz"], ["--older-than", "soon"]]
)
def test_purge_without_exactly_one_filter_asks_nothing(
    command: Callable[..., Any], daemon: Any, flags: list[str]
) -> None:
    result = command("purge", "--yes", "--url", daemon.url, *flags)
    assert result.code == 2
    assert result.err.count("\n") == 1
    assert daemon.asked == []


@pytest.mark.parametrize(("answer", "code", "asked"), [("y\n", 0, 1), ("\n", 1, 0), ("n\n", 1, 0)])
def test_purge_asks_on_a_terminal(
    command: Callable[..., Any],
    daemon: Any,
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    code: int,
    asked: int,
) -> None:
    daemon.answers["POST /cache/purge"] = 200, {"nodes": 1, "bytes": 1}
    controller, terminal = os.openpty()
    os.write(controller, answer.encode())
    with os.fdopen(terminal, "r") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        result = command("purge", "--all", "--url", daemon.url)
    os.close(controller)
    assert result.code == code
    assert len(daemon.asked) == asked
    assert f"Remove everything from {daemon.url}?" in result.err
    if code:
        assert result.err.endswith("homeprefixd: error: nothing was removed\n")


@pytest.mark.parametrize(
    ("status", "reply", "code", "message"),
    [
        (404, {"error": {"message": "no prefix 99"}}, 4, "no prefix 99"),
        (400, {"error": {"message": "two prefixes begin so"}}, 2, "two prefixes begin so"),
        (503, {"error": {"message": "the store is away"}}, 5, "the store is away"),
        (500, b"<html>", 1, "/cache/purge: HTTP 500"),
        (200, b"<html>", 5, "does not look like homeprefixd: its reply to /cache/purge is no JSON"),
    ],
)
def test_what_the_daemon_refuses_is_told(
    command: Callable[..., Any], daemon: Any, status: int, reply: Any, code: int, message: str
) -> None:
    daemon.answers["POST /cache/purge"] = status, reply
    result = command("purge", "--prefix", "99", "--yes", "--url", daemon.url)
    assert result.code == code
    assert message in result.err
    assert result.err.count("\n") == 1


def test_ages() -> None:
    given = ["30d", "12h", "90min", "90m", "45s", "1.5h", "2 w"]
    assert [age_seconds(text) for text in given] == [2592000, 43200, 5400, 5400, 45, 5400, 1209600]
    for wrong in ("", "d", "-1d", "0", "30", "3 years"):
        with pytest.raises(click.UsageError, match="30d, 12h"):
            age_seconds(wrong)


def test_a_summary_for_people() -> None:
    assert summary(STATS) == [
        ("model smol", "ok"),
        ("hot, in RAM", "1.5 KiB of 1.0 MiB, 12 blocks"),
        ("warm, on disk", "2.0 MiB of 1.0 GiB, 34 blocks (full: no space)"),
        ("waiting to be written", "2 blocks, 3.0 KiB"),
        ("running for", "2 h"),
        ("requests that found something", "3 of 4 (75%)"),
        ("tokens found", "2,200 hot, 64 warm"),
        ("written", "2.0 KiB"),
        ("evicted", "5 hot, 6 warm"),
        ("damaged, lost, errors", "7, 8, 9"),
    ]
    one = {**STATS, "hot": {**STATS["hot"], "nodes": 1}, "queue": {"nodes": 1, "bytes": 1}}
    assert dict(summary(one))["hot, in RAM"] == "1.5 KiB of 1.0 MiB, 1 block"
    assert dict(summary(one))["waiting to be written"] == "1 block, 1 B"
    closed = {name: value for name, value in STATS.items() if name != "daemon"}
    assert summary({**closed, "queue": {"nodes": 0, "bytes": 0}, "warm": {**STATS["warm"], "state": "ok"}}) == [
        ("warm, on disk", "2.0 MiB, 34 blocks")
    ]


# ------------------------------------------------------------------------------------------- finding what is running


def test_a_running_daemon_is_found_also_while_it_loads(daemon: Any, tmp_path: Path) -> None:
    running(tmp_path, daemon.url)
    assert reach.running_daemon(tmp_path) == daemon.url
    daemon.answers["GET /health"] = 503, {"error": {"message": "loading"}}
    assert reach.running_daemon(tmp_path) == daemon.url


def test_leftovers_are_no_daemon(daemon: Any, tmp_path: Path) -> None:
    assert reach.running_daemon(tmp_path) is None
    running(tmp_path, daemon.url, pid=ended_pid())
    assert reach.running_daemon(tmp_path) is None
    assert daemon.asked == []
    running(tmp_path, "http://127.0.0.1:1")
    assert reach.running_daemon(tmp_path) is None
    for text in ("", "{}", "[]", '{"pid": "x", "url": "y"}', '{"pid": -1, "url": "http://127.0.0.1:1"}'):
        (tmp_path / "daemon.json").write_text(text)
        assert reach.running_daemon(tmp_path) is None


def test_a_foreign_directory_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object, **__: object) -> str:
        raise PermissionError  # root, which tests may run as, is denied nothing

    monkeypatch.setattr(Path, "read_text", denied)
    with pytest.raises(UnavailableError, match="use sudo, or name the daemon with --url"):
        reach.running_daemon(tmp_path)


def test_listening_addresses_become_connectable_ones() -> None:
    assert reach.connectable("http://0.0.0.0:8080") == "http://127.0.0.1:8080"
    assert reach.connectable("http://[::]:8080") == "http://[::1]:8080"
    assert reach.connectable("http://192.168.1.2:8080") == "http://192.168.1.2:8080"


def test_a_proxy_is_not_asked(command: Callable[..., Any], daemon: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    daemon.answers["GET /cache/stats"] = 200, STATS
    assert command("stats", "--url", daemon.url).code == 0


def test_the_key_is_sent(
    command: Callable[..., Any], daemon: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    daemon.answers["GET /cache/stats"] = 200, STATS
    file = tmp_path / "key"
    file.write_text("from-the-file \n")
    assert command("stats", "--url", daemon.url).code == 0
    monkeypatch.setenv("HOMEPREFIXD_API_KEY", "from-the-variable")
    assert command("stats", "--url", daemon.url).code == 0
    assert command("stats", "--url", daemon.url, "--api-key-file", str(file)).code == 0
    shown = [None, "Bearer from-the-variable", "Bearer from-the-file"]  # in all calls of a command, and in nothing else
    assert [key for key, _ in itertools.groupby(daemon.keys)] == shown


def test_a_key_that_is_none(command: Callable[..., Any], daemon: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    for file, word in ((tmp_path / "empty", "empty"), (tmp_path / "missing", "missing")):
        result = command("stats", "--url", daemon.url, "--api-key-file", str(file))
        assert result.code == 2
        assert word in result.err


def test_a_daemon_that_asks_for_a_key_says_how(command: Callable[..., Any], daemon: Any) -> None:
    daemon.answers["GET /cache/stats"] = 401, {"error": {"message": "This server asks for an API key."}}
    result = command("stats", "--url", daemon.url)
    assert result.code == 1
    assert "HOMEPREFIXD_API_KEY or --api-key-file" in result.err


def test_an_empty_directory_is_no_cache(command: Callable[..., Any], tmp_path: Path) -> None:
    result = command("stats", "--cache-dir", str(tmp_path))
    assert result.code == 4
    assert f"there is no cache in {tmp_path}" in result.err
    assert list(tmp_path.iterdir()) == []
