"""Cells that several sequences use at once: the `shared` tier, where nothing is copied and nothing computed twice.

Only for models whose state is made of blocks (there is a slicer): elsewhere a part of a sequence cannot be shared.
Engine thread only.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable

from ..prefix.blocks import BLOCK_TOKENS, common_tokens
from .cells import CellLedger
from .places import Places
from .sequence import Phase, Sequence

logger = logging.getLogger(__name__)

LEAST = 16
"""Tokens of a match that is used at all: fewer would save nothing, and take what follows them off the 64-grid."""


class Sharer:
    """`counters` gets: shared_tokens, position_errors."""

    def __init__(self, places: Places, cells: CellLedger, exact: bool, counters: defaultdict[str, float]) -> None:
        self._places, self._cells, self._exact, self._counters = places, cells, exact, counters

    def find(self, sequence: Sequence, residents: Iterable[Sequence]) -> tuple[Sequence | None, int]:
        """Who has most of `sequence`'s prefix in its cells, and how many tokens of it may be shared now.

        Whole blocks where the store knows more than that, so that its blocks can follow; else to the token.
        """
        best, most = None, 0
        for other in residents:
            if not _may_share(sequence, other):
                continue
            count = min(common_tokens(sequence.le(), other.le()), other.n_past, len(sequence.tokens) - 1)
            if self._exact:
                count = _whole(min(count, other.grid_until))
            if count > most:
                best, most = other, count
        if most < sequence.matched:
            most = _whole(most)
        return (best, most) if best is not None and most >= LEAST else (None, 0)

    def computed_by(self, sequence: Sequence, residents: Iterable[Sequence]) -> Sequence | None:
        """Who is computing blocks that `sequence` could share, if it waited for them."""
        for other in residents:
            if other.phase is Phase.DECODE or not _may_share(sequence, other):
                continue
            common = min(common_tokens(sequence.le(), other.le()), len(sequence.tokens) - 1, len(other.tokens) - 1)
            useful = _whole(common) if self._exact else common
            if useful >= sequence.matched + BLOCK_TOKENS and other.n_past < useful:
                return other
        return None

    def share(self, source: Sequence, target: Sequence, count: int) -> None:
        """Have `target`, which is empty, use the first `count` cells of `source`."""
        self._places.copy(source.seq_id, target.seq_id, 0, count)
        if self._places.pos_min(target.seq_id) != 0 or self._places.pos_max(target.seq_id) != count - 1:
            logger.error("request %s: cells could not be shared, it is computed", target.request.rid)
            self._counters["position_errors"] += 1
            self._places.remove(target.seq_id)
            return
        self._cells.share(source.seq_id, target.seq_id, count)
        target.n_past = target.restored = count
        target.saved = min(_whole(count), source.saved)  # what is not saved yet may never be by `source`
        target.grid_until = min(_whole(count), source.grid_until)
        target.next_node = sum(1 for node in target.plan or () if node.start + node.use <= count)
        self._counters["shared_tokens"] += count
        if not target.started:
            target.cached = count
            target.tiers["shared"] = count


def _may_share(sequence: Sequence, other: Sequence) -> bool:
    asked, has = sequence.request, other.request
    return other is not sequence and asked.cache and has.cache and asked.space == has.space


def _whole(count: int) -> int:
    return count - count % BLOCK_TOKENS
