"""Adapters through a real daemon: by name and by field, in several dialects, after a restart, damaged ones."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.integration.serving import ROOT, Served, serve
from tests.tiny_lora import make_lora
from tests.tiny_model import make

PROMPT = "The kitchen light is on and the door of the garage is closed. " * 8


def settings(model: Path, adapters: str) -> str:
    return f"""
[model]
path = "{model}"
alias = "base"
ctx = 1024
parallel = 3
adapters = [{adapters}]
[cache]
hot = "32MiB"
warm = "64MiB"
tail_delay = 0
"""


def text(served: Served, **asked: Any) -> tuple[str, int]:
    body = {"model": "base", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, **asked}
    status, reply = served.ask("/v1/completions", body)
    assert status == 200, f"{reply}\n{served.log.read_text()}"
    return reply["choices"][0]["text"], reply["timings"]["cache_n"]


def wait_until_known(served: Served) -> Any:
    deadline = time.monotonic() + 30
    while not (found := served.details("base"))["namespace"] or not found["adapters"][0]["sha256"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def shown(directory: Path, served: Served) -> str:
    command = [sys.executable, "-m", "homeprefixd", "model", "show", "base", "--url", served.url]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True, timeout=60)
    return done.stdout


def test_adapters(tmp_path: Path) -> None:
    model = make("llama", None, tmp_path / "base.gguf")
    files = {name: make_lora(model, tmp_path / f"{name}.gguf", seed=ord(name)) for name in "ab"}
    (tmp_path / "bad.gguf").write_bytes(files["a"].read_bytes()[:300])
    adapters = ", ".join(
        [
            '{id = "a", path = "a.gguf"}',
            '{id = "b", path = "b.gguf", scale = 0.5, alias = "b-half"}',
            '{id = "bad", path = "bad.gguf"}',
        ]
    )
    config = settings(model, adapters)
    with serve(tmp_path, config) as served:
        wait_until_known(served)
        listed = [one["id"] for one in served.ask("/v1/models")[1]["data"]]
        assert listed == ["base", "base:a", "b-half", "base:bad"]
        assert [one["id"] for one in served.ask("/models/details")[1]["models"]] == ["base"]
        assert served.ask("/models/unload", {"model": "base"})[1]["unloaded"]
        assert [one["name"] for one in served.ask("/lora-adapters")[1]] == ["a", "b", "bad"]  # of one not loaded, too
        cold = {name: text(served, model=name) for name in ("base", "base:a", "b-half")}
        assert len({reply for reply, _ in cold.values()}) == 3
        assert {cached for _, cached in cold.values()} == {0}
        for asked, name in (
            ({"lora": [{"id": "a"}]}, "base:a"),
            ({"lora": [{"id": 0, "scale": 1}]}, "base:a"),
            ({"lora": [{"id": "b"}]}, "b-half"),
            ({"model": "base:b"}, "b-half"),
            ({"lora": []}, "base"),
        ):
            reply, cached = text(served, **asked)
            assert (reply, cached > 300) == (cold[name][0], True), asked
        assert text(served, lora=[{"id": "a", "scale": 0.25}])[1] == 0
        messages = [{"role": "user", "content": PROMPT}]
        anthropic = {"model": "base:a", "messages": messages, "max_tokens": 4, "temperature": 0}
        assert served.ask("/v1/messages", anthropic)[1]["usage"]["cache_read_input_tokens"] == 0
        again = served.chat("base:a", PROMPT)
        assert (again["model"], again["usage"]["prompt_tokens_details"]["cached_tokens"] > 300) == ("base:a", True)
        ollama = {"model": "base:a", "messages": messages, "stream": False, "options": {"num_predict": 4}}
        assert served.ask("/api/chat", ollama)[1]["prompt_cached_count"] > 300
        for asked in ({"model": "base:a"}, {"model": "base", "lora": [{"id": "a"}]}, {"model": "base:b"}):
            found = served.ask("/cache/match", {"prompt": PROMPT, **asked})[1]
            assert found["cached_tokens"] > 300, asked
        assert (
            served.ask("/cache/match", {"model": "base", "prompt": PROMPT, "lora": [{"id": "b"}, {"id": "a"}]})[1][
                "cached_tokens"
            ]
            == 0
        )
        for asked, code, words in (
            ({"model": "base", "lora": [{"id": "c"}]}, 400, "no adapter 'c'; there is: a (or 0), b (or 1)"),
            ({"model": "base", "lora": [{"id": 7}]}, 400, "no adapter '7'"),
            ({"model": "base", "lora": [{"id": "a", "scale": 1e6}]}, 400, "lora[0].scale"),
            ({"model": "base", "lora": [{"id": "a", "scale": "much"}]}, 400, "lora[0].scale"),
            ({"model": "base", "lora": {"id": "a"}}, 400, "`lora` must be array"),
            ({"model": "base:a", "lora": [{"id": "b"}]}, 400, "exclude each other"),
            ({"model": "base:c"}, 404, "base:a, b-half, base:bad"),
            ({"model": "base:bad"}, 503, "bad.gguf"),
        ):
            status, reply = served.ask("/v1/completions", {"prompt": "Hello", "max_tokens": 1, **asked})
            assert (status, words in reply["error"]["message"]) == (code, True), (asked, reply)
        embedded = served.ask("/v1/embeddings", {"model": "base:a", "input": "Hello"})
        assert (embedded[0], "without adapters" in embedded[1]["error"]["message"]) == (400, True)
        table = shown(tmp_path, served)
        assert "adapter a" in table
        assert "failed to load lora adapter" in table
    make_lora(model, files["b"], seed=99)  # trained again
    with serve(tmp_path, config) as served:
        wait_until_known(served)
        assert text(served, model="base:a") == (cold["base:a"][0], text(served, model="base:a")[1])
        assert text(served, model="base")[0] == cold["base"][0]
        trained, cached = text(served, model="b-half")
        assert (trained != cold["b-half"][0], cached) == (True, 0)
        assert any(line.startswith("adapters: stored prefixes have") for line in served.details("base")["mismatch"])
        assert "not usable: adapters: stored prefixes have" in shown(tmp_path, served)
        assert "cannot be used: adapters: stored prefixes have" in served.log.read_text()
