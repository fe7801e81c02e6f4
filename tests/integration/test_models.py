"""Several models with real workers: swapped with prefixes hot, killed, unloaded in use; files that are no models."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.serving import Served, serve
from tests.tiny_model import make

POLICY = "The kitchen light is on and the door of the garage is closed. " * 30
"""Several hundred tokens."""

MEMORY = 360 << 20
"""Bytes for one of two models: the demo model takes about 220 MiB, a tiny one 120 MiB, the hot tier 64 MiB."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Path:
    """A GGUF of the architecture llama with random weights."""
    return make("llama", demo_model, tmp_path_factory.mktemp("tiny") / "tiny.gguf")


def settings(folder: Path, demo_model: Path, memory: int = 0) -> str:
    return f"""
[model]
path = "none"
ctx = 1024
parallel = 2
[models]
dir = "{folder}"
memory = {memory or '"auto"'}
[[models.list]]
path = "{demo_model}"
alias = "demo"
[cache]
hot = "64MiB"
warm = "256MiB"
"""


@pytest.fixture
def two(tmp_path: Path, demo_model: Path, tiny: Path) -> tuple[Path, str]:
    """A folder with the tiny model, and settings for it and the demo model with memory for one at a time."""
    folder = tmp_path / "models"
    folder.mkdir()
    os.link(tiny, folder / "tiny.gguf")
    return folder, settings(folder, demo_model, MEMORY)


def known_state(served: Served, model: str) -> str:
    return str(served.details(model)["status"]["value"])


def wait_for(served: Served, model: str, state: str) -> None:
    deadline = time.monotonic() + 30
    while known_state(served, model) != state:
        assert time.monotonic() < deadline, served.log.read_text()
        time.sleep(0.05)


def test_swapped_models_find_their_prefixes_hot(tmp_path: Path, two: tuple[Path, str]) -> None:
    with serve(tmp_path, two[1]) as served:
        listed = served.ask("/v1/models")[1]["data"]
        assert [(one["id"], one["status"]["value"]) for one in listed] == [("demo", "unloaded"), ("tiny", "unloaded")]
        first = served.chat("demo", f"{POLICY} Is the light on?")
        assert first["timings"]["cache_n"] == 0
        deadline = time.monotonic() + 30  # its file is being hashed behind the first request
        while not served.details("demo")["namespace"]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        served.chat("demo", f"{POLICY} Is the light on?")
        old = served.worker("demo")
        served.chat("tiny", "Hello")
        assert (known_state(served, "demo"), known_state(served, "tiny")) == ("unloaded", "loaded")
        with pytest.raises(ProcessLookupError):
            os.kill(old, 0)
        again = served.chat("demo", f"{POLICY} Is the door open?")
        timings = again["timings"]
        assert timings["cache_tiers"].get("hot", 0) > 300, timings
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 300
        assert timings["prompt_n"] < 64
        assert known_state(served, "tiny") == "unloaded"
        shown = served.details("demo")
        assert shown["namespace"]["arch"] == "llama"
        assert shown["mismatch"] == []


def test_models_are_listed_without_a_swap(tmp_path: Path, two: tuple[Path, str], demo_model: Path) -> None:
    """VS Code asks `/api/show` of each model that `/api/tags` lists."""
    make("llama-embed", demo_model, two[0] / "embedder.gguf")
    (two[0] / "broken.gguf").write_bytes(demo_model.read_bytes()[:100_000])
    with serve(tmp_path, two[1].replace("ctx = 1024\n", "")) as served:
        served.chat("demo", "Hello")
        worker = served.worker("demo")
        listed = {one["name"]: one for one in served.ask("/api/tags")[1]["models"]}
        names = list(listed)
        assert [one["details"]["family"] for one in listed.values()] == ["llama", "", "llama-embed", "llama"]
        assert [len(one["digest"]) for one in listed.values()] == [64, 0, 0, 0]
        shown = {name: served.ask("/api/show", {"model": name}) for name in names}
        assert names == ["demo", "broken", "embedder", "tiny"]
        assert served.worker("demo") == worker
        assert [known_state(served, name) for name in names] == ["loaded", *["unloaded"] * 3]
        assert [shown[name][0] for name in names] == [200] * 4
        assert shown["broken"][1]["model_info"]["general.architecture"] == "unknown"
        assert served.ask("/models/load", {"model": "broken"})[0] == 503  # and it is not asked for again for a while
        assert served.ask("/api/show", {"model": "broken"}) == shown["broken"]
        assert shown["embedder"][1]["capabilities"] == ["embedding"]
        assert served.ask("/api/show", {"model": "demo"})[1]["details"]["quantization_level"] == "Q4_1"
        served.chat("tiny", "Hello")
        now = {one["name"]: one for one in served.ask("/api/tags")[1]["models"]}
        assert known_state(served, "demo") == "unloaded"
        assert now["demo"] == listed["demo"]  # as it was when it was loaded
        assert now["tiny"] == {**listed["tiny"], "digest": now["tiny"]["digest"]}
        assert len(now["tiny"]["digest"]) == 64
        assert served.ask("/api/show", {"model": "tiny"}) == shown["tiny"]
        assert served.ask("/api/show", {"model": "demo"}) == shown["demo"]
        props = served.ask("/props?model=tiny")[1]
        assert shown["tiny"][1]["template"] == props["chat_template"]
        served.ask("/v1/embeddings", {"model": "embedder", "input": "x"})
        assert served.ask("/api/show", {"model": "embedder"}) == shown["embedder"]


