"""What stands where a prompt leaves the known path."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from prefix_testing import House, Store, Worker

from homeprefixd.prefix.blocks import from_le, to_le
from homeprefixd.prefix.neighbours import neighbour

PROMPT = list(range(1000, 1000 + 10 * 64 + 10))


def path(house: House, tokens: list[int], beyond: int = 10_000) -> list[int]:
    return from_le(neighbour(house.cache, house.namespace, to_le(tokens), beyond))


@pytest.mark.parametrize("stored", ["hot", "warm"])
def test_the_path_goes_on_where_a_prompt_leaves_it(house: House, stored: str) -> None:
    house.save(PROMPT)
    if stored == "warm":
        house.cache.write(everything=True)
        house.reopen()
    other = [*PROMPT[:100], 7, *PROMPT[101:]]
    assert path(house, other) == PROMPT
    assert path(house, other, beyond=60) == PROMPT[: 3 * 64]  # whole blocks, to where it is enough
    assert path(house, PROMPT) == PROMPT
    assert path(house, [7, *PROMPT[1:]]) == []
    assert path(house, []) == []


def test_of_several_the_one_used_last(house: House) -> None:
    shared = PROMPT[:128]
    first, second = ([*shared, *range(start, start + 64)] for start in (5000, 6000))
    house.save(first)
    house.save(second)
    house.restore(first)
    assert path(house, shared) == first
    house.restore(second)
    assert path(house, shared) == second


def test_looking_is_no_use(house: House) -> None:
    house.save(PROMPT)
    before = house.cache.counters.lookups
    path(house, PROMPT)
    assert house.cache.counters.lookups == before
    house.session.close()
    house.session = house.cache.session()  # no lease is left


def test_over_the_socket(
    tmp_path: Path, start_store: Callable[..., Store], start_worker: Callable[[Store], Worker]
) -> None:
    store = start_store(tmp_path)
    store.greet()
    worker = start_worker(store)
    worker.save(PROMPT, size=3000)
    namespace = worker.namespace
    found = worker.client.neighbour(namespace, to_le([*PROMPT[:100], 7]), 60, 10.0)
    assert from_le(found) == PROMPT[: 3 * 64]
    store.stop()
    assert worker.client.neighbour(namespace, to_le(PROMPT), 60, 1.0) == b""
