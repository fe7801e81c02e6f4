"""cache.py against a dict: whatever happens, in whatever order, what comes back is what was saved."""

from __future__ import annotations

from cache_machine import Machine, prompts
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from prefix_testing import MIB

from homeprefixd.prefix.blocks import block_key, to_le
from homeprefixd.prefix.purge import purge


class Against(Machine):
    """On a sound disk."""

    @rule(tokens=prompts)
    def purge_what_begins_so(self, tokens: list[int]) -> None:
        lease = self.house.cache.lookup(self.house.namespace, to_le(tokens), limit=len(tokens), exact=False, load=False)
        if not lease.plan:
            return
        key = lease.plan[-1].key
        parent, tokens_be = lease.places[-1][:32], lease.places[-1][32:]
        purge(self.house.cache, prefix=key.hex(), now=self.house.now)
        assert all(
            node.key != key
            for node in self.house.cache.lookup(
                self.house.namespace, to_le(tokens), limit=len(tokens), exact=False, load=False
            ).plan
        )
        self._forget(parent, tuple(int.from_bytes(tokens_be[i : i + 4], "big") for i in range(0, len(tokens_be), 4)))

    def _forget(self, parent: bytes, tokens: tuple[int, ...]) -> None:
        """A node, all below it, and all above it that leads nowhere else."""
        self.nodes.get(parent, set()).discard(tokens)
        waiting = [block_key(parent, to_le(tokens))]
        while waiting:
            key = waiting.pop()
            waiting += [block_key(key, to_le(child)) for child in self.nodes.pop(key, ())]
        if not self.nodes.get(parent):
            for above, children in self.nodes.items():
                for child in children:
                    if block_key(above, to_le(child)) == parent:
                        self._forget(above, child)
                        return

    @rule(limit=st.sampled_from([1 * MIB, 2 * MIB, 64 * MIB]))
    @precondition(lambda self: not self.ample)
    def resize(self, limit: int) -> None:
        self.house.cache.resize(limit)
        self.house.cache.write()


class Tight(Against):
    """Hardly any room: everything is evicted all the time."""

    hot = 8 * 4096
    warm = 1 * MIB
    ample = False


TestAmple = Against.TestCase
TestTight = Tight.TestCase
TestAmple.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestTight.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