def test_a_model_that_never_fits_is_refused_with_sizes(tmp_path: Path, two: tuple[Path, str]) -> None:
    with serve(tmp_path, two[1].replace("ctx = 1024", "ctx = 8192")) as served:
        body = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
        status, reply = served.ask("/v1/chat/completions", body)
        assert (status, reply["error"]["code"]) == (503, "does_not_fit")
        assert "MiB" in reply["error"]["message"]
        assert "models.memory" in reply["error"]["message"]
        served.chat("tiny", "Hello")


def test_a_change_of_settings_is_named(tmp_path: Path, two: tuple[Path, str]) -> None:
    for kv_type in ("f16", "q8_0"):
        with serve(tmp_path, f"{two[1]}\n".replace("ctx = 1024", f'ctx = 1024\nkv_type = "{kv_type}"')) as served:
            for question in ("Is it on?", "Is it off?"):
                served.chat("tiny", f"{POLICY} {question}")
            deadline = time.monotonic() + 30
            while not served.details("tiny")["namespace"]:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            served.chat("tiny", f"{POLICY} Really?")
            mismatch = served.details("tiny")["mismatch"]
            assert bool(mismatch) == (kv_type == "q8_0")
    assert any("type_k" in line and "f16" in line for line in mismatch)
    assert "type_k" in served.log.read_text()


def test_a_file_that_is_written_into_while_it_is_loaded(tmp_path: Path, demo_model: Path) -> None:
    """Weights are mapped: they change under the worker. It ends, and nothing that it computed since is kept."""
    path = tmp_path / "model.gguf"
    first = make("llama", demo_model, tmp_path / "first.gguf", seed=1).read_bytes()
    second = make("llama", demo_model, tmp_path / "second.gguf", seed=2).read_bytes()
    assert len(first) == len(second)
    path.write_bytes(first)

    def answers(served: Served, *, cached: bool = True, tries: int = 1) -> list[str]:
        """To two prompts; a worker that ends is a 503, and the request is to be sent again."""
        texts = []
        for question in ("Is it on?", "Is it off?"):
            body = {"model": "model", "prompt": f"{POLICY} {question}", "max_tokens": 8, "temperature": 0}
            for _ in range(tries):
                status, reply = served.ask("/v1/completions", {**body, "cache_prompt": cached})
                if status == 200:
                    break
                assert status == 503, reply
                time.sleep(0.5)
            texts.append(reply["choices"][0]["text"])
        return texts

    with serve(tmp_path, f'[model]\npath = "{path}"\nctx = 1024\n[cache]\nhot = "64MiB"\nwarm = "256MiB"\n') as served:
        old = answers(served, cached=False)
        assert answers(served) == answers(served) == old
        process = served.worker("model")
        with path.open("r+b") as file:
            file.write(second)
        new = answers(served, tries=40)
        assert served.worker("model") != process
        assert "was changed while it was loaded" in served.log.read_text()
        assert new == answers(served, cached=False)
        assert new != old
        with path.open("r+b") as file:
            file.write(first)
        assert answers(served, tries=40) == old


