"""Into which context a sequence goes: what it costs there, by what is there already. No model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from homeprefixd.chat.stream import TextStream
from homeprefixd.config import AT_ONCE, FULL
from homeprefixd.engine import capacity
from homeprefixd.engine.context import Context
from homeprefixd.engine.places import MOST, Place, Places
from homeprefixd.engine.sequence import Request, Sequence
from homeprefixd.frames.worker import Sampling

CELL, WEIGHTS = 23_040, 98_000_000  # bytes, of the demo model


class FakeContext:
    """Remembers what it was asked; 4,096 cells."""

    n_ctx = 4096

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def pos_max(self, seq: int) -> int:
        self.asked.append(("pos_max", seq))
        return 7

    def copy(self, source: int, target: int, start: int = -1, end: int = -1) -> None:
        self.asked.append(("copy", source, target, start, end))


def places(count: int, *, weights: float = WEIGHTS) -> Places:
    contexts = [cast(Context, FakeContext()) for _ in range(count)]
    return Places(contexts, 3, cell_bytes=CELL, weight_bytes=weights)


def sequence(tokens: int, max_tokens: int = 100) -> Sequence:
    request = Request("r", list(range(tokens)), max_tokens, [], Sampling(), True, True, "", 0.0)
    return Sequence(request, list(range(tokens)), TextStream([]))


def put(place: Place, tokens: int) -> None:
    there = sequence(tokens)
    there.seq_id = place.ids.pop()
    place.residents[there.seq_id] = there
    place.running.append(there)


def cheapest(found: Places, wanted: Sequence, shared: dict[int, int] | None = None) -> int:
    """Where nobody there shares with another."""
    used = [sum(len(there.tokens) for there in place.residents.values()) for place in found.all]
    costs = [found.cost(place, wanted, (shared or {}).get(at, 0), used[at]) for at, place in enumerate(found.all)]
    return costs.index(min(costs))


def test_ids_say_where_a_sequence_is() -> None:
    found = places(2)
    assert [sorted(place.all_ids) for place in found.all] == [[0, 1, 2], [4, 5, 6]]  # 3 and 7 are scratch
    assert [found.of(seq) for seq in (2, 4)] == list(found.all)
    assert found.pos_max(5) == 7
    found.copy(4, 6, 0, 64)
    asked = cast(FakeContext, found.all[1].context).asked
    assert asked == [("pos_max", 1), ("copy", 0, 2, 0, 64)]
    assert (found.n_ctx, found.cells) == (4096, 8192)


def test_long_ones_that_share_nothing_are_apart() -> None:
    found = places(2)
    put(found.all[0], 3000)
    assert cheapest(found, sequence(2000)) == 1


def test_short_ones_are_together_where_reading_the_weights_takes_longer() -> None:
    found = places(2, weights=100 * WEIGHTS)
    put(found.all[0], 60)
    assert cheapest(found, sequence(40)) == 0


def test_weights_that_are_read_at_once_keep_even_short_ones_apart() -> None:
    found = places(2, weights=0)
    put(found.all[0], 60)
    assert cheapest(found, sequence(40)) == 1


def test_a_shared_prefix_draws_and_a_few_shared_tokens_do_not() -> None:
    found = places(2)
    put(found.all[0], 2100)
    assert cheapest(found, sequence(2050), {0: 2000}) == 0
    assert cheapest(found, sequence(2050), {0: 16}) == 1


def test_the_emptier_one_where_none_is_empty() -> None:
    found = places(2)
    put(found.all[0], 3000)
    put(found.all[1], 500)
    assert cheapest(found, sequence(1000)) == 1


class FakeModel:
    """Metadata of a model of full attention alone."""

    is_recurrent = is_hybrid = False
    n_swa = 0
    path = Path(__file__)  # a file without long-rope factors

    def meta(self, _key: str) -> str | None:
        return None


def split(pool: int, ctx: int, parallel: int = 4, **changes: Any) -> list[int]:
    model = FakeModel()
    for name in ("is_recurrent", "is_hybrid", "n_swa"):
        if name in changes:
            setattr(model, name, changes.pop(name))
    flags = {"on_gpu": False, "has_scores": True, **changes}
    return capacity.split(cast(Any, model), capacity.Capacity(ctx, pool), parallel, **flags)


def test_the_pool_is_split_where_each_part_holds_a_request() -> None:
    assert split(32_512, 8192) == [8448] * 4  # what `choose` gives for 4 times 8,192
    assert split(32_000, 8192) == [10_496] * 3  # three hold 8,192 tokens and more
    assert split(32_768, 8192) == [8448] * 4  # and are no multiple of 4,096
    assert split(32_768, 8192, has_scores=False) == [8192] * 4
    assert split(100_000, 1000, parallel=16) == [25_088 - 256] * MOST
    assert split(12_000, 8192) == [12_000]
    assert split(32_768, 8192, parallel=1) == [32_768]


def test_more_requests_than_full_contexts_but_where_each_costs_memory() -> None:
    model = FakeModel()
    assert capacity.at_once(cast(Any, model), on_gpu=False) == AT_ONCE > FULL
    assert capacity.at_once(cast(Any, model), on_gpu=True) == FULL
    model.n_swa = 512
    assert capacity.at_once(cast(Any, model), on_gpu=False) == FULL


@pytest.mark.parametrize("why", [{"on_gpu": True}, {"is_recurrent": True}, {"is_hybrid": True}, {"n_swa": 1024}])
def test_one_context_where_state_or_memory_asks_for_it(why: dict[str, Any]) -> None:
    assert split(32_768, 8192, **why) == [32_768]
