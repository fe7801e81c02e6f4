"""Whether processes that a test has started still live."""

from __future__ import annotations

import psutil


def alive(pid: int) -> bool:
    """A zombie that nobody has reaped is dead."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
