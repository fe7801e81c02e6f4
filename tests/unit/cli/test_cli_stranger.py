"""`--url` of something that is no daemon of ours: files, other servers, other JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from test_cli_cache import PREFIXES, STATS

from homeprefixd.cli import main

ASKING = [  # route, command
    ("GET /cache/stats", ["stats"]),
    ("GET /cache/stats", ["stats", "--json"]),
    ("GET /cache/prefixes", ["ls"]),
    ("GET /cache/overview", ["top", "--once"]),
    ("GET /cache/explain/last", ["explain"]),
    ("POST /cache/purge", ["purge", "--all", "--yes"]),
    ("POST /cache/verify", ["verify"]),
    ("POST /cache/compact", ["compact"]),
    ("POST /cache/pin", ["pin"]),
    ("POST /cache/unpin", ["unpin", "--all"]),
    ("POST /cache/warm", ["warm", "--text", "x"]),
    ("POST /cache/match", ["match", "--text", "x"]),
    ("POST /cache/export", ["export", "--prefix", "ab", "-o", "out"]),
    ("POST /cache/import", ["import", "in"]),
    ("GET /models/details", ["model", "ls"]),
    ("GET /models/details", ["model", "show", "x"]),
    ("POST /models/load", ["model", "load", "x"]),
    ("POST /models/unload", ["model", "unload", "x"]),
]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").write_bytes(b"a prefix")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("reply", [{}, [], 7, {"models": 7, "data": []}, b"<html>", b"\xff", b"[" * 100_000])
@pytest.mark.parametrize(("route", "arguments"), ASKING)
def test_what_another_server_says_is_not_taken_for_ours(
    command: Callable[..., Any], daemon: Any, route: str, arguments: list[str], reply: Any
) -> None:
    daemon.answers[route] = 200, reply
    done = command(*arguments, "--url", daemon.url)
    assert (done.code, done.out) == (5, "")
    assert f"{daemon.url} does not look like homeprefixd: " in done.err
    assert done.err.count("\n") == 1
    assert not Path("out").exists()


@pytest.mark.parametrize("arguments", [["stats"], ["ls"], ["top"], ["model", "ls"]])
def test_a_server_without_our_routes(command: Callable[..., Any], daemon: Any, arguments: list[str]) -> None:
    done = command(*arguments, "--url", daemon.url)
    assert (done.code, done.out) == (5, "")
    assert "does not look like homeprefixd: it knows no /" in done.err


def test_what_is_missing_deep_inside_is_named(command: Callable[..., Any], daemon: Any) -> None:
    daemon.answers["GET /cache/stats"] = 200, {**STATS, "warm": {"bytes": 1, "limit": 1, "nodes": 1}}
    assert "missing required field `state` - at `$.warm`" in command("stats", "--url", daemon.url).err
    daemon.answers["GET /cache/prefixes"] = 200, {"prefixes": [{**PREFIXES["prefixes"][0], "hits": "x"}], "total": 1}  # type: ignore[index]
    assert "at `$.prefixes[0].hits`" in command("ls", "--url", daemon.url).err


@pytest.mark.parametrize("url", ["file:///etc", "FTP://x/", "data://x", " file:///etc", "url:file:///etc", "://x"])
@pytest.mark.parametrize("arguments", [arguments for _route, arguments in ASKING])
def test_only_http_is_asked(command: Callable[..., Any], arguments: list[str], url: str) -> None:
    done = command(*arguments, "--url", url)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"homeprefixd: error: --url cannot be {url!r}; allowed: ")


def test_every_command_with_an_address_is_here() -> None:
    def leaves(group: click.Group, above: str = "") -> Iterator[tuple[str, click.Command]]:
        for name, one in group.commands.items():
            if isinstance(one, click.Group):
                yield from leaves(one, f"{above}{name} ")
            else:
                yield f"{above}{name}", one

    named = {name for name, one in leaves(main.cli) if any("--url" in option.opts for option in one.params)}
    tried = {" ".join(arguments[:2] if arguments[0] == "model" else arguments[:1]) for _route, arguments in ASKING}
    assert {name for name in named if not name.startswith("bench")} == tried
