"""The queue: who is next, who waits for what another computes, whom there are cells for. Engine thread only."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

from ..prefix.blocks import BLOCK_TOKENS
from .cells import CellLedger
from .places import Place, Places
from .residents import Residents
from .restoring import Restorer
from .sequence import Sequence
from .shares import AGEING, Shares, head_start
from .sharing import Sharer

_RESUMES = 3_000.0  # tokens that one whose reply has begun is ahead of its class: half of what a class is
_DISPLACED = 3  # times that one request makes way for more urgent ones, at most
_OUTDATED = 1.0  # seconds after which a look-up is made again if something was saved since
_HEAD_OF_LINE = 5.0  # seconds after which nobody smaller may pass one that waits for cells


class Queue:
    """`restorer`, `sharer` None: cache mode off. `wake`: has the engine look again."""

    def __init__(
        self,
        restorer: Restorer | None,
        sharer: Sharer | None,
        cells: CellLedger,
        shares: Shares,
        places: Places,
        wake: Callable[[], None],
    ) -> None:
        self.waiting: list[Sequence] = []
        self._restorer, self._sharer, self._cells, self._shares = restorer, sharer, cells, shares
        self._places, self._wake = places, wake

    def order(self, now: float) -> list[Sequence]:
        """Those whose look-up is done: urgent ones and longest cached prefixes first, with ageing and fair shares."""
        ready: list[tuple[float, Sequence]] = []
        for sequence in self.waiting:
            if self._restorer is None:
                sequence.plan = ()
            elif not self._restorer.planned(sequence):
                continue
            request = sequence.request
            worth = sequence.matched + AGEING * (now - request.arrived) + sequence.urgency
            if sequence.generated:  # it was set aside: to its client this is a pause
                worth += _RESUMES
            ready.append((worth - self._shares.behind(request.client, now), sequence))
        ready.sort(key=lambda item: -item[0])
        return [sequence for _worth, sequence in ready]

    def is_behind(self, sequence: Sequence, residents: Collection[Sequence]) -> bool:
        """True while another computes blocks that this one could share: computed once, they serve both."""
        if self._sharer is None or self._restorer is None or not sequence.request.cache or sequence.must_compute:
            return False
        other = self._sharer.computed_by(sequence, residents)
        if other is not None:
            sequence.behind = True
            other.urgency = max(other.urgency, sequence.urgency)
            return True
        if sequence.behind:
            sequence.behind = False
            _other, count = self._sharer.find(sequence, residents)
            if count <= sequence.matched:  # whoever computed them has left: its blocks are in the store
                self._restorer.begin(sequence, self._wake, may_wait=False)
                return not self._restorer.planned(sequence)
        return False

    def is_outdated(self, sequence: Sequence, now: float) -> bool:
        """Whether its look-up was long ago and is made again, as what it would compute may be stored by now. True while
        the answer is awaited."""
        missing = len(sequence.tokens) - max(sequence.matched, 1)
        if self._restorer is None or sequence.lookup is None or missing < BLOCK_TOKENS:
            return False
        if now - sequence.lookup_since < _OUTDATED or not self._restorer.saved_since(sequence):
            return False
        self._restorer.begin(sequence, self._wake, may_wait=False)
        return not self._restorer.planned(sequence)

    def make_way(self, sequence: Sequence, residents: Residents) -> list[Sequence]:
        """Background requests, the youngest, that have to leave so that there is a place and cells for it: as few as it
        takes, none if all of them are not enough.

        One that came so long before that it would have its turn first now stays, but where somebody waits for a voice.
        """
        own = head_start(sequence.request.priority)

        def may_go(other: Sequence) -> bool:
            aged = other.urgency + AGEING * (sequence.request.arrived - other.request.arrived)
            return other.urgency < min(0.0, own) and other.displaced < _DISPLACED and (own > 0 or aged < own)

        young = [other for other in reversed(list(residents)) if may_go(other)]
        found = [self._in_the_way(sequence, place, young, residents.is_full) for place in self._places.all]
        return min((going for going in found if going), key=len, default=[])

    def _in_the_way(self, sequence: Sequence, place: Place, young: list[Sequence], is_full: bool) -> list[Sequence]:
        """Those of `young` that have to leave so that it can enter `place`; `is_full`: one at least, from anywhere."""
        staying, going = list(place.residents.values()), list[Sequence]()
        for other in young:
            if self._has_room(sequence, staying, 0):
                break
            if other in staying:
                staying.remove(other)
                going.append(other)
        if not self._has_room(sequence, staying, 0):
            return []
        return going or (young[:1] if is_full else [])

    def find_place(self, sequence: Sequence) -> tuple[Place | None, Sequence | None, int]:
        """Where it costs least and has room now, whose first cells it can use there, and how many."""
        best: tuple[Place | None, Sequence | None, int] = (None, None, 0)
        least = math.inf
        for place in self._places.all:
            if not place.ids:
                continue
            source, count = None, 0
            if self._sharer is not None and place.residents and not (sequence.no_lookup or sequence.must_compute):
                source, count = self._sharer.find(sequence, place.residents.values())
            cost = self._places.cost(place, sequence, count, self._in_use(place.residents.values()))
            if cost < least and self._has_room(sequence, place.residents.values(), count):
                best, least = (place, source, count), cost
        return best

    def _has_room(self, sequence: Sequence, residents: Collection[Sequence], shared: int) -> bool:
        """Whether there are cells for its prompt beside `residents` in one context, `shared` of which it uses, too."""
        if not residents:
            return True
        needed = len(sequence.tokens) + BLOCK_TOKENS - shared
        return self._in_use(residents) + needed <= self._places.n_ctx

    def _in_use(self, residents: Collection[Sequence]) -> int:
        """Cells that they use, or will for what is not computed yet; shared ones count once."""
        coming = sum(len(other.tokens) - other.n_past for other in residents)
        return self._cells.used({other.seq_id: other.n_past for other in residents}) + coming

    def blocks_others(self, sequence: Sequence, now: float) -> bool:
        """It has waited for cells for so long that nobody smaller may pass it."""
        return now - sequence.request.arrived > _HEAD_OF_LINE
