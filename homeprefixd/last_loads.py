"""What models were when they were loaded last: remembered by content in the cache directory (`models.json`).

A worker writes it, the daemon and the commands read it while a model is not loaded. Like the probe's outcome it goes by
what a file says of itself (its first megabytes and its size), so that a moved file is known and another one under the
same name is not. A file that cannot be read or written is nobody's error.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import msgspec

from .frames import Frame
from .frames.worker import ModelInfo, NamespaceKnown, Ready
from .kept_files import one_at_a_time, read_kept, write_kept

LAST_LOADS_FILE = "models.json"
"""In the cache directory."""

HEAD = 8 << 20  # bytes of a model's file: metadata and names of tensors, after the vocabulary

_REMEMBERED = 200  # models
_MOST = 8 << 20  # bytes of a file that can be ours
_LATEST = 1e11  # Unix time, s: all that can be written as a date is earlier

logger = logging.getLogger(__name__)


class LastLoad(msgspec.Struct, frozen=True):
    """A model as it was loaded last. `size`: of its file, bytes; `at`: Unix time, s."""

    info: ModelInfo
    size: Annotated[int, msgspec.Meta(ge=0)]
    at: Annotated[float, msgspec.Meta(ge=0, le=_LATEST)]


class _Content(msgspec.Struct):
    """Of an adapter."""

    sha256: str
    scale: float


class _Vector(_Content):
    first_layer: int
    last_layer: int


class _Edges(msgspec.Struct):
    window: int


class _Namespace(msgspec.Struct):
    """What is read of a description by name."""

    model_sha256: str = ""
    adapters: list[_Content] = []
    control_vectors: list[_Vector] = []
    edges: _Edges | None = None


def described(info: ModelInfo | None) -> dict[str, Any]:
    """What decides which prefixes a model finds, and more that only loading it tells."""
    return {
        "cache_mode": info.cache_mode if info is not None else "",
        "cache_reason": info.cache_reason if info is not None else "",
        "namespace": info.namespace if info is not None else {},
        "mismatch": info.mismatch if info is not None else [],
        "adapters": [msgspec.to_builtins(adapter) for adapter in info.adapters] if info is not None else [],
        "control_vectors": [msgspec.to_builtins(one) for one in info.control_vectors] if info is not None else [],
    }


class LastLoads:
    """One file, `directory / LAST_LOADS_FILE`. Any thread may ask, and workers may write at once."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / LAST_LOADS_FILE
        self._heads: dict[tuple[int, int, int, int], str] = {}

    def remember(self, model: Path, info: ModelInfo) -> None:
        """Waits for the disk, never raises."""
        try:
            head, size = self._head(model)
            key = f"{head} {info.alias}"
            with one_at_a_time(self._path.parent):
                known = self._read()
                known.pop(key, None)  # the newest is the last
                known[key] = LastLoad(info, size, time.time())
                write_kept(self._path, msgspec.json.encode(dict(list(known.items())[-_REMEMBERED:])))
        except OSError as error:
            logger.info("what %s is cannot be remembered in %s: %s", info.alias, self._path, error.strerror or error)

    def recall(self, models: Iterable[tuple[str, Path]]) -> dict[str, LastLoad]:
        """Those of these models, by name and file, that were loaded before; by name. Waits for the disk.

        The same file under another name counts where its own name was not loaded yet.
        """
        known = self._read()
        sizes = {one.size for one in known.values()}
        found: dict[str, LastLoad] = {}
        for alias, path in models:
            try:
                if not known or os.stat(path).st_size not in sizes:
                    continue
                head, _ = self._head(path)
            except OSError:
                continue
            others = [one for key, one in known.items() if key.startswith(f"{head} ")]
            if others:
                found[alias] = known.get(f"{head} {alias}", others[-1])
        return found

    def _head(self, path: Path) -> tuple[str, int]:
        """What a file says of itself, hashed, and its size. Raises OSError."""
        with path.open("rb") as file:
            stat = os.fstat(file.fileno())
            identity = stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns
            if identity not in self._heads:
                self._heads[identity] = f"{hashlib.sha256(file.read(HEAD)).hexdigest()} {stat.st_size}"
        return self._heads[identity], stat.st_size

    def _read(self) -> dict[str, LastLoad]:
        try:
            found = msgspec.json.decode(read_kept(self._path, _MOST), type=dict[str, msgspec.Raw])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
            logger.info("%s cannot be read: %s", self._path, error)
            return {}
        known = {}
        for key, entry in found.items():
            try:
                known[key] = _checked(entry)
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                logger.info("an entry of %s is not what was kept here: %s", self._path, error)
        return known


def _checked(entry: msgspec.Raw) -> LastLoad:
    """Raises MsgspecError, ValueError, RecursionError."""
    found = msgspec.json.decode(entry, type=LastLoad)
    namespace = found.info.namespace
    msgspec.convert(namespace, _Namespace)
    if not all(_is_plain(value) for key, value in namespace.items() if key not in _Namespace.__struct_fields__):
        raise ValueError("its namespace has lists of something else than texts and numbers")
    return found


def _is_plain(value: Any) -> bool:
    """Whether it is a text, a number, a list of such, or fields that are."""
    if isinstance(value, dict):
        return all(_is_plain(field) for field in value.values())
    return not (isinstance(value, list) and any(isinstance(item, dict | list) for item in value))


class Remembering:
    """Watches what a worker says of its model, and has it remembered, on a thread that nobody waits for."""

    def __init__(self, loads: LastLoads, model: Path) -> None:
        self._loads, self._model = loads, model
        self._lock = threading.Lock()
        self._info: ModelInfo | None = None

    def watch(self, frame: Frame) -> None:
        """A frame that was sent."""
        with self._lock:
            if isinstance(frame, Ready):
                self._info = frame.model
            elif isinstance(frame, NamespaceKnown) and self._info is not None:
                self._info = msgspec.structs.replace(
                    self._info, namespace=frame.namespace, mismatch=frame.mismatch, adapters=frame.adapters
                )
            else:
                return
            if self._info.namespace or self._info.cache_mode == "off":
                threading.Thread(target=self._remember, args=(self._info,), name="last-load", daemon=True).start()

    def _remember(self, info: ModelInfo) -> None:
        with self._lock:
            if info is self._info:
                self._loads.remember(self._model, info)
