"""Tables in a pipe and on a terminal, sizes, ages, and the line that shows progress."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys

import pytest

from homeprefixd.cli.output import (
    Column,
    Output,
    ProgressLine,
    age_text,
    count_text,
    printable,
    seconds_text,
)
from homeprefixd.sizes import size_text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


COLUMNS = [Column("name"), Column("count", right=True), Column("text", flexible=True)]


def test_plain_tables_are_aligned_and_have_no_escapes() -> None:
    stream = io.StringIO()
    Output(stream=stream).table(COLUMNS, [["a", "1", "one"], ["longer", "12,345", "[bold]two"]])
    assert stream.getvalue() == ("name     count  text\na            1  one\nlonger  12,345  [bold]two\n")


def test_terminal_tables_fit_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    stream = Terminal()
    Output(stream=stream).table(COLUMNS, [["an-id-of-some-length", "12,345", "[bold]" + "x" * 200]])
    lines = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue()).splitlines()
    assert all(len(line) <= 60 for line in lines)
    [row] = [line for line in lines if "12,345" in line]
    assert "an-id-of-some-length" in row
    assert "[bold]x" in row
    assert "…" in row


def test_narrow_terminals_lose_what_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = [Column("id"), Column("a", optional=1), Column("b", optional=2), Column("text", flexible=True)]
    row = ["0123456789abcdef", "aaaaaaaaaa", "bbbbbbbbbb", "begin " + "-" * 90 + " end"]
    shown = {}
    for width in (45, 58, 75):
        monkeypatch.setenv("COLUMNS", str(width))
        stream = Terminal()
        Output(stream=stream).table(columns, [row])
        shown[width] = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())
        assert row[0] in shown[width]
        assert "begin" in shown[width]
        assert "- end" in shown[width]
    assert [("aaaaaaaaaa" in shown[w], "bbbbbbbbbb" in shown[w]) for w in shown] == [
        (False, False),
        (False, True),
        (True, True),
    ]


def test_a_prompt_cannot_write_on_the_terminal() -> None:
    assert printable("a\x1b[2Jb\nc\td\x07") == "a\ufffd[2Jb c d\ufffd"
    stream = io.StringIO()
    Output(stream=stream).table([Column("preview")], [["line\nline\x1b[31m"]])
    assert "\x1b" not in stream.getvalue()
    assert stream.getvalue().count("\n") == 2


def test_documents_are_json() -> None:
    stream = io.StringIO()
    Output(True, stream).document({"name": "Küche"})
    assert "Küche" in stream.getvalue()
    assert json.loads(stream.getvalue()) == {"name": "Küche"}


def test_units() -> None:
    assert [size_text(n) for n in (0, 1023, 1536, 150 << 20, 3 << 30, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "150 MiB",
        "3.0 GiB",
        "5.0 TiB",
    ]
    assert count_text(1234567) == "1,234,567"
    assert [seconds_text(s) for s in (9.8346, 0.112, 0.0087)] == ["9.83 s", "112 ms", "8.7 ms"]
    assert [age_text(1000, 1000 + age) for age in (3, 119, 121, 7200, 90000, 10 * 86400)] == [
        "3 s ago",
        "119 s ago",
        "2 min ago",
        "2 h ago",
        "1 d ago",
        "10 d ago",
    ]
    assert age_text(0) == "never"
    assert age_text(2000, 1000) == "0 s ago"


def test_progress_on_a_terminal_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    stream = Terminal()
    line = ProgressLine(stream)
    line.show("x" * 50)
    line.tick("second")
    line.clear()
    assert "\n" not in stream.getvalue()
    assert "x" * 19 in stream.getvalue()
    assert "x" * 20 not in stream.getvalue()
    assert stream.getvalue().endswith("\x1b[K")


def test_progress_elsewhere_is_a_line_for_each_news() -> None:
    stream = io.StringIO()
    line = ProgressLine(stream)
    line.show("one")
    line.show("one")
    line.tick("one: 0.1 s")
    line.show("two")
    line.clear()
    assert stream.getvalue() == "one\ntwo\n"


def test_starting_up_imports_no_room() -> None:
    """The daemon is started through this package and must stay small; `--help` must be quick."""
    code = "import sys, homeprefixd.cli.main; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    loaded = set(out.split())
    heavy = {"rich", "aiohttp", "numpy", "lmdb", "jinja2", "llama_cpp", "zstandard", "psutil", "asyncio"}
    assert not loaded & heavy
    assert not any(name.startswith(("homeprefixd.bench", "homeprefixd.prefix", "homeprefixd.api")) for name in loaded)
