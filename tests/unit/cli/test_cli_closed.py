"""`pin`, `unpin`, `export`, `import` with the daemon stopped."""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from homeprefixd.bench.many_nodes import DESCRIPTION, fill
from homeprefixd.cli import transfer
from homeprefixd.errors import RequestError
from homeprefixd.prefix import transfer as prefix
from homeprefixd.prefix.blocks import FORMAT_VERSION, block_key, namespace_of, to_le
from homeprefixd.prefix.codec import PIECE, Encoder, piece_count
from homeprefixd.prefix.disk import Disk
from homeprefixd.prefix.policy import Worth

MIB = 1 << 20


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    directory = tmp_path / "cache"
    fill(directory, 200)
    return directory


def first_id(command: Callable[..., Any], directory: Path) -> str:
    found = json.loads(command("ls", "--cache-dir", str(directory), "--json").out)
    return str(found["prefixes"][0]["id"])


def test_pin_list_unpin(command: Callable[..., Any], directory: Path) -> None:
    flags = ("--cache-dir", str(directory))
    assert "nothing is pinned" in command("pin", *flags).out
    node = first_id(command, directory)
    done = command("pin", "--prefix", node, "--label", "house", "--ttl", "30d", *flags)
    assert (done.code, done.err) == (0, "")
    assert f"pinned {node}, 3,200 tokens" in done.out
    [pin] = json.loads(command("pin", *flags, "--json").out)["pins"]
    assert (pin["id"], pin["label"], pin["tokens"], pin["tiers"]) == (node, "house", 3200, ["warm"])
    assert pin["expires"] - pin["created"] == pytest.approx(30 * 86400)
    assert json.loads(command("stats", *flags, "--json").out)["pins"]["count"] == 1
    assert "1 unpinned" in command("unpin", "--label", "house", *flags).out
    assert "nothing is pinned" in command("pin", *flags).out


def test_looking_at_pins_changes_nothing(command: Callable[..., Any], directory: Path) -> None:
    before = (directory / "data.mdb").read_bytes()
    assert command("pin", "--cache-dir", str(directory)).code == 0
    assert (directory / "data.mdb").read_bytes() == before


@pytest.mark.skipif(
    subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode != 0
    if shutil.which("unshare")
    else True,
    reason="needs a mount namespace of its own",
)
def test_what_only_looks_works_where_nothing_can_be_written(directory: Path) -> None:
    (directory / "lock").unlink(missing_ok=True)
    mount = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && shift && exec "$@"'
    read_only = ("unshare", "-rm", "sh", "-c", mount, "sh", str(directory))

    def ask(*command: str) -> subprocess.CompletedProcess[str]:
        line = [*read_only, sys.executable, "-m", "homeprefixd", *command, "--cache-dir", str(directory)]
        return subprocess.run(line, capture_output=True, text=True, timeout=30, check=False)

    assert "200 blocks" in ask("stats").stdout
    assert json.loads(ask("ls", "--json").stdout)["total"] == 200
    (directory / "opened").touch()  # as a crash leaves it
    with open(directory / "lock", "w") as lock:
        assert "200 blocks" in ask("verify").stdout
        done = ask("purge", "--all")
        assert (done.returncode, "Read-only file system" in done.stderr) == (6, True)
        fcntl.flock(lock, fcntl.LOCK_EX)  # a daemon that sees the directory by another mount
        assert "in use by another homeprefixd" in ask("verify").stderr


def test_what_needs_the_daemon_says_so(command: Callable[..., Any], directory: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "prefix")
    for line in (["pin", "--text", "x"], ["unpin", "--request", "r1"], ["export", "--text", "x", "-o", out]):
        done = command(*line, "--cache-dir", str(directory))
        assert (done.code, done.err.count("\n")) == (5, 1)
        assert "homeprefixd serve" in done.err
        assert "--prefix" in done.err
    assert not Path(out).exists()


def test_what_is_not_there(command: Callable[..., Any], directory: Path, tmp_path: Path) -> None:
    flags = ("--cache-dir", str(directory))
    out = tmp_path / "prefix"
    assert command("pin", "--prefix", "ffffffff", *flags).code == 4
    assert command("unpin", "--label", "nobody", *flags).code == 4
    assert command("export", "--prefix", "ffffffff", "-o", str(out), *flags).code == 4
    assert list(tmp_path.glob("prefix*")) == []
    assert command("pin", "--cache-dir", str(tmp_path / "none")).code == 4


def test_a_prefix_goes_from_one_closed_store_to_another(
    command: Callable[..., Any], directory: Path, tmp_path: Path
) -> None:
    node = first_id(command, directory)
    out = tmp_path / "prefix"
    done = command("export", "--prefix", node, "-o", str(out), "--cache-dir", str(directory), "--json")
    assert (done.code, done.err) == (0, "")
    assert json.loads(done.out)["bytes"] == out.stat().st_size
    assert out.stat().st_mode & 0o077 == 0
    other = tmp_path / "other"
    fill(other, 50)
    flags = ("--cache-dir", str(other))
    assert command("purge", "--all", "--yes", *flags).code == 0
    done = command("import", str(out), *flags)
    assert (done.code, done.err) == (0, "")
    assert "3,200 tokens" in done.out
    assert first_id(command, other) == node
    assert command("import", str(out), *flags).out == "nothing new: all 50 blocks were there\n"
    found = json.loads(command("verify", *flags, "--json").out)
    assert (found["nodes"], found["damaged"]) == (50, 0)


