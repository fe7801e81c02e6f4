"""A load that finds no room waits, and goes on as soon as there is some, however that came about."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import cast

import pytest
from faulty_disk import FaultyDisk
from prefix_testing import MIB, House

from homeprefixd.channel import Channel
from homeprefixd.frames import store as frames
from homeprefixd.prefix.blocks import BLOCK_TOKENS, to_le
from homeprefixd.prefix.connection import Connection
from homeprefixd.prefix.hot import HotNode
from homeprefixd.prefix.memory_pressure import CALM, Reading
from homeprefixd.prefix.service import Service
from homeprefixd.prefix.threads import Writer

SIZE = 300_000  # of a block
WANTED, USED, MORE = [1] * BLOCK_TOKENS, [2] * BLOCK_TOKENS * 2, [3] * BLOCK_TOKENS * 4
PARKED = 0.2  # s after which a load has found that it must wait
SOON = 5.0  # s


class Waiting:
    """A store's parts in one process, with a block on disk, and a request that uses others in RAM."""

    def __init__(self, house: House) -> None:
        self.house = house
        self.cache = house.cache
        self.came = threading.Event()
        for tokens in (WANTED, USED):
            house.save(tokens, SIZE)
            house.cache.write(everything=True)
        for hot in [hot for hot in self.cache.hot.by_key.values() if hot.node.end == BLOCK_TOKENS and not hot.children]:
            self.cache.forget_hot(hot)
        self.service = Service(self.cache, Writer())
        self.service.readers.start()
        self.held = house.session.lookup(house.namespace, to_le(USED), limit=len(USED))
        ours, theirs = socket.socketpair()
        self.channel: Channel[frames.FromStore] = Channel(ours, frames.FromStore)
        self.connection = Connection(self.service, theirs, owner=False, name="test")
        self._thread = threading.Thread(target=self.connection.serve, daemon=True)
        self._thread.start()

    def load(self) -> None:
        """Begin to load the block; there must be no room for it yet."""
        lease = self.house.session.lookup(self.house.namespace, to_le(WANTED), limit=len(WANTED))
        self.cache.taken(lease, 0)
        self.service.readers.load(lease, self._ready, lambda _index, _reason: None)
        assert not self.came.wait(PARKED)

    def _ready(self, _index: int, _hot: HotNode) -> None:
        self.came.set()

    def close(self) -> None:
        self.channel.close()
        self._thread.join()
        self.service.readers.stop()


@pytest.fixture
def waiting(make: Callable[..., House]) -> Iterator[Waiting]:
    waiting = Waiting(make(hot=2 * MIB, kind=FaultyDisk))
    yield waiting
    waiting.close()


def test_memory_is_no_longer_short(waiting: Waiting) -> None:
    relief = waiting.service.relief
    relief.bound(2 * SIZE)
    relief._allowance.limit = 2 * MIB  # it was as much before memory became short
    waiting.load()
    relief._read = lambda: Reading(8 << 30, 16 << 30, 0.0)
    waiting.house.now += CALM
    for _ in range(16):
        relief.look()
    assert waiting.came.wait(SOON)


def test_a_larger_budget(waiting: Waiting) -> None:
    waiting.service.relief.bound(2 * SIZE)
    waiting.load()
    waiting.service.relief.bound(2 * MIB)
    assert waiting.came.wait(SOON)


@pytest.mark.parametrize("commits", [False, True])
def test_slots_that_were_reserved(waiting: Waiting, commits: bool) -> None:
    """Given back, or filled: then what is in them may go again."""
    channel, namespace = waiting.channel, waiting.house.namespace
    channel.send(frames.Reserve(1, [SIZE] * 4))
    reserved = channel.receive()
    assert isinstance(reserved, frames.Reserved)
    assert len(reserved.offsets) == 4
    waiting.load()
    if commits:
        node = frames.NewNode(namespace, to_le(MORE[:BLOCK_TOKENS]), 0, reserved.offsets[0], SIZE, True, 0.2, "", "")
        channel.send(frames.Commit(namespace, [node]))
    else:
        channel.send(frames.Abandon(reserved.offsets))
    assert waiting.came.wait(SOON)


def test_what_was_being_written(waiting: Waiting) -> None:
    assert len(waiting.house.save(MORE, SIZE)) == 4
    held = cast(FaultyDisk, waiting.cache.disk).faults.held = threading.Event()
    writing = threading.Thread(target=lambda: waiting.cache.write(everything=True))
    writing.start()
    try:
        while not waiting.cache.writing:
            time.sleep(0.001)
        waiting.load()
    finally:
        held.set()
        writing.join()
    assert waiting.came.wait(SOON)


def test_an_export(waiting: Waiting) -> None:
    """It fills RAM, and whoever reads its file is slow."""
    waiting.house.save(MORE, SIZE)
    waiting.cache.write(everything=True)
    reading, writing = socket.socketpair()
    export = frames.Export(1, namespace=waiting.house.namespace, tokens=to_le(MORE))
    thread = threading.Thread(target=waiting.connection._transfer, args=(export, writing.detach()))
    with reading:
        thread.start()
        assert reading.recv(1)
        waiting.load()
        while reading.recv(1 << 20):
            pass
    thread.join()
    assert waiting.came.wait(SOON)
