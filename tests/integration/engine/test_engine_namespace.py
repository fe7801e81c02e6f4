"""What changes the namespace of a model's prefixes, and what does not: these are found under other settings, too."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from homeprefixd.engine.building import DEBUG_LOGITS
from homeprefixd.lora import Space
from tests.integration.engine.memory_store import MemoryStore
from tests.integration.engine.running import Running
from tests.tiny_model import split

Run = Callable[..., Running]
PROMPT = [3 + (i * 37 + i * i * 5) % 250 for i in range(130)]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def key(running: Running) -> bytes:
    running.known()
    assert running.worker.namespaces is not None
    found = running.worker.namespaces.opened(Space())
    assert found is not None
    return found


@pytest.mark.parametrize("arch", ["llama", "gemma3", "mamba2"])
@pytest.mark.parametrize(
    "changes",
    [
        {"threads": 1},
        {"alias": "another"},
        {"ctx": 512},
        {"ctx": 512, "pool": 4096},
        {"parallel": 1},
        {"batch": 64},
        {"chat_template": TEMPLATE},
    ],
    ids=str,
)
def test_what_does_not_matter(
    run: Run, small: Callable[[str], Path], tmp_path: Path, arch: str, changes: dict[str, Any]
) -> None:
    store = MemoryStore()
    first = run(small(arch), store)
    known = key(first)
    if arch == "llama":
        first.ask(PROMPT, 1)
    moved = tmp_path / "moved.gguf"
    shutil.copyfile(small(arch), moved)
    other = run(moved, store, **changes)
    assert key(other) == known
    if arch == "llama":  # the store of this test knows nothing of edges
        assert other.ask(PROMPT, 1)[1].timings.cache_n == 129


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_type": "bf16"},
        {"kv_type_v": "bf16"},
        {"kv_type": "q8_0", "kv_type_v": "f16"},
        {"flash_attention": True},
        {"kv_type": "q8_0", "flash_attention": True},
        {"salt": "another"},
    ],
    ids=str,
)
def test_what_matters(run: Run, small: Callable[[str], Path], changes: dict[str, Any]) -> None:
    store = MemoryStore()
    first = run(small("llama"), store)
    known = key(first)
    first.ask(PROMPT, 1)
    other = run(small("llama"), store, **changes)
    assert key(other) != known
    assert other.ask(PROMPT, 1)[1].timings.cache_n == 0


def test_types_of_k_and_v_are_named_apart(run: Run, small: Callable[[str], Path]) -> None:
    first, second = run(small("llama"), kv_type_v="f16"), run(small("llama"), kv_type="f32", kv_type_v="bf16")
    assert key(first) == key(run(small("llama")))  # said or not
    namespaces = second.worker.namespaces
    assert key(second)
    assert namespaces is not None
    assert [namespaces.description[name] for name in ("type_k", "type_v")] == ["f32", "bf16"]


def test_the_context_size_matters_to_models_that_choose_their_factors_by_it(
    run: Run, small: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 1,024 tokens the short ones, beyond them the long ones: then K is another, and answers are."""
    monkeypatch.setenv(DEBUG_LOGITS, "1")
    store = MemoryStore()
    first = run(small("llama+longrope"), store, ctx=512)
    known, logits = key(first), first.ask(PROMPT, 1)[1].timings.logits_sha256
    within = run(small("llama+longrope"), store, ctx=1024, threads=1, alias="another")
    assert key(within) == known
    assert within.ask([*PROMPT, 3], 1)[1].timings.cache_n == len(PROMPT)
    assert within.ask(PROMPT, 1, cache=False)[1].timings.logits_sha256 == logits
    for sizes in ({"ctx": 2048}, {"ctx": 512, "pool": 2048}):
        beyond = run(small("llama+longrope"), store, **sizes)
        assert key(beyond) not in (known, b"")
        end = beyond.ask([*PROMPT, 3] if "pool" in sizes else PROMPT, 1)[1]
        assert end.timings.cache_n == (len(PROMPT) if "pool" in sizes else 0)  # of the other one beyond
        assert beyond.ask(PROMPT, 1, cache=False)[1].timings.logits_sha256 != logits
        namespaces = beyond.worker.namespaces
        assert namespaces is not None
        assert namespaces.description["rope"]["factors"] == "long"


def test_other_weights_under_the_same_name_matter(run: Run, small: Callable[[str], Path], tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    found = []
    for arch in ("llama", "qwen3"):
        path.unlink(missing_ok=True)
        shutil.copyfile(small(arch), path)
        found.append(key(run(path)))
    assert found[0] != found[1]


def test_a_split_model_is_all_of_its_parts(run: Run, small: Callable[[str], Path], tmp_path: Path) -> None:
    store = MemoryStore()
    parts = split(small("llama"), tmp_path / "parted", 10)
    assert len(parts) > 2
    first = run(parts[0], store)
    known = key(first)
    assert first.ask(PROMPT, 1)[1].timings.cache_n == 0
    assert first.ask([*PROMPT, 3], 1)[1].timings.cache_n == len(PROMPT)
    data = bytearray(parts[-1].read_bytes())
    data[-100] ^= 1  # one weight of the last part
    parts[-1].write_bytes(data)
    other = run(parts[0], store)
    assert key(other) != known
    assert other.ask([*PROMPT, 3], 1)[1].timings.cache_n == 0
