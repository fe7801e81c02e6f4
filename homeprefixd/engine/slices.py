"""State of blocks out of and into a context, with every check that llama.cpp leaves to its caller.

A block [start, end) of a sequence goes through a scratch sequence: `seq_cp` shares its cells, the state of scratch is
the state of the block alone. llama.cpp returns success for a block imported twice, one left out, or another one's
bytes; so positions are checked before and after, the size gives the number of cells, and whatever fails leaves the
sequence empty. Only for models whose whole state is cells of full attention (`why_not`).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from .bindings import PARTIAL_ONLY, Batch, Context, Model
from .failures import DecodeError
from .joining import Joiner, JoinError, joiner_of

logger = logging.getLogger(__name__)

NO_RANGED_COPY = frozenset({"deepseek4"})
"""Architectures whose memory aborts the process when a part of a sequence is copied."""

_TEST_BLOCK = 8


class SliceError(Exception):
    """A block could not be exported or imported. After an import, the sequence is empty."""


@dataclass(frozen=True)
class BlockSize:
    """Bytes of a block's state: `fixed + tokens * per_token`."""

    fixed: int
    per_token: int

    def of(self, tokens: int) -> int:
        return self.fixed + tokens * self.per_token


def why_not(model: Model) -> str:
    """Why this model's state cannot be cut into blocks, "" if as far as its metadata tell it can."""
    if model.arch in NO_RANGED_COPY:
        return f"the memory of {model.arch} models cannot be copied in parts"
    if model.is_recurrent:
        return "it is a recurrent model: its state is not made of blocks"
    if model.is_hybrid:
        return "it is a hybrid model: part of its state is recurrent and not made of blocks"
    if model.n_swa > 0:
        return f"it has sliding-window attention ({model.n_swa} positions): part of its state is soon overwritten"
    return ""


class Slicer:
    """Exports and imports blocks of one context through its scratch sequence. Engine thread only."""

    def __init__(self, context: Context, scratch: int, size: BlockSize, joiner: Joiner | None = None) -> None:
        self._context = context
        self._scratch = scratch
        self.size = size
        self.joiner = joiner
        """Joins blocks for `import_block`; None where this gains nothing, or is not certain."""

    def export(self, seq: int, start: int, end: int, view: memoryview) -> int:
        """Write the state of positions [start, end) of `seq` to `view` (writable). Returns bytes. Raises SliceError."""
        context, expected = self._context, self.size.of(end - start)
        if len(view) < expected:
            raise SliceError(f"a slot of {len(view)} bytes for {expected}")
        target = np.frombuffer(view, np.uint8)
        if not target.flags.writeable:
            raise SliceError("a slot that cannot be written")
        context.copy(seq, self._scratch, start, end)
        try:
            if context.pos_min(self._scratch) != start or context.pos_max(self._scratch) != end - 1:
                raise SliceError(f"positions {start} to {end - 1} of sequence {seq} are not all in memory")
            written = context.export_state(self._scratch, target.ctypes.data, expected)
        finally:
            self._empty_scratch()
        if written != expected:
            raise SliceError(f"llama.cpp wrote {written} of {expected} bytes")
        return written

    def import_block(self, seq: int, start: int, count: int, use: int, view: memoryview) -> None:
        """Append a block, or joined ones, of `count` tokens at position `start` to `seq`; keep its first `use` tokens.

        Raises SliceError; `seq` is empty then.
        """
        try:
            self._import(seq, start, count, use, np.frombuffer(view, np.uint8))
        except SliceError:
            self._context.remove(seq)
            self._empty_scratch()
            raise

    def empty(self, seq: int) -> None:
        """Forget a sequence of which something could not be restored."""
        self._context.remove(seq)

    def _import(
        self, seq: int, start: int, count: int, use: int, source: np.ndarray[tuple[int], np.dtype[np.uint8]]
    ) -> None:
        context, scratch = self._context, self._scratch
        at = context.pos_max(seq) + 1
        if start != at:
            raise SliceError(f"a block for position {start} where {at} comes next")
        if not 0 < use <= count:
            raise SliceError(f"{use} tokens of a block of {count}")
        expected = self.size.of(count)
        if len(source) != expected:
            raise SliceError(f"{len(source)} bytes for {count} tokens, which have {expected}")
        if context.pos_max(scratch) != -1:
            raise SliceError("the scratch sequence is not empty")
        read = context.import_state(scratch, source.ctypes.data, expected)
        if read != expected:
            raise SliceError(f"llama.cpp read {read} of {expected} bytes")
        if context.pos_min(scratch) != start or context.pos_max(scratch) != start + count - 1:
            raise SliceError("the state is that of other positions")
        context.copy(scratch, seq)
        self._empty_scratch()
        if use < count and not context.remove(seq, start + use):
            raise SliceError("the block cannot be cut")
        if context.pos_max(seq) != start + use - 1 or context.pos_min(seq) != 0:
            raise SliceError(f"positions {context.pos_min(seq)} to {context.pos_max(seq)} after the import")

    def _empty_scratch(self) -> None:
        self._context.remove(self._scratch)
        if self._context.pos_max(self._scratch) != -1:
            raise SliceError("the scratch sequence cannot be emptied")


def make_slicer(context: Context, scratch: int) -> Slicer | str:
    """A slicer that was seen to work on this very context, or the reason why there is none. Clears the context.

    It decodes 18 tokens (so it is the warm-up, too): two short blocks and a token after them, exported, restored,
    and the logits compared bit for bit; then the blocks in the wrong order, which must be refused.
    """
    if reason := why_not(context.model):
        warm_up(context)
        return reason
    try:
        return _self_test(context, scratch)
    except (SliceError, DecodeError) as error:
        logger.warning("the self-test of restoring blocks failed: %s", error)
        return f"the self-test of restoring blocks failed: {error}"
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
    slicer.joiner = _proven_joiner(slicer, blocks)
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


def _proven_joiner(slicer: Slicer, blocks: list[memoryview]) -> Joiner | None:
    """A joiner that makes of two blocks what llama.cpp writes for both; None if there is none."""
    joiner = joiner_of(blocks[0], _TEST_BLOCK)
    if joiner is None:
        return None
    n = 2 * _TEST_BLOCK
    both, joined = bytearray(slicer.size.of(n)), np.zeros(slicer.size.of(n), np.uint8)
    slicer.export(0, 0, n, memoryview(both))
    try:
        joiner.join(blocks, [_TEST_BLOCK] * 2, 0, joined)
    except JoinError as error:
        logger.warning("blocks are restored one by one: %s", error)
        return None
    if joined.tobytes() != bytes(both):
        logger.warning("blocks are restored one by one: joining two gives another state than llama.cpp does")
        return None
    return joiner


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
