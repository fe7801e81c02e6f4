"""A stream for log lines whose writer never waits: whoever reads the daemon's stderr may have stopped reading.

A thread writes; where it cannot keep up, lines are dropped and counted, and the count is written once it can.
"""

from __future__ import annotations

import contextlib
import io
import os
import threading
from collections import deque
from typing import TextIO, cast

MAX_WAITING = 256 << 10  # letters that wait to be written; more are dropped
DRAIN_SECONDS = 0.5  # that `drain` waits


class PatientStream(io.TextIOBase):
    """Writes to `stream`'s descriptor, in whole lines. Thread-safe. Raises OSError if it has none."""

    def __init__(self, stream: TextIO) -> None:
        stream.flush()
        self._stream = stream
        self._descriptor = stream.fileno()
        self._lines: deque[str] = deque()
        self._waiting = 0
        self._dropped = 0
        self._writing = False
        self._part = ""
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._descriptor

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def write(self, text: str) -> int:
        """Never waits, never fails."""
        with self._changed:
            *whole, self._part = (self._part + text).split("\n")
            for line in whole:
                self._take(line + "\n")
            if self._part and self.isatty():  # a line that is changed in place
                self._take(self._part)
                self._part = ""
            self._changed.notify_all()
        return len(text)

    def flush(self) -> None:
        """Nothing: a handler of `logging` flushes after each line, and must not wait either."""

    def drain(self) -> None:
        """Wait until all is written, for a moment at most."""
        with self._changed:
            self._changed.wait_for(lambda: not self._lines and not self._writing, DRAIN_SECONDS)

    def _take(self, line: str) -> None:
        if self._waiting + len(line) > MAX_WAITING:
            self._dropped += 1
            return
        self._lines.append(line)
        self._waiting += len(line)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines)
                text = "".join(self._lines)
                if self._dropped:
                    text += f"({self._dropped} lines were lost: nobody read them)\n"
                self._lines.clear()
                self._waiting = self._dropped = 0
                self._writing = True
            data = text.encode(self.encoding or "utf-8", "backslashreplace")
            with contextlib.suppress(OSError):  # closed, or a full disk
                while data:
                    data = data[os.write(self._descriptor, data) :]
            with self._changed:
                self._writing = False
                self._changed.notify_all()


def patient(stream: TextIO) -> TextIO:
    """A PatientStream on `stream`; `stream` itself where it has no descriptor (in tests)."""
    try:
        return cast(TextIO, PatientStream(stream))
    except OSError:
        return stream
