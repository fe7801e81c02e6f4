"""What models were when they were loaded last: by content, through damage, and without harm where it cannot be kept."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from homeprefixd.frames.worker import ModelInfo, NamespaceKnown, Ready
from homeprefixd.last_loads import HEAD, LAST_LOADS_FILE, LastLoads, Remembering


def info(alias: str = "a", **changes: Any) -> ModelInfo:
    values: dict[str, Any] = {
        "alias": alias, "path": "/m", "arch": "llama", "description": "d", "n_params": 1, "size": 1, "n_vocab": 1,
        "n_embd": 1, "n_ctx_train": 1, "n_ctx": 1, "n_pool": 1, "kv_bytes_per_token": 1.0, "parallel": 1, "threads": 1,
        "has_template": False, "cache_mode": "blocks", "cache_reason": "", "namespace": {"type_k": "f16"},
    }  # fmt: skip
    return ModelInfo(**{**values, **changes})


def namespaces(loads: LastLoads, *models: tuple[str, Path]) -> dict[str, Any]:
    return {alias: last.info.namespace["type_k"] for alias, last in loads.recall(models).items()}


def test_by_content_and_name(tmp_path: Path) -> None:
    loads = LastLoads(tmp_path)
    model, moved, other = (tmp_path / name for name in ("model", "moved", "other"))
    model.write_bytes(b"GGUF" + bytes(100))
    assert namespaces(loads, ("a", model)) == {}
    loads.remember(model, info())
    loads.remember(model, info("b", namespace={"type_k": "q8_0"}))
    model.rename(moved)
    other.write_bytes(b"GGUF" + bytes(99) + b"x")  # as large
    again = LastLoads(tmp_path)
    asked = (("a", moved), ("b", moved), ("new", moved), ("c", other), ("d", model))
    assert namespaces(again, *asked) == {"a": "f16", "b": "q8_0", "new": "q8_0"}
    moved.write_bytes(other.read_bytes())  # another one under the same name
    assert namespaces(again, ("a", moved)) == {}
    assert (tmp_path / LAST_LOADS_FILE).stat().st_mode & 0o777 == 0o600
    long = tmp_path / "long"
    with long.open("wb") as file:
        file.truncate(HEAD + 100)
    loads.remember(long, info("long"))
    assert namespaces(again, ("long", long)) == {"long": "f16"}


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"a": {"size": 1}}', bytes(1000), b"[" * 100_000])
def test_a_damaged_file_is_begun_anew(tmp_path: Path, damage: bytes) -> None:
    loads, model = LastLoads(tmp_path), tmp_path / "model"
    model.write_bytes(b"GGUF")
    (tmp_path / LAST_LOADS_FILE).write_bytes(damage)
    assert namespaces(loads, ("a", model)) == {}
    loads.remember(model, info())
    assert namespaces(loads, ("a", model)) == {"a": "f16"}


def test_what_cannot_be_kept_harms_nobody(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.write_bytes(b"GGUF")
    nowhere = LastLoads(tmp_path / "nowhere")
    nowhere.remember(model, info())
    nowhere.remember(tmp_path / "gone", info())
    assert nowhere.recall([("a", model), ("b", tmp_path / "gone")]) == {}


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    loads, model = LastLoads(tmp_path), tmp_path / "model"
    model.write_bytes(b"GGUF")
    for number in range(203):
        loads.remember(model, info(f"m{number}"))
    known = msgspec.json.decode((tmp_path / LAST_LOADS_FILE).read_bytes())
    assert [key.split()[-1] for key in known] == [f"m{number}" for number in range(3, 203)]


def finished(name: str) -> None:
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(10)


def test_what_a_worker_says_is_remembered(tmp_path: Path) -> None:
    loads, model = LastLoads(tmp_path), tmp_path / "model"
    model.write_bytes(b"GGUF")
    watching = Remembering(loads, model)
    watching.watch(NamespaceKnown({"type_k": "early"}))
    watching.watch(Ready(info(namespace={})))
    finished("last-load")
    assert namespaces(loads, ("a", model)) == {}  # its hash is not known yet
    watching.watch(NamespaceKnown({"type_k": "q4_0"}, ["type_k: other"]))
    finished("last-load")
    assert loads.recall([("a", model)])["a"].info.mismatch == ["type_k: other"]
    assert namespaces(loads, ("a", model)) == {"a": "q4_0"}
    watching.watch(Ready(info("embedder", namespace={}, cache_mode="off")))
    finished("last-load")
    assert loads.recall([("embedder", model)])["embedder"].info.cache_mode == "off"


@pytest.mark.parametrize(
    "changed",
    [
        {"at": 1e300},
        {"at": -1e18},
        {"size": -1},
        {"namespace": {"adapters": 7}},
        {"namespace": {"adapters": [{"sha256": 5, "scale": 1.0}]}},
        {"namespace": {"adapters": [{"path": "a"}]}},
        {"namespace": {"control_vectors": "x"}},
        {"namespace": {"control_vectors": [{"sha256": "a", "scale": 1.0, "first_layer": 1}]}},
        {"namespace": {"edges": 3}},
        {"namespace": {"model_sha256": 5}},
        {"namespace": {"a": [{"b": None}]}},
        {"namespace": {"rope": {"a": [[1]]}}},
        {"namespace": []},
    ],
)
def test_an_entry_that_is_not_as_it_should_be_is_left_out(tmp_path: Path, changed: dict[str, Any]) -> None:
    loads, model = LastLoads(tmp_path), tmp_path / "model"
    model.write_bytes(b"GGUF")
    loads.remember(model, info("good"))
    loads.remember(model, info("bad"))
    known = msgspec.json.decode((tmp_path / LAST_LOADS_FILE).read_bytes())
    bad = next(entry for key, entry in known.items() if key.endswith(" bad"))
    (bad["info"] if "namespace" in changed else bad).update(changed)
    (tmp_path / LAST_LOADS_FILE).write_bytes(msgspec.json.encode(known))
    assert namespaces(loads, ("good", model), ("bad", model)) == {"good": "f16", "bad": "f16"}
    assert loads.recall([("bad", model)])["bad"].info.alias == "good"  # the same file's
    full = {
        "adapters": [{"sha256": "a", "scale": 0.5}],
        "control_vectors": [{"sha256": "a", "scale": 1.0, "first_layer": 1, "last_layer": 2}],
        "edges": {"window": 64},
        "rope": {"scaling": "none", "factors": [1.0, "a"]},
        "kernels": ["a"],
        "type_k": "f16",
    }
    loads.remember(model, info("full", namespace=full))
    assert loads.recall([("full", model)])["full"].info.namespace == full


def test_workers_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    code = """
import pathlib, sys
from homeprefixd.last_loads import LastLoads
from tests.unit.test_last_loads import info
folder, name = pathlib.Path(sys.argv[1]), sys.argv[2]
for number in range(30):
    LastLoads(folder).remember(folder / "model", info(f"{name}{number}"))
"""
    (tmp_path / "model").write_bytes(b"GGUF")
    running = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), name]) for name in "ab"]
    assert [process.wait(60) for process in running] == [0, 0]
    known = msgspec.json.decode((tmp_path / LAST_LOADS_FILE).read_bytes())
    assert {key.split()[-1] for key in known} == {f"{name}{number}" for name in "ab" for number in range(30)}
    assert {path.name for path in tmp_path.iterdir()} == {"model", LAST_LOADS_FILE, "kept.lock"}
