"""cache.py against a dict: what `test_cache_machine.py` and `test_fault_machine.py` have in common."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from prefix_testing import MIB, SHAPED, House, payload_of

from homeprefixd.prefix.blocks import BLOCK_TOKENS, block_key, to_le
from homeprefixd.prefix.cache import BlockLostError, Lease
from homeprefixd.prefix.checking import check_some
from homeprefixd.prefix.disk import Disk
from homeprefixd.prefix.policy import ORDER_BYTES
from homeprefixd.prefix.purge import purge

# few blocks, that begin alike, in every order, and tails that begin like them
_blocks = [tuple([n] * BLOCK_TOKENS) for n in range(2)] + [tuple([0] * 60 + [5] * 4)]
prompts = st.builds(
    lambda blocks, tail: [t for block in blocks for t in block] + tail,
    st.lists(st.sampled_from(_blocks), max_size=3),
    st.lists(st.integers(0, 1), max_size=3),
).filter(bool)
_sizes = st.sampled_from([100, 4096, 9000])


class Machine(RuleBasedStateMachine):
    """`hot` and `warm` in bytes. With little room nodes may go at any time, but what is there must be right."""

    hot = 64 * MIB
    warm = 64 * MIB
    kind: type[Disk] = Disk
    ample = True
    """Nothing is evicted and nothing fails: all that the dict knows is there."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="hpd-machine-"))
        self.house = House(self.directory, hot=self.hot, warm=self.warm, kind=self.kind)
        self.nodes: dict[bytes, set[tuple[int, ...]]] = {}  # parent -> tokens of children
        self.leases: list[tuple[Lease, list[bytes]]] = []
        self.damaged: set[bytes] = set()  # keys of nodes whose payload is not what was saved

    @property
    def disk(self) -> Disk:
        disk = self.house.cache.disk
        assert disk is not None
        return disk

    def teardown(self) -> None:
        self.let_go()
        self.house.close()
        shutil.rmtree(self.directory)

    def best(self, tokens: list[int]) -> int:
        """How many tokens the dict knows."""
        parent: bytes = self.house.namespace
        at = 0
        while tuple(tokens[at : at + BLOCK_TOKENS]) in self.nodes.get(parent, ()) and at + BLOCK_TOKENS <= len(tokens):
            parent = block_key(parent, to_le(tokens[at : at + BLOCK_TOKENS]))
            at += BLOCK_TOKENS
        rest = tokens[at : at + BLOCK_TOKENS]
        common = [
            next((n for n, (a, b) in enumerate(zip(child, rest, strict=False)) if a != b), min(len(child), len(rest)))
            for child in self.nodes.get(parent, ())
        ]
        return at + max(common, default=0)

    @initialize(runs=st.booleans())
    def choose(self, runs: bool) -> None:
        """Whether whole blocks have states that can lie in runs: for a model they all have, or none."""
        self.runs = runs

    @rule(tokens=prompts, size=_sizes, owner=st.sampled_from(["", "guest"]))
    def save(self, tokens: list[int], size: int, owner: str) -> None:
        keys = self.house.save(tokens, SHAPED if self.runs else size, owner=owner)
        parent: bytes = self.house.namespace
        for number, key in enumerate(keys):
            part = tuple(tokens[number * BLOCK_TOKENS : (number + 1) * BLOCK_TOKENS])
            children = self.nodes.setdefault(parent, set())
            if not any(child[: len(part)] == part for child in children):
                children -= {
                    child
                    for child in children
                    if part[: len(child)] == child and not self.nodes.get(block_key(parent, to_le(child)))
                }
                children.add(part)
            parent = key

    @rule()
    def write(self) -> None:
        self.house.cache.write(everything=True)

    @rule(seconds=st.sampled_from([0.1, 1.0, 100.0]))
    def time_passes(self, seconds: float) -> None:
        self.house.now += seconds
        self.house.cache.write()

    @rule(tokens=prompts, limit=st.integers(0, 300))
    def match(self, tokens: list[int], limit: int) -> None:
        found = self.house.known(tokens, limit=limit)
        best = self.best(tokens[:limit])
        assert found == best if self.ample else found <= best

    @rule(tokens=prompts)
    def restore(self, tokens: list[int]) -> None:
        lease = self.house.session.lookup(self.house.namespace, to_le(tokens), limit=len(tokens))
        states: list[bytes] = []
        for index, node in enumerate(lease.plan):
            try:
                found = self.house.block(lease, index)
            except BlockLostError:
                assert not self.ample
                break
            state = payload_of(node.key, node.size)[: node.size]
            assert found == state
            states.append(state)
        self.leases.append((lease, states))

    @precondition(lambda self: self.leases)
    @rule()
    def let_go(self) -> None:
        """Leased slots have not changed until now."""
        for lease, states in self.leases:
            for index, state in enumerate(states):
                assert self.house.state(lease.held[index]) == state
            self.house.session.release(lease)
        self.leases.clear()

    @rule()
    def purge_all(self) -> None:
        purge(self.house.cache, everything=True, now=self.house.now)
        self.nodes.clear()

    @precondition(lambda self: not self.ample)
    @rule(percent=st.sampled_from([0, 20, 60]))
    def share(self, percent: int) -> None:
        self.house.cache.set_shares({}, {"guest": percent})

    @rule()
    def verify(self) -> None:
        at: bytes | None = b""
        while at is not None:
            with self.disk.reading() as (txn, tables):
                checked = check_some(txn, tables, at)
            assert {problem.key for problem in checked.problems} <= self.damaged
            at = checked.following

    @invariant()
    def leaves_are_in_the_order(self) -> None:
        """All leaves on disk, and no others, wait to be evicted."""
        with self.disk.table() as table:
            rows = [row[ORDER_BYTES:] for level in table.leaves_by_level() for row in level]
            leaves = [key for key in table.keys_from(b"") if not table.has_children(key)]
            newest = [row[ORDER_BYTES:] for row in table.newest()]
        assert sorted(rows) == sorted(leaves) == sorted(newest)

    @rule()
    def reopen(self) -> None:
        self.let_go()
        self.before_reopen()
        self.house.reopen()

    def before_reopen(self) -> None:
        """What must be so for a clean end."""

    @invariant()
    def everything_agrees(self) -> None:
        self.house.cache.check_integrity()
        assert self.disk.used() <= self.disk.limit
        sizes, owners = Counter[str](), Counter[str]()
        with self.disk.table() as table:
            for key in table.keys_from(b""):
                node = table.place(key)
                assert node is not None
                sizes[node.record.namespace.hex()] += node.record.stored
                owners[node.record.owner] += node.record.stored
        del owners[""]
        assert (self.disk.sums.sizes, self.disk.sums.owners) == (dict(sizes), dict(owners))
