"""`warm`, `match`, `pin`, `unpin`: what they send, and what they print."""

from __future__ import annotations

import io
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from homeprefixd import __version__

REQUEST = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
WARMED: dict[str, Any] = {
    "id": "warm-1",
    "prompt_tokens": 2000,
    "cached_tokens": 64,
    "computed_tokens": 1936,
    "seconds": 9.5,
}
MATCHED = {
    "prompt_tokens": 2000,
    "cached_tokens": 1500,
    "computed_tokens": 500,
    "cache_tiers": {"hot": 1000, "warm": 500},
    "bytes": 30_000_000,
    "predicted_ttft_ms": 2500.0,
    "predicted_cold_ttft_ms": None,
}
PIN = {
    "id": "00ffaa",
    "model": "demo",
    "label": "house",
    "tokens": 1900,
    "created": 1.0,
    "expires": 0.0,
    "preview": "You are",
    "tiers": ["warm"],
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "request.json"
    path.write_text(json.dumps(REQUEST))
    return path


def test_warm(command: Callable[..., Any], daemon: Any, file: Path) -> None:
    daemon.answers["POST /cache/warm"] = 200, WARMED
    done = command("warm", str(file), "--url", daemon.url)
    assert (done.code, daemon.asked[-1]) == (0, ("POST /cache/warm", REQUEST))
    assert "2,000 tokens are warm: 64 were, 1,936 computed in 9.50 s" in done.out
    assert json.loads(command("warm", str(file), "--url", daemon.url, "--json").out) == WARMED
    daemon.answers["POST /cache/export"] = 200, b"x"
    command("export", str(file), "--url", daemon.url, "-o", str(file.with_name("out")))
    assert ("POST /cache/export", REQUEST) in daemon.asked
    assert daemon.agents == {f"homeprefixd/{__version__}"}  # that is how records and figures name it


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ((1, 0, 1, 16), "1 token: too short to be kept, which begins at 16 tokens"),
        ((15, 0, 15, 16), "15 tokens: too short to be kept"),
        ((16, 1, 15, 16), "16 tokens are warm: 1 was, 15 computed in 9.50 s"),
        ((1, 0, 1, 0), "1 token is warm: 0 were, 1 computed"),  # a daemon that keeps everything, or does not say
    ],
)
def test_warm_says_what_is_not_kept(
    command: Callable[..., Any], daemon: Any, counts: tuple[int, int, int, int], said: str
) -> None:
    names = ("prompt_tokens", "cached_tokens", "computed_tokens", "least_tokens")
    daemon.answers["POST /cache/warm"] = 200, {**WARMED, **dict(zip(names, counts, strict=True))}
    assert command("warm", "--text", "x", "--url", daemon.url).out.startswith(said)


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        (2000, "2,000 tokens are warm: "),
        (None, "2,000 tokens are warm: "),
        (
            640,
            "640 of 2,000 tokens are kept, for the rest there was no room (`cache.hot`, `cache.warm`): 64 were known",
        ),
    ],
)
def test_warm_says_how_much_is_kept(command: Callable[..., Any], daemon: Any, kept: int | None, said: str) -> None:
    daemon.answers["POST /cache/warm"] = 200, {**WARMED, "known_tokens": kept}
    assert command("warm", "--text", "x", "--url", daemon.url).out.startswith(said)


