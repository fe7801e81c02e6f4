"""Embeddings in the worker: one that nobody waits for any more ends at once, and the next ones are right."""

from __future__ import annotations

import queue
import time
from pathlib import Path

import numpy as np
import pytest

from homeprefixd.engine.bindings import Model
from homeprefixd.engine.embedding import Embedder
from homeprefixd.engine.llama_log import LlamaLog
from homeprefixd.frames import Frame
from homeprefixd.frames.worker import Converted, Embed

LONG = list(range(1000, 1000 + 4000))


@pytest.fixture(scope="module")
def model(demo_model: Path) -> Model:
    return Model.load(demo_model, LlamaLog())


def test_a_running_embedding_is_cancelled(model: Model) -> None:
    answers: queue.Queue[Frame] = queue.Queue()
    embedder = Embedder(model, 2, answers.put)
    embedder.put(Embed("one", ["a lamp"]))
    first = answers.get(timeout=30)
    assert isinstance(first, Converted)
    embedder.put(Embed("long", [LONG]))
    deadline = time.monotonic() + 10
    while embedder._current != "long":  # it is computed, not only queued
        assert time.monotonic() < deadline
        time.sleep(0.005)
    time.sleep(0.5)  # for llama.cpp to begin: it must be what ends
    embedder.cancel("long")
    asked = time.monotonic()
    embedder.put(Embed("two", ["a lamp"]))
    second = answers.get(timeout=30)
    assert time.monotonic() - asked < 5  # of the half minute that the long one takes
    assert isinstance(second, Converted)
    assert (second.rid, answers.empty()) == ("two", True)
    vectors = [np.frombuffer(answer.vectors[0], "<f4") for answer in (first, second)]
    assert float(vectors[0] @ vectors[1]) == pytest.approx(1, abs=1e-4)
