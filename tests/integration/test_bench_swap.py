"""`bench swap`: a real daemon with memory for one of two models, and rows that can miss their bars."""

from __future__ import annotations

from pathlib import Path

from homeprefixd.bench.swap import BAR, Round, measure, rows_of


def test_a_round(demo_model: Path) -> None:
    ratio, reused, load = measure(demo_model, None, 2, 1, lambda line: None, size=300)
    assert ratio.value is not None
    assert ratio.value > 0
    assert (ratio.bar, ratio.met) == (f"<= {BAR:g}", ratio.value <= BAR)
    assert reused.met, reused
    assert load.value is not None
    assert load.value > 0.02


def test_bars_can_be_missed() -> None:
    good = Round(back=1.1, load=1.0, hot=(0.1, 0.1), reused=2200, wanted=2200)
    assert [row.met for row in rows_of([good], True)] == [True, True, None]
    slow, cold = good._replace(back=1.3), good._replace(reused=1000)
    assert [row.met for row in rows_of([slow], False)] == [False, True, None]
    assert [row.met for row in rows_of([good, cold], False)] == [True, False, None]
