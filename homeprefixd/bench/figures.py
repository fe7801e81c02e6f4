"""Percentiles and the few other figures that reports are made of. Plain Python: the client must stay small."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

PERCENTILES = (50, 95, 99)


def percentile(values: Iterable[float], percent: float) -> float | None:
    """The `percent`-th percentile by linear interpolation between the two nearest ranks; None without values.

    With n values sorted as x[0..n-1] it stands at rank percent/100 * (n-1): Hyndman and Fan's type 7, NumPy's default.
    Of few values a high percentile is close to the largest one; it is never beyond it.
    """
    ordered = sorted(values)
    if not ordered:
        return None
    rank = min(max(percent, 0.0), 100.0) / 100.0 * (len(ordered) - 1)
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """`p50`, `p95`, `p99` and `max`."""
    ordered = sorted(values)
    shown: dict[str, float | None] = {f"p{percent}": percentile(ordered, percent) for percent in PERCENTILES}
    return {**shown, "max": ordered[-1] if ordered else None}


def ratio(part: float | None, whole: float | None) -> float | None:
    """part / whole; None where that says nothing."""
    return None if part is None or not whole else part / whole
