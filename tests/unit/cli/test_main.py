"""Errors are one line and an exit code; help is quick; settings reach the commands."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from homeprefixd import __version__
from homeprefixd.cli import main
from homeprefixd.cli.settings import SETTING_FLAGS
from homeprefixd.config_keys import keys
from homeprefixd.errors import ModelError

Command = Callable[..., "object"]


def process(*arguments: str, **more: object) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "homeprefixd", *arguments]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)


def test_help_is_quick() -> None:
    best = 9.0
    for _ in range(5):
        begin = time.monotonic()
        out, _err = process("--help").communicate(timeout=30)
        best = min(best, time.monotonic() - begin)
        assert "serve" in out
    assert best < 2


def test_version_and_no_arguments(command: Command) -> None:
    assert command("--version").out == f"homeprefixd {__version__}\n"
    assert command().out == command("--help").out
    for group in ("config", "model", "bench"):
        alone = command(group)
        assert (alone.code, alone.err) == (0, "")
        assert alone.out == command(group, "--help").out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nonsense"], 2, "No such command 'nonsense'; see `homeprefixd --help`"),
        (["serve", "--prot", "1"], 2, "--prot"),
        (["serve", "--port", "seventy"], 2, "--port: server.port cannot be 'seventy'"),
        (["serve", "--hot", "20G"], 2, "--hot: cache.hot cannot be '20G'"),
        (["serve", "--config", "/nowhere.toml"], 2, "--config: there is no readable file /nowhere.toml"),
        (["stats"], 4, "there is no cache in"),
        (["stats", "--url", "http://127.0.0.1:1"], 5, "no homeprefixd answers at http://127.0.0.1:1"),
        (["stats", "--url", "127.0.0.1:1"], 5, "http://127.0.0.1:1: Connection refused"),
        (["stats", "--url", "banana"], 2, "--url cannot be 'banana', which is no URL; allowed: an address such as"),
        (["stats", "--url", "ftp://x:1"], 2, "--url cannot be 'ftp://x:1'; allowed"),
        (["stats", "--url", "http://"], 2, "--url cannot be 'http://'; allowed"),
        (["stats", "--url", "not:an address"], 2, "white space"),
        (["stats", "--url", "http://x:1/v1/"], 2, "leave out /v1, which is for clients of the API: http://x:1"),
        (["stats", "--cache-dir", __file__], 2, f"{__file__} is a file, not a directory"),
    ],
)
def test_errors_are_one_line(command: Command, arguments: list[str], code: int, message: str) -> None:
    result = command(*arguments)
    assert result.code == code
    assert result.out == ""
    assert result.err.startswith("homeprefixd: error: ")
    assert message in result.err
    assert result.err.count("\n") == 1


@click.command()
@click.argument("how")
def fails(how: str) -> None:
    if how == "told":
        raise ModelError("two\n  lines")
    if how == "interrupt":
        raise KeyboardInterrupt
    raise ZeroDivisionError("a bug")


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(main.cli.commands, "fails", fails)


@pytest.mark.usefixtures("failing")
def test_errors_of_every_kind(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    told = command("fails", "told")
    assert (told.code, told.err) == (3, "homeprefixd: error: two lines\n")
    assert command("fails", "interrupt").code == 130
    bug = command("fails", "bug")
    assert bug.code == 1
    assert bug.err == "homeprefixd: error: unexpected ZeroDivisionError: a bug (HOMEPREFIXD_TRACEBACK=1 shows where)\n"
    monkeypatch.setenv("HOMEPREFIXD_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        command("fails", "bug")


@pytest.mark.parametrize("arguments", [["config", "show"], ["--help"], ["--version"], ["ls", "--help"], ["bench"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_leaves_is_no_error(unbuffered: str, arguments: list[str]) -> None:
    """Like `homeprefixd config show | head -1`, with the reader gone before the first byte."""
    reader, writer = os.pipe()
    os.close(reader)
    argv = [sys.executable, "-m", "homeprefixd", *arguments]
    environ = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    try:
        done = subprocess.run(argv, stdout=writer, stderr=subprocess.PIPE, text=True, env=environ, check=False)
    finally:
        os.close(writer)
    assert done.stderr == ""
    assert done.returncode == main.BROKEN_PIPE


def test_config_show_says_where_values_come_from(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[cache]\nhot = "1GiB"\n')
    monkeypatch.setenv("HOMEPREFIXD_MODEL_CTX", "4096")
    arguments = ["config", "show", "--config", str(file), "--port", "9000"]
    rows = [line.split() for line in command(*arguments, "--origin").out.splitlines()]
    assert ["cache.hot", "1073741824", f"{file}:2"] in rows
    assert ["model.ctx", "4096", "HOMEPREFIXD_MODEL_CTX"] in rows
    assert ["server.port", "9000", "--port"] in rows
    assert ["model.parallel", "0", "default"] in rows
    assert {row[0] for row in rows[1:]} == set(keys())
    plain = command(*arguments).out
    assert "--port" not in plain
    document = json.loads(command(*arguments, "--origin", "--json").out)
    assert document["file"] == str(file)
    assert document["settings"]["cache.hot"] == {"value": 1 << 30, "origin": f"{file}:2"}
    assert json.loads(command(*arguments, "--json").out)["settings"]["server"]["port"] == 9000


def test_config_show_says_where_the_cache_lies(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shown(*flags: str) -> str:
        text = command("config", "show", *flags).out
        assert json.loads(command("config", "show", "--json", *flags).out)["settings"]["cache"]["dir"] in text
        return next(line.split()[1].strip('"') for line in text.splitlines() if line.startswith("cache.dir"))

    assert shown() == str(tmp_path / "home" / ".cache" / "homeprefixd")
    monkeypatch.setenv("CACHE_DIRECTORY", "/var/cache/homeprefixd")
    assert shown() == "/var/cache/homeprefixd"
    assert shown("--cache-dir", "/mnt/ssd") == "/mnt/ssd"
    monkeypatch.delenv("CACHE_DIRECTORY")
    monkeypatch.delenv("HOME")
    assert shown() == ""


def test_config_check(command: Command, tmp_path: Path) -> None:
    good = command("config", "check")
    assert good.code == 0
    assert good.out == "ok: no configuration file, 0 settings given, the others are defaults\n"
    assert json.loads(command("config", "check", "--json", "--port", "1").out) == {"ok": True, "file": None, "given": 1}
    assert "1 setting given" in command("config", "check", "--port", "1").out
    file = tmp_path / "c.toml"
    file.write_text("[server]\nprot = 1\n")
    bad = command("config", "check", "--config", str(file))
    assert bad.code == 2
    assert f"{file}:2: there is no setting server.prot; did you mean port?" in bad.err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ('keys_file = "."', "Is a directory; see server.keys_file"),
        ('keys_file = "none.toml"', "No such file or directory; see server.keys_file"),
        ('keys_file = "c.toml"', "Object contains unknown field `server`"),
        ('keys_file = "empty.toml"', "has no [[key]]; see server.keys_file"),
        ('host = "nö"', "server.host 'nö' is no address of this machine"),
        ('host = "a..b"', "server.host 'a..b' is no address of this machine"),
        ('host = "192.0.2.1"', "server.host '192.0.2.1' is no address of this machine"),
        ('tls_cert = "none.pem"', "server.tls_cert: "),
    ],
)
def test_config_check_refuses_what_serve_would(command: Command, tmp_path: Path, settings: str, message: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(f"[server]\n{settings}\n", encoding="utf-8")
    (tmp_path / "empty.toml").touch()
    done = command("config", "check", "--config", str(file))
    assert (done.code, done.out) == (2, "")
    assert message in done.err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ('path = "none.gguf"', "none.gguf does not exist"),
        ('path = "."', "is a directory, not a GGUF file"),
        ('control_vectors = [{ path = "none.gguf" }]', "none.gguf (`model.control_vectors`) is missing: it must be"),
        ('control_vectors = [{ path = "folder" }]', "folder (`model.control_vectors`) is a directory"),
        ('control_vectors = [{ path = "pipe" }]', "pipe (`model.control_vectors`) is no regular file"),
        ('control_vectors = [{ path = "c.toml" }]', "c.toml is damaged (it does not begin with GGUF)"),
        ('adapters = [{ id = "a", path = "none.gguf" }]', "none.gguf (`model.adapters`) is missing: it must be"),
        ('adapters = [{ id = "a", path = "folder" }]', "folder (`model.adapters`) is a directory"),
        ('adapters = [{ id = "a", path = "c.toml" }]', "`model.adapters`) cannot be used: "),
    ],
)
@pytest.mark.timeout(20)
def test_config_check_looks_at_files(command: Command, tmp_path: Path, settings: str, message: str) -> None:
    file = tmp_path / "c.toml"
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    file.write_text(f"[model]\n{settings}\n", encoding="utf-8")
    done = command("config", "check", "--config", str(file))
    assert (done.code, done.out) == (3, "")
    assert message in done.err


def test_config_check_listens_nowhere(command: Command) -> None:
    """The daemon may be running already."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert command("config", "check", "--port", str(taken.getsockname()[1])).code == 0


