"""Who is in the contexts: its place, its id, the cells it uses; and that nothing is left where nobody is."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterator

from .cells import CellLedger
from .places import Place, Places
from .sequence import Phase, Sequence

logger = logging.getLogger(__name__)

_HOLES = 2048  # cells without use below the highest one, which attention still looks at, that are worth closing


class Residents(Collection[Sequence]):
    """`parallel`: sequences at most. Engine thread only, but for `lengths` and `used`."""

    def __init__(self, places: Places, cells: CellLedger, parallel: int, counters: defaultdict[str, float]) -> None:
        self._places, self._cells, self._parallel, self._counters = places, cells, parallel, counters
        self._by_id: dict[int, Sequence] = {}  # in order of admission

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, sequence: object) -> bool:
        return isinstance(sequence, Sequence) and self._by_id.get(sequence.seq_id) is sequence

    def __iter__(self) -> Iterator[Sequence]:
        """In order of admission. They may leave meanwhile."""
        return iter(list(self._by_id.values()))

    @property
    def is_full(self) -> bool:
        return len(self._by_id) >= self._parallel

    @property
    def decoding(self) -> bool:
        """Whether a reply runs."""
        return any(place.running for place in self._places.all)

    def lengths(self) -> dict[int, int]:
        """By sequence id: tokens that are in the context."""
        return {seq_id: sequence.n_past for seq_id, sequence in list(self._by_id.items())}

    def used(self, lengths: dict[int, int]) -> int:
        """Cells in use by sequences of such lengths; shared ones count once."""
        return self._cells.used(lengths)

    def left_high(self) -> list[Sequence]:
        """Those that are left of many in a context, perhaps in high cells, and whose state can be saved.

        Each step costs as if all cells up to the highest were in use: 6,600 unused ones make decoding a third slower
        (the design's figure).
        """
        found = []
        for place in self._places.all:
            if len(place.residents) == 1:
                (sequence,) = place.residents.values()
                stays = sequence.phase is Phase.DECODE and sequence.request.cache and not sequence.no_save
                if stays and place.peak - sequence.n_past >= max(_HOLES, sequence.n_past):
                    found.append(sequence)
        return found

    def enter(self, sequence: Sequence, place: Place) -> None:
        """It gets an id in `place`, and has no cell yet."""
        sequence.seq_id = place.ids.pop()
        others = list(place.residents.values())
        for other in (sequence, *others) if others else ():
            other.aligned = False
        self._by_id[sequence.seq_id] = place.residents[sequence.seq_id] = sequence
        self._cells.enter(sequence.seq_id)

    def empty(self, sequence: Sequence) -> None:
        """It stays and has no cell any more."""
        self._places.remove(sequence.seq_id)
        self._cells.enter(sequence.seq_id)

    def owns_all(self, sequence: Sequence) -> None:
        """What it has from now on is its own: it shares no cell."""
        self._cells.enter(sequence.seq_id)

    def leave(self, sequence: Sequence) -> None:
        """Its cells and its id are free. Of one that is in no context: nothing happens."""
        if sequence not in self:
            return
        place = self._places.of(sequence.seq_id)
        if sequence in place.running:
            place.running.remove(sequence)
        place.peak = max(place.peak, self.used({seq_id: other.n_past for seq_id, other in place.residents.items()}))
        del self._by_id[sequence.seq_id], place.residents[sequence.seq_id]
        self._places.remove(sequence.seq_id)
        self._cells.leave(sequence.seq_id)
        place.ids.append(sequence.seq_id)
        sequence.seq_id = -1
        if not place.residents:
            place.peak = 0
            self._check_empty(place)
            place.context.clear()  # the next one begins at the first cell, so on the grid

    def _check_empty(self, place: Place) -> None:
        """Nobody is in a context: no cell, sequence id or lease may be left."""
        left = [seq for seq in range(self._parallel + 1) if place.context.pos_max(seq) != -1]
        missing = place.all_ids.difference(place.ids)
        if left or missing or place.running or self._cells.used(dict.fromkeys(place.all_ids, 0)):
            logger.error("the empty context is not: cells of %s, ids %s, running %s", left, missing, place.running)
            self._counters["integrity_errors"] += 1
            place.running.clear()
