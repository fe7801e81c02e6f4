"""Several contexts of one model, and into which of them a sequence goes.

Without flash attention a call costs as if each of its tokens looked at every cell up to the highest one in use,
whoever's it is: beside 9,000 cells of others, prefill of the demo model is four times slower and one token of decode
takes three times as long (measured). So sequences that share nothing go into contexts of their own, unless they are so
short that reading the weights once for both saves more.

Sequence ids are the engine's own: they say in which context a sequence is. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items

from .context import Context
from .sequence import Sequence
from .slices import Slicer

MOST = 4
"""Contexts of one model, at most: each has buffers of its own."""

_READING = 2.0  # bytes of weights that are read in the time that attention takes for a byte of K and V (measured)
_BESIDE = 0.5  # what a cell costs each of several tokens of a call, as a share of what it costs one alone (measured)
_PREFILL_CELL = 0.3  # what a cell costs a token of a prefill, as a share of what it costs one of decode (measured)
_PREFILL_CALL = 0.3  # what a token of a prefill costs, as a share of what it takes to read the weights (measured)
_SWITCH = 0.1  # what other adapters in a context cost each step, as a share of what it takes to read the weights
_REPLY = 100  # tokens that a reply of no certain length is guessed to have
_LONG_REPLY = 256  # more are seldom used


class Place:
    """One context, and who is in it. `ids` are free; `peak`: cells in use at most since it was empty."""

    def __init__(self, context: Context, first: int, parallel: int) -> None:
        self.context = context
        self.first = first
        self.ids = list(range(first, first + parallel))[::-1]
        self.all_ids = frozenset(self.ids)
        self.residents: dict[int, Sequence] = {}  # by sequence id, in order of admission
        self.running: list[Sequence] = []  # those that decode
        self.peak = 0

    def local(self, seq: int) -> int:
        """llama.cpp's id of a sequence that is here."""
        return seq - self.first


class Places:
    """All contexts of a model, all alike: `parallel` sequences may be in each, beside its scratch sequence.

    `cell_bytes`: of K and V of one token; `weight_bytes`: what each call reads of the model. The methods that a
    `Context` has too take the engine's sequence ids.
    """

    def __init__(self, contexts: Items[Context], parallel: int, *, cell_bytes: float, weight_bytes: float) -> None:
        self._stride = parallel + 1
        self.all = tuple(Place(context, at * self._stride, parallel) for at, context in enumerate(contexts))
        self.n_ctx = min(place.context.n_ctx for place in self.all)
        """Cells of each."""
        self.cells = sum(place.context.n_ctx for place in self.all)
        self._weights_in_cells = weight_bytes / _READING / cell_bytes if cell_bytes else 0.0

    def of(self, seq: int) -> Place:
        """Where a sequence is."""
        return self.all[seq // self._stride]

    @property
    def native_seconds(self) -> float:
        """Time that was spent in llama.cpp."""
        return sum(place.context.native_seconds for place in self.all)

    def cost(self, place: Place, sequence: Sequence, shared: int, used: int) -> float:
        """What `sequence` costs in `place`, over its life, more than running alone with all its prompt known.

        In cells that a token of decode looks at. `used`: cells that those in `place` use or will, for their prompts;
        `shared`: of them, those that have tokens of it.
        """
        request, tokens = sequence.request, len(sequence.tokens)
        reply = min(request.max_tokens, _LONG_REPLY) if request.max_tokens >= 0 else _REPLY
        missing = tokens - max(sequence.matched, shared)
        computing = missing * _PREFILL_CALL * self._weights_in_cells
        if not place.residents:
            return computing
        others = used - shared
        each = others + len(place.residents) * (tokens - shared)
        alike = any(other.request.lora == request.lora for other in place.residents.values())
        saved = self._weights_in_cells if alike else -_SWITCH * self._weights_in_cells
        return computing + reply * (_BESIDE * each - saved) + _PREFILL_CELL * missing * others

    def close(self) -> None:
        for place in self.all:
            place.context.close()

    # ---- as a Context

    def pos_min(self, seq: int) -> int:
        place = self.of(seq)
        return place.context.pos_min(place.local(seq))

    def pos_max(self, seq: int) -> int:
        place = self.of(seq)
        return place.context.pos_max(place.local(seq))

    def remove(self, seq: int, start: int = -1, end: int = -1) -> bool:
        place = self.of(seq)
        return place.context.remove(place.local(seq), start, end)

    def copy(self, source: int, target: int, start: int = -1, end: int = -1) -> None:
        """Both are in one place."""
        place = self.of(source)
        place.context.copy(place.local(source), place.local(target), start, end)


class PlacedSlicer(Slicer):
    """The slicers of all places, as one that takes the engine's sequence ids. `first`: the one that was proven."""

    def __init__(self, first: Slicer, contexts: Iterable[Context], parallel: int) -> None:
        self._stride = parallel + 1
        self._slicers = [Slicer(context, parallel, first.size, first.layout, first.cells) for context in contexts]
        self.size, self.layout, self.cells = first.size, first.layout, first.cells

    def export(self, seq: int, start: int, end: int, view: memoryview) -> int:
        return self._slicers[seq // self._stride].export(seq % self._stride, start, end, view)

    def import_block(self, seq: int, start: int, count: int, use: int, view: memoryview) -> None:
        self._slicers[seq // self._stride].import_block(seq % self._stride, start, count, use, view)

    def empty(self, seq: int) -> bool:
        return self._slicers[seq // self._stride].empty(seq % self._stride)

    def clear(self, seq: int) -> None:
        self._slicers[seq // self._stride].clear(seq % self._stride)

    def refuses(self, seq: int, start: int, count: int, state: memoryview, edge: memoryview | None = None) -> str:
        return self._slicers[seq // self._stride].refuses(seq % self._stride, start, count, state, edge)
