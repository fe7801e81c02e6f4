"""Percentiles by the documented method."""

from __future__ import annotations

import random

import numpy as np
import pytest

from homeprefixd.bench.figures import percentile, percentiles, ratio


def test_between_ranks() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([10.0, 20.0], 95) == pytest.approx(19.5)
    assert percentile([7.0], 99) == 7.0
    assert percentile([], 50) is None


@pytest.mark.parametrize("count", [2, 3, 20, 101, 1000])
def test_as_numpy_has_them(count: int) -> None:
    chance = random.Random(count)
    values = [chance.expovariate(1.0) for _ in range(count)]
    for percent in (0, 5, 50, 95, 99, 100):
        assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)))


def test_all_of_them() -> None:
    shown = percentiles([float(n) for n in range(101)])
    assert shown == {"p50": 50.0, "p95": 95.0, "p99": 99.0, "max": 100.0}
    assert percentiles([]) == {"p50": None, "p95": None, "p99": None, "max": None}


def test_ratio() -> None:
    assert ratio(1.0, 4.0) == 0.25
    assert ratio(1.0, 0.0) is None
    assert ratio(None, 1.0) is None
    assert ratio(1.0, None) is None
