"""What became of the forms that replies were asked to have of late, so that nobody waits for it, or pays for it, twice.

By content: a key is a digest of all that a form is made of.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

from ..errors import RequestError
from .constraint import Mask

_MASKS = 64  # apps send the same few again and again
_REFUSALS = 256  # in a place of their own: however many are refused, nobody's mask goes for them
_LONG = 3.0  # s
_DOUBTFUL = 600.0
"""Seconds for which an outcome is kept that another try may change: it took long, perhaps since the machine was busy,
or was too much for the limits."""

_Entry = TypeVar("_Entry")


class KnownForms:
    """Any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` in seconds."""
        self._clock = clock
        self._lock = threading.Lock()
        self._masks: OrderedDict[bytes, tuple[Mask, float]] = OrderedDict()  # with the time until which it counts
        self._refusals: OrderedDict[bytes, tuple[RequestError, float]] = OrderedDict()

    def add(self, key: bytes, outcome: Mask | RequestError, seconds: float) -> None:
        """`outcome`: a mask at its start, of which copies are used, or why there is none. `seconds`: what it took."""
        is_doubtful = seconds > _LONG
        if isinstance(outcome, RequestError):
            is_doubtful |= outcome.code == "grammar_too_complex"
        until = self._clock() + _DOUBTFUL if is_doubtful else float("inf")
        with self._lock:
            if isinstance(outcome, RequestError):
                _keep(self._refusals, key, (copy.copy(outcome), until), _REFUSALS)  # without its traceback
            else:
                _keep(self._masks, key, (outcome, until), _MASKS)

    def get(self, key: bytes) -> Mask | RequestError | None:
        """A mask or an error for the caller alone; None: not known."""
        with self._lock:
            outcome = self._find(key)
        return copy.copy(outcome) if isinstance(outcome, RequestError) else outcome and outcome.copy()

    def __contains__(self, key: bytes) -> bool:
        with self._lock:
            return self._find(key) is not None

    def _find(self, key: bytes) -> Mask | RequestError | None:
        now = self._clock()
        for place in (self._masks, self._refusals):
            found = place.get(key)
            if found is not None and now < found[1]:
                place.move_to_end(key)
                return found[0]
        return None


def _keep(place: OrderedDict[bytes, _Entry], key: bytes, entry: _Entry, most: int) -> None:
    place[key] = entry
    place.move_to_end(key)
    if len(place) > most:
        place.popitem(last=False)
