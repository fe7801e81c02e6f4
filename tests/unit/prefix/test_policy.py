"""policy.py: who goes first."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homeprefixd.bench.policy_cost import measure
from homeprefixd.prefix.policy import (
    LEVELS,
    Candidates,
    Evicted,
    LeastRecentlyUsed,
    Policy,
    Rank,
    Worth,
    order_key,
    overdue,
    rank_of,
)

_ranks = st.builds(Rank, st.integers(0, LEVELS - 1), st.floats(0, 1e12), st.integers(-(2**31), -1))


class Item:
    """What is ranked: `rank` can be changed, None: it must not go."""

    def __init__(self, rank: Rank | None) -> None:
        self.rank = rank
        self.offered = False


def candidates_of(*items: Item, now: float = 1000.0) -> Candidates[Item]:
    candidates: Candidates[Item] = Candidates(lambda item: item.rank, lambda: now)
    for item in items:
        candidates.offer(item)
    return candidates


def rank(policy: Policy, *, last_use: float = 0.0, end: int = 64, cost: float = 1.0, hits: int = 0) -> Rank:
    return policy.rank(last_use=last_use, end=end, size=1 << 20, cost=cost, hits=hits)


@given(_ranks, _ranks)
def test_order_keys_sort_as_ranks_do(a: Rank, b: Rank) -> None:
    assert (order_key(a) < order_key(b)) == (a < b)
    assert rank_of(order_key(a) + b"node") == a


def test_the_leaf_of_a_path_goes_first() -> None:
    policy = LeastRecentlyUsed()
    assert rank(policy, last_use=5.0, end=128) < rank(policy, last_use=5.0) < rank(policy, last_use=6.0, end=640)


@pytest.mark.parametrize(("figures", "times"), [({"hits": 1}, 2**1.5), ({"cost": 2.0}, 2.0), ({"hits": 3}, 2**4.5)])
def test_what_is_worth_more_may_lie_unused_longer(figures: dict[str, Any], times: float) -> None:
    better, plain = rank(Worth(), **figures), rank(Worth())
    for age in (100.0, 1e6):
        here = overdue(better._replace(last_use=1e9 - age), 1e9)
        assert here < overdue(plain._replace(last_use=1e9 - 1.1 * age / times), 1e9)
        assert here > overdue(plain._replace(last_use=1e9 - 0.9 * age / times + 1), 1e9)


@given(st.floats(), st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_any_figures_have_a_rank(cost: float, size: int, hits: int) -> None:
    order_key(Worth().rank(last_use=-1.0, end=1 << 20, size=size, cost=cost, hits=hits))


def test_candidates_follow_changed_ranks() -> None:
    a, b, c = Item(Rank(5, 1, 0)), Item(Rank(5, 2, 0)), Item(Rank(5, 3, 0))
    candidates = candidates_of(a, b, c)
    a.rank = Rank(5, 9, 0)
    b.rank = None
    assert candidates.pop() is c
    b.rank = Rank(9, 10, 0)
    candidates.offer(b)
    assert candidates.pop() is a
    assert candidates.pop() is b
    assert candidates.pop() is None
    candidates.offer(b)
    assert candidates.pop() is b


@given(st.lists(_ranks, min_size=1, max_size=30))
def test_the_most_overdue_of_all_levels_goes(ranks: list[Rank]) -> None:
    now = 1e12
    candidates = candidates_of(*map(Item, ranks), now=now)
    found = []
    while (item := candidates.pop()) is not None:
        assert item.rank is not None
        found.append(overdue(item.rank, now))
    assert found == sorted((overdue(rank, now) for rank in ranks), reverse=True)


def test_stale_offers_do_not_pile_up() -> None:
    candidates = candidates_of()
    for _ in range(10_000):
        item = Item(Rank(0, 1, 0))
        candidates.offer(item)
        candidates.offer(item)
        item.rank = None  # it is gone
        candidates.shrink(1)
    assert len(candidates) < 100
    assert candidates.pop() is None


def test_what_was_evicted_is_remembered_for_a_while() -> None:
    evicted = Evicted()
    keys = [hashlib.blake2b(number.to_bytes(4, "little"), digest_size=32).digest() for number in range(300_000)]
    for key in keys[:1000]:
        evicted.add(key, 2)
    assert all(evicted.hits(key) == 3 for key in keys[:1000])
    assert sum(evicted.hits(key) for key in keys[1000:101_000]) < 1000  # taken for others: less than 1 %
    for key in keys[1000:]:
        evicted.add(key, 0)
    assert sum(evicted.hits(key) for key in keys[:1000]) < 1500


def test_it_costs_little() -> None:
    cost = measure(100_000)
    assert cost.bytes < 200
    assert cost.touch_us < 25  # 5 where nothing else runs
