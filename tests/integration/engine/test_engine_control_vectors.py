"""Control vectors in the engine: they change answers, and what was stored without them is not used with them.

Logits are compared, not text; each comparison is seen to tell vectors apart.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from homeprefixd.engine.control_vectors import ControlVectors
from homeprefixd.errors import ModelError
from homeprefixd.frames.worker import ControlVector
from tests.integration.engine.memory_store import MemoryStore
from tests.integration.engine.running import Logits, Running
from tests.tiny_model import LAYERS, WIDTH
from tests.tiny_vector import make_vector

Run = Callable[..., Running]
PROMPT = [3 + (i * 37 + i * i * 5) % 250 for i in range(193)]  # three blocks, and the token that is always computed
ALL = range(1, LAYERS)


def started(run: Run, path: Path, store: MemoryStore, *vectors: ControlVector, **changes: Any) -> Running:
    running = run(path, store, reuse="exact", parallel=1, ctx=512, control_vectors=list(vectors), **changes)
    running.known()
    return running


def first(logits: Logits, running: Running) -> tuple[np.ndarray, int]:
    """Logits of a request's first token, and how much of its prompt was reused."""
    rid = running.start(PROMPT, 1)
    end = running.finish(rid)
    return logits.of.pop(rid)[0], end.timings.cache_n


def apart(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one - other).max() / np.abs(one).max())


@pytest.fixture
def vector(tmp_path: Path) -> str:
    return str(make_vector(tmp_path / "calm.gguf", width=WIDTH, layers=ALL))


@pytest.mark.parametrize("arch", ["llama", "gemma3", "granitehybrid"])
def test_answers_and_namespaces_are_others_with_a_vector(
    run: Run, small: Any, vector: str, monkeypatch: pytest.MonkeyPatch, arch: str
) -> None:
    """Without flash attention's help: by content, scale and layers, each apart from all others."""
    logits, store = Logits(monkeypatch), MemoryStore()
    found = []
    for vectors in (
        [],
        [ControlVector(vector, 1.0)],
        [ControlVector(vector, 0.5)],
        [ControlVector(vector, 1.0, 2)],
        [ControlVector(vector, 1.0, 1, 1)],
    ):
        running = started(run, small(arch), store, *vectors)
        cold, reused = first(logits, running)
        assert reused == 0, "stored prefixes are shared"
        found.append(cold)
        if arch == "llama":  # the store of this test knows nothing of edges
            hot, reused = first(logits, running)
            assert reused == 192
            assert np.array_equal(hot, cold)
    for one in range(len(found)):
        for other in range(one):
            assert apart(found[one], found[other]) > 0.01, (one, other)


def test_what_does_not_matter(run: Run, small: Any, vector: str, tmp_path: Path) -> None:
    """A scale of 0, where the file lies, the order, a range that is that of all layers, said or not."""
    store = MemoryStore()
    started(run, small("llama"), store).ask(PROMPT, 1)
    nothing = started(run, small("llama"), store, ControlVector(vector, 0.0))
    assert nothing.ask(PROMPT, 1)[1].timings.cache_n == 192
    assert "control_vectors" not in nothing.worker.namespaces.description  # type: ignore[union-attr]
    other = make_vector(tmp_path / "other.gguf", width=WIDTH, layers=ALL, seed=1)
    moved = tmp_path / "moved.gguf"
    moved.write_bytes(Path(vector).read_bytes())
    started(run, small("llama"), store, ControlVector(vector, 0.5), ControlVector(str(other), 1.0)).ask(PROMPT, 1)
    again = started(
        run, small("llama"), store, ControlVector(str(other), 1.0, 1, 99), ControlVector(str(moved), 0.5, 1, LAYERS - 1)
    )
    assert again.ask(PROMPT, 1)[1].timings.cache_n == 192
    make_vector(moved, width=WIDTH, layers=ALL, seed=2)  # made again under the same name
    anew = started(run, small("llama"), store, ControlVector(str(other), 1.0), ControlVector(str(moved), 0.5))
    assert anew.ask(PROMPT, 1)[1].timings.cache_n == 0


def test_each_context_has_it(run: Run, small: Any, vector: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several requests that share nothing are in several contexts."""
    logits = Logits(monkeypatch)
    running = run(
        small("llama"), parallel=3, ctx=300, pool=900, control_vectors=[ControlVector(vector, 1.0)], reuse="off"
    )
    assert len(running.engine._places.all) == 3
    alone = running.start(PROMPT, 4)
    running.finish(alone)
    together = [running.start(PROMPT, 4) for _ in range(3)]
    for rid in together:
        running.finish(rid)
        assert logits.compare(rid, alone) == 4


def test_a_model_that_takes_none_is_told(
    run: Run, small: Any, vector: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(run, small("llama"), MemoryStore(), ControlVector(vector, 1.0))
    assert "changes nothing" not in caplog.text
    monkeypatch.setattr(ControlVectors, "apply", lambda self, context: None)  # as if llama.cpp left it out
    started(run, small("llama"), MemoryStore(), ControlVector(vector, 1.0))
    assert (
        "`model.control_vectors` changes nothing: llama.cpp applies no control vectors to llama models" in caplog.text
    )


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ({"width": WIDTH * 2}, [f"direction.1 has {WIDTH * 2} numbers, the model's layers {WIDTH}"]),
        ({"layers": [0, 1]}, ["layer 0"]),
        ({"layers": [LAYERS, LAYERS + 1]}, ["for layers 3 to 4, none of them from 1 to 2"]),
        ({"layers": []}, ["no direction tensors"]),
        ({"name": "blk.{}.attn_q.weight"}, ["a tensor 'blk.1.attn_q.weight', so it is no control vector"]),
        ({"kind": np.float16}, ["direction.1 is not a row of 32-bit floats"]),
        ({"rows": 2}, ["direction.1 is not a row of 32-bit floats"]),
    ],
    ids=str,
)
def test_a_wrong_vector_is_refused_by_file_and_setting(
    run: Run, small: Any, tmp_path: Path, made: dict[str, Any], words: list[str]
) -> None:
    path = make_vector(tmp_path / "wrong.gguf", **{"width": WIDTH, "layers": ALL, **made})
    with pytest.raises(ModelError) as error:
        run(small("llama"), control_vectors=[ControlVector(str(path), 1.0)])
    for word in (*words, str(path), "`model.control_vectors`"):
        assert word in error.value.message, error.value.message


def test_a_range_that_the_model_has_not_is_refused(run: Run, small: Any, vector: str) -> None:
    with pytest.raises(ModelError, match=r"its first_layer is 7, and the model's layers are 1 to 2"):
        run(small("llama"), control_vectors=[ControlVector(vector, 1.0, 7, 9)])


def test_damaged_files_are_refused_by_file_and_setting(run: Run, small: Any, tmp_path: Path, vector: str) -> None:
    whole = Path(vector).read_bytes()
    path = tmp_path / "damaged.gguf"

    def refused() -> None:
        with pytest.raises(ModelError) as error:
            run(small("llama"), control_vectors=[ControlVector(str(path), 1.0)])
        assert str(path) in error.value.message
        assert "`model.control_vectors`" in error.value.message

    refused()  # there is none
    path.mkdir()
    refused()
    path.rmdir()
    for data in (b"", b"no vector", small("llama").read_bytes(), whole[: len(whole) - 4], whole[:200], whole[:30]):
        path.write_bytes(data)
        refused()
    path.write_bytes(whole[:-4] + np.float32(np.nan).tobytes())
    refused()
