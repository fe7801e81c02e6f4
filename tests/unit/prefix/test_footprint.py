"""The store with 100,000 nodes: small and ready at once, whether it was stopped or killed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from prefix_testing import MIB, Store, Worker

from homeprefixd.bench.many_nodes import PATH_NODES, fill
from homeprefixd.frames import store as frames
from homeprefixd.prefix.blocks import BLOCK_TOKENS, to_le

NODES = 100_000
BAR = 60_000_000  # bytes of RssAnon


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("many")
    fill(directory, NODES)
    return directory


def test_small_and_ready_at_once(
    directory: Path, start_store: Callable[..., Store], start_worker: Callable[[Store], Worker]
) -> None:
    store = start_store(directory, hot=64 * MIB, warm=4 << 30)
    store.greet()
    ready = time.monotonic() - store.began
    assert store.stats()["warm"]["nodes"] >= NODES
    assert store.rss_anon() < BAR / 2
    assert len(store.ask(frames.ListPrefixes(1, 100)).prefixes) == 100
    worker = start_worker(store)
    tokens = [token for depth in range(PATH_NODES) for token in range(depth, depth + BLOCK_TOKENS)]
    lookup = worker.client.lookup(worker.namespace, to_le(tokens), len(tokens), exact=False)
    assert len(lookup.wait_plan(5) or ()) == PATH_NODES
    for index in range(PATH_NODES):
        assert lookup.wait_block(index, 5) == b"tiny"
    lookup.release()
    times = []
    for _ in range(20):  # a look-up goes down its path; it does not go through all that there is
        begin = time.perf_counter()
        worker.client.lookup(worker.namespace, to_le(tokens), len(tokens), exact=False, load=False).wait_plan(5)
        times.append(time.perf_counter() - begin)
    assert sorted(times)[len(times) // 2] < 1
    for number in range(100):  # written meanwhile, 30 MB
        worker.save([number], size=300_000)
    assert store.flush() == 0
    assert store.rss_anon() < BAR
    assert ready < 20
    assert store.stop() == (0, "")


def test_ram_keeps_its_bound_in_real_bytes(
    tmp_path: Path, start_store: Callable[..., Store], start_worker: Callable[[Store], Worker]
) -> None:
    """Ten times as much comes as the hot tier may have; what the kernel counts of it is never more."""
    hot = 24 * MIB
    store = start_store(tmp_path, hot=hot, warm=256 * MIB)
    store.greet()
    worker = start_worker(store)
    most = 0
    for number in range(480):
        worker.save([number] * 64, size=500_001)  # no whole number of pages
        if number % 20 == 0:
            worker.restore([number // 2] * 64)
            most = max(most, store.shared_memory())
            assert store.stats()["hot"]["bytes"] <= hot
    assert 0.8 * hot < most <= hot
    assert store.rss_anon() < BAR
    assert store.stop()[0] == 0


def test_ready_soon_after_sigkill(directory: Path, start_store: Callable[..., Store]) -> None:
    store = start_store(directory, hot=64 * MIB, warm=4 << 30)
    store.greet()
    store.kill()
    store = start_store(directory, hot=64 * MIB, warm=4 << 30)
    store.greet()
    assert time.monotonic() - store.began < 20
    assert store.rss_anon() < BAR
    assert store.stats()["warm"]["nodes"] >= NODES
    assert store.stop() == (0, "")
