"""`model ls|load|unload|show` against a daemon's answers, and without one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from homeprefixd.last_loads import LastLoads
from tests.unit.api.scripted_backend import MODEL
from tests.unit.cli.conftest import Daemon, Result

Command = Callable[..., Result]


def entry(name: str, state: str = "loaded", **more: Any) -> dict[str, Any]:
    return {
        "id": name,
        "status": {"value": state},
        "path": f"/m/{name}.gguf",
        "with_adapters": [f"{name}:x"],
        "bytes": 2 << 30,
        "progress": 1.0,
        "reason": "",
        "pinned": False,
        "memory": 3 << 30,
        "requests": 2,
        "expires": 120.0,
        "cache_mode": "blocks",
        "cache_reason": "",
        "namespace": {"type_k": "f16", "rope": {"scaling": "none"}, "adapters": [{"sha256": "ab" * 32, "scale": 0.5}]},
        "adapters": [
            {"id": "x", "path": "/m/x.gguf", "scale": 0.5, "default": True, "problem": "", "sha256": "ab" * 32},
            {"id": "y", "path": "/m/y.gguf", "scale": 1.0, "default": False, "problem": "it is damaged", "sha256": ""},
        ],
        "mismatch": ["type_k: stored prefixes have q8_0, this run f16"],
        **more,
    }


@pytest.fixture
def models(daemon: Daemon) -> Daemon:
    listed = [entry("a", pinned=True), entry("b", "failed", reason="/m/b.gguf is damaged", memory=0, expires=None)]
    daemon.answers["GET /models/details"] = 200, {"models": [*listed, entry("c", "loading", progress=0.25)]}
    return daemon


def test_ls(command: Command, models: Daemon) -> None:
    done = command("model", "ls", "--url", models.url)
    assert done.code == 0
    lines = done.out.splitlines()
    assert lines[0].split() == ["model", "state", "file", "memory", "running", "unloaded", "in"]
    assert lines[1].split() == ["a", "loaded", "2.0", "GiB", "3.0", "GiB", "2", "never"]
    assert "failed" in lines[2]
    assert "loading 25%" in lines[3]
    assert lines[4] == "b: /m/b.gguf is damaged"
    assert "3.0 GiB" in lines[3]
    assert len(json.loads(command("model", "ls", "--json", "--url", models.url).out)["models"]) == 3
    models.answers["GET /models/details"] = 200, {"models": [entry("a", "unloaded")]}
    assert "needs 3.0 GiB" in command("model", "ls", "--url", models.url).out


def test_ls_without_a_daemon_tells_the_settings(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one.gguf").write_bytes(b"GGUF....")
    (tmp_path / "two.gguf").write_bytes(b"")
    monkeypatch.setenv("HOMEPREFIXD_MODELS_DIR", str(tmp_path))
    done = command("model", "ls", "--json")
    found = {model["id"]: model["status"]["value"] for model in json.loads(done.out)["models"]}
    assert found == {"one": "unloaded", "two": "failed"}
    assert "two.gguf is empty" in command("model", "ls").out


def test_load_and_unload(command: Command, daemon: Daemon) -> None:
    daemon.answers["POST /models/load"] = 200, {"success": True, "model": entry("a")}
    done = command("model", "load", "a", "--keep-alive", "-1", "--url", daemon.url)
    assert done.out == "a is loaded, with 3.0 GiB of memory\n"
    assert daemon.asked[-1] == ("POST /models/load", {"model": "a", "keep_alive": -1.0})
    for unloaded, said in ((True, "a is unloaded"), (False, "it is unloaded when its last request ends")):
        daemon.answers["POST /models/unload"] = 200, {"success": True, "unloaded": unloaded}
        assert said in command("model", "unload", "a", "--url", daemon.url).out
    daemon.answers["POST /models/load"] = 503, {"error": {"message": "the model x needs about 9 GiB"}}
    refused = command("model", "load", "x", "--url", daemon.url)
    assert (refused.code, refused.err) == (5, "homeprefixd: error: the model x needs about 9 GiB\n")


def test_show(command: Command, models: Daemon) -> None:
    shown = command("model", "show", "a", "--url", models.url).out
    assert "namespace type_k" in shown
    assert "namespace rope.scaling" in shown
    assert "abababababab at 0.5" in next(line for line in shown.splitlines() if line.startswith("namespace adapters"))
    assert re.search(r"adapter x +/m/x.gguf at 0.5, used where a request names none: sha256 abab", shown)
    assert re.search(r"adapter y +/m/y.gguf at 1: it is damaged", shown)
    assert "not usable: type_k: stored prefixes have q8_0, this run f16" in shown
    for name in ("a", "a:x"):
        assert json.loads(command("model", "show", name, "--json", "--url", models.url).out)["id"] == "a"
    unknown = command("model", "show", "z", "--url", models.url)
    assert (unknown.code, "there is: a, b, c" in unknown.err) == (4, True)


def test_show_of_one_that_is_not_loaded(command: Command, daemon: Daemon) -> None:
    vector = {"path": "/m/v.gguf", "scale": 0.5, "first": 2, "last": 9, "sha256": "cd" * 32}
    of_namespace = {"sha256": "cd" * 32, "scale": 0.5, "first_layer": 2, "last_layer": 9}
    one = entry("a", "unloaded", as_of=1_800_000_000.0, control_vectors=[vector], namespace={"c": [of_namespace]})
    daemon.answers["GET /models/details"] = 200, {"models": [one]}
    shown = " ".join(command("model", "show", "a", "--url", daemon.url).out.split())
    assert re.search(r"as of the last load 2027-01-1\d \d\d:\d\d: all that follows reuse blocks", shown)
    assert f"control vector /m/v.gguf at 0.5 on layers 2 to 9: sha256 {'cd' * 32}" in shown
    assert "namespace c cdcdcdcdcdcd at 0.5 on layers 2 to 9" in shown


def test_show_without_a_daemon(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "one.gguf"
    model.write_bytes(b"GGUF....")
    monkeypatch.setenv("HOMEPREFIXD_MODEL_PATH", str(model))
    where = ["--cache-dir", str(tmp_path / "cache")]
    assert "its namespace is known when it is loaded" in command("model", "show", "one", *where).out
    (tmp_path / "cache").mkdir()
    LastLoads(tmp_path / "cache").remember(model, replace(MODEL, alias="one", namespace={"type_k": "f16"}))
    shown = command("model", "show", "one", *where)
    assert "as of the last load" in shown.out
    assert "namespace type_k" in shown.out
    assert json.loads(command("model", "show", "one", "--json", *where).out)["namespace"] == {"type_k": "f16"}
    unknown = command("model", "show", "z", *where)
    assert (unknown.code, "there is: one" in unknown.err) == (4, True)


def test_without_a_daemon(command: Command, tmp_path: Path) -> None:
    done = command("model", "load", "a", "--cache-dir", str(tmp_path))
    assert done.code == 5
    assert "no daemon runs on" in done.err
