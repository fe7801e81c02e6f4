"""When and why a block went for good, and where else a prompt is stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefix_testing import DESCRIPTION, MIB, House, Store, Worker

from homeprefixd.frames.store import Gone, Traced
from homeprefixd.prefix import purge
from homeprefixd.prefix.blocks import to_le
from homeprefixd.prefix.removals import Removals
from homeprefixd.prefix.tracing import trace

SIZE = 400_000
FIRST = [7] * 64 + [8] * 64 + [9] * 20


def traced(house: House, tokens: list[int]) -> Traced:
    return trace(house.cache, 1, house.namespace, to_le(tokens))


def test_it_is_bounded() -> None:
    removals = Removals(most=3, wall=lambda: 5.0)
    removals.add([bytes([n]) * 32 for n in range(4)], "budget")
    assert len(removals) == 3
    assert removals.get(bytes(32)) is None
    assert removals.get(bytes([3]) * 32) == (5.0, "budget")
    assert removals.counts["budget"] == 4
    removals.add([bytes([3]) * 32], "purged")
    assert removals.get(bytes([3]) * 32) == (5.0, "purged")


def test_what_is_there_and_what_never_was(house: House) -> None:
    house.save(FIRST)
    assert traced(house, FIRST) == Traced(1, None, len(FIRST))
    assert traced(house, [5] * 200) == Traced(1, None, 0)
    assert traced(house, []) == Traced(1, None, 0)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"hot": 4 * MIB, "warm": 0}, "no_disk"),
        ({"hot": 4 * MIB, "warm": 8 * MIB}, "budget"),
    ],
    ids=["RAM only", "the disk's budget"],
)
def test_the_cache_is_full(make: Callable[..., House], settings: dict[str, int], why: str) -> None:
    house = make(**settings)
    house.save(FIRST, SIZE)
    house.cache.write(everything=True)
    began = house.now
    for number in range(100, 140):
        house.save([number] * 64, SIZE)
        house.cache.write(everything=True)
        house.now += 1000
    gone = traced(house, FIRST).gone
    assert gone is not None
    assert gone.start in (0, 64)
    assert (gone.start == 0) == (house.known(FIRST) == 0)
    assert gone.why == why
    assert gone.start + gone.count in (128, len(FIRST))
    assert began < gone.when < house.now
    longer = traced(house, [*FIRST, *range(64)]).gone
    assert longer is not None
    assert longer.start == gone.start
    assert traced(house, [139] * 64).gone is None


def test_the_end_of_a_prompt(house: House) -> None:
    """It was shorter than a block; the prompt that asks for it has more there."""
    [_first, _second, tail] = house.save(FIRST)
    house.cache.forget_hot(house.cache.hot.by_key[tail])
    house.cache.removals_seen.add([tail], "budget")
    assert traced(house, [*FIRST, 1, 2, 3]).gone == Gone(128, traced(house, FIRST).gone.when, "budget", 20)  # type: ignore[union-attr]


def test_purged(house: House) -> None:
    house.save(FIRST)
    house.cache.write(everything=True)
    purge.purge(house.cache, everything=True, now=house.now)
    gone = traced(house, FIRST).gone
    assert gone is not None
    assert (gone.start, gone.count, gone.why) == (0, len(FIRST), "purged")
    house.save(FIRST)
    assert traced(house, FIRST).gone is None  # it came back


def test_it_is_kept_over_a_restart(house: House) -> None:
    house.save(FIRST)
    house.cache.write(everything=True)
    purge.purge(house.cache, everything=True, now=house.now)
    before = traced(house, FIRST)
    house.reopen()
    assert traced(house, FIRST) == before
    house.cache.removals_seen.unpack(b"nonsense")  # it is not an error
    assert traced(house, FIRST) == before
    assert len(house.cache.removals_seen.pack(2)) < len(house.cache.removals_seen.pack(100))


def test_damaged(house: House) -> None:
    house.save(FIRST)
    house.cache.write(everything=True)
    lease = house.cache.lookup(house.namespace, to_le(FIRST), limit=1000, exact=False, load=False)
    house.cache.damaged(lease.places[1], "a test")
    gone = traced(house, FIRST).gone
    assert gone is not None
    assert (gone.start, gone.why) == (64, "damaged")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"kv_type": "q8_0"}, "kv_type: f16 there, q8_0 here"),
        ({"salt": "guest"}, "salt: another one"),
        ({"model_sha256": "cd" * 32, "model": "large"}, "model: another there, large here"),
        ({"adapters": [["ab", 1.0]], "adapter_names": ["poet"]}, "adapters: none there, poet here"),
        ({"rope": {"scale": "2"}}, "rope.scale: none there, 2 here"),
    ],
)
@pytest.mark.parametrize("stored", ["hot", "warm"])
def test_under_another_namespace(house: House, stored: str, change: dict[str, Any], named: str) -> None:
    house.save(FIRST)
    if stored == "warm":
        house.cache.write(everything=True)
        house.reopen()
    there = house.namespace
    house.namespace = house.cache.open_namespace({**DESCRIPTION, **change})[0]
    assert traced(house, FIRST) == Traced(1, None, 0, len(FIRST), [named])
    assert traced(house, [1, *FIRST[1:]]) == Traced(1, None, 0)
    house.save(FIRST)
    assert traced(house, FIRST) == Traced(1, None, len(FIRST))
    house.namespace = there
    assert traced(house, FIRST).elsewhere == 0


def test_over_the_socket(
    tmp_path: Path, start_store: Callable[..., Store], start_worker: Callable[[Store], Worker]
) -> None:
    store = start_store(tmp_path)
    store.greet()
    worker = start_worker(store)
    worker.save(FIRST)
    assert worker.client.trace(worker.namespace, to_le(FIRST), 5.0) == Traced(
        ticket=worker.client.trace(worker.namespace, to_le(FIRST), 5.0).ticket - 1,  # type: ignore[union-attr]
        gone=None,
        known=len(FIRST),
    )
