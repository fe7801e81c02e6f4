"""`bench codec`: it reads llama.cpp's state apart, and its figures are of the real codec."""

from __future__ import annotations

from pathlib import Path

from homeprefixd.bench.codec_table import measure


def test_the_table(demo_model: Path) -> None:
    rows = measure(demo_model, 2, levels=(0, 1), tokens=128, least=0.01)
    assert [(row.kv_type, row.part, row.level) for row in rows] == [
        (kv_type, part, level) for kv_type in ("f16", "q8_0") for part in "KV" for level in (0, 1)
    ]
    ratio = {(row.kv_type, row.level): row.ratio for row in rows if row.part == "K"}
    assert 0.99 < ratio["f16", 0] < 1.0  # headers
    assert ratio["f16", 1] > 1.1
    assert ratio["q8_0", 1] < 1.05
    assert all(row.read > 0 and row.write > 0 for row in rows)
