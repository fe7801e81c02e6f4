"""Caches, disks, real stores and small workers, for the tests of `prefix/`."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from homeprefixd.channel import Channel
from homeprefixd.frames import Frame
from homeprefixd.frames import store as frames
from homeprefixd.frames.store import NewNode
from homeprefixd.prefix.arena import Arena
from homeprefixd.prefix.blocks import BLOCK_TOKENS, Namespace, block_key, to_le
from homeprefixd.prefix.cache import Cache
from homeprefixd.prefix.client import StoreClient
from homeprefixd.prefix.codec import Decoder
from homeprefixd.prefix.disk import Disk
from homeprefixd.prefix.hot import HotNode
from homeprefixd.prefix.loading import Lease
from homeprefixd.prefix.policy import Worth
from homeprefixd.prefix.runs import RUN, Layout, layout_of
from homeprefixd.prefix.session import Session

DESCRIPTION = {"model_sha256": "ab" * 32, "kv_type": "f16"}
MIB = 1 << 20


class WrongStateError(AssertionError):
    """A block holds something else than what was saved under its key."""


def _made_of(body: bytes, cells: int) -> bytes:
    """A state as llama.cpp lays it out without flash attention: 2 layers, K of 16 bytes a token, V of 8 rows."""

    def some(count: int) -> bytes:
        nonlocal body
        taken, body = body[:count], body[count:]
        return taken

    state = struct.pack("<IiII", 7, -1, 1, cells) + some(12 * cells) + struct.pack("<II", 1, 2)
    state += b"".join(struct.pack("<iQ", 1, 16) + some(16 * cells) for _ in range(2))
    return state + b"".join(struct.pack("<iII", 1, 2, 8) + some(16 * cells) for _ in range(2))


_shape = layout_of(memoryview(_made_of(bytes(1 << 20), BLOCK_TOKENS)), BLOCK_TOKENS)
assert _shape is not None
SHAPE: Layout = _shape
SHAPED = SHAPE.size(1)
"""Bytes of a whole block's state that can lie in a run."""


