"""policy.py: who goes first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from homeprefixd.prefix.policy import Candidates, LeastRecentlyUsed, Rank, order_key

_ranks = st.builds(Rank, st.floats(0, 1e12), st.integers(-(2**31), -1))


@given(_ranks, _ranks)
def test_order_keys_sort_as_ranks_do(a: Rank, b: Rank) -> None:
    assert (order_key(a) < order_key(b)) == (a < b)


def test_the_leaf_of_a_path_goes_first() -> None:
    policy = LeastRecentlyUsed()
    rank = lambda last_use, end: policy.rank(last_use=last_use, end=end, size=1, cost=1.0, hits=0)  # noqa: E731
    assert rank(5.0, 128) < rank(5.0, 64) < rank(6.0, 640)


def test_candidates_follow_changed_ranks() -> None:
    ranks: dict[str, Rank | None] = {"a": Rank(1, 0), "b": Rank(2, 0), "c": Rank(3, 0)}
    candidates: Candidates[str] = Candidates(lambda name: ranks[name])
    for name in ranks:
        candidates.offer(name)
    ranks["a"] = Rank(9, 0)
    ranks["b"] = None
    assert candidates.pop() == "c"
    ranks["b"] = Rank(10, 0)
    assert candidates.pop() == "a"
    assert candidates.pop() is None
    candidates.offer("b")
    assert candidates.pop() == "b"


def test_stale_offers_do_not_pile_up() -> None:
    turn = 0
    candidates: Candidates[str] = Candidates(lambda name: Rank(turn, 0))
    for turn in range(10_000):  # noqa: B007
        candidates.offer("a")
        candidates.shrink(1)
    assert len(candidates) < 100
    assert candidates.pop() == "a"
