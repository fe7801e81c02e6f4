"""Prefixes as files: what was exported is imported, whole and checked, or refused with what is wrong."""

from __future__ import annotations

import errno
import io
import math
import os
import random
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from faulty_disk import FaultyDisk
from hypothesis import given, settings
from hypothesis import strategies as st
from prefix_testing import DESCRIPTION, MIB, SHAPE, SHAPED, House, Store, Worker, payload_of

from homeprefixd.errors import NotFoundError
from homeprefixd.frames import store as frames
from homeprefixd.prefix.blocks import FORMAT_VERSION, MODEL_NAME, block_key, namespace_of, to_le
from homeprefixd.prefix.codec import PIECE, Encoder, piece_count
from homeprefixd.prefix.purge import purge
from homeprefixd.prefix.transfer import (
    MAGIC,
    Header,
    NodeRecord,
    TransferError,
    Transferred,
    _put,
    export,
    import_,
)

PROMPT = [*range(64), *range(64, 128), *range(10)]
SIZE = 300_000  # of a block: two pieces


def exported(house: House, tokens: list[int] = PROMPT) -> bytes:
    file = io.BytesIO()
    done = export(house.cache, house.session, file, namespace=house.namespace, tokens=to_le(tokens), prefix="")
    assert done.nodes == 3
    return file.getvalue()


def imported(house: House, data: bytes) -> int:
    return import_(house.cache, house.session, io.BytesIO(data), house.cache.write_path).tokens


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
    again = import_(target.cache, target.session, io.BytesIO(data), target.cache.write_path)
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


def handmade(nodes: list[tuple[list[int], bytes]], *, told: int | None = None, kind: str = "prompt") -> bytes:
    """A file with right checksums, of nodes with these tokens and states. `told`: how many it says that it has."""
    file = io.BytesIO()
    file.write(MAGIC)
    count = len(nodes) if told is None else told
    _put(file, Header(FORMAT_VERSION, dict(DESCRIPTION), count))
    parent, at, encoder = bytes(namespace_of(DESCRIPTION)), 0, Encoder(0)
    for tokens, state in nodes:
        key = block_key(parent, to_le(tokens))
        _put(file, NodeRecord(to_le(tokens), at, len(state), True, kind, 0.1, ""))
        for number in range(piece_count(len(state))):
            piece = encoder.encode(key, number, memoryview(state)[number * PIECE : (number + 1) * PIECE])
            file.write(struct.pack("<I", len(piece)) + piece)
        parent, at = key, at + len(tokens)
    _put(file, Header(FORMAT_VERSION, {}, count))
    return file.getvalue()


def long_import(house: House, blocks: int) -> Transferred:
    """Of 1 MiB of state for each block."""
    data = handmade([([n] * 64, random.Random(n).randbytes(MIB)) for n in range(blocks)])
    return import_(house.cache, house.session, io.BytesIO(data), house.cache.write_path)


class Meanwhile(io.BytesIO):
    """A file of which, once `at` of its bytes were read, something else is done."""

    def __init__(self, data: bytes, at: float, what: Callable[[], object]) -> None:
        """`at`: as a share of it."""
        super().__init__(data)
        self._at = int(len(data) * at)
        self._what: Callable[[], object] | None = what

    def read(self, size: int | None = -1, /) -> bytes:
        if self._what is not None and self.tell() >= self._at:
            what, self._what = self._what, None
            what()
        return super().read(size)


def blocks(first: int, count: int, size: int = MIB) -> bytes:
    """A file of blocks with states that do not compress."""
    return handmade([([n] * 64, random.Random(n).randbytes(size)) for n in range(first, first + count)])


def taken_in(house: House, file: io.BytesIO) -> Transferred:
    return import_(house.cache, house.session, file, house.cache.write_path)


def test_two_imports_at_once_say_each_what_was_new_of_it(tmp_path: Path) -> None:
    house = House(tmp_path, hot=64 * MIB)
    old, new = blocks(0, 12, 3000), blocks(100, 12, 3000)
    assert taken_in(house, io.BytesIO(old)).known == 0
    others: list[Transferred] = []
    done = taken_in(house, Meanwhile(new, 0.5, lambda: others.append(taken_in(house, io.BytesIO(old)))))
    assert (done.nodes, done.known, done.kept) == (12, 0, 12 * 64)
    assert [(one.nodes, one.known) for one in others] == [(12, 12)]
    house.close()


