"""How long a prefill call is. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from ..prefix.blocks import BLOCK_TOKENS

SHORTEST_CALL = 8  # tokens, where a block takes longer than others may stall; longer ones are multiples of it


def chunk_end(start: int, total: int, most: int) -> int:
    """Where a prefill call that begins at `start` ends; `most`: its longest, a multiple of the block size or less.

    Calls begin and end on the 64-grid, and the remainder has one of its own, so that logits do not depend on `most`
    (but where it is less than a block: then each call is as long as it may be, as each costs others a step).
    """
    if most < BLOCK_TOKENS:
        return min(start + most, total)
    to_grid = start - start % BLOCK_TOKENS + BLOCK_TOKENS
    if start % BLOCK_TOKENS:  # after a cut block: up to the grid, or all if it is little
        return total if total - start <= BLOCK_TOKENS else to_grid
    whole = (total - start) // BLOCK_TOKENS * BLOCK_TOKENS
    return start + min(most, whole) if whole else total


def stop_at(points: Iterable[int], start: int, end: int) -> int:
    """Where a call from `start` to `end` ends if it must not go past the first of `points` on its way."""
    return min((point for point in points if start < point < end), default=end)


def longest_call(allowed: float, batch: int, *, whole_blocks: bool) -> int:
    """Tokens of a prefill call that may have `allowed` tokens, so that others do not stall longer than they may.

    `whole_blocks`: one block at least, even if that takes longer.
    """
    if allowed >= BLOCK_TOKENS:
        return min(batch, int(allowed) // BLOCK_TOKENS * BLOCK_TOKENS)
    if whole_blocks:
        return BLOCK_TOKENS
    return max(SHORTEST_CALL, int(allowed) // SHORTEST_CALL * SHORTEST_CALL)