def payload_of(key: bytes, size: int) -> bytes:
    """The state that a node is given in tests: its own, and half of it compresses."""
    body = (key + bytes(len(key))) * (size // (2 * len(key)) + 1)
    return _made_of(body, BLOCK_TOKENS) if size == SHAPED else body


class House:
    """A cache over a directory, that can be closed and opened again, and a model's worker in small."""

    def __init__(
        self,
        directory: Path,
        *,
        hot: int = 4 * MIB,
        warm: int = 64 * MIB,
        write_queue: int = 64 * MIB,
        daily_writes: int = 0,
        min_free: int = 0,
        kind: type[Disk] = Disk,
    ) -> None:
        """`kind`: of disk, so that one with faults can stand in."""
        self.kind = kind
        self.directory = directory
        self.hot = hot
        self.warm = warm
        self.write_queue = write_queue
        self.daily_writes = daily_writes
        self.min_free = min_free
        self.now = 1_000_000.0
        self.decoder = Decoder()
        self.open()

    def open(self) -> None:
        disk = None
        if self.warm:
            disk = self.kind(
                self.directory, limit=self.warm, level=1, policy=Worth(), min_free=self.min_free, wall=self.tick
            )
        self.cache = Cache(
            Arena(self.hot),
            disk,
            policy=Worth(),
            write_queue=self.write_queue,
            tail_delay=2.0,
            daily_writes=self.daily_writes,
            wall=self.tick,
            clock=self.tick,
        )
        self.session: Session = self.cache.session()
        self.namespace: Namespace = self.cache.open_namespace(DESCRIPTION)[0]

    def tick(self) -> float:
        self.now += 0.001
        return self.now

    def close(self) -> int:
        self.session.close()
        self.cache.check_integrity()
        pending = self.cache.close()
        self.cache.arena.close()
        return pending

    def reopen(self) -> None:
        self.close()
        self.open()

    def save(
        self,
        tokens: Sequence[int],
        size: int = 3000,
        *,
        grid: bool = True,
        mark: bytes = b"",
        skip: int = 0,
        owner: str = "",
    ) -> list[bytes]:
        """Commit all blocks of a prompt but the first `skip`, tail included; returns their keys.

        Those of `SHAPED` bytes lie in runs.
        """
        keys: list[bytes] = []
        nodes: list[NewNode] = []
        parent: bytes = self.namespace
        whole, run, part = len(tokens) // BLOCK_TOKENS, (0, 1), 0  # offset and parts
        for number, start in enumerate(range(0, len(tokens), BLOCK_TOKENS)):
            own = to_le(tokens[start : start + BLOCK_TOKENS])
            key = block_key(parent, own)
            if number >= skip:
                if part == 0:
                    parts = min(RUN, whole - number) if size == SHAPED and number < whole else 1
                    room = SHAPE.size(parts) if parts > 1 else size
                    offsets = self.session.reserve([room], after=keys[skip - 1] if skip else b"")
                    if not offsets:
                        break
                    run = offsets[0], parts
                offset, parts = run
                state = memoryview(payload_of(mark + key, size))[:size]
                if parts > 1:
                    SHAPE.put(state, self.cache.arena.view(offset, SHAPE.size(parts)), part, parts)
                else:
                    self.cache.arena.view(offset, size)[:] = state
                new = NewNode(parent, own, start, offset, size, grid, 0.2, "prompt", f"from {start}")
                nodes.append(msgspec.structs.replace(new, part=part, parts=parts))
                part = (part + 1) % parts
            keys.append(key)
            parent = key
        self.session.commit(self.namespace, nodes, owner)
        return keys

    def block(self, lease: Lease, index: int) -> bytes:
        """The state of a node of a match. Raises BlockLostError."""
        return self.state(lease.held[index] if index in lease.held else self.cache.load(lease, index, self.decoder))

    def state(self, hot: HotNode) -> bytes:
        return bytes(self.cache.state(hot, self.decoder.scratch))

    def known(self, tokens: Sequence[int], *, limit: int = 1 << 30, exact: bool = False) -> int:
        """How many tokens of a prompt are known, by a dry run."""
        lease = self.cache.lookup(self.namespace, to_le(tokens), limit=limit, exact=exact, load=False)
        return sum(node.use for node in lease.plan)

    def restore(self, tokens: Sequence[int], *, exact: bool = False) -> list[tuple[str, bytes]]:
        """Tier and state of each node of a match."""
        lease = self.session.lookup(self.namespace, to_le(tokens), limit=1 << 30, exact=exact)
        try:
            found = []
            for index, node in enumerate(lease.plan):
                found.append((node.tier, self.block(lease, index)))
            return found
        finally:
            self.session.release(lease)


class Store:
    """A real store process, with the daemon's end of its connection."""

    def __init__(self, directory: Path, *flags: str, hot: int = 32 * MIB, warm: int = 256 * MIB) -> None:
        ours, theirs = socket.socketpair()
        argv = [sys.executable, "-m", "homeprefixd.prefix.service", "--fd", str(theirs.fileno())]
        argv += ["--cache-dir", str(directory), "--hot", str(hot), "--warm", str(warm), "--tail-delay", "0.2", *flags]
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            argv, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
        )
        theirs.close()
        self.channel: Channel[frames.FromStore] = Channel(ours, frames.FromStore)

    def greet(self) -> frames.Welcome:
        welcome = self.ask(frames.Hello(arena=False))
        assert isinstance(welcome, frames.Welcome)
        return welcome

    def ask(self, frame: Frame) -> Any:
        self.channel.send(frame)
        return self.channel.receive()

    def adopt(self) -> socket.socket:
        """A new client's end of a connection."""
        ours, theirs = socket.socketpair()
        self.channel.send(frames.Adopt("worker", "test"), theirs.fileno())
        theirs.close()
        return ours

    def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = self.ask(frames.Stats(1)).stats
        return stats

    def flush(self) -> int:
        pending: int = self.ask(frames.Flush(2)).pending
        return pending

    def rss_anon(self) -> int:
        """Bytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        [line] = [line for line in status.splitlines() if line.startswith("RssAnon:")]
        return int(line.split()[1]) * 1024

    def shared_memory(self) -> int:
        """Bytes of memory that the arena takes, as the kernel counts them."""
        descriptors = Path(f"/proc/{self.process.pid}/fd")
        arena = next(path for path in descriptors.iterdir() if "homeprefixd-hot" in os.readlink(path))
        return os.stat(arena).st_blocks * 512

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)

    def stop(self) -> tuple[int, str]:
        """Exit status and stderr."""
        self.channel.close()
        _out, said = self.process.communicate(timeout=60)
        return self.process.returncode, said


class Worker:
    """A worker in small: a StoreClient whose blocks are made up."""

    def __init__(self, store: Store) -> None:
        self.client = StoreClient()
        self.attach(store)

    def attach(self, store: Store) -> None:
        self.client.attach(store.adopt())
        opened = self.client.open_namespace(DESCRIPTION, timeout=10)
        assert opened is not None
        self.namespace = opened.key

    def save(self, tokens: Sequence[int], size: int = 3000, owner: str = "", *, skip: int = 0) -> list[bytes]:
        """Save all blocks of a prompt but the first `skip`; returns the keys of those for which there was room."""
        keys: list[bytes] = []
        parent: bytes = self.namespace
        for start in range(0, len(tokens), BLOCK_TOKENS):
            part = to_le(tokens[start : start + BLOCK_TOKENS])
            key = block_key(parent, part)
            if start < skip * BLOCK_TOKENS:
                parent = key
                continue
            slots = self.client.reserve([size], timeout=5)
            if not slots:
                break
            slots[0].view[:] = payload_of(key, size)[:size]
            node = NewNode(parent, part, start, slots[0].offset, size, True, 0.2, "prompt", f"from {start}")
            self.client.commit(self.namespace, [node], owner)
            keys.append(key)
            parent = key
        self.client.file_hash(0, 0, 0, 0, timeout=5)  # answered in order: what was committed has arrived
        return keys

    def restore(self, tokens: Sequence[int]) -> tuple[list[str], list[bytes]]:
        """Tiers, and the keys of the blocks that came; checks that each holds what was saved under its key."""
        lookup = self.client.lookup(self.namespace, to_le(tokens), 1 << 30, exact=False)
        try:
            tiers: list[str] = []
            keys: list[bytes] = []
            for index, node in enumerate(lookup.wait_plan(10) or ()):
                block = lookup.wait_block(index, 10)
                if block is None:
                    assert lookup.state(index) == "lost"
                    break
                if bytes(block) != payload_of(node.key, node.size)[: node.size]:
                    raise WrongStateError(f"block {index} of {len(lookup.plan or ())} is not what was saved")
                tiers.append(node.tier)
                keys.append(node.key)
            return tiers, keys
        finally:
            lookup.release()
