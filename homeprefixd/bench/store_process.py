"""The store alone, under measurement: its real process and a real client, with states that are made up.

What a worker does with the store is done here without a model: look up, wait for the blocks, reserve, fill, commit.
The states have a real one's size and compress as one does.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..channel import Channel, ChannelClosedError
from ..errors import StoreError
from ..frames import Frame
from ..frames import store as frames
from ..frames.store import NewNode
from ..models.store_link import StoreSettings
from ..prefix.blocks import BLOCK_TOKENS, KEY_BYTES, block_key, to_le
from ..prefix.client import StoreClient
from ..supervise import child_environment

DESCRIPTION = {"model": "made up", "model_sha256": "be" * 32, "kv_type": "f16"}
DEMO_BLOCK = BLOCK_TOKENS * 30 * 2 * 3 * 64 * 2
"""Bytes of 64 tokens' state of the demo model in f16: 30 layers, K and V, 3 heads of 64 numbers."""

_KINDS = 8  # of states
_PATIENCE = 30.0  # s for any answer
_STOP = 60.0  # s that it may write what waits


class States:
    """What blocks hold: one of a few patterns of f16 numbers by the block's key, and the key itself."""

    def __init__(self, size: int) -> None:
        """`size` in bytes, even."""
        numbers = np.random.default_rng(1)
        self._kinds = [numbers.normal(size=size // 2).astype(np.float16).view(np.uint8) for _kind in range(_KINDS)]

    def fill(self, view: memoryview, key: bytes) -> None:
        view[:] = self._kinds[key[0] % _KINDS].data
        view[:KEY_BYTES] = key

    def is_right(self, view: memoryview, key: bytes) -> bool:
        """Is it what `fill` has written?"""
        rest = np.frombuffer(view, np.uint8)[KEY_BYTES:]
        return bytes(view[:KEY_BYTES]) == key and np.array_equal(rest, self._kinds[key[0] % _KINDS][KEY_BYTES:])


class StoreProcess:
    """A store on a directory of its own, with the daemon's end of its connection."""

    def __init__(self, directory: Path, *, hot: int, warm: int) -> None:
        """Sizes in bytes. Raises StoreError if it does not start."""
        self._directory = directory
        settings = StoreSettings(
            directory, hot=hot, warm=warm, compression=1, tail_delay=2.0, write_queue=hot // 2, log_level="warning"
        )
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._log = directory.with_name(f"{directory.name}.log")
        ours, theirs = socket.socketpair()
        with theirs, self._log.open("wb") as log:
            self._process = subprocess.Popen(
                settings.command(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env=child_environment(os.environ),
            )
        self._channel: Channel[frames.FromStore] = Channel(ours, frames.FromStore)
        self.ask(frames.Hello(arena=False))

    def ask(self, frame: Frame) -> Any:
        """Its answer. Raises StoreError."""
        try:
            self._channel.send(frame)
            return self._channel.receive()
        except ChannelClosedError as error:
            words = self._log.read_text(errors="replace").strip().splitlines()
            raise StoreError(words[-1] if words else f"the store has ended: {error}") from error

    def stats(self) -> dict[str, Any]:
        """The figures of `GET /cache/stats`."""
        found: dict[str, Any] = self.ask(frames.Stats(1)).stats
        return found

    def flush(self) -> None:
        """Have all written that waits."""
        self.ask(frames.Flush(2))

    def connect(self) -> StoreClient:
        """A client, as a worker is one."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._channel.send(frames.Adopt("worker", "bench"), theirs.fileno())
        client = StoreClient()
        client.attach(ours)
        return client

    def stop(self) -> None:
        """Let it write what waits, and end."""
        self._channel.close()
        try:
            self._process.wait(_STOP)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@dataclass(frozen=True)
class Asked:
    """What a look-up with all its blocks came to."""

    seconds: float
    blocks: int  # that came
    warm: int  # of these, from disk
    wrong: int  # of these, that hold something else


class MadeUpWorker:
    """Does with the store what a worker does. Belongs to one thread."""

    def __init__(self, store: StoreProcess, states: States, block: int) -> None:
        """`block`: bytes of a block's state. Raises StoreError."""
        self._client = store.connect()
        self._states = states
        self._block = block
        opened = self._client.open_namespace(DESCRIPTION, _PATIENCE)
        if opened is None:
            raise StoreError("the store did not answer")
        self._namespace = opened.key

    def ask(self, tokens: Sequence[int]) -> Asked:
        """Look a prompt up and wait for all its blocks; checking them is not timed."""
        begin = time.perf_counter()
        lookup = self._client.lookup(self._namespace, to_le(tokens), len(tokens), exact=False)
        try:
            plan = lookup.wait_plan(_PATIENCE) or ()
            views = []
            for index in range(len(plan)):
                view = lookup.wait_block(index, _PATIENCE)
                if view is None:
                    break
                views.append(view)
            seconds = time.perf_counter() - begin
            wrong = sum(not self._states.is_right(v, node.key) for v, node in zip(views, plan, strict=False))
            warm = sum(node.tier == "warm" for node in plan[: len(views)])
            return Asked(seconds, len(views), warm, wrong)
        finally:
            lookup.release()

    def save(self, tokens: Sequence[int], *, known: int = 0) -> tuple[float, int]:
        """Save all whole blocks of a prompt but the first `known`: seconds, and blocks for which there was room.

        Filling them is not timed: a worker exports its state there.
        """
        begin = time.perf_counter()
        count = len(tokens) // BLOCK_TOKENS - known
        slots = self._client.reserve([self._block] * count, _PATIENCE)
        filling = time.perf_counter()
        parent: bytes = self._namespace
        nodes: list[NewNode] = []
        for number in range(known + len(slots)):
            part = to_le(tokens[number * BLOCK_TOKENS : (number + 1) * BLOCK_TOKENS])
            key = block_key(parent, part)
            if number >= known:
                slot = slots[number - known]
                self._states.fill(slot.view, key)
                start = number * BLOCK_TOKENS
                nodes.append(NewNode(parent, part, start, slot.offset, self._block, True, 0.3, "prompt", "made up"))
            parent = key
        filled = time.perf_counter()
        if nodes:
            self._client.commit(self._namespace, nodes)
        return time.perf_counter() - filled + filling - begin, len(nodes)

    def close(self) -> None:
        self._client.close()
