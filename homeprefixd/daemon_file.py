"""`daemon.json` in the cache directory, by which the commands find a daemon that runs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from pathlib import Path

DAEMON_FILE = "daemon.json"
"""While the daemon runs: {"pid", "url"}, and with TLS "certificate"."""

LOOK_EVERY = 3.0
"""Seconds between looks whether it is still there: who removes the cache directory removes it too."""

logger = logging.getLogger(__name__)


class DaemonFile:
    """The file of one daemon: written, kept there, removed at the end."""

    def __init__(self, directory: Path, url: str, certificate: str = "") -> None:
        """`url`: for programs on this machine. `certificate`: path of the one that the daemon shows, "" without TLS."""
        self._path = directory / DAEMON_FILE
        self._content = {"pid": os.getpid(), "url": url} | ({"certificate": certificate} if certificate else {})
        self._written = False
        self._failed = False

    def write(self) -> None:
        """Where that is not possible it is logged once; until `keep` has it written, commands need the address."""
        part = self._path.with_name(f"{DAEMON_FILE}.{os.getpid()}")
        try:
            try:
                with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                    json.dump(self._content, file)
                part.replace(self._path)
            except OSError:
                with contextlib.suppress(OSError):
                    part.unlink()
                raise
        except OSError as error:
            if not self._failed:
                logger.warning("cannot write %s, so the commands need --url: %s", self._path, error.strerror)
            self._written, self._failed = False, True
            return
        if self._failed:
            logger.info("%s is written now", self._path)
        self._written, self._failed = True, False

    async def keep(self) -> None:
        """Write it again where that failed, or once its directory is there again without it; until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY)
            if self._path.parent.is_dir() and not (self._written and self._path.exists()):
                self.write()

    def remove(self) -> None:
        """Again does nothing."""
        if self._written:
            with contextlib.suppress(OSError):
                self._path.unlink()
            self._written = False
