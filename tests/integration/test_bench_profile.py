"""`bench profile`: the functions of a real step, with llama.cpp's part told apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from homeprefixd.bench.step_profile import measure


def test_the_rows(demo_model: Path) -> None:
    first, *rows, last = measure(demo_model, 2, 2, 12)
    assert (first.function, last.function) == ("within llama.cpp", "all of Python")
    assert first.share + last.share == pytest.approx(1.0)
    assert 0 < last.share < first.share
    calls = {row.function: row.calls for row in rows}
    assert calls["scheduler: _decode_together"] == pytest.approx(0.5, abs=0.1)  # two tokens each
    assert calls["scheduler: _next_token"] == pytest.approx(1.0, abs=0.1)
