"""arena.py: extents never overlap, coalesce, and give memory back."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homeprefixd.prefix.arena import PAGE, Arena, pages

SIZE = 64 * PAGE


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(SIZE)
    yield arena
    arena.close()


def resident(arena: Arena) -> int:
    """Bytes of memory that the arena holds."""
    return os.fstat(arena.descriptor).st_blocks * 512


@given(st.lists(st.tuples(st.sampled_from(["allocate", "free", "shrink", "give back"]), st.integers(1, 20 * PAGE))))
def test_extents_never_overlap(steps: list[tuple[str, int]]) -> None:
    arena = Arena(SIZE)
    held: dict[int, int] = {}
    now = 0.0
    for step, number in steps:
        now += 1
        if step == "allocate":
            offset = arena.allocate(number)
            if offset is not None:
                held[offset] = number
        elif step == "give back":
            arena.give_back(now, keep=0)
        elif held:
            offset = sorted(held)[number % len(held)]
            if step == "free":
                arena.free(offset, held.pop(offset), now)
            else:
                smaller = max(1, held[offset] // 2)
                arena.shrink(offset, held[offset], smaller, now)
                held[offset] = smaller
        arena.check()
        assert arena.used == sum(map(pages, held.values()))
        spans = sorted((offset, offset + pages(size)) for offset, size in held.items())
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    for offset, size in held.items():
        arena.free(offset, size, now)
    assert arena.allocate(SIZE) == 0
    arena.close()


def test_no_room_is_none(arena: Arena) -> None:
    assert arena.allocate(SIZE) == 0
    assert arena.allocate(1) is None


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_free_neighbours_become_one(arena: Arena, order: tuple[int, ...]) -> None:
    offsets = [arena.allocate(SIZE // 4) for _ in range(4)]
    for number in order:
        offset = offsets[number]
        assert offset is not None
        arena.free(offset, SIZE // 4, 1.0)
    assert arena.fragments == 1
    assert arena.allocate(3 * SIZE // 4) == 0


def test_freed_memory_is_used_first(arena: Arena) -> None:
    first = arena.allocate(4 * PAGE)
    second = arena.allocate(4 * PAGE)
    assert first is not None
    assert second is not None
    arena.free(second, 4 * PAGE, 1.0)
    arena.free(first, 4 * PAGE, 2.0)
    arena.give_back(1.5, keep=0)
    assert arena.allocate(4 * PAGE) == first


def test_unused_memory_is_given_back(arena: Arena) -> None:
    offset = arena.allocate(32 * PAGE)
    assert offset is not None
    assert arena.populate(offset, 32 * PAGE)
    assert resident(arena) == 32 * PAGE
    arena.free(offset, 32 * PAGE, now=10.0)
    assert arena.give_back(before=10.0, keep=0) == 0
    assert arena.give_back(before=11.0, keep=8 * PAGE) == 24 * PAGE
    assert resident(arena) == 8 * PAGE
    arena.check()
    assert arena.allocate(SIZE) == 0


def test_prepared_memory_is_there() -> None:
    arena = Arena(8 << 20)
    while arena.prepare(3 << 20, now=0.0):
        arena.check()
    assert arena.used == 0
    assert resident(arena) == 3 << 20
    assert arena.allocate(3 << 20) == 0
    arena.close()


def test_memory_that_could_not_be_had_is_asked_for_again(arena: Arena) -> None:
    fill = arena._fill
    arena._fill = lambda offset, size: False  # type: ignore[method-assign]
    offset = arena.allocate(PAGE)
    assert offset is not None
    assert not arena.populate(offset, PAGE)
    arena.free(offset, PAGE, 1.0)
    arena._fill = fill  # type: ignore[method-assign]
    assert arena.allocate(PAGE) == offset
    assert arena.populate(offset, PAGE)
    assert resident(arena) == PAGE


def test_nobody_can_shorten_it(arena: Arena) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(arena.descriptor, PAGE)