def test_one_is_killed_and_one_unloaded_while_they_serve(tmp_path: Path, demo_model: Path, two: Any) -> None:
    with serve(tmp_path, settings(two[0], demo_model)) as served:
        replies: list[Any] = []
        loads = [threading.Thread(target=lambda: replies.append(served.chat("tiny", "Hello"))) for _ in range(2)]
        for thread in loads:
            thread.start()
        for thread in loads:
            thread.join()
        assert len(replies) == 2
        assert served.log.read_text().count("unloading") == 0
        served.chat("demo", "Hello")
        long = threading.Thread(
            target=lambda: replies.append(served.chat("demo", "Count", max_tokens=60, ignore_eos=True))
        )
        long.start()
        deadline = time.monotonic() + 30
        while not served.details("demo")["requests"]:
            assert time.monotonic() < deadline
        os.kill(served.worker("tiny"), signal.SIGKILL)
        wait_for(served, "tiny", "loading")  # until the daemon has seen it
        status, reply = served.ask("/models/unload", {"model": "demo"})
        assert (status, reply["unloaded"]) == (200, False)
        served.chat("tiny", "Hello again")  # by a new worker
        long.join()
        assert replies[-1]["usage"]["completion_tokens"] == 60
        wait_for(served, "demo", "unloaded")


def test_embeddings_of_a_chat_model_beside_its_chats(tmp_path: Path, demo_model: Path, two: Any) -> None:
    with serve(tmp_path, settings(two[0], demo_model)) as served:
        texts = ["a cat sat on the mat", "a kitten is on a rug", "interest rates of the central bank"]
        status, body = served.ask("/v1/embeddings", {"model": "demo", "input": texts})
        assert status == 200, body
        vectors = [one["embedding"] for one in body["data"]]
        assert {len(vector) for vector in vectors} == {576}

        def close(a: list[float], b: list[float]) -> float:
            return sum(x * y for x, y in zip(a, b, strict=True))

        assert close(vectors[0], vectors[0]) == pytest.approx(1, abs=1e-4)
        assert close(vectors[0], vectors[1]) > close(vectors[0], vectors[2])
        tokens = served.ask("/tokenize", {"model": "demo", "content": texts[0], "add_special": True})[1]["tokens"]
        body = served.ask("/v1/embeddings", {"model": "demo", "input": tokens, "dimensions": 64})[1]
        cut = body["data"][0]["embedding"]
        assert close(cut, cut) == pytest.approx(1, abs=1e-4)
        assert body["usage"]["prompt_tokens"] == len(tokens)
        length = sum(x * x for x in vectors[0][:64]) ** 0.5
        assert cut == pytest.approx([x / length for x in vectors[0][:64]], abs=1e-3)
        mixed = [*tokens[:2], " sat on the mat"]  # ids of "a cat", and the rest
        [both] = served.ask("/v1/embeddings", {"model": "demo", "input": mixed})[1]["data"]
        assert close(both["embedding"], vectors[0]) == pytest.approx(1, abs=1e-3)
        status, refused = served.ask("/v1/embeddings", {"model": "demo", "input": "x", "dimensions": 577})
        assert (status, refused["error"]["param"]) == (400, "dimensions")
        status, refused = served.ask("/v1/embeddings", {"model": "demo", "input": "word " * 9000})
        assert (status, refused["error"]["code"]) == (400, "context_length_exceeded")
        served.chat("demo", "Hello")


def test_a_model_that_makes_embeddings_only(tmp_path: Path, demo_model: Path, two: Any) -> None:
    make("llama-embed", demo_model, two[0] / "embedder.gguf")
    with serve(tmp_path, settings(two[0], demo_model)) as served:
        texts = ["a cat sat on the mat", "rates", "a cat sat on the mat"]
        status, body = served.ask("/v1/embeddings", {"model": "embedder", "input": texts})
        assert status == 200, body
        first, other, again = (one["embedding"] for one in body["data"])
        assert first == again != other
        assert sum(x * x for x in first) == pytest.approx(1, abs=1e-4)
        assert served.ask("/v1/models")[1]["data"][1]["meta"]["n_embd"] == len(first)
        for path, asked in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "stream": True}),
            ("/tokenize", {"content": "Hi"}),
        ):
            status, refused = served.ask(path, {"model": "embedder", **asked})
            assert (status, "makes embeddings only" in refused["error"]["message"]) == (400, True), refused
        other_weights = make("llama-embed", demo_model, tmp_path / "other.gguf", seed=1).read_bytes()
        with (two[0] / "embedder.gguf").open("r+b") as file:
            file.write(other_weights)
        deadline = time.monotonic() + 30
        while (answer := served.ask("/v1/embeddings", {"model": "embedder", "input": texts}))[0] != 200:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert "was changed while it was loaded" in served.log.read_text()
        assert answer[1]["data"][0]["embedding"] != first


