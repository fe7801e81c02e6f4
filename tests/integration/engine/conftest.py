"""Fixtures: running engines, tiny models, pseudo-random tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import tiny_model
from tests.integration.engine.memory_store import MemoryStore
from tests.integration.engine.running import Running, load_frame


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Iterator[Callable[..., Running]]:
    """Make running workers; they are closed at the end. Not cached before `Running.known`."""
    made: list[Running] = []

    def make(path: Path, store: MemoryStore | None = None, **changes: Any) -> Running:
        running = Running(load_frame(path, **changes), store or MemoryStore())
        made.append(running)
        return running

    yield make
    for running in made:
        running.close()
    for running in made:
        assert running.store.leases == 0, "a look-up was not released"
        assert not running.engine.counters["integrity_errors"]


@pytest.fixture(scope="session")
def tiny(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny model of an architecture, made once."""
    folder = tmp_path_factory.mktemp("tiny")

    def get(arch: str) -> Path:
        path = folder / f"{arch}.gguf"
        return path if path.exists() else tiny_model.make(arch, demo_model, path)

    return get


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Likewise, with a vocabulary of bytes: made and loaded in no time."""
    folder = tmp_path_factory.mktemp("small")

    def get(arch: str) -> Path:
        path = folder / f"{arch}.gguf"
        return path if path.exists() else tiny_model.make(arch, None, path)

    return get


@pytest.fixture(scope="session")
def tokens() -> Callable[[int, int], list[int]]:
    """`count` pseudo-random token ids by seed, of ordinary tokens."""

    def get(count: int, seed: int = 0) -> list[int]:
        return [1000 + (i * 7919 + seed * 104729 + i * i * 31) % 40000 for i in range(count)]

    return get
