"""What the day has come to, kept over restarts in a small file of the cache directory: `figures.json`.

A thread writes, so the daemon's loop never waits for the disk. A file that is damaged, or not ours, is nobody's error:
the day begins anew.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from ..kept_files import read_kept, write_kept

FIGURES_FILE = "figures.json"
"""In the cache directory."""

EVERY = 15.0
"""Seconds between two writes at least: flash wears."""

MOST_MODELS = 64
"""Models whose rate is kept, those that were measured last."""

_MOST = 64 << 10  # bytes of a file that can be ours
_PATIENCE = 5.0  # s that a stop waits for the disk

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Sum = Annotated[float, msgspec.Meta(ge=0)]

logger = logging.getLogger(__name__)


class Day(msgspec.Struct):
    """Sums of one day, local time. What was warmed by hand is not in them: nobody waited for it."""

    date: Annotated[str, msgspec.Meta(max_length=10)] = ""
    requests: _Count = 0
    failed: _Count = 0
    prompt: _Count = 0
    reused: _Count = 0
    generated: _Count = 0
    saved_s: _Sum = 0.0
    lost_s: _Sum = 0.0
    unmeasured: _Count = 0  # requests that reused something, of which it is not known what that saved


class Rate(msgspec.Struct, frozen=True):
    """How fast a model's prompts were computed here last."""

    tokens_per_s: Annotated[float, msgspec.Meta(ge=1e-3, le=1e7)]
    path: str = ""  # of the model's file: another one under the same name has another rate


class Figures(msgspec.Struct):
    """All that the file holds. `rates`: by model, the one that was measured last comes last."""

    version: Literal[1] = 1
    day: Day = msgspec.field(default_factory=Day)
    rates: dict[str, Rate] = {}


class FiguresFile:
    """One file. `put` belongs to the event loop."""

    def __init__(self, path: Path, every: float = EVERY) -> None:
        """`every`: seconds between two writes at least."""
        self._path = path
        self._every = every
        self._lock = threading.Lock()
        self._waiting: bytes | None = None
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._broken = False

    def read(self) -> Figures:
        """What was kept; empty figures where there is none that can be used, which is logged."""
        try:
            data = read_kept(self._path, _MOST)
        except FileNotFoundError:
            return Figures()
        except OSError as error:
            logger.warning("%s cannot be read, so the day's figures begin anew: %s", self._path, error.strerror)
            return Figures()
        try:
            found = msgspec.json.decode(data, type=Figures)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            logger.warning("%s is not what was kept here, so the day's figures begin anew: %s", self._path, error)
            return Figures()
        found.rates = dict(list(found.rates.items())[-MOST_MODELS:])
        return found

    def put(self, figures: Figures) -> None:
        """Write them soon, unless newer ones come before. Never waits for the disk, never raises."""
        data = msgspec.json.encode(figures)
        with self._lock:
            if self._closing.is_set():
                return
            self._waiting = data
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="figures", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Returns when all is written, or the disk did not answer for some seconds."""
        self._closing.set()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(_PATIENCE)

    def _run(self) -> None:
        """Write what waits, from time to time, until nothing does."""
        while True:
            self._closing.wait(self._every)
            with self._lock:
                data, self._waiting = self._waiting, None
                if data is None:
                    self._thread = None
                    return
            try:
                write_kept(self._path, data)
                self._broken = False
            except OSError as error:
                if not self._broken:
                    logger.warning("the day's figures cannot be kept in %s: %s", self._path, error.strerror or error)
                self._broken = True
