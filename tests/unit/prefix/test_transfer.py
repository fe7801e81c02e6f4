"""Prefixes as files: what was exported is imported, whole and checked, or refused with what is wrong."""

from __future__ import annotations

import io
import math
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefix_testing import DESCRIPTION, MIB, House, Store, Worker, payload_of

from homeprefixd.errors import NotFoundError
from homeprefixd.frames import store as frames
from homeprefixd.prefix.blocks import MODEL_NAME, to_le
from homeprefixd.prefix.transfer import TransferError, export, import_

PROMPT = [*range(64), *range(64, 128), *range(10)]
SIZE = 300_000  # of a block: two pieces


def exported(house: House, tokens: list[int] = PROMPT) -> bytes:
    file = io.BytesIO()
    done = export(house.cache, house.session, file, namespace=house.namespace, tokens=to_le(tokens), prefix="")
    assert done.nodes == 3
    return file.getvalue()


def imported(house: House, data: bytes) -> int:
    def flush() -> None:
        house.cache.write(everything=True)

    return import_(house.cache, house.session, io.BytesIO(data), flush).tokens


@pytest.fixture
def source(tmp_path: Path) -> Iterator[House]:
    """Holds the prompt."""
    (tmp_path / "source").mkdir()
    house = House(tmp_path / "source")
    house.save(PROMPT, SIZE)
    house.cache.write(everything=True)
    yield house
    house.close()


@pytest.fixture
def target(tmp_path: Path) -> Iterator[House]:
    (tmp_path / "target").mkdir()
    house = House(tmp_path / "target")
    yield house
    house.close()


def test_there_it_is_what_it_was_here(source: House, target: House) -> None:
    source.reopen()  # so that it comes from disk
    data = exported(source)
    assert imported(target, data) == len(PROMPT)
    target.reopen()
    found = target.restore(PROMPT)
    assert [tier for tier, _state in found] == ["warm"] * 3
    keys = [
        node.key
        for node in target.cache.lookup(target.namespace, to_le(PROMPT), limit=200, exact=True, load=False).plan
    ]
    assert len(keys) == 3  # of the grid, as before
    assert [state for _tier, state in found] == [payload_of(key, SIZE)[:SIZE] for key in keys]
    target.cache.check_integrity()


