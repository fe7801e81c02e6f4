"""cache.py on a disk with faults against a dict: pins, crashes, damage, a full disk, another model's prompts."""

from __future__ import annotations

import errno
import shutil
import tempfile
from pathlib import Path
from typing import cast

from cache_machine import Machine, prompts
from faulty_disk import FaultyDisk
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule
from prefix_testing import MIB

from homeprefixd.errors import HomeprefixdError
from homeprefixd.frames.store import Pin, Unpin
from homeprefixd.prefix.blocks import KEY_BYTES, to_le
from homeprefixd.prefix.disk_file import piece_key
from homeprefixd.prefix.pin_reach import end_of, holder
from homeprefixd.prefix.warm_table import PAYLOADS

_OTHER = {"model_sha256": "cd" * 32, "kv_type": "f16"}


def tokens_of(tree_key: bytes) -> tuple[int, ...]:
    return tuple(int.from_bytes(tree_key[i : i + 4], "big") for i in range(KEY_BYTES, len(tree_key), 4))


class Faulty(Machine):
    """The dict follows what was lost: nothing may be there that was not saved, and nothing may be wrong."""

    kind = FaultyDisk
    ample = False

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[bytes, int] = {}  # places of pins, and how many tokens of each were seen on disk

    @property
    def disk(self) -> FaultyDisk:
        return cast(FaultyDisk, self.house.cache.disk)

    def follow(self) -> None:
        """The dict becomes what is there; it must not be more."""
        there: dict[bytes, set[tuple[int, ...]]] = {}
        with self.house.cache.view() as (_tables, warm):
            assert warm is not None
            known = [warm.place(key) for key in warm.keys_from(b"")]
            places = {node.tree_key for node in known if node is not None}
            places |= {hot.node.tree_key for hot in self.house.cache.hot.by_key.values()}
        for place in places:
            there.setdefault(place[:KEY_BYTES], set()).add(tokens_of(place))
        for parent, children in there.items():
            # a short node stays on disk until the longer one that covers it is written
            for child in children:
                assert any(known[: len(child)] == child for known in self.nodes.get(parent, ())), (parent, child)
        self.nodes = there

    @rule(data=st.data())
    def corrupt(self, data: st.DataObject) -> None:
        """A bit of what is stored is not what was written any more."""
        with self.disk.table() as table:
            keys = list(table.keys_from(b""))
        if not keys:
            return
        key = data.draw(st.sampled_from(keys))
        with self.disk._env.begin(write=True) as txn:
            table = self.disk._tables[PAYLOADS]
            piece = bytearray(txn.get(piece_key(key, 0), db=table))
            at = data.draw(st.integers(0, 8 * len(piece) - 1))
            piece[at // 8] ^= 1 << at % 8
            txn.put(piece_key(key, 0), bytes(piece), db=table)
        self.damaged.add(key)
        self.held.clear()

    @rule(error=st.sampled_from([0, 0, errno.EIO, errno.ENOSPC, errno.EDQUOT]))
    def writes_fail(self, error: int) -> None:
        self.disk.faults.write_error = error

    @rule(error=st.sampled_from([0, 0, errno.EIO]), flips=st.sampled_from([0.0, 0.0, 0.5]))
    def reads_fail(self, error: int, flips: float) -> None:
        self.disk.faults.read_error = error
        self.disk.faults.flips = flips
        if flips:
            self.held.clear()  # what seems damaged is dropped

    @rule()
    def crash(self) -> None:
        """What was committed to the file is all that is left."""
        self.let_go()
        faults = self.disk.faults
        place = Path(tempfile.mkdtemp(prefix="hpd-machine-"))
        shutil.copytree(self.directory, place, dirs_exist_ok=True)
        self.house.session.close()
        self.disk.close()
        self.house.cache.arena.close()
        shutil.rmtree(self.directory)
        self.directory = self.house.directory = place
        self.house.open()
        self.disk.faults = faults
        self.follow()

    def before_reopen(self) -> None:
        self.disk.faults.write_error = 0
        self.house.now += 700

    @rule(tokens=prompts)
    def another_model(self, tokens: list[int]) -> None:
        """Its prompts are its own."""
        ours = self.house.namespace
        self.house.namespace = self.house.cache.open_namespace(_OTHER)[0]
        self.save(tokens, 4096, "")
        self.house.namespace = ours

    @rule(tokens=prompts, label=st.sampled_from(["", "a", "b"]))
    def pin(self, tokens: list[int], label: str) -> None:
        try:
            made = self.house.cache.pins.pin(Pin(0, self.house.namespace, to_le(tokens), label=label))
        except HomeprefixdError:
            return
        assert made[0].tokens <= len(tokens)

    @rule(label=st.sampled_from(["a", "b"]))
    def unpin(self, label: str) -> None:
        try:
            self.house.cache.pins.unpin(Unpin(0, label=label))
        except HomeprefixdError:
            return

    @rule()
    def purge_all(self) -> None:
        try:
            super().purge_all()
        except HomeprefixdError:
            return  # the disk could not be changed: the dict knows more than what is left
        assert not self.house.cache.pins.rows
        self.held.clear()

    @invariant()
    def pins_hold(self) -> None:
        """What was pinned and on disk once is still there, also where that is not all of it."""
        pins = self.house.cache.pins
        self.held = {place: kept for place, kept in self.held.items() if place in pins.rows}
        there = {}
        with self.disk.table() as table:
            for place, row in pins.rows.items():
                above = [table.place(row.path[at : at + KEY_BYTES]) for at in range(0, len(row.path), KEY_BYTES)]
                node = holder([table], place)
                ends = (one.end for one in (*above, node) if one is not None)
                there[place] = min(end_of(place, row), max(ends, default=0))  # what is more may be another node's
        hidden = self.house.cache.hidden
        if not hidden and not self.damaged:
            assert all(there[place] >= kept for place, kept in self.held.items())
            described = {pins.describe({place: pins.rows[place]})[0].kept: kept for place, kept in there.items()}
            assert all(said <= kept for said, kept in described.items())
        if not self.damaged:
            self.held |= there


class FaultyTight(Faulty):
    hot = 8 * 4096
    warm = 1 * MIB


TestFaulty = Faulty.TestCase
TestFaultyTight = FaultyTight.TestCase
TestFaulty.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestFaultyTight.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
