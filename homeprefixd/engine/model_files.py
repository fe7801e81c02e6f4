"""Which files a model is made of, and whether somebody writes into them while it is loaded."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path

FileIdentity = tuple[int, int, int, int]
"""Device, inode, size in bytes, mtime in ns: as long as they are the same, so is the content."""

_SPLIT = re.compile(r"^(.*)-(\d{5})-of-(\d{5})\.gguf$")


def model_files(path: Path) -> list[Path]:
    """The file, or all parts of a split one (`name-00001-of-00003.gguf`), in order."""
    match = _SPLIT.match(path.name)
    if match is None:
        return [path]
    stem, _, count = match.groups()
    return [path.with_name(f"{stem}-{i:05d}-of-{count}.gguf") for i in range(1, int(count) + 1)]


def file_identity(path: Path | int) -> FileIdentity:
    """Of the file at a path, or of a descriptor. Raises OSError."""
    status = os.stat(path)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


CHANGED = 4
"""Exit code of a process whose model's file was written into."""

logger = logging.getLogger(__name__)


class LoadedFiles:
    """The files of a model that is loaded, or is about to be: llama.cpp maps them into memory.

    So what is written into them changes the weights under a running model, and what it computes is no longer the state
    of the model whose hash is known. A file that is replaced by another one of its name changes nothing here.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        """One that cannot be opened is left out: loading it will say why."""
        self._files: list[tuple[Path, int]] = []
        for path in paths:
            with contextlib.suppress(OSError):
                self._files.append((path, os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)))
        self._identities = [file_identity(descriptor) for _path, descriptor in self._files]

    def identities(self) -> list[tuple[Path, FileIdentity]]:
        """What each of them was when it was opened."""
        return [(path, identity) for (path, _), identity in zip(self._files, self._identities, strict=True)]

    def changed(self) -> Path | None:
        """One that was written since; costs a microsecond each."""
        for (path, descriptor), identity in zip(self._files, self._identities, strict=True):
            if file_identity(descriptor) != identity:
                return path
        return None

    def end_if_changed(self) -> None:
        """End this process at once, so that the daemon starts another one, which loads what is there."""
        path = self.changed()
        if path is not None:
            logger.critical("%s was changed while it was loaded: it is loaded again", path)
            os._exit(CHANGED)
