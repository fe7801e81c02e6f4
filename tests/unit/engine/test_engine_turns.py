"""Who is next where one thread makes what may take seconds, and what of it is remembered."""

from __future__ import annotations

from typing import Any

import pytest

from homeprefixd.engine import known_forms
from homeprefixd.engine.known_forms import KnownForms
from homeprefixd.engine.turns import Turns
from homeprefixd.errors import RequestError


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Pristine:
    """Stands in for a mask at its start."""

    def copy(self) -> Pristine:
        return Pristine()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def order(turns: Turns[str], clock: Clock, takes: dict[str, float]) -> list[str]:
    """All that wait, as they are taken; `takes`: seconds of each account's."""
    found = []
    while turns._waiting:
        found.append(turns.take())
        client = found[-1][:-1]
        clock.now += takes[client]
        turns.spent(client, takes[client])
    return found


def put(turns: Turns[str], *works: str) -> None:
    """A work is its account and a digit."""
    for work in works:
        turns.put(work, work[:-1], work.encode(), work)


def test_accounts_take_turns(clock: Clock) -> None:
    turns: Turns[str] = Turns(lambda form: False, clock)
    put(turns, "sh0", "sh1", "sh2", "sh3")
    assert turns.take() == "sh0"
    put(turns, "kid0", "kid1", "dad0")
    clock.now += 5
    turns.spent("sh", 5.0)
    assert order(turns, clock, {"sh": 5, "kid": 0.001, "dad": 0.001}) == [
        "kid0", "dad0", "kid1", "sh1", "sh2", "sh3",
    ]  # fmt: skip


def test_those_who_take_much_alternate_and_what_was_taken_long_ago_counts_less(clock: Clock) -> None:
    turns: Turns[str] = Turns(lambda form: False, clock)
    put(turns, "a0", "a1", "a2", "b0", "b1")
    assert order(turns, clock, {"a": 5, "b": 5}) == ["a0", "b0", "a1", "b1", "a2"]
    clock.now += 3600
    turns.spent("b", 1.0)
    put(turns, "b2", "a3")
    assert turns.take() == "a3"


def test_what_became_known_waits_for_nobody(clock: Clock) -> None:
    known: set[bytes] = set()
    turns: Turns[str] = Turns(known.__contains__, clock)
    put(turns, "kid0", "sh0", "sh1", "sh2")
    turns.spent("sh", 60.0)
    known.add(b"sh2")
    assert [turns.take() for _ in range(4)] == ["sh2", "kid0", "sh0", "sh1"]


def test_what_nobody_wants_is_not_made(clock: Clock) -> None:
    turns: Turns[str] = Turns(lambda form: False, clock)
    put(turns, "sh0", "sh1")
    assert turns.drop("sh0")
    assert not turns.drop("sh0")
    assert turns.take() == "sh1"


def test_a_refusal_is_told_again_by_an_error_of_its_own(clock: Clock) -> None:
    known = KnownForms(clock)
    refusal = RequestError("no.", param="response_format", code="unsupported_schema")
    known.add(b"k", refusal, 0.1)
    found: Any = known.get(b"k")
    assert found is not refusal
    assert found is not known.get(b"k")
    assert (str(found), found.message, found.param, found.code) == (
        "no.", "no.", "response_format", "unsupported_schema",
    )  # fmt: skip
    clock.now += 1e6
    assert b"k" in known


def test_what_another_try_may_change_is_forgotten(clock: Clock) -> None:
    known = KnownForms(clock)
    known.add(b"slow", RequestError("no.", code="grammar_too_complex"), 5.0)
    known.add(b"deep", RequestError("no.", code="grammar_too_complex"), 0.1)
    known.add(b"long", Pristine(), 4.0)  # type: ignore[arg-type]
    known.add(b"quick", Pristine(), 0.1)  # type: ignore[arg-type]
    assert all(key in known for key in (b"slow", b"deep", b"long", b"quick"))
    clock.now += 3600
    assert [key for key in (b"slow", b"deep", b"long", b"quick") if key in known] == [b"quick"]
    assert known.get(b"slow") is None


def test_there_is_a_bound_and_refusals_cost_no_mask_its_place(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_forms, "_MASKS", 2)
    monkeypatch.setattr(known_forms, "_REFUSALS", 3)
    known = KnownForms(clock)
    for key in (b"a", b"b"):
        known.add(key, Pristine(), 0.0)  # type: ignore[arg-type]
    for number in range(5):
        known.add(bytes([number]), RequestError("no."), 0.0)
    assert [number for number in range(5) if bytes([number]) in known] == [2, 3, 4]
    assert b"a" in known  # and used last
    known.add(b"c", Pristine(), 0.0)  # type: ignore[arg-type]
    assert [key for key in (b"a", b"b", b"c") if key in known] == [b"a", b"c"]
