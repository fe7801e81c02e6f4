"""What llama.cpp says: kept for error messages, forwarded to Python's logging.

llama.cpp has one log callback per process, so there is one `LlamaLog` at a time. Knows nothing of models.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections import deque

from llama_cpp import llama_cpp as C  # noqa: N812

_KEPT = 40
_WARNING, _ERROR, _CONTINUED = 3, 4, 5
# llama.cpp's INFO is a page per model, and a full context is a WARN to it: one step quieter than it thinks.
_LEVELS = {2: logging.DEBUG, _WARNING: logging.INFO, _ERROR: logging.WARNING}

_EXPECTED = ("possible training context overflow",)  # the pool of cells is shared: no request is as long as it

logger = logging.getLogger(__name__)


class LlamaLog:
    """Captures llama.cpp's log from creation until `close`. Called from any of llama.cpp's threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: deque[tuple[int, str]] = deque(maxlen=_KEPT)
        self._open = ""
        self._level = 0
        self._callback = C.llama_log_callback(self._take)
        # llama.cpp may call it until another one is set, whoever has dropped this object by then: it is never freed.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._callback))
        C.llama_log_set(self._callback, None)

    def _take(self, level: int, text: bytes, _user_data: int) -> None:
        try:
            piece = text.decode("utf-8", "replace")
            with self._lock:
                if level != _CONTINUED:
                    self._end_line()
                    self._level = level
                self._open += piece
                if self._open.endswith("\n"):
                    self._end_line()
        except Exception:  # nothing may be raised into llama.cpp
            logger.exception("a line of llama.cpp's log was lost")

    def _end_line(self) -> None:
        line, self._open = self._open.strip(), ""
        if line.strip("."):  # progress dots
            self._lines.append((self._level, line))
            quiet = any(text in line for text in _EXPECTED)
            logger.log(logging.DEBUG if quiet else _LEVELS.get(self._level, logging.DEBUG), "%s", line)

    def clear(self) -> None:
        """Forget the lines kept so far, so that `reason` speaks of what comes next."""
        with self._lock:
            self._lines.clear()

    def reason(self) -> str:
        """Errors (else warnings) among the last lines, joined; "" if llama.cpp gave none."""
        with self._lock:
            lines = list(self._lines)
        for wanted in (_ERROR, _WARNING):
            chosen = [line.partition(": ")[2] or line for level, line in lines if level == wanted]
            if chosen:
                return "; ".join(dict.fromkeys(chosen[:4]))  # the first ones name the cause
        return ""

    def close(self) -> None:
        """Back to llama.cpp's own output on stderr."""
        C.llama_log_set(C.llama_log_callback(), None)
