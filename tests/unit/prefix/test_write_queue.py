"""write_queue.py: what waits, and until when."""

from __future__ import annotations

from homeprefixd.prefix.blocks import BlockKey, block_key, namespace_of, swap, to_le
from homeprefixd.prefix.hot import Extent, HotNode
from homeprefixd.prefix.tree import Placed, Record
from homeprefixd.prefix.write_queue import PATIENCE, QUIET, WriteQueue

ROOT = namespace_of({})


def node(number: int, tokens: int = 64, size: int = 100) -> HotNode:
    data = to_le(range(number, number + tokens))
    record = Record(BlockKey(block_key(ROOT, data)), ROOT, 0, size, 0, True, "prompt", 0.1, 0.0, 0.0, 0, "")
    return HotNode(Placed(ROOT + swap(data), record), Extent(0, 1), warm=False)


def test_blocks_wait_until_no_others_come() -> None:
    queue = WriteQueue(10_000, 2.0)
    nodes = [node(n) for n in range(4)]
    for second, hot in enumerate(nodes):
        queue.add(hot, float(second))
        assert queue.due(second + QUIET - 0.01) == []
    assert queue.next_due() == 3 + QUIET
    assert queue.due(3 + QUIET) == nodes


def test_they_do_not_wait_for_ever() -> None:
    queue = WriteQueue(1 << 30, 2.0)
    first = node(0)
    queue.add(first, 0.0)
    for second in range(1, 30):
        queue.add(node(second), float(second))
    assert queue.due(PATIENCE - 0.01) == []
    assert queue.due(PATIENCE) == [first]


def test_they_do_not_wait_while_half_the_bound_is_used() -> None:
    queue = WriteQueue(1000, 2.0)
    for number in range(5):
        queue.add(node(number), 7.0)
    assert queue.due(7.0) == []
    queue.add(node(5), 7.0)
    assert len(queue.due(7.0)) == 6


def test_tails_wait_on_their_own_and_go_first_when_it_is_full() -> None:
    queue = WriteQueue(300, 5.0)
    tail, block = node(0, tokens=10), node(100)
    queue.add(tail, 0.0)
    queue.add(block, 4.0)
    assert queue.due(5.0) == [tail, block]  # the tail's own time; the block's, since half of the bound is used
    assert queue.add(node(200), 5.0) == []
    assert queue.add(node(300), 5.0) == [tail]
    last = node(400)
    assert queue.add(last, 5.0) == [last]
    assert queue.bytes == 300


def test_what_was_refused_is_remembered_until_it_waits_or_goes() -> None:
    queue = WriteQueue(10_000, 2.0)
    evicted, refused, gone, written = nodes = [node(n) for n in range(0, 400, 100)]
    for hot in nodes[1:]:
        queue.add(hot, 0.0)
        queue.refuse(hot)
    queue.refuse(evicted)  # it did not wait: it was on disk before
    assert (len(queue), queue.bytes) == (0, 0)
    gone.indexed, written.warm = False, True
    assert queue.refused() == [refused]
    queue.refuse(refused)  # again, for the same reason
    assert queue.refused() == [refused]
    queue.add(refused, 1.0)
    assert queue.refused() == []
    queue.refuse(refused)
    queue.remove(refused)
    assert queue.refused() == []
    queue.check()
