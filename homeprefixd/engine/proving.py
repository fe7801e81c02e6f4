"""A slicer for a context, believed only after it was seen to work there: blocks exported, restored, logits compared.

Also for what it cannot do: wrong blocks must be refused.
"""

from __future__ import annotations

import logging

import numpy as np

from ..prefix.blocks import BLOCK_TOKENS
from ..prefix.runs import Layout, layout_of
from .bindings import Model
from .cell_table import CellTable
from .context import PARTIAL_ONLY, Batch, Context
from .edges import EdgeSlicer, measure
from .failures import DecodeError
from .slices import BlockSize, SliceError, Slicer
from .whole import WholeSlicer

logger = logging.getLogger(__name__)

NO_RANGED_COPY = frozenset({"deepseek4"})
"""Architectures whose memory aborts the process when a part of a sequence is copied."""

_TEST_BLOCK = 8

# Bytes before the first cell's position: of llama.cpp's own header 8, 4 for the number of streams, 4 for that of cells.
_SPAN_CELLS, _WINDOW_CELLS, _STATE_CELLS = 16, 8, 4


def why_not(model: Model) -> str:
    """Why this model's state cannot be cut into blocks, "" if as far as its metadata tell it can."""
    if model.arch in NO_RANGED_COPY:
        return f"the memory of {model.arch} models cannot be copied in parts"
    if model.is_hybrid and model.n_swa > 0:
        return "it has both recurrent layers and sliding-window attention"
    if 0 < model.n_swa < 2 * _TEST_BLOCK:
        return f"its sliding window has only {model.n_swa} positions"
    return ""


def has_edges(model: Model) -> bool:
    """Whether a part of its state is needed only to go on from there."""
    return model.is_recurrent or model.is_hybrid or model.n_swa > 0


def make_slicer(context: Context, scratch: int, not_blocks: str = "") -> tuple[Slicer | None, str]:
    """A slicer that was seen to work on this very context, or None; and why it is none, or none of blocks.

    It decodes 17 tokens, or twice as many (so it is the warm-up, too): two short blocks and a token after them,
    exported, restored, and the logits compared bit for bit; then a wrong block or edge, which must be refused.
    `not_blocks`: why the state is known not to be made of blocks; "" if it is not known. Clears the context.
    """
    reason = not_blocks or why_not(context.model)
    if not reason:
        try:
            return (_prove_edges if has_edges(context.model) else _self_test)(context, scratch), ""
        except (SliceError, DecodeError) as error:
            logger.warning("the self-test of restoring blocks failed: %s", error)
            reason = f"the self-test of restoring blocks failed: {error}"
        finally:
            context.clear()
    try:
        return _prove_whole(context, scratch), reason
    except (SliceError, DecodeError) as error:
        return None, f"{reason}; as a whole it cannot be restored: {error}"
    finally:
        context.clear()


def _self_test(context: Context, scratch: int) -> Slicer:
    n = 2 * _TEST_BLOCK
    tokens, batch = _test_tokens(context.model, n + 1), Batch(n)
    _decode(context, batch, tokens[:n], 0)
    whole = context.state_size(0)
    if not whole or context.state_size(0, PARTIAL_ONLY) != whole:
        raise SliceError("part of the state is needed only at its end, so it is not made of blocks alone")
    slicer = Slicer(context, scratch, _measure(context, scratch))
    blocks = [memoryview(bytearray(slicer.size.of(_TEST_BLOCK))) for _ in range(2)]
    for i, block in enumerate(blocks):
        slicer.export(0, i * _TEST_BLOCK, (i + 1) * _TEST_BLOCK, block)
    slicer.layout = _proven_layout(slicer, blocks)
    slicer.cells = CellTable.of(blocks[1], _SPAN_CELLS, _TEST_BLOCK, _TEST_BLOCK)
    _decode(context, batch, tokens[n:], n)
    cold = context.logits(-1)
    context.clear()
    for i, block in enumerate(blocks):
        slicer.import_block(0, i * _TEST_BLOCK, _TEST_BLOCK, _TEST_BLOCK, block)
    _decode(context, batch, tokens[n:], n)
    if not np.array_equal(cold.view(np.uint32), context.logits(-1).view(np.uint32)):
        raise SliceError("restored blocks give other logits")
    context.clear()
    try:
        slicer.import_block(0, 0, _TEST_BLOCK, _TEST_BLOCK, blocks[1])
    except SliceError:
        return slicer
    raise SliceError("the second block was taken for the first")