def test_two_imports_at_once_where_there_is_room_for_one(tmp_path: Path) -> None:
    house = House(tmp_path, hot=8 * MIB, warm=30 * MIB)
    others: list[Transferred] = []
    one, other = blocks(0, 24), blocks(100, 24)
    done = taken_in(house, Meanwhile(one, 0.7, lambda: others.append(taken_in(house, io.BytesIO(other)))))
    assert (done.nodes, done.tokens, others[0].nodes) == (24, 24 * 64, 24)
    assert others[0].kept == 24 * 64
    assert 0 <= done.kept < 24 * 64
    assert "`cache.warm`" in done.not_kept
    house.reopen()
    assert house.known([n // 64 for n in range(24 * 64)]) == done.kept
    assert house.known([100 + n // 64 for n in range(24 * 64)]) == 24 * 64
    house.close()


@pytest.mark.parametrize("how", ["purged", "full"])
def test_what_has_no_room_any_more_is_checked_too(tmp_path: Path, how: str) -> None:
    """The answer is what is kept and why not all; damage further on is found all the same."""
    house = House(tmp_path, hot=8 * MIB, kind=FaultyDisk)

    def happens() -> None:
        if how == "purged":
            purge(house.cache, everything=True, now=house.now)
            return
        disk = house.cache.disk
        assert isinstance(disk, FaultyDisk)
        disk.faults.write_error = errno.ENOSPC

    data = blocks(0, 24)
    done = taken_in(house, Meanwhile(data, 0.5, happens))
    assert (done.nodes, done.tokens, done.bytes) == (24, 24 * 64, 24 * MIB)
    assert (done.kept > 0) == (how == "full")
    assert done.kept < done.tokens
    assert ("or was purged" if how == "purged" else "the disk cannot be written") in done.not_kept
    wrong = bytearray(data)
    wrong[-MIB] ^= 1
    house.namespace = house.cache.open_namespace(DESCRIPTION)[0]
    with pytest.raises(TransferError, match="damaged"):
        taken_in(house, Meanwhile(bytes(wrong), 0.5, happens))
    house.close()


def test_the_floor_is_named(tmp_path: Path) -> None:
    house = House(tmp_path, hot=64 * MIB, min_free=100 * MIB)
    disk = house.cache.disk
    assert disk is not None
    disk.free_bytes = lambda: 112 * MIB - disk.file_bytes()  # type: ignore[method-assign]
    done = taken_in(house, io.BytesIO(blocks(0, 24)))
    assert 4 * 64 <= done.kept < 24 * 64
    assert "`cache.min_free` leaves 100 MiB of the disk to others" in done.not_kept
    assert disk.free_bytes() >= 100 * MIB
    house.close()


@pytest.mark.parametrize("room", ["all", "budget", "day", "disk", "off"])
def test_an_import_says_what_is_on_disk(tmp_path: Path, room: str) -> None:
    """What it calls imported is there after a restart; else it says how much is not, and why."""
    warm = {"all": 64 * MIB, "budget": 10 * MIB, "off": 0}.get(room, 64 * MIB)
    house = House(tmp_path, hot=64 * MIB, warm=warm, daily_writes=6 * MIB if room == "day" else 0, kind=FaultyDisk)
    if room == "disk":
        house.save([1], 1000)
        house.cache.write(everything=True)
        disk = house.cache.disk
        assert isinstance(disk, FaultyDisk)
        disk.faults.write_error = errno.ENOSPC
    done = long_import(house, 24)
    assert (done.nodes, done.tokens) == (24, 24 * 64)
    why = {
        "all": "",
        "budget": "does not fit into `cache.warm`",
        "day": "`cache.daily_writes`",
        "disk": "the disk cannot be written",
        "off": "nothing is kept on disk",
    }
    assert why[room] in done.not_kept
    assert bool(done.not_kept) == (done.kept < done.tokens) == (room != "all")
    if room in ("disk", "off"):
        assert done.kept == 0
    else:
        assert done.kept >= 4 * 64
        house.reopen()
        assert house.known([n // 64 for n in range(24 * 64)]) == done.kept
    house.close()


def test_a_handmade_file_is_refused_for_what_is_wrong(target: House) -> None:
    whole, other, short = ([n] * 64 for n in (1, 2, 3))
    state = bytes(3000)
    files = {
        "fewer than 64 tokens and is not the last": handmade([(whole, state), (short[:5], state), (other, state)]),
        "ends after 2 blocks, and says that it has 4611686018427387904": handmade(
            [(whole, state), (other, state)], told=1 << 62
        ),
        "says that it has -1 blocks": handmade([(whole, state)], told=-1),
        "says that it has 0 blocks": handmade([], told=0),
        "a kind of 100000 characters": handmade([(whole, state)], kind="x" * 100_000),
    }
    for message, data in files.items():
        with pytest.raises(TransferError, match=message):
            imported(target, data)
    target.cache.check_integrity()


def test_states_of_another_size_than_the_models_are_refused(target: House) -> None:
    target.save([7] * 256, SHAPED)  # in a run, by which the layout is known
    for size in (10, SHAPED - 1, SHAPED + 1):
        with pytest.raises(TransferError, match=f"has {size} bytes, where 64 tokens have {SHAPED} here"):
            imported(target, handmade([([1] * 64, bytes(size))]))
    assert imported(target, handmade([([1] * 64, bytes(SHAPED)), ([2] * 5, bytes(SHAPE.of(5).size(1)))])) == 69


def test_an_edge_where_states_have_none(source: House, target: House) -> None:
    data = handmade([([1] * 64, bytes(3000)), ([0xFFFFFFFF], bytes(100))])
    with pytest.raises(TransferError, match="an edge, which states of this model have not"):
        imported(target, data)
