"""`top`, `explain`, and what `stats` says of today."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from homeprefixd.config_file import apply_rule, rule_line
from homeprefixd.config_sources import Flag, load
from homeprefixd.explain.causes import GATE

RECORD = {
    "id": "chatcmpl-1",
    "app": "HomeApp",
    "client": "10.0.0.2 HomeApp/1",
    "model": "smol",
    "began": 1_795_986_907.0,
    "number": 1,
    "state": "finished",
    "prompt": 2231,
    "reused": 31,
    "tiers": {"hot": 31},
    "first_ms": 9830.0,
    "generated": 20,
    "cause": "clock",
}
EXPLANATION = {
    "id": "chatcmpl-1",
    "cause": "clock",
    "title": "a clock or date in the system message",
    "text": "31 of 2,231 tokens were reused. 2,190 more could have been.",
    "lead": "The time is ",
    "before": "21:15",
    "after": "21:\x1b[31m16",
    "advice": "Put it at the end.",
    "rule": "move_volatile_line",
}
OVERVIEW: dict[str, Any] = {
    "now": 1_795_986_930.0,
    "version": "0.1.0",
    "daemon": {"state": "ok", "model": "smol", "reason": "", "workers": []},
    "store": {"hot": {"bytes": 1 << 30, "limit": 2 << 30}, "warm": {"bytes": 0, "limit": 1 << 30}},
    "today": {
        "requests": 12,
        "failed": 1,
        "prompt": 20000,
        "reused": 15000,
        "generated": 300,
        "saved_s": 71.5,
        "lost_s": 9.7,
    },
    "first_ms": {"cold": 9830.0, "warm": 112.0},
    "apps": [
        {
            "app": "HomeApp",
            "requests": 12,
            "lost_s": 9.7,
            "text": "lost 9.7 s since 08:00, 7.5 s of it to a clock or date in the system message",
        }
    ],
    "running": [{**RECORD, "state": "prefill", "done": 1000, "began": 1_795_986_925.0}],
    "recent": [RECORD],
}


@pytest.fixture
def seen(daemon: Any) -> Any:
    daemon.answers["GET /cache/overview"] = 200, OVERVIEW
    daemon.answers["GET /cache/explain/last"] = 200, {"record": RECORD, "explanation": EXPLANATION}
    return daemon


def test_the_shell_completes() -> None:
    environ = {
        **os.environ,
        "_HOMEPREFIXD_COMPLETE": "bash_complete",
        "COMP_WORDS": "homeprefixd expl",
        "COMP_CWORD": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "homeprefixd"], env=environ, capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stdout == "plain,explain\n"


def test_top_in_a_pipe(command: Callable[..., Any], seen: Any) -> None:
    said = command("top", "--url", seen.url)
    assert said.code == 0, said.err
    for text in (
        "smol ok",
        "12 requests, 75% of prompt tokens reused, 72 s saved, 9.70 s lost, 1 failed",
        "cold 9.83 s",
        "RAM ██████████░░░░░░░░░░ 1.0 GiB of 2.0 GiB",
        "1,000 of 2,231",
        "clock",
        "7.5 s of it to a clock or date in the system message",
    ):
        assert text in said.out
    assert json.loads(command("top", "--url", seen.url, "--json").out) == OVERVIEW


def test_top_of_a_hot_tier_that_was_lowered(command: Callable[..., Any], seen: Any) -> None:
    store = {**OVERVIEW["store"], "hot": {"bytes": 50 << 20, "limit": 2 << 30, "allowance": 100 << 20}}
    seen.answers["GET /cache/overview"] = 200, {**OVERVIEW, "store": store}
    said = command("top", "--url", seen.url).out
    assert "RAM ██████████░░░░░░░░░░ 50.0 MiB of 100 MiB (2.0 GiB at the start)" in said


def test_top_without_a_store_or_a_request(command: Callable[..., Any], seen: Any) -> None:
    none = {"cold": None, "warm": None}
    empty = {**OVERVIEW, "store": None, "running": [], "recent": [], "apps": [], "first_ms": none}
    seen.answers["GET /cache/overview"] = 200, empty
    said = command("top", "--url", seen.url, "--once").out
    assert "the store is away" in said
    assert "nothing" in said


def test_ctrl_c_is_how_one_leaves_top(seen: Any) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "homeprefixd", "top", "--url", seen.url]
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    with subprocess.Popen(command, stdout=theirs, stderr=subprocess.PIPE, env=environ) as process:
        os.close(theirs)
        shown = b""
        while b"smol ok" not in shown:
            shown += os.read(ours, 4096)
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # EIO: it has ended
            while os.read(ours, 4096):
                pass
        said = process.stderr.read() if process.stderr is not None else b""
    os.close(ours)
    assert (process.returncode, said) == (0, b"")


def test_explain(command: Callable[..., Any], seen: Any) -> None:
    said = command("explain", "--url", seen.url)
    assert said.code == 0, said.err
    for text in (EXPLANATION["text"], "then      21:15", "Put it at the end.", 'move_volatile_line = "on"', "9.83 s"):
        assert text in said.out
    assert "\x1b" not in said.out
    assert "restored" not in said.out  # nothing is told of it here
    assert json.loads(command("explain", "last", "--url", seen.url, "--json").out)["record"] == RECORD
    assert command("explain", "chatcmpl-2", "--url", seen.url).code == 4


def test_explain_names_what_was_waited_for(command: Callable[..., Any], seen: Any) -> None:
    for waits, lines in (
        ({"load_ms": 2600.0, "queue_ms": 2.0}, ["2.60 s of it: the model was loaded first"]),
        ({"queue_ms": 31600.0}, ["31.60 s of it: it waited for its turn, behind other requests"]),
        ({"queue_ms": 31600.0, "first_ms": 0.0}, ["31.60 s: it waited for its turn, behind other requests"]),
        ({"load_ms": 0.1, "queue_ms": 2.0}, []),
    ):
        record = {**RECORD, **waits}
        seen.answers["GET /cache/explain/last"] = 200, {"record": record, "explanation": EXPLANATION}
        said = command("explain", "--url", seen.url).out.splitlines()
        assert [line for line in said if "loaded first" in line or "its turn" in line] == lines


def test_explain_says_what_was_restored_and_why(command: Callable[..., Any], seen: Any) -> None:
    gate = {"known": 2000, "restored": 64, "reason": "computed", "load_s": 3.5, "compute_s": 0.5}
    for given, text in ((gate, "3.50 s"), ({**gate, "reason": "unmeasured", "load_s": None, "compute_s": None}, "")):
        seen.answers["GET /cache/explain/last"] = 200, {"record": {**RECORD, "gate": given}, "explanation": EXPLANATION}
        said = command("explain", "--url", seen.url).out
        assert "Of 2,000 known tokens 64 were to be restored" in said
        assert GATE[given["reason"]] in said
        assert text in said


def test_explain_applies_the_rule(command: Callable[..., Any], seen: Any, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("# mine\n[server]\nport = 8081\n")
    said = command("explain", "--apply", "--url", seen.url, "--config", str(file))
    assert said.code == 0, said.err
    assert tomllib.loads(file.read_text()) == {"server": {"port": 8081}, "stable": {"move_volatile_line": "on"}}
    assert file.read_text().startswith("# mine\n")
    nothing = {**EXPLANATION, "rule": ""}
    seen.answers["GET /cache/explain/last"] = 200, {"record": RECORD, "explanation": nothing}
    assert command("explain", "--apply", "--url", seen.url, "--config", str(file)).code == 1


def test_an_outdated_rule_is_not_written(command: Callable[..., Any], seen: Any, tmp_path: Path) -> None:
    """Neither by the daemon nor into a file that was named."""
    file = tmp_path / "c.toml"
    file.write_text("")
    outdated = "This rule is not the right one any more: see the request chatcmpl-9."
    answer = {"record": RECORD, "explanation": EXPLANATION, "outdated": outdated}
    seen.answers["GET /cache/explain/last"] = 200, answer
    refusal = {"error": {"message": outdated, "type": "invalid_request_error", "param": "id", "code": "outdated"}}
    seen.answers["POST /cache/explain/chatcmpl-1/apply"] = 400, refusal
    by_daemon, by_hand = (
        command("explain", "--apply", "--url", seen.url, *more) for more in ((), ("--config", str(file)))
    )
    assert by_daemon.code == by_hand.code != 0
    assert by_daemon.err == by_hand.err
    assert outdated in by_hand.err
    assert file.read_text() == ""
    said = command("explain", "--url", seen.url).out
    assert outdated in said
    assert "--apply writes it" not in said


def test_the_daemon_applies_the_rule_and_knows_its_file(
    command: Callable[..., Any], seen: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written into the user's own file is of no use to a daemon that reads another one."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    seen.answers["GET /cache/explain/last"] = 200, {"record": RECORD, "explanation": {**EXPLANATION, "app": "HomeApp"}}
    done = {"rule": "move_volatile_line", "setting": "on", "app": "HomeApp", "file": "/etc/own.toml", "reason": ""}
    seen.answers["POST /cache/explain/chatcmpl-1/apply"] = 200, done
    said = command("explain", "--apply", "--url", seen.url)
    assert said.code == 0, said.err
    assert 'move_volatile_line = "on" for HomeApp, written to /etc/own.toml' in said.out
    assert ("POST /cache/explain/chatcmpl-1/apply", {}) in seen.asked  # of that record, whatever is the last one now
    assert list(tmp_path.iterdir()) == []
    seen.answers["POST /cache/explain/chatcmpl-1/apply"] = 200, {**done, "file": "", "reason": "it is read-only"}
    assert "not written: it is read-only" in command("explain", "--apply", "--url", seen.url).out


def test_a_rule_of_one_app_is_written_for_it(command: Callable[..., Any], seen: Any, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("")
    seen.answers["GET /cache/explain/last"] = 200, {"record": RECORD, "explanation": {**EXPLANATION, "app": "HomeApp"}}
    said = command("explain", "--apply", "--url", seen.url, "--config", str(file))
    assert '[[stable.per_app]] with app = "HomeApp"' in said.out
    table = {"app": "HomeApp", "move_volatile_line": "on"}
    assert tomllib.loads(file.read_text()) == {"stable": {"per_app": [table]}}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[stable]\n",
        '[stable]  # rules\nsort_keys = "on"\n\n[log]\nlevel = "info"\n',
        '[stable]\nsort_tools = "off"  # no\n',
        '[log]\nlevel = "info"\n[stable]',
    ],
)
def test_a_rule_is_written_into_any_file(tmp_path: Path, text: str) -> None:
    file = tmp_path / "new" / "config.toml"
    file.parent.mkdir()
    file.write_text(text)
    for _ in range(2):  # again changes nothing
        apply_rule("sort_tools", file)
        loaded = load(environ={"HOME": str(tmp_path)}, config_file=Flag("--config", str(file)))
        assert loaded.config.stable.sort_tools == "on"
        assert file.read_text().count("sort_tools") == 1
    if "sort_keys" in text:
        assert loaded.config.stable.sort_keys == "on"


def test_expressions_are_joined(tmp_path: Path, command: Callable[..., Any], seen: Any) -> None:
    file = tmp_path / "c.toml"
    for setting in (r"^Step [^\n]*$", "^It's [^\\n]*$", r"^Step [^\n]*$"):
        explanation = {**EXPLANATION, "rule": "move", "setting": setting}
        seen.answers["GET /cache/explain/last"] = 200, {"record": RECORD, "explanation": explanation}
        said = command("explain", "--apply", "--url", seen.url, "--config", str(file)) if file.exists() else None
        if said is None:
            apply_rule("move", file, setting)
        else:
            assert said.code == 0, said.err
            assert rule_line("move", setting) in said.out
    loaded = load(environ={"HOME": str(tmp_path)}, config_file=Flag("--config", str(file)))
    assert loaded.config.stable.move == r"^Step [^\n]*$|^It's [^\n]*$"


def test_stats_say_what_was_saved_today(command: Callable[..., Any], seen: Any) -> None:
    from test_cli_cache import STATS

    seen.answers["GET /cache/stats"] = 200, STATS
    rows = [" ".join(line.split()) for line in command("stats", "--url", seen.url).out.splitlines()]
    assert "saved today 71.50 s" in rows
    assert "first token, median cold 9.83 s, warm 112 ms" in rows
    assert "lost by HomeApp lost 9.7 s since 08:00, 7.5 s of it to a clock or date in the system message" in rows


def test_stats_with_an_app_of_a_long_name(command: Callable[..., Any], seen: Any) -> None:
    from test_cli_cache import STATS

    name = "Begin" + "A" * 180 + "End"
    apps = [{**app, "app": name} for app in OVERVIEW["apps"]]
    seen.answers["GET /cache/stats"] = 200, STATS
    seen.answers["GET /cache/overview"] = 200, {**OVERVIEW, "apps": apps}
    said = command("stats", "--url", seen.url).out
    assert "lost by Begin" in said
    assert max(map(len, said.splitlines())) <= 120
    assert max(map(len, command("top", "--url", seen.url).out.splitlines())) <= 120
    assert name in command("top", "--json", "--url", seen.url).out


def test_a_saving_that_is_not_known_is_not_told_as_none(command: Callable[..., Any], seen: Any) -> None:
    from test_cli_cache import STATS

    seen.answers["GET /cache/stats"] = 200, STATS
    for saved, stats, top in (
        (0.0, "saved today not known yet: how fast this model computes was not measured", "is not known yet"),
        (71.5, "saved today 71.50 s, and what 2 requests saved before it could be measured", "72 s saved"),
    ):
        today = {**OVERVIEW["today"], "saved_s": saved, "unmeasured": 2}
        seen.answers["GET /cache/overview"] = 200, {**OVERVIEW, "today": today}
        rows = [" ".join(line.split()) for line in command("stats", "--url", seen.url).out.splitlines()]
        assert stats in rows
        assert top in command("top", "--url", seen.url).out