def _prove_edges(context: Context, scratch: int) -> EdgeSlicer:
    model, half, n = context.model, _TEST_BLOCK, 2 * _TEST_BLOCK
    recurrent = model.is_recurrent or model.is_hybrid
    tokens, batch = _test_tokens(model, n + 1), Batch(n)
    _decode(context, batch, tokens[:n], 0)
    slicer = measure(context, scratch, half, 0 if recurrent else model.n_swa, recurrent)
    if not slicer.size.per_token and not model.is_recurrent:
        raise SliceError("all of its state is needed only at its end")
    context.clear()
    nodes: list[tuple[memoryview, memoryview]] = []
    for start in (0, half):
        _decode(context, batch, tokens[start : start + half], start)
        span, edge = (memoryview(bytearray(size)) for size in (slicer.size.of(half), slicer.edge.of(half)))
        slicer.export_node(0, start, start + half, span, edge)
        nodes.append((span, edge))
    if slicer.size.per_token:
        slicer.cells = CellTable.of(nodes[1][0], _SPAN_CELLS, half, half)
    at, first = (_STATE_CELLS, n - 1) if recurrent else (_WINDOW_CELLS, half)
    slicer.edge_cells = CellTable.of(nodes[1][1], at, first, n - first)
    _decode(context, batch, tokens[n:], n)
    cold = context.logits(-1)
    context.clear()
    for index, (span, edge) in enumerate(nodes):
        needed = index == 1 or not recurrent
        slicer.import_node(0, index * half, index * half, half, span, edge if needed else None)
    slicer.check(0, n)
    _decode(context, batch, tokens[n:], n)
    if not np.array_equal(cold.view(np.uint32), context.logits(-1).view(np.uint32)):
        raise SliceError("restored blocks give other logits")
    context.clear()
    slicer.import_node(0, 0, 0, half, *(nodes[0] if not recurrent else (nodes[0][0], None)))
    try:
        slicer.import_node(0, half, half, half, nodes[1][0], nodes[0][1])
    except SliceError:
        return slicer
    raise SliceError("the edge of another position was taken")


def _prove_whole(context: Context, scratch: int) -> WholeSlicer:
    n = 2 * _TEST_BLOCK
    tokens, batch = _test_tokens(context.model, n + 2), Batch(n)
    slicer = WholeSlicer(context, scratch)
    snapshots: list[memoryview] = []
    for first in (0, 1):  # the second is another prompt's
        _decode(context, batch, tokens[first : first + n], 0)
        snapshots.append(memoryview(bytearray(slicer.edge_bytes(0, 0, n))))
        slicer.export_node(0, 0, n, None, snapshots[-1])
        if first == 0:
            _decode(context, batch, tokens[n : n + 1], n)
            cold = context.logits(-1)
        context.clear()
    found = []
    for snapshot in snapshots:
        slicer.import_node(0, 0, 0, n, memoryview(b"\0"), snapshot)
        slicer.check(0, n)
        _decode(context, batch, tokens[n : n + 1], n)
        found.append(context.logits(-1))
        context.clear()
    if not np.array_equal(cold.view(np.uint32), found[0].view(np.uint32)):
        raise SliceError("a restored snapshot gives other logits")
    if np.array_equal(cold.view(np.uint32), found[1].view(np.uint32)):
        raise SliceError("another prompt's snapshot gives the same logits, so a wrong one would go unnoticed")
    return slicer


def _proven_layout(slicer: Slicer, blocks: list[memoryview]) -> Layout | None:
    """A layout by which two blocks make what llama.cpp writes for both; None if there is none."""
    test, n = layout_of(blocks[0], _TEST_BLOCK), 2 * _TEST_BLOCK
    if test is None:
        return None
    both, made = (memoryview(bytearray(slicer.size.of(n))) for _ in range(2))
    slicer.export(0, 0, n, both)
    for part, block in enumerate(blocks):
        test.put(block, made, part, 2)
    if made != both or not test.is_in_order(both, 2, 0):
        logger.warning("blocks are restored one by one: two put together give another state than llama.cpp does")
        return None
    return test.of(BLOCK_TOKENS)


def _measure(context: Context, scratch: int) -> BlockSize:
    """Sizes of one block and of two, of which that of any other follows."""
    sizes = []
    for end in (_TEST_BLOCK, 2 * _TEST_BLOCK):
        context.copy(0, scratch, 0, end)
        sizes.append(context.state_size(scratch))
        context.remove(scratch)
    per_token, rest = divmod(sizes[1] - sizes[0], _TEST_BLOCK)
    if rest or per_token <= 0 or sizes[0] <= per_token * _TEST_BLOCK:
        raise SliceError(f"sizes of state are not linear in tokens: {sizes}")
    return BlockSize(sizes[0] - per_token * _TEST_BLOCK, per_token)


def warm_up(context: Context) -> None:
    """One decode, so that the first request does not pay for what llama.cpp does once. Raises DecodeError."""
    _decode(context, Batch(2), _test_tokens(context.model, 2), 0)
    context.clear()


def _test_tokens(model: Model, count: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return (np.arange(1, count + 1, dtype=np.int64) * 7919 % model.n_vocab).astype(np.int32)


def _decode(context: Context, batch: Batch, tokens: np.ndarray[tuple[int], np.dtype[np.int32]], start: int) -> None:
    batch.set_prompt(tokens, start, 0)
    if not context.decode(batch):
        raise DecodeError(1, "no room in an empty context")
    context.synchronize()
