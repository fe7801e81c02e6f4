"""The composition root of the daemon: builds things, starts and stops them in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from .config import Config


@dataclass(frozen=True)
class DaemonState:
    """What the daemon is doing, for whoever shows it. Several calls with the same phase come as `progress` grows."""

    phase: Literal["starting", "loading", "ready", "stopping"]
    message: str  # one line for a person
    progress: float = 0.0  # of loading the model, 0 to 1
    url: str = ""  # base URL, e.g. "http://127.0.0.1:8080"; "" until the server listens


StateCallback = Callable[[DaemonState], None]


def run(config: Config, *, on_state: StateCallback | None = None) -> int:
    """Serve until SIGTERM or SIGINT; the exit code. Raises HomeprefixdError (its `exit_code`) if it cannot start."""
    raise NotImplementedError
