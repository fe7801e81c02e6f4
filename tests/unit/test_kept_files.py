"""Small files of the cache directory: whatever lies under their names, nobody waits for it or takes it for ours."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from homeprefixd import kept_files
from homeprefixd.engine.probe import MEMO, Outcome, _remember, _remembered
from homeprefixd.kept_files import one_at_a_time, read_kept, write_kept
from homeprefixd.last_loads import LAST_LOADS_FILE, LastLoads
from tests.unit.test_last_loads import info


def _large(path: Path) -> None:
    path.touch()
    os.truncate(path, 64 << 20)


ODD: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a link to itself": lambda path: path.symlink_to(path),
    "too large": _large,
    "no text": lambda path: path.write_bytes(b"\xff\xfe"),
    "deep": lambda path: path.write_bytes(b'{"a":' * 100_000),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("made", ODD)
def test_what_is_no_file_of_ours_is_begun_anew(tmp_path: Path, made: str) -> None:
    for name in (MEMO, LAST_LOADS_FILE):
        ODD[made](tmp_path / name)
    model, outcome = tmp_path / "model", Outcome("blocks")
    model.write_bytes(b"GGUF")
    loads = LastLoads(tmp_path)
    assert loads.recall([("a", model)]) == {}
    assert _remembered(tmp_path / MEMO, Outcome) == {}
    loads.remember(model, info())
    _remember(tmp_path / MEMO, {"x": outcome})
    if made != "a folder":
        assert set(loads.recall([("a", model)])) == {"a"}
        assert _remembered(tmp_path / MEMO, Outcome) == {"x": outcome}
    assert not list(tmp_path.glob(f"*.{os.getpid()}"))


def test_one_wrong_entry_costs_no_other(tmp_path: Path) -> None:
    memo = tmp_path / MEMO
    memo.write_text('{"a": ["maybe"], "b": ["off", "why"], "c": 5}')
    assert _remembered(memo, Outcome) == {"b": Outcome("off", "why")}
    _remember(memo, {"d": Outcome("blocks")})
    assert list(_remembered(memo, Outcome)) == ["b", "d"]


def test_read_and_written(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_kept(path, b"some")
    assert read_kept(path, 4) == b"some"
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(OSError, match="too large"):
        read_kept(path, 3)
    with pytest.raises(FileNotFoundError):
        read_kept(tmp_path / "y", 3)


def test_one_after_the_other_but_nobody_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, leave = threading.Event(), threading.Event()
    order: list[str] = []

    def hold() -> None:
        with one_at_a_time(tmp_path):
            entered.set()
            assert leave.wait(10)
            order.append("first")

    thread = threading.Thread(target=hold)
    thread.start()
    assert entered.wait(10)
    monkeypatch.setattr(kept_files, "_PATIENCE", 0.05)
    with one_at_a_time(tmp_path):
        order.append("impatient")
    monkeypatch.setattr(kept_files, "_PATIENCE", 10.0)
    leave.set()
    with one_at_a_time(tmp_path):
        order.append("second")
    thread.join(10)
    assert order == ["impatient", "first", "second"]
    with one_at_a_time(tmp_path / "nowhere"):
        pass
