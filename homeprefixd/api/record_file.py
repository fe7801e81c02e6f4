"""Records of requests in a file, one JSON object a line, which begins anew when it is full.

A thread writes: the daemon's loop never waits for the disk. Trouble with the file is told once and is nobody's error.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from ..config import RecordsConfig
from .figures_file import FiguresFile
from .records import Record, Records

_QUEUE = 10_000  # records that may wait; more are dropped, and counted

logger = logging.getLogger(__name__)


class RecordFile:
    """`path`, and beside it the ones that were full: `path.1` (the newest) to `path.N`."""

    def __init__(self, path: Path, size: int, files: int, *, text: bool = False) -> None:
        """`size`: bytes of one file; `files`: full ones that are kept; `text`: with pieces of prompts."""
        self._path, self._size, self._files, self._text = path, size, files, text
        self._queue: queue.Queue[bytes | None] = queue.Queue(_QUEUE)
        self._thread: threading.Thread | None = None
        self._broken = False
        self.dropped = 0

    def put(self, record: Record) -> None:
        """Write it soon. Never waits, never raises."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="records", daemon=True)
            self._thread.start()
        shown = record if self._text else without_text(record)
        try:
            self._queue.put_nowait(msgspec.json.encode(shown) + b"\n")
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Returns when all is written."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (line := self._queue.get()) is not None:
            try:
                self._write(line)
                self._broken = False
            except OSError as error:
                self.dropped += 1
                if not self._broken:
                    logger.warning("records cannot be written to %s: %s", self._path, error.strerror or error)
                self._broken = True

    def _write(self, line: bytes) -> None:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        with open(descriptor, "a+b", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            full = size + len(line) > self._size and size > 0
            if not full:
                if size and os.pread(descriptor, 1, size - 1) != b"\n":  # a half line of a process that was killed
                    line = b"\n" + line
                _append(descriptor, line, size)
                return
        self._rotate()
        self._write(line)

    def _rotate(self) -> None:
        """`path` becomes `path.1`, that one `path.2`, and the last one goes."""
        for number in range(self._files, 0, -1):
            older = self._path.with_name(f"{self._path.name}.{number}")
            newer = self._path.with_name(f"{self._path.name}.{number - 1}") if number > 1 else self._path
            if newer.exists():
                newer.replace(older)
        if not self._files:
            self._path.unlink()


def _append(descriptor: int, line: bytes, size: int) -> None:
    """All of it or nothing: a half line would spoil the next one too. Raises OSError."""
    done = 0
    try:
        while done < len(line):
            done += os.write(descriptor, line[done:])
    except OSError:
        if done:
            os.ftruncate(descriptor, size)
        raise


def without_text(record: Record) -> Record:
    """The record without anything that was written in a prompt."""
    return record if record.explanation is None else msgspec.structs.replace(record, explanation=None)


def recorded(
    config: RecordsConfig | None,
    figures: FiguresFile | None = None,
    path_of: Callable[[str], str] = lambda model: "",
) -> Records:
    """Records as the configuration wants them; without one, in RAM only. The rest: see `Records`."""
    config = config or RecordsConfig()
    file = RecordFile(Path(config.file), config.file_size, config.files, text=config.text == "on")
    return Records(
        config.keep,
        file.put if config.file else None,
        close=file.close,
        explain=config.explain == "on",
        figures=figures,
        path_of=path_of,
    )
