"""What the eviction policy costs: `python -m homeprefixd.bench.policy_cost [NODES]`.

For NODES (100,000) nodes that are all leaves, which is the worst case: microseconds of the policy's work for each use,
with the sorting that it causes when room is needed; bytes of memory for each node, apart from the node's own record.
"""

from __future__ import annotations

import random
import sys
import time
import tracemalloc
from dataclasses import dataclass

from ..prefix.policy import Candidates, Evicted, Policy, Rank, Worth


@dataclass(slots=True, eq=False)
class _Node:
    last_use: float
    hits: int = 0
    offered: bool = False


@dataclass(frozen=True)
class Cost:
    """Per node."""

    touch_us: float  # with its share of the evictions' work
    bytes: float


def measure(nodes: int = 100_000, policy: Policy | None = None) -> Cost:
    """A tier of `nodes` leaves, each used three times in random order; then a tenth are evicted."""
    ranks = policy or Worth()
    now = 0.0

    def rank(node: _Node) -> Rank:
        return ranks.rank(last_use=node.last_use, end=64, size=1 << 20, cost=0.2, hits=node.hits)

    everything = [_Node(float(number)) for number in range(nodes)]
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    candidates: Candidates[_Node] = Candidates(rank, lambda: now)
    evicted = Evicted()
    for node in everything:
        candidates.offer(node)
    memory = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    order = random.Random(1).choices(everything, k=3 * nodes)
    begin = time.perf_counter()
    for now, node in enumerate(order, nodes):
        node.last_use = now
        node.hits += 1
        candidates.offer(node)
    for number in range(nodes // 10):
        if (gone := candidates.pop()) is not None:
            evicted.add(number.to_bytes(32, "big"), gone.hits)
    return Cost((time.perf_counter() - begin) / len(order) * 1e6, memory / nodes)


if __name__ == "__main__":
    cost = measure(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)
    print(f"{cost.touch_us:.2f} us a use, {cost.bytes:.0f} bytes a node")
