"""Flags that are settings: declared once, given as text, read by `config_sources` together with the other sources."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from .. import config_sources
from ..config_sources import Flag, Loaded, find_file, user_file

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

SETTING_FLAGS: Mapping[str, tuple[str, str, str]] = {
    "--model": ("model.path", "FILE", "A GGUF file.  [default: the demo model]"),
    "--alias": ("model.alias", "NAME", "The model's name in the API.  [default: from the file's name]"),
    "--host": ("server.host", "ADDRESS", "Address to listen on.  [default: 127.0.0.1]"),
    "--port": ("server.port", "PORT", "Port to listen on; 0 is any free one.  [default: 8080]"),
    "--cache-dir": ("cache.dir", "DIR", "Where the store lies.  [default: $XDG_CACHE_HOME/homeprefixd]"),
    "--ctx": ("model.ctx", "N", "Tokens that one request may use.  [default: from model and memory]"),
    "--threads": ("model.threads", "N", "Threads that compute.  [default: physical cores]"),
    "--parallel": ("model.parallel", "N", "Requests that run at once, 1 to 64.  [default: 8]"),
    "--hot": ("cache.hot", "SIZE", "RAM for the cache, as 4GiB or 10%.  [default: from free memory]"),
    "--warm": ("cache.warm", "SIZE", "Disk for the cache, as 20GiB or 10%.  [default: from free disk]"),
    "--kv-type": ("model.kv_type", "TYPE", "f16, bf16, f32, q8_0, q4_0, q4_1, iq4_nl, q5_0 or q5_1.  [default: f16]"),
    "--reuse": ("cache.reuse", "MODE", "token, exact (bit-identical logits) or off.  [default: token]"),
    "--log-level": ("log.level", "LEVEL", "debug, info, warning or error.  [default: info]"),
    "--grace": ("server.grace", "SECONDS", "Time for running requests at a clean stop.  [default: 20]"),
}
"""Flag -> (setting, metavar, help)."""


def setting_flags(*flags: str) -> Callable[[Decorated], Decorated]:
    """Decorator: the named flags of SETTING_FLAGS, and `--config`."""

    def decorate(function: Decorated) -> Decorated:
        function = click.option(
            "--config",
            metavar="FILE",
            help="A TOML file of settings.  [default: $HOMEPREFIXD_CONFIG, the user's, the system's]",
        )(function)
        for flag in reversed(flags):
            _path, metavar, text = SETTING_FLAGS[flag]
            function = click.option(flag, metavar=metavar, help=text)(function)
        return function

    return decorate


json_flag = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")


def file_for(given: Mapping[str, str | None]) -> Path | None:
    """The configuration file that is in use, else the user's own; None without a home. Raises ConfigError."""
    return load_settings(given).file or find_file(os.environ) or user_file(os.environ)


def load_settings(given: Mapping[str, str | None]) -> Loaded:
    """Settings from every source. `given` is click's parameters: `cache_dir`, ... and `config`. Raises ConfigError."""
    flags: dict[str, Flag] = {}
    for name, value in given.items():
        flag = f"--{name.replace('_', '-')}"
        if value is not None and flag in SETTING_FLAGS:
            flags[SETTING_FLAGS[flag][0]] = Flag(flag, value)
    config = given.get("config")
    return config_sources.load(
        environ=os.environ, flags=flags, config_file=None if config is None else Flag("--config", config)
    )