@pytest.mark.parametrize("way", ["--text", "file", "stdin"])
def test_a_prompt_as_text(
    command: Callable[..., Any], daemon: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    daemon.answers["POST /cache/warm"] = 200, WARMED
    text = "Once upon a time"
    (tmp_path / "prompt.txt").write_text(text)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    given = {"--text": ("--text", text), "file": (str(tmp_path / "prompt.txt"),), "stdin": ("-",)}[way]
    assert command("warm", *given, "--url", daemon.url, "--model", "demo").code == 0
    assert daemon.asked[-1] == ("POST /cache/warm", {"prompt": text, "model": "demo"})


def test_match(command: Callable[..., Any], daemon: Any, file: Path) -> None:
    daemon.answers["POST /cache/match"] = 200, MATCHED
    done = command("match", str(file), "--url", daemon.url)
    assert (done.code, daemon.asked[-1]) == (0, ("POST /cache/match", REQUEST))
    assert "1,500 (1,000 hot, 500 warm)" in done.out
    assert "about 2.50 s" in done.out
    assert "not known" in done.out
    assert json.loads(command("match", str(file), "--url", daemon.url, "--json").out) == MATCHED


@pytest.mark.parametrize(
    ("flags", "body"),
    [
        (["--prefix", "00FF"], {"prefix": "00ff"}),
        (["--request", "chatcmpl-1", "--label", "a"], {"request_id": "chatcmpl-1", "label": "a"}),
        (["--text", "x", "--ttl", "30d"], {"prompt": "x", "ttl": 2_592_000.0}),
        ([], {}),
    ],
)
def test_pin(command: Callable[..., Any], daemon: Any, flags: list[str], body: dict[str, Any]) -> None:
    daemon.answers["POST /cache/pin"] = 200, {"pins": [PIN], "prompt_tokens": 2000}
    done = command("pin", *flags, "--url", daemon.url)
    assert (done.code, daemon.asked[-1]) == (0, ("POST /cache/pin", body))
    if flags:
        assert "pinned 00ffaa, 1,900 tokens; 100 more are not stored" in done.out
    else:
        assert "house" in done.out
        assert "for ever" in done.out
    daemon.answers["POST /cache/pin"] = 200, {"pins": []}
    assert "nothing is pinned" in command("pin", "--url", daemon.url).out


def test_a_pin_of_which_not_all_is_kept(command: Callable[..., Any], daemon: Any) -> None:
    poor = {**PIN, "kept": 640, "not_kept": "there is no room"}
    daemon.answers["POST /cache/pin"] = 200, {"pins": [poor], "prompt_tokens": 1900}
    done = command("pin", "--text", "x", "--url", daemon.url)
    assert done.out == "pinned 00ffaa, 1,900 tokens\nonly 640 of them are on disk: there is no room\n"
    assert "00ffaa: 640 of 1,900 tokens are on disk: there is no room" in command("pin", "--url", daemon.url).out


@pytest.mark.parametrize(
    ("flags", "body"),
    [
        (["--label", "a"], {"label": "a"}),
        (["--all"], {"all": True}),
        (["--prefix", "00"], {"prefix": "00"}),
        (["--request", "r"], {"request_id": "r"}),
    ],
)
def test_unpin(command: Callable[..., Any], daemon: Any, flags: list[str], body: dict[str, Any]) -> None:
    daemon.answers["POST /cache/unpin"] = 200, {"pins": [PIN]}
    done = command("unpin", *flags, "--url", daemon.url)
    assert (done.code, daemon.asked[-1]) == (0, ("POST /cache/unpin", body))
    assert "1 unpinned" in done.out


@pytest.mark.parametrize(
    "arguments",
    [
        ["warm"],
        ["match"],
        ["warm", "/nowhere/x.json"],
        ["warm", "/"],
        ["warm", "x", "--text", "y"],
        ["pin", "--label", "a"],
        ["pin", "--prefix", "00", "--request", "r"],
        ["pin", "--prefix", "xyz"],
        ["pin", "--prefix", "00", "--ttl", "soon"],
        ["unpin"],
        ["unpin", "--all", "--label", "a"],
    ],
)
def test_what_is_refused(command: Callable[..., Any], daemon: Any, arguments: list[str]) -> None:
    done = command(*arguments, "--url", daemon.url)
    assert done.code == 2
    assert done.err.count("\n") == 1
    assert not daemon.asked


def test_json_that_is_no_request(command: Callable[..., Any], daemon: Any, tmp_path: Path) -> None:
    for text in ('{"model": "x"}', "[1, 2]"):
        (tmp_path / "x.json").write_text(text)
        done = command("warm", str(tmp_path / "x.json"), "--url", daemon.url)
        assert (done.code, "no request" in done.err) == (2, True)
    (tmp_path / "x.json").write_bytes(b"\xff\xfe\x00")
    assert command("warm", str(tmp_path / "x.json"), "--url", daemon.url).code == 2


@pytest.mark.parametrize("name", ["warm", "match", "pin", "export", "unpin"])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"messages": [\n  {"role" "user"}]}', "line 2, column 11: expecting ':' delimiter"),
        ('\n {"messages": [', "line 2, column 16: expecting value"),
        ("{" * 20, "line 1, column 2: expecting property name"),
        ('{"a": ' * 100_000, "begins with a brace"),
    ],
    ids=["no colon", "cut off", "no key", "deep"],
)
def test_a_request_with_a_mistake_is_not_taken_as_text(
    command: Callable[..., Any], daemon: Any, tmp_path: Path, name: str, text: str, said: str
) -> None:
    file = tmp_path / "it's.json"
    file.write_text(text)
    done = command(name, str(file), "--url", daemon.url, *(["-o", str(tmp_path / "out")] if name == "export" else []))
    assert (done.code, done.out, daemon.asked) == (2, "", [])
    assert said in done.err
    assert f"""--text "$(cat {shlex.quote(str(file))})\"""" in done.err


