"""The file is made small while it is in use: nothing is lost, nobody waits long, and a full disk changes nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from prefix_testing import MIB, House, Store, Worker, payload_of

from homeprefixd.frames import store as frames
from homeprefixd.prefix.disk import DiskFullError
from homeprefixd.prefix.env_gate import EnvGate
from homeprefixd.prefix.purge import purge

SIZE = 400_000


def test_space_is_given_back_while_others_read(make: Callable[..., House], monkeypatch: pytest.MonkeyPatch) -> None:
    house = make(hot=4 * MIB, warm=64 * MIB)
    disk = house.cache.disk
    assert disk is not None
    prompts = [[n] * 64 for n in range(100)]
    for tokens in prompts:
        house.save(tokens, SIZE)
        house.cache.write(everything=True)
    for tokens in prompts[20:]:
        purge(house.cache, prefix=house.cache.lookup(
            house.namespace, b"".join(t.to_bytes(4, "little") for t in tokens), limit=64, exact=False, load=False
        ).plan[0].key.hex(), now=house.now)  # fmt: skip
    before = disk.file_bytes()
    ending = threading.Event()
    longest, found = 0.0, []

    def read() -> None:
        nonlocal longest
        while not ending.is_set():
            began = time.perf_counter()
            found.append(house.known(prompts[len(found) % 20]))
            longest = max(longest, time.perf_counter() - began)

    reader = threading.Thread(target=read)
    reader.start()
    written = disk.sums.written.today
    try:
        was, now = disk.compact()
        assert was == before
        copied = disk.sums.written.today - written  # it wears the disk as everything does
        assert 0.9 * now < copied <= now
        assert disk.compact() == (now, now)  # for nothing it is not copied
        assert disk.sums.written.today == written + copied
        monkeypatch.setattr("homeprefixd.prefix.disk._LEAST_GAIN", -(1 << 40))
        monkeypatch.setattr("homeprefixd.prefix.disk._GAIN_SHARE", -1)
        for _time in range(4):
            was, now = disk.compact()
    finally:
        ending.set()
        reader.join()
    assert (was, now) == (disk.file_bytes(), disk.file_bytes())
    assert disk.file_bytes() < before / 3
    assert set(found) == {64}
    assert longest < 10
    for tokens in prompts[:20]:
        [(_tier, state)] = house.restore(tokens)
        assert state == payload_of(state[:32], SIZE)[:SIZE]
    house.save([500] * 64, SIZE)
    house.cache.write(everything=True)
    house.reopen()
    assert sum(house.known(tokens) == 64 for tokens in [*prompts, [500] * 64]) == 21
    assert not list(house.directory.glob("*.part"))


@pytest.mark.parametrize(
    ("free", "says"),
    [(1000, "only 1000 B of the disk are free"), (90 * MIB, "`cache.min_free` leaves 90.0 MiB of the disk to others")],
)
def test_without_room_for_the_copy_nothing_changes(make: Callable[..., House], free: int, says: str) -> None:
    house = make(hot=4 * MIB, min_free=90 * MIB)
    disk = house.cache.disk
    assert disk is not None
    for number in range(30):
        house.save([number] * 64, SIZE)
        house.cache.write(everything=True)
    for node in [hot.node.record.key.hex() for hot in house.cache.hot.by_key.values()][2:]:
        purge(house.cache, prefix=node, now=house.now)
    disk.free_bytes = lambda: free  # type: ignore[method-assign]
    with pytest.raises(DiskFullError, match=says):
        disk.compact()
    house.reopen()
    assert house.known([1] * 64) == 64


def test_who_is_alone() -> None:
    gate = EnvGate()
    with gate.use(), gate.use(), gate.alone(0.01) as free:
        assert not free
    order: list[str] = []
    with gate.alone(1.0) as free:
        assert free

        def use() -> None:
            with gate.use():
                order.append("used")

        thread = threading.Thread(target=use)
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
        order.append("alone")
    thread.join(10)
    assert order == ["alone", "used"]


def test_a_real_store(
    start_store: Callable[..., Store], start_worker: Callable[[Store], Worker], tmp_path: object
) -> None:
    store = start_store(tmp_path)
    store.greet()
    worker = start_worker(store)
    keys = worker.save(list(range(640)), SIZE)
    assert store.flush() == 0
    done = store.ask(frames.Compact(9))
    assert (done.ticket, done.error) == (9, "")
    assert 0 < done.after <= done.before
    assert worker.restore(list(range(640)))[1] == keys
    assert store.stop()[0] == 0
    again = start_store(tmp_path)
    again.greet()
    worker.attach(again)
    assert worker.restore(list(range(640)))[1] == keys
