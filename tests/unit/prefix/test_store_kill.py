"""SIGKILL of the store while it takes, writes and evicts: it opens again, and nothing that comes back is wrong.

The short form runs in CI; `scripts/test -m long tests/unit/prefix/test_store_kill.py` runs the 200 moments.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from prefix_testing import MIB, Store, Worker

from homeprefixd.frames import store as frames

Start = Callable[..., Store]
Connect = Callable[[Store], Worker]

_SIZE = 60_000  # of a block
_KEPT = [10_000 + n for n in range(200)]  # flushed before the first kill: must never be lost


def prompt(number: int) -> list[int]:
    """Four blocks, the first shared by ten prompts."""
    return [number // 10] * 64 + [n % 50_000 for n in range(number, number + 150)]


def load(worker: Worker, seed: int, ending: threading.Event, wrong: list[BaseException]) -> None:
    """Save and restore until told to stop; whatever comes back is compared (`Worker.restore`)."""
    numbers = random.Random(seed)
    try:
        while not ending.is_set():
            number = numbers.randrange(500)
            worker.save(prompt(number), _SIZE)
            worker.restore(prompt(numbers.randrange(500)))
            worker.restore(_KEPT)
    except AssertionError as error:
        wrong.append(error)


def kill_at_random_moments(start: Start, connect: Connect, directory: Path, moments: int, seed: int) -> None:
    choose = random.Random(seed)
    store = start(directory, hot=16 * MIB, warm=24 * MIB)
    store.greet()
    worker = connect(store)
    kept = worker.save(_KEPT, _SIZE)
    assert worker.restore(_KEPT)[1] == kept  # so it has arrived
    assert store.ask(frames.Pin(4, prefix=kept[-1].hex()[:16])).error == ""
    assert store.flush() == 0
    wrong: list[BaseException] = []
    for moment in range(moments):
        ending = threading.Event()
        threads = [
            threading.Thread(target=load, args=(worker, seed * 1000 + 2 * moment + i, ending, wrong)) for i in range(2)
        ]
        for thread in threads:
            thread.start()
        time.sleep(choose.uniform(0.02, 0.6))
        store.kill()
        ending.set()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive(), "a client hangs"
        assert not wrong, f"moment {moment}: {wrong}"
        store.channel.close()
        store = start(directory, hot=16 * MIB, warm=24 * MIB)
        store.greet()
        assert store.stats()["warm"]["state"] == "ok"
        worker.attach(store)
        assert worker.restore(_KEPT)[1] == kept, f"moment {moment}: what was flushed is not there"
    done = store.ask(frames.Verify(3))
    assert (done.damaged, done.problems) == (0, [])
    assert not list(directory.glob("*.damaged-*")), "a store was set aside"
    worker.client.close()
    assert store.stop()[0] == 0


def test_sigkill_at_random_moments(start_store: Start, start_worker: Connect, tmp_path: Path) -> None:
    kill_at_random_moments(start_store, start_worker, tmp_path, moments=6, seed=1)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_sigkill_at_200_random_moments(start_store: Start, start_worker: Connect, tmp_path: Path) -> None:
    kill_at_random_moments(start_store, start_worker, tmp_path, moments=200, seed=2)