def test_text_that_begins_otherwise_is_text(command: Callable[..., Any], daemon: Any, tmp_path: Path) -> None:
    daemon.answers["POST /cache/warm"] = 200, WARMED
    for text in ("Say {this}", "[INST] Hi", '"quoted'):
        (tmp_path / "prompt.txt").write_text(text)
        assert command("warm", str(tmp_path / "prompt.txt"), "--url", daemon.url).code == 0
        assert daemon.asked[-1] == ("POST /cache/warm", {"prompt": text})
    assert command("warm", "--text", "{not JSON", "--url", daemon.url).code == 0
    assert daemon.asked[-1] == ("POST /cache/warm", {"prompt": "{not JSON"})


def test_without_a_daemon(command: Callable[..., Any], tmp_path: Path) -> None:
    done = command("warm", "--text", "x", "--cache-dir", str(tmp_path))
    assert (done.code, "homeprefixd serve" in done.err) == (5, True)


def test_pins_in_lists(command: Callable[..., Any], daemon: Any) -> None:
    prefix = {
        "id": "00ff", "model": "demo", "tokens": 100, "own_tokens": 50, "bytes": 10, "tiers": ["hot"],
        "last_use": 1.0, "hits": 2, "preview": "You", "pinned": 64, "labels": ["house"],
    }  # fmt: skip
    daemon.answers["GET /cache/prefixes"] = 200, {"prefixes": [prefix], "total": 1}
    assert "64, house" in command("ls", "--url", daemon.url).out
    daemon.answers["GET /cache/prefixes"] = 200, {"prefixes": [{**prefix, "pinned": 0, "labels": []}], "total": 1}
    assert "pinned" not in command("ls", "--url", daemon.url).out


@pytest.mark.parametrize("arguments", [["pin"], ["unpin"], ["export", "-o", "out"]])
def test_what_is_neither_an_id_nor_a_file(command: Callable[..., Any], arguments: list[str], tmp_path: Path) -> None:
    directory = ["--cache-dir", str(tmp_path)]
    done = command(*arguments, "deadbeef", *directory)
    assert (done.code, done.out) == (2, "")
    assert "there is no file 'deadbeef'; an id (hexadecimal digits" in done.err
    assert "is given as --prefix deadbeef" in done.err
    done = command(*arguments, "house", *directory)
    assert (done.code, done.out) == (2, "")
    assert "'house' is no id (hexadecimal digits, as `homeprefixd ls` shows them" in done.err
    assert "there is no such file" in done.err


def test_hints_call_the_command_as_it_was_typed(
    command: Callable[..., Any], daemon: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOMEPREFIXD_PROGRAM", "scripts/run")
    flags = ("--cache-dir", str(tmp_path))
    assert "start it with `scripts/run serve`" in command("warm", "--text", "x", *flags).err
    assert "see `scripts/run warm --help`" in command("warm", *flags).err
    assert "as `scripts/run ls` shows them" in command("pin", "house", *flags).err
    assert "an id from `scripts/run ls`" in command("pin", "--prefix", "xyz", *flags).err
    daemon.answers["POST /cache/pin"] = 200, {"pins": [PIN], "prompt_tokens": 2000}
    assert "`scripts/run warm` it first" in command("pin", "--text", "x", "--url", daemon.url).out
    assert "Usage: scripts/run pin " in command("pin", "--help").out
