"""Fixtures for the tests of `prefix/`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prefix_testing import House, Store, Worker


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path)
    yield house
    house.close()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., House]]:
    """Makes caches of other sizes over one directory."""
    houses: list[House] = []

    def build(**sizes: Any) -> House:
        houses.append(House(tmp_path, **sizes))
        return houses[-1]

    yield build
    for house in houses:
        house.close()


@pytest.fixture
def start_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Store]]:
    """Starts stores that end with the test."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in sys.path if p))
    stores: list[Store] = []

    def start(directory: Path, *flags: str, **sizes: int) -> Store:
        stores.append(Store(directory, *flags, **sizes))
        return stores[-1]

    yield start
    for store in stores:
        store.channel.close()
        if store.process.poll() is None:
            store.process.kill()
        store.process.wait(10)
        if store.process.stderr is not None:
            store.process.stderr.close()


@pytest.fixture
def start_worker() -> Iterator[Callable[[Store], Worker]]:
    """Connects workers that leave with the test."""
    workers: list[Worker] = []

    def start(store: Store) -> Worker:
        workers.append(Worker(store))
        return workers[-1]

    yield start
    for worker in workers:
        worker.client.close()
