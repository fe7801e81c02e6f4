"""`verify` and `compact` on a closed store and on a daemon."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import pytest

from homeprefixd.bench.many_nodes import fill
from homeprefixd.cli import verify as module
from homeprefixd.prefix.client import AdminClient


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    directory = tmp_path / "cache"
    fill(directory, 500)
    return directory


def damage(directory: Path) -> str:
    """Flip a bit of one payload; its node's id."""
    env = lmdb.open(str(directory), max_dbs=8)
    payloads = env.open_db(b"payloads")
    with env.begin(write=True) as txn:
        key, value = next(iter(txn.cursor(payloads)))
        txn.put(key, value[:-1] + bytes([value[-1] ^ 1]), db=payloads)
    env.close()
    return bytes(key).hex()[:16]


def test_a_sound_store(directory: Path, command: Callable[..., Any]) -> None:
    done = command("verify", "--cache-dir", str(directory))
    assert done.code == 0
    assert "500 blocks" in done.out
    assert "all as written" in done.out


def test_a_damaged_store(directory: Path, command: Callable[..., Any]) -> None:
    node = damage(directory)
    done = command("verify", "--cache-dir", str(directory))
    assert done.code == 1
    assert f"{node}: piece 0 has a wrong checksum" in done.out
    assert "--repair" in done.out
    done = command("verify", "--cache-dir", str(directory), "--repair", "--json", "--rate", "1GB")
    assert done.code == 0
    found = json.loads(done.out)
    assert found["damaged"] == 1
    assert found["removed"] >= 1
    again = json.loads(command("verify", "--cache-dir", str(directory), "--json").out)
    assert (again["nodes"], again["damaged"]) == (500 - found["removed"], 0)


def test_a_running_daemon_is_asked(
    directory: Path, command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str, Any]] = []
    reply = {"nodes": 2, "bytes": 9, "damaged": 1, "removed": 0, "problems": ["a: b"], "seconds": 0.1, "complete": True}

    def call(url: str, path: str, body: Any, timeout: float) -> Any:
        asked.append((url, path, body))
        return reply

    monkeypatch.setattr(module, "call", call)
    assert command("verify", "--url", "http://here").code == 1
    assert command("verify", "--url", "http://here", "--repair", "--rate", "5MB").code == 0
    assert asked == [
        ("http://here", "/cache/verify", {"repair": False}),
        ("http://here", "/cache/verify", {"repair": True, "rate": 5_000_000}),
    ]


def test_compact_gives_space_back_and_keeps_what_is_there(directory: Path, command: Callable[..., Any]) -> None:
    with AdminClient.start(directory) as client:
        ids = [prefix.id for prefix in client.prefixes().prefixes[1:]]
        for prefix in ids:
            client.purge(prefix=prefix)
        left = client.stats()["warm"]["nodes"]
    done = command("compact", "--cache-dir", str(directory), "--json")
    assert done.code == 0
    sizes = json.loads(done.out)
    assert sizes["after"] < sizes["before"] / 2
    assert (directory / "data.mdb").stat().st_mode & 0o077 == 0
    assert not (directory / "data.mdb.part").exists()
    found = json.loads(command("verify", "--cache-dir", str(directory), "--json").out)
    assert (found["nodes"], found["damaged"]) == (left, 0)
    assert "given back" in command("compact", "--cache-dir", str(directory)).out


def test_compact_leaves_others_what_is_theirs_of_the_disk(
    directory: Path, command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (directory / "data.mdb").read_bytes()
    monkeypatch.setenv("HOMEPREFIXD_CACHE_MIN_FREE", str(shutil.disk_usage(directory).free))
    done = command("compact", "--cache-dir", str(directory))
    assert done.code == 6
    assert "cache.min_free" in done.err
    assert (directory / "data.mdb").read_bytes() == before
    monkeypatch.setenv("HOMEPREFIXD_CACHE_MIN_FREE", "0")
    assert command("compact", "--cache-dir", str(directory)).code == 0


def test_a_store_in_use_is_not_compacted(directory: Path, command: Callable[..., Any]) -> None:
    before = (directory / "data.mdb").read_bytes()
    with AdminClient.start(directory):
        done = command("compact", "--cache-dir", str(directory))
    assert done.code == 6
    assert "in use" in done.err
    assert (directory / "data.mdb").read_bytes() == before


@pytest.mark.parametrize("name", ["verify", "compact"])
def test_no_store(tmp_path: Path, command: Callable[..., Any], name: str) -> None:
    done = command(name, "--cache-dir", str(tmp_path))
    assert done.code == 4
    assert "there is no cache" in done.err
    (tmp_path / "data.mdb").write_bytes(b"something else" * 1000)
    done = command(name, "--cache-dir", str(tmp_path))
    assert done.code == 6
    assert "data.mdb" in done.err
    assert (tmp_path / "data.mdb").read_bytes() == b"something else" * 1000


def test_a_bad_rate(tmp_path: Path, command: Callable[..., Any]) -> None:
    done = command("verify", "--cache-dir", str(tmp_path), "--rate", "fast")
    assert done.code == 2
    assert "--rate" in done.err
