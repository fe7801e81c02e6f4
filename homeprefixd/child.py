"""What every child process of the daemon does first.

Used by the main of the store and of each worker, before anything heavy is imported. Knows nothing of either: only how
a child is tied to its parent, and how its log lines look on the pipe that the daemon reads (`supervise.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import logging
import os
import signal
import sys
from pathlib import Path

PARENT_PID = "HOMEPREFIXD_PARENT_PID"
"""Environment variable with the daemon's process id, so that a child can tell that it was orphaned at once."""

OOM_SCORE_STEP = 200
"""How much sooner than the daemon the kernel takes a child when memory is out: a child is started again, warm."""

ORPHANED = 7
"""Exit status of a child whose parent was gone before it had begun."""

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_NAME_BYTES = 15  # what the kernel keeps of a process name


class LevelPrefixFormatter(logging.Formatter):
    """Each line starts with its level's name and a space, tracebacks too: the daemon logs it again at that level."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return "\n".join(f"{record.levelname} {line}" for line in text.splitlines() or [""])


def become_child(name: str, log_level: str) -> None:
    """Tie this process to its parent: it is killed when the parent's thread that started it ends, however it ends.

    `name`: what it is, e.g. "store"; shown by `top` as "hpd-store". `log_level`: debug, info, warning or error; log
    records go to stderr, one line each. SIGINT and SIGHUP are ignored (the daemon decides), SIGTERM ends the
    process. Leaves by SystemExit(ORPHANED) when the parent is gone already. Call it first, in the main thread.
    """
    expected = os.environ.pop(PARENT_PID, "")
    parent = int(expected) if expected.isdigit() else os.getppid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above: no signal will come
        raise SystemExit(ORPHANED)
    _prctl(_PR_SET_NAME, ctypes.c_char_p(f"hpd-{name}".encode()[:_NAME_BYTES]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.umask(0o077)
    _be_first_for_the_oom_killer()
    faulthandler.enable(all_threads=False)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LevelPrefixFormatter("%(message)s"))
    logging.basicConfig(level=log_level.upper(), handlers=[handler], force=True)


def _prctl(option: int, argument: object) -> None:
    """Raises OSError where the kernel refuses: a child that cannot be tied to its parent must not run."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(ctypes.c_int(option), argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def _be_first_for_the_oom_killer() -> None:
    score = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError, ValueError):
        score.write_text(str(min(1000, int(score.read_text()) + OOM_SCORE_STEP)))
