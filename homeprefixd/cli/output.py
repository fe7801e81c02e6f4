"""What commands print: tables on a terminal, aligned plain text in a pipe, JSON where it was asked for.

rich is imported only when a table goes to a terminal: the daemon, which is started by this package, stays small.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TextIO

_NARROWEST = 16  # letters of a column that is cut
_PADDING = 3  # blanks that a column adds to its text


@dataclass(frozen=True)
class Column:
    """A column of a table. `right`: numbers.

    Where the terminal is too narrow, the `flexible` one is cut in its middle, then those that are `optional` are left
    out, the lowest number first.
    """

    title: str
    right: bool = False
    flexible: bool = False
    optional: int = 0


class Output:
    """Where a command's results go. `as_json`: one JSON document instead of text."""

    def __init__(self, as_json: bool = False, stream: TextIO | None = None) -> None:
        self.as_json = as_json
        self.stream = stream or sys.stdout
        self.terminal = self.stream.isatty()

    def document(self, value: Any) -> None:
        """One JSON document, indented; with ASCII escapes where the stream's encoding lacks a letter."""
        text = json.dumps(value, indent=2, ensure_ascii=False)
        try:
            text.encode(self.stream.encoding or "utf-8")
        except UnicodeEncodeError:
            text = json.dumps(value, indent=2)
        self.line(text)

    def line(self, text: str = "") -> None:
        """One line of text, at once."""
        self.stream.write(text + "\n")
        self.stream.flush()

    def table(self, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
        """`rows` have one text for each column. Control characters in them are made visible."""
        cells = [[printable(cell) for cell in row] for row in rows]
        if self.terminal:
            self._rich(columns, cells)
        else:
            self._plain(columns, cells)

    def _plain(self, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
        lines = [[column.title for column in columns], *rows]
        widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
        for line in lines:
            cells = [
                cell.rjust(width) if column.right else cell.ljust(width)
                for cell, width, column in zip(line, widths, columns, strict=True)
            ]
            self.stream.write("  ".join(cells).rstrip() + "\n")
        self.stream.flush()

    def _rich(self, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
        from rich import box
        from rich.cells import cell_len
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        width = shutil.get_terminal_size().columns
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
        lines = [[column.title for column in columns], *rows]
        widths = [max(cell_len(line[index]) for line in lines) for index in range(len(columns))]
        shown = list(range(len(columns)))

        def room() -> int:
            """What is left for the flexible column."""
            fixed = sum(widths[index] for index in shown if not columns[index].flexible)
            return width - fixed - _PADDING * len(shown) - 1

        for index in sorted((i for i in shown if columns[i].optional), key=lambda i: columns[i].optional):
            if room() < _NARROWEST:
                shown.remove(index)
        rest = max(_NARROWEST, room())
        for index in shown:
            column = columns[index]
            table.add_column(
                column.title,
                justify="right" if column.right else "left",
                no_wrap=True,
                overflow="ellipsis",
                min_width=None if column.flexible else widths[index],
                max_width=rest if column.flexible else None,
            )
        for row in rows:
            cells = [shortened(row[i], rest) if columns[i].flexible else row[i] for i in shown]
            table.add_row(*(Text(cell) for cell in cells))  # Text: what is in a cell is no markup
        Console(file=self.stream, width=width).print(table)


class ProgressLine:
    """One line on a terminal that is written over; elsewhere, a line for each new text. Goes to stderr."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._shown = ""

    def show(self, text: str) -> None:
        """Show `text` in place of what was shown."""
        if text == self._shown:
            return
        self._shown = text
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            self._stream.write("\r\x1b[K" + text[:width] + "\r")  # what is logged meanwhile begins a line
        else:
            self._stream.write(text + "\n")
        self._stream.flush()

    def tick(self, text: str) -> None:
        """Like `show`, on a terminal only: for what changes several times a second."""
        if self._terminal:
            self.show(text)

    def clear(self) -> None:
        """Take the line away."""
        if self._terminal and self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
        self._shown = ""


def shortened(text: str, width: int) -> str:
    """`text` in at most `width` letters: the end of a long one says more than its middle."""
    if len(text) <= width:
        return text
    head = (width - 1) // 3
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def printable(text: str) -> str:
    """`text` on one line: white space becomes blanks, other control characters a visible mark."""
    return "".join(
        " " if letter in "\n\r\t" else letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}"
        for letter in text
    )


def count_text(count: float) -> str:
    """A count with separators: `12,345`."""
    return f"{count:,.0f}"


def counted(count: float, noun: str) -> str:
    """A count and what is counted: `1 block`, `12,345 blocks`."""
    return f"{count_text(count)} {noun}" if count == 1 else f"{count_text(count)} {noun}s"


def seconds_text(seconds: float) -> str:
    """A measured time: `9.83 s`, `112 ms`, `8.7 ms`."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    milliseconds = seconds * 1000
    return f"{milliseconds:.0f} ms" if milliseconds >= 10 else f"{milliseconds:.1f} ms"


def age_text(then: float, now: float | None = None) -> str:
    """How long ago a Unix time was: `12 s ago`, `3 h ago`; `never` for 0."""
    if then <= 0:
        return "never"
    age = max(0.0, (time.time() if now is None else now) - then)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if age >= 2 * length or (age >= length and unit == "d"):
            return f"{age / length:.0f} {unit} ago"
    return f"{age:.0f} s ago"
