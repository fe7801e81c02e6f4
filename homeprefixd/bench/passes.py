"""The order of a benchmark: target after target, never two at once, and for each the phases asked for."""

from __future__ import annotations

import asyncio
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped, unused-ignore]

from .. import __version__
from ..errors import ConfigError
from .load import Load, Run, Snapshot
from .targets import Target
from .workloads import Plan

PHASES = ("off", "cold", "hot", "restart")
"""In the order they run.

off: fresh start, requests ask that the cache be left alone (`cache_prompt: false`). cold: fresh start, nothing cached.
hot: the same requests again. restart: again, after the target was ended and started.
"""


def checked_phases(text: str, targets: Sequence[Target]) -> tuple[str, ...]:
    """`cold,hot` as a tuple in the order they run. Raises ConfigError with what is allowed."""
    wanted = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in wanted if name not in PHASES]:
        raise ConfigError(f"--phases: there is no phase {unknown[0]!r}: there are {', '.join(PHASES)}.")
    if not wanted:
        raise ConfigError(f"--phases is empty: name some of {', '.join(PHASES)}.")
    phases = tuple(name for name in PHASES if name in wanted)
    for target in targets:
        if target.managed and "cold" not in phases and {"hot", "restart"} & set(phases):
            raise ConfigError("--phases: hot and restart come after cold, which fills the cache; name cold too.")
        if not target.managed and "restart" in phases:
            raise ConfigError(f"--phases: {target.name} is not started by this command, so it cannot be restarted.")
    return phases


class Passes:
    """Runs a plan over all targets and phases. `runs` holds what is finished, also after an error.

    `restart_at`: share of the plan's duration after which each target is restarted, or None. `say` gets a line before
    what takes time; `progress` a snapshot twice a second.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        plan: Plan,
        phases: Sequence[str],
        *,
        restart_at: float | None = None,
        timeout: float = 300.0,
        plain: bool = False,
        say: Callable[[str], None],
        progress: Callable[[Snapshot], None],
    ) -> None:
        if not targets:
            raise ConfigError("Name whom to measure: --serve, --llama-server PATH or --url URL.")
        if restart_at is not None and not 0 < restart_at < 1:
            raise ConfigError(f"--restart-at must be a share of the run between 0 and 1, not {restart_at:g}.")
        if restart_at is not None and (fixed := [target.name for target in targets if not target.managed]):
            raise ConfigError(f"--restart-at: {fixed[0]} is not started by this command, so it cannot be restarted.")
        if plain and "off" in phases:
            raise ConfigError("--plain leaves `cache_prompt` out, which the phase off consists of.")
        self._targets = targets
        self._plan = plan
        self._phases = phases
        self._restart = None if restart_at is None else restart_at * plan.duration
        self._timeout = timeout
        self._plain = plain
        self._say = say
        self._progress = progress
        self.runs: list[Run] = []

    def run(self) -> list[Run]:
        """All of them. Raises UnavailableError where a target cannot be reached or does not come back."""
        for target in self._targets:
            for phase in self._phases:
                self._prepare(target, phase)
                load = Load(
                    target,
                    self._plan,
                    phase,
                    restart_at=self._restart,
                    timeout=self._timeout,
                    plain=self._plain,
                    progress=self._progress,
                )
                self.runs.append(asyncio.run(load.run()))
            target.close()
        return self.runs

    def _prepare(self, target: Target, phase: str) -> None:
        if not target.managed:
            return
        if phase in ("off", "cold"):
            self._say(f"{target.name}: starting, with nothing cached")
            target.fresh()
        elif phase == "restart":
            self._say(f"{target.name}: restarting")
            target.stop()
            target.start()


def machine_facts(**more: Any) -> dict[str, Any]:
    """Where this is measured, for the report; `more` is added."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_before": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "homeprefixd": __version__,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        **more,
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
