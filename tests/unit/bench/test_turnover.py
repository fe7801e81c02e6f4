"""`bench turnover` in short: the file keeps its budget, nothing is lost or wrong. Speed is for the full form."""

from __future__ import annotations

from pathlib import Path

from homeprefixd.bench.store_process import MadeUpWorker, States, StoreProcess
from homeprefixd.bench.turnover import Pass, _rows, measure

BLOCK = 256 << 10
SIZE = 16 << 20


def test_a_store_that_turns_over(tmp_path: Path) -> None:
    rows = measure(size=SIZE, times=20, rate=150e6, every=0.02, rounds=1, block=BLOCK, directory=tmp_path)
    found = {row.what: row for row in rows}
    assert [row.what for row in rows if row.bar and "turns over" not in row.what and not row.met] == []
    assert (found["file / budget"].value or 0) > 0.7  # it was full
    assert (found["written / budget"].value or 0) >= 20
    assert all(row.value is not None for row in rows)
    assert list(tmp_path.iterdir()) == []


def test_what_is_wrong_is_noticed() -> None:
    calm = Pass([0.1] * 100, file=SIZE, written=SIZE)
    full = Pass([0.1] * 98 + [0.2] * 2, lost=1, wrong=1, file=2 * SIZE, written=3 * SIZE, seconds=1.0)
    met = {row.what: row.met for row in _rows(calm, full, SIZE, 20)}
    assert [name for name, fine in met.items() if fine] == ["requests while it turns over / without eviction, median"]
    assert len(met) == 6


def test_blocks_that_hold_something_else_are_told(tmp_path: Path) -> None:
    """The check that the benchmark relies on can fail."""
    states, others = States(BLOCK), States(BLOCK)
    others._kinds = [kind[::-1].copy() for kind in others._kinds]
    store = StoreProcess(tmp_path / "cache", hot=32 << 20, warm=SIZE)
    try:
        worker, liar = MadeUpWorker(store, states, BLOCK), MadeUpWorker(store, others, BLOCK)
        assert worker.save(list(range(256)))[1] == 4
        assert liar.save(list(range(1000, 1128)))[1] == 2
        store.flush()
        right, wrong = worker.ask(list(range(256))), worker.ask(list(range(1000, 1128)))
        assert (right.blocks, right.wrong, wrong.blocks, wrong.wrong) == (4, 0, 2, 2)
        worker.close()
        liar.close()
    finally:
        store.stop()