# ------------------------------------------------------------------------------------------------- hostile files


def mutated(whole: bytes, head: int, chance: random.Random) -> bytes:
    """With some bytes of its first `head` changed, or numbers of 4 or 8 bytes made large."""
    data = bytearray(whole)
    for _ in range(chance.randint(1, 8)):
        at = chance.randrange(4, head)
        width = chance.choice((1, 1, 4, 8))
        value = chance.choice((0, 1, 2**31, 2**63 - 1, 2**64 - 1, chance.randrange(256), chance.randrange(2**32)))
        data[at : at + width] = (value & (2 ** (8 * width) - 1)).to_bytes(width, "little")
    return bytes(data)


def hostile(tmp_path: Path, demo_model: Path, cuts: int, mutations: int) -> None:
    """Each file is loaded by a daemon that serves the demo model all the time."""
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "directory.gguf").mkdir()
    (folder / "empty.gguf").write_bytes(b"")
    (folder / "text.gguf").write_text("no model\n" * 100)
    target = make("llama", None, folder / "hostile.gguf")
    whole = target.read_bytes()
    chance = random.Random(7)
    files = [(f"cut at {at}", whole[:at]) for at in (len(whole) * n // cuts + n for n in range(cuts))]
    # Half of them before the vocabulary, where the numbers are that decide sizes; half in all that is no weight.
    heads = (whole.index(b"tokenizer.ggml.model"), whole.index(b"output_norm.weight") + 1000)
    files += [(f"mutation {n}", mutated(whole, heads[n % 2], chance)) for n in range(mutations)]
    refused = 0
    wrong: list[str] = []
    listed = f'[[models.list]]\npath = "{folder}/directory.gguf"\n'
    stays = settings(folder, demo_model).replace('alias = "demo"', 'alias = "demo"\nkeep_alive = 3600')
    with serve(tmp_path, stays + listed) as served:
        served.chat("demo", "Hello")
        worker = served.worker("demo")
        for name in ("empty", "text", "directory"):
            status, reply = served.ask("/models/load", {"model": name})
            assert status == 503
            assert f"{name}.gguf is" in reply["error"]["message"]
        for what, data in files:
            target.write_bytes(data)
            status, reply = served.ask("/models/load", {"model": "hostile"}, timeout=600)
            refused += status != 200
            if status == 200:  # what was changed does not matter, or only to its answers
                if what.startswith("cut"):
                    wrong.append(f"{what}: it was loaded")
                body = {"model": "hostile", "prompt": "Hello", "max_tokens": 2}
                status, reply = served.ask("/v1/completions", body, timeout=600)
                refused += status != 200
                unloaded = served.ask("/models/unload", {"model": "hostile"})
                if unloaded[0] != 200:
                    wrong.append(f"{what}: {unloaded}")
            elif "hostile" not in reply["error"]["message"]:
                wrong.append(f"{what}: {reply}")
            if status not in (200, 400, 503) or (status != 200 and len(reply["error"]["message"]) > 2000):
                wrong.append(f"{what}: {status} {reply}")
            if served.process.poll() is not None or served.worker("demo") != worker:
                wrong.append(f"{what}: the daemon or the other model did not go on")
                break
        served.chat("demo", "Hello again")
        assert served.process.poll() is None
    assert not wrong, "\n".join(wrong)
    assert refused >= cuts + mutations // 4
    print(f"{refused} of {len(files)} refused")


def test_hostile_files(tmp_path: Path, demo_model: Path) -> None:
    hostile(tmp_path, demo_model, cuts=4, mutations=6)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_hostile_files_in_full(tmp_path: Path, demo_model: Path) -> None:
    hostile(tmp_path, demo_model, cuts=50, mutations=500)
