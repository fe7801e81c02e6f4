"""The daemon's log: where its lines go, how they look, and which are left out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import MutableMapping
from typing import Any, TextIO

EXCEPTION_EVERY = 60.0
"""Seconds between two reports of the same fault in the event loop."""


def configure_logging(level: str, environ: MutableMapping[str, str], stream: TextIO) -> None:
    """Log to `stream`, for the journal with its priorities and without the time. Loggers that are set up stay so."""
    if logging.getLogger().handlers:
        return
    handler = logging.StreamHandler(stream)
    if environ.get("JOURNAL_STREAM"):
        handler.setFormatter(JournalFormatter("%(name)s: %(message)s"))
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handler.addFilter(_is_ours)
    logging.basicConfig(level=level.upper(), handlers=[handler])


def _is_ours(record: logging.LogRecord) -> bool:
    """False for what aiohttp says, traceback and all, of bytes that are no HTTP: any client could fill the log."""
    error = record.exc_info[1] if record.exc_info else None
    return not (record.name.startswith("aiohttp") and type(error).__module__ == "aiohttp.http_exceptions")


class JournalFormatter(logging.Formatter):
    """Each line begins with its priority, see sd-daemon(3)."""

    def format(self, record: logging.LogRecord) -> str:
        priority = 3 if record.levelno >= logging.ERROR else 4 if record.levelno >= logging.WARNING else 6
        priority = 7 if record.levelno <= logging.DEBUG else priority
        return "\n".join(f"<{priority}>{line}" for line in super().format(record).splitlines() or [""])


class Throttle:
    """An event loop's handler for what no task has handled: the same message at most once in `every` seconds.

    asyncio reports a failing accept a hundred times a second, each time with a traceback.
    """

    def __init__(self, every: float) -> None:
        self._every = every
        self._last: dict[str, float] = {}

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        message, now = str(context.get("message")), loop.time()
        if now - self._last.get(message, -self._every) < self._every:
            return
        if len(self._last) > 100:
            self._last.clear()
        self._last[message] = now
        loop.default_exception_handler(context)