def test_it_passes_ram_by(tmp_path: Path) -> None:
    """A prefix larger than the hot tier is exported, and nothing that is in use makes room for it."""
    house = House(tmp_path, hot=2 * MIB)
    long = [n // 64 for n in range(64 * 12)]  # 3.6 MB
    for end in range(64, len(long) + 1, 64):
        house.save(long[:end], SIZE, skip=end // 64 - 1)
        house.cache.write(everything=True)
    house.reopen()
    house.restore(long[: 64 * 2])
    before = set(house.cache.hot.by_key)
    assert len(before) == 2
    file = io.BytesIO()
    done = export(house.cache, house.session, file, namespace=house.namespace, tokens=to_le(long), prefix="")
    assert (done.nodes, done.bytes) == (12, 12 * SIZE)
    assert set(house.cache.hot.by_key) == before
    assert house.cache.counters.evicted_hot == house.cache.counters.no_room == 0
    house.cache.check_integrity()
    house.close()


def test_again_it_is_known(source: House, target: House) -> None:
    data = exported(source)
    imported(target, data)
    again = import_(target.cache, target.session, io.BytesIO(data), lambda: None)
    assert (again.nodes, again.known) == (3, 3)
    target.cache.check_integrity()


def test_another_namespace_is_refused_and_what_differs_is_named(source: House, tmp_path: Path) -> None:
    data = exported(source)
    (tmp_path / "other").mkdir()
    other = House(tmp_path / "other")
    other.cache.usage._opened.clear()
    other.cache.open_namespace({**DESCRIPTION, "kv_type": "q8_0"})
    with pytest.raises(TransferError, match="kv_type: f16 there, q8_0 here"):
        imported(other, data)
    other.cache.usage._opened.clear()
    other.cache.open_namespace({**DESCRIPTION, "salt": "secret"})
    with pytest.raises(TransferError, match="salt: another one") as refused:
        imported(other, data)
    assert "secret" not in str(refused.value)
    assert other.known(PROMPT) == 0
    other.close()


def test_a_namespace_that_nobody_has_asked_for_yet(source: House, target: House) -> None:
    """An API key's own: the daemon has started again, and the key has not been used since."""
    usual = {**DESCRIPTION, MODEL_NAME: "m"}
    own = {**usual, "salt": "secret"}
    source.namespace = source.cache.open_namespace(own)[0]
    source.save(PROMPT, SIZE)
    data = exported(source)
    target.cache.usage._opened.clear()
    target.cache.open_namespace(usual)
    target.cache.usage.configured(["m"])
    with pytest.raises(TransferError, match="salt: another one"):
        imported(target, data)  # it was never used here
    target.cache.open_namespace(own)
    target.cache.usage._opened.pop(source.namespace)
    assert imported(target, data) == len(PROMPT)


def test_nothing_of_it_is_stored(source: House) -> None:
    with pytest.raises(NotFoundError):
        exported(source, [5] * 100)
    with pytest.raises(NotFoundError):
        export(source.cache, source.session, io.BytesIO(), namespace=b"", tokens=b"", prefix="ffff")


def test_more_than_one_file(source: House, target: House) -> None:
    data = exported(source)
    with pytest.raises(TransferError, match="something follows its end"):
        imported(target, data + data)
    assert len(target.restore(PROMPT)) == 3


@pytest.mark.parametrize("cost", [math.inf, math.nan, -1.0, 1e300])
def test_no_such_time_was_measured(source: House, target: House, cost: float) -> None:
    """A file with right checksums can be made by anybody: its figures must not stop the store that takes it in."""
    for hot in source.cache.hot.by_key.values():
        hot.node.record.cost = cost
    with pytest.raises(TransferError, match="seconds to compute"):
        imported(target, exported(source))
    target.save(PROMPT, SIZE)
    target.cache.write(everything=True)
    target.cache.check_integrity()


def test_damage_is_found(source: House, target: House) -> None:
    """Whatever bit is wrong, and wherever it is cut: refused, and what has come is right."""
    data = exported(source)

    @settings(max_examples=60, deadline=None)
    @given(st.integers(0, 8 * len(data) - 1), st.booleans())
    def check(at: int, cut: bool) -> None:
        wrong = bytearray(data)
        if cut:
            del wrong[at // 8 :]
        else:
            wrong[at // 8] ^= 1 << at % 8
        try:
            imported(target, bytes(wrong))
        except TransferError:
            pass
        else:
            raise AssertionError("a damaged file was taken in")
        for tier_state in target.restore(PROMPT):
            key = tier_state[1][:32]
            assert tier_state[1] == payload_of(key, SIZE)[:SIZE]
        target.cache.check_integrity()

    check()


def test_through_pipes_of_real_stores(
    start_store: Callable[..., Store], start_worker: Callable[[Store], Worker], tmp_path: Path
) -> None:
    one, two = start_store(tmp_path / "one"), start_store(tmp_path / "two", hot=8 * MIB)
    for store in (one, two):
        store.greet()
    worker, other = start_worker(one), start_worker(two)
    long = [n % 1000 for n in range(64 * 60)]
    key = worker.save(long, SIZE)[-1]  # 18 MB: more than the other's RAM
    assert len(worker.restore(long)[1]) == 60  # what was committed has arrived
    reading, writing = os.pipe()
    one.channel.send(frames.Export(1, prefix=key.hex()[:16]), writing)
    two.channel.send(frames.Import(2), reading)
    os.close(reading)
    os.close(writing)
    sent, taken = one.channel.receive(), two.channel.receive()
    assert isinstance(sent, frames.Transferred)
    assert isinstance(taken, frames.Transferred)
    assert not taken.error, taken
    assert not sent.error, sent
    assert (sent.nodes, sent.tokens) == (taken.nodes, taken.tokens) == (60, 3840)
    assert two.stop()[0] == 0
    two = start_store(tmp_path / "two")
    two.greet()
    other.attach(two)
    assert len(other.restore(long)[1]) == 60
    # an importer that leaves
    reading, writing = os.pipe()
    one.channel.send(frames.Export(3, prefix=key.hex()[:16]), writing)
    os.close(writing)
    threading.Timer(0.2, os.close, args=(reading,)).start()
    failed = one.channel.receive()
    assert isinstance(failed, frames.Transferred)
    assert failed.kind == "UnavailableError"
    assert one.stop()[0] == 0