def large_prefix(file: Path, blocks: int) -> None:
    """Of 1 MiB of state a block, of the model that `fill` is of."""
    with file.open("wb") as out:
        out.write(prefix.MAGIC)
        prefix._put(out, prefix.Header(FORMAT_VERSION, dict(DESCRIPTION), blocks))
        parent, encoder = bytes(namespace_of(DESCRIPTION)), Encoder(0)
        for number in range(blocks):
            tokens, state = to_le([number] * 64), random.Random(number).randbytes(MIB)
            parent = block_key(parent, tokens)
            prefix._put(out, prefix.NodeRecord(tokens, number * 64, MIB, True, "prompt", 0.1, ""))
            for piece in range(piece_count(MIB)):
                record = encoder.encode(parent, piece, memoryview(state)[piece * PIECE : (piece + 1) * PIECE])
                out.write(struct.pack("<I", len(record)) + record)
        prefix._put(out, prefix.Header(FORMAT_VERSION, {}, blocks))


@pytest.mark.parametrize("source", ["file", "environment", "flag"])
def test_an_import_keeps_to_the_budget_of_the_daemon(
    command: Callable[..., Any], directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """What it says that it has kept is not evicted by the next start."""
    large_prefix(tmp_path / "large", 24)
    flags = ["--cache-dir", str(directory)]
    if source == "file":
        (tmp_path / "config.toml").write_text('[cache]\nwarm = "10MiB"\n')
        flags += ["--config", str(tmp_path / "config.toml")]
    elif source == "environment":
        monkeypatch.setenv("HOMEPREFIXD_CACHE_WARM", "10MiB")
    budget = ["--warm", "10MiB"] if source == "flag" else []
    done = json.loads(command("import", str(tmp_path / "large"), *flags, *budget, "--json").out)
    assert (done["nodes"], done["tokens"]) == (24, 24 * 64)
    assert 4 * 64 <= done["kept"] < 24 * 64
    assert "does not fit into `cache.warm`" in done["not_kept"]
    assert (directory / "data.mdb").stat().st_blocks * 512 <= 11 * MIB
    there = json.loads(command("ls", *flags, "--json").out)["prefixes"]
    assert done["kept"] in [one["tokens"] for one in there]


def test_an_import_leaves_others_what_is_theirs(command: Callable[..., Any], directory: Path, tmp_path: Path) -> None:
    large_prefix(tmp_path / "large", 24)
    (tmp_path / "config.toml").write_text('[cache]\nmin_free = "64TiB"\n')
    before = (directory / "data.mdb").stat().st_blocks
    flags = ("--cache-dir", str(directory), "--config", str(tmp_path / "config.toml"))
    said = command("import", str(tmp_path / "large"), *flags, "--json")
    assert (said.code, said.err) == (0, "")
    done = json.loads(said.out)
    assert done["kept"] < 24 * 64
    assert "`cache.min_free`" in done["not_kept"]
    assert (directory / "data.mdb").stat().st_blocks <= before + 4096


def test_what_only_removes_or_marks_evicts_nothing(
    command: Callable[..., Any], directory: Path, tmp_path: Path
) -> None:
    """A daemon may have been started with more."""
    flags = ("--cache-dir", str(directory))
    large_prefix(tmp_path / "large", 8)
    assert command("import", str(tmp_path / "large"), *flags, "--warm", "1GiB").code == 0
    (tmp_path / "config.toml").write_text('[cache]\nwarm = "2MiB"\n')
    small = (*flags, "--config", str(tmp_path / "config.toml"))
    assert command("pin", "--prefix", first_id(command, directory), *small).code == 0
    assert command("unpin", "--all", *small).code == 0
    assert command("purge", "--older-than", "300000d", *small).code == 0
    assert json.loads(command("ls", *flags, "--json").out)["total"] == 208


def test_a_store_that_never_had_this_model_refuses(
    command: Callable[..., Any], directory: Path, tmp_path: Path
) -> None:
    out = tmp_path / "prefix"
    node = first_id(command, directory)
    assert command("export", "--prefix", node, "-o", str(out), "--cache-dir", str(directory)).code == 0
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    disk = Disk(other, limit=1 << 28, level=0, policy=Worth())
    description = {**DESCRIPTION, "kv_type": "q8_0"}
    disk.put_namespace(namespace_of(description), description)
    disk.close()
    done = command("import", str(out), "--cache-dir", str(other))
    assert done.code != 0
    assert "kv_type: f16 there, q8_0 here" in done.err


def test_hints_of_the_store_call_the_command_as_it_was_typed(
    command: Callable[..., Any], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOMEPREFIXD_PROGRAM", "scripts/run")
    flags = ("--cache-dir", str(directory))
    assert "`scripts/run pin` lists" in command("unpin", "--label", "nobody", *flags).err
    assert "see `scripts/run ls`" in command("pin", "--prefix", "ffffffff", *flags).err


def test_files_are_called_what_they_were_called(command: Callable[..., Any], directory: Path, tmp_path: Path) -> None:
    flags = ("--cache-dir", str(directory))
    node = first_id(command, directory)
    (tmp_path / "folder").mkdir()
    for target, why in (("none/x", "No such file or directory"), ("folder", "Is a directory")):
        done = command("export", "--prefix", node, "-o", str(tmp_path / target), *flags)
        assert done.code == 2
        assert done.err == f"homeprefixd: error: {tmp_path / target} cannot be written: {why}\n"
    assert list(tmp_path.glob("*.part")) == []
    file = tmp_path / "x"
    for data, why in ((b"", "it is empty"), (b"homeprefixd", "it is cut short"), (b"GGUF" * 9, "this is no prefix")):
        file.write_bytes(data)
        done = command("import", str(file), *flags)
        assert done.code == 2
        assert done.err.startswith(f"homeprefixd: error: {file}: {why}")


def test_an_empty_standard_input_is_said_to_be_that(
    command: Callable[..., Any], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        done = command("import", "-", "--cache-dir", str(directory))
    assert (done.code, done.err) == (2, "homeprefixd: error: standard input: it is empty\n")


def test_what_is_no_file_is_written_into(command: Callable[..., Any], directory: Path, tmp_path: Path) -> None:
    flags = ("--prefix", first_id(command, directory), "--cache-dir", str(directory))
    out, fifo, null = tmp_path / "out", tmp_path / "fifo", tmp_path / "null"
    assert command("export", *flags, "-o", str(out)).code == 0
    os.mkfifo(fifo)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(fifo.read_bytes()))
    reader.start()
    done = command("export", *flags, "-o", str(fifo))
    reader.join(30)
    assert (done.code, done.err, done.out) == (0, "", f"written to {fifo}\n")
    assert got == [out.read_bytes()]
    assert fifo.is_fifo()
    null.symlink_to("/dev/null")
    done = command("export", *flags, "-o", str(null), "--json")
    assert (done.code, json.loads(done.out)["bytes"]) == (0, None)
    assert null.is_symlink()
    assert Path("/dev/null").is_char_device()
    assert list(tmp_path.glob("*.part")) == []


def test_a_daemons_reply_goes_into_a_pipe(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(fifo.read_bytes()))
    reader.start()
    with transfer._written(str(fifo)) as out:
        out.write(b"prefix")
    reader.join(30)
    assert (got, fifo.is_fifo()) == ([b"prefix"], True)
    with (
        pytest.raises(RequestError, match="/dev/full cannot be written: No space left"),
        transfer._written("/dev/full") as out,
    ):
        out.write(b"x")


def test_a_link_leads_to_what_is_written(command: Callable[..., Any], directory: Path, tmp_path: Path) -> None:
    flags = ("--prefix", first_id(command, directory), "--cache-dir", str(directory))
    (tmp_path / "far").mkdir()
    link = tmp_path / "link"
    link.symlink_to("far/prefix")
    for _ in range(2):  # new, then there
        assert command("export", *flags, "-o", str(link)).code == 0
        assert link.is_symlink()
        assert os.listdir(tmp_path / "far") == ["prefix"]
    assert (tmp_path / "far" / "prefix").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("target", ["-", "/dev/stdout", "/proc/self/fd/1"])
def test_standard_output_may_be_a_file_or_a_pipe(
    command: Callable[..., Any], directory: Path, tmp_path: Path, target: str
) -> None:
    node = first_id(command, directory)
    assert command("export", "--prefix", node, "-o", str(tmp_path / "x"), "--cache-dir", str(directory)).code == 0
    line = [sys.executable, "-m", "homeprefixd", "export", "--prefix", node, "--cache-dir", str(directory), "-o"]
    kept = tmp_path / "kept"
    kept.touch()
    inode = kept.stat().st_ino
    with kept.open("ab") as file:
        done = subprocess.run([*line, target], stdout=file, stderr=subprocess.PIPE, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert kept.stat().st_ino == inode
    assert kept.read_bytes()[:4096] == (tmp_path / "x").read_bytes()[:4096]


def test_a_terminal_is_refused(command: Callable[..., Any], directory: Path, tmp_path: Path) -> None:
    node = first_id(command, directory)
    line = [sys.executable, "-m", "homeprefixd", "export", "--prefix", node, "--cache-dir", str(directory), "-o"]
    ours, theirs = os.openpty()
    try:
        for target in ("-", os.ttyname(theirs)):
            done = subprocess.run([*line, target], stdout=theirs, stderr=subprocess.PIPE, timeout=60, check=False)
            assert done.returncode == 2
            assert b"is a terminal" in done.stderr
    finally:
        os.close(ours)
        os.close(theirs)