def test_serve_has_the_flags_of_the_contract() -> None:
    contract = "model alias host port cache-dir ctx threads parallel hot warm kv-type config reuse log-level grace json"
    flags = {flag for option in main.cli.commands["serve"].params for flag in option.opts}
    assert flags == {f"--{name}" for name in contract.split()}


def test_every_flag_is_a_setting_and_shows_its_default() -> None:
    known = keys()
    for path, _metavar, text in SETTING_FLAGS.values():
        assert path in known
        default = known[path].default
        shown = text.partition("[default: ")[2].rstrip("]")
        if default:
            assert shown == (f"{default:g}" if isinstance(default, float) else str(default))
        else:
            assert shown


def test_every_command_prints_json() -> None:
    def walk(group: click.Group) -> list[click.Command]:
        return [
            leaf for one in group.commands.values() for leaf in (walk(one) if isinstance(one, click.Group) else [one])
        ]

    commands = walk(main.cli)
    assert len(commands) >= 7
    for one in commands:
        assert any("--json" in option.opts for option in one.params), one.name


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_closed_standard_streams_are_as_if_null(tmp_path: Path, closed: int) -> None:
    """A shell's `<&-`, `>&-`, `2>&-`."""
    redirect = ("<&-", ">&-", "2>&-")[closed]
    command = f'exec "$0" -m homeprefixd purge --all --cache-dir "$1" {redirect}'
    done = subprocess.run(
        ["/bin/sh", "-c", command, sys.executable, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 4, done
    assert "Traceback" not in done.stderr
    assert "unexpected" not in done.stderr
    assert ("no daemon runs on it" in done.stderr) == (closed != 2)


def test_output_that_cannot_be_written_is_an_error_in_words() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "homeprefixd", "--help"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert done.returncode == 1
    assert done.stderr == "homeprefixd: error: No space left on device\n"


def test_long_errors_are_cut(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "homeprefixd", "stats", "--cache-dir", "/x" * 3000],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 4
    assert len(done.stderr) < 1300
    assert done.stderr.startswith("homeprefixd: error: there is no cache in /x/x")
