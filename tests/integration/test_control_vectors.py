"""Control vectors through a real daemon, and what is known of a model that is not loaded or has no daemon."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.integration.serving import ROOT, Served, serve
from tests.tiny_model import LAYERS, WIDTH, make
from tests.tiny_vector import make_vector

PROMPT = "The kitchen light is on and the door of the garage is closed. " * 8


def settings(model: Path, vectors: str) -> str:
    return f"""
[model]
path = "none"
[cache]
hot = "32MiB"
warm = "64MiB"
tail_delay = 0
[[models.list]]
path = "{model}"
alias = "base"
ctx = 1024
parallel = 1
control_vectors = [{vectors}]
[[models.list]]
path = "{model}"
alias = "other"  # of two, none is loaded at the start
"""


def text(served: Served) -> tuple[str, int]:
    body = {"model": "base", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    status, reply = served.ask("/v1/completions", body)
    assert status == 200, f"{reply}\n{served.log.read_text()}"
    return reply["choices"][0]["text"], reply["timings"]["cache_n"]


def known(served: Served) -> Any:
    """Loaded, and its namespace known."""
    text(served)
    deadline = time.monotonic() + 30
    while not (found := served.details("base"))["namespace"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def shown(*where: str) -> str:
    command = [sys.executable, "-m", "homeprefixd", "model", "show", "base", *where]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True, timeout=60)
    return " ".join(done.stdout.split())


def test_control_vectors(tmp_path: Path) -> None:
    model = make("llama", None, tmp_path / "base.gguf")
    vector = make_vector(tmp_path / "calm.gguf", width=WIDTH, layers=range(1, LAYERS))
    with serve(tmp_path, settings(model, "")) as served:
        assert served.details("base")["namespace"] == {}
        known(served)
        text(served)
        plain, reused = text(served)
        assert reused > 300
    with serve(tmp_path, settings(model, '{ path = "calm.gguf", scale = 0.75, first_layer = 2 }')) as served:
        before = served.details("base")  # as it was without
        assert (before["status"]["value"], "control_vectors" in before["namespace"]) == ("unloaded", False)
        assert before["as_of"] > 0
        found = known(served)
        assert found["as_of"] is None
        [one] = found["namespace"]["control_vectors"]
        assert (one["scale"], one["first_layer"], one["last_layer"]) == (0.75, 2, LAYERS - 1)
        steered, _ = text(served)
        assert steered != plain
        assert text(served)[1] > 300
        difference = (
            f"control_vectors: stored prefixes have none, this run {one['sha256'][:12]} at 0.75 on layers 2 to 2"
        )
        assert found["mismatch"] == [difference]
        assert f"cannot be used: {difference}" in served.log.read_text()
        vectors = f"control vector {vector} at 0.75 on layers 2 to 2: sha256 {one['sha256']}"
        of_namespace = f"namespace control_vectors {one['sha256'][:12]} at 0.75 on layers 2 to 2"
        while_loaded = shown("--url", served.url)
        assert "as of the last load" not in while_loaded
        assert served.ask("/models/unload", {"model": "base"})[1]["unloaded"]
        after = shown("--url", served.url)
        for table in (while_loaded, after):
            assert vectors in table
            assert of_namespace in table
            assert f"not usable: {difference}" in table
        assert "state unloaded" in after
        assert "as of the last load" in after
    where = ["--cache-dir", str(tmp_path / "cache"), "--config", str(tmp_path / "config.toml")]
    stopped = shown(*where)
    assert "as of the last load" in stopped
    assert vectors in stopped
    assert json.loads((tmp_path / "cache" / "models.json").read_text())
    make("qwen3", None, tmp_path / "other.gguf").replace(model)  # another one under the same name
    assert "its namespace is known when it is loaded" in shown(*where)
    (tmp_path / "calm.gguf").write_bytes(b"")
    with serve(tmp_path, settings(model, '{ path = "calm.gguf" }')) as served:
        status, reply = served.ask("/v1/completions", {"model": "base", "prompt": "x", "max_tokens": 1})
        assert (status, reply["error"]["code"]) == (503, "model_load_failed")
        assert f"the control vector {vector} (`model.control_vectors`) is empty" in reply["error"]["message"]
