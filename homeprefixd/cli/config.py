"""`config show` and `config check`: what the daemon would run with, and why."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import click
import msgspec

from ..config import ModelConfig, ServerConfig
from ..config_sources import cache_directory
from ..errors import ConfigError, ModelError
from ..gguf_header import read_metadata
from .output import Column, Output, counted
from .settings import SETTING_FLAGS, json_flag, load_settings, setting_flags


@click.group(invoke_without_command=True)
@click.pass_context
def config(context: click.Context) -> None:
    """Show or check the settings."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@config.command()
@click.option("--origin", is_flag=True, help="Say where each value came from.")
@json_flag
@setting_flags(*SETTING_FLAGS)
def show(origin: bool, as_json: bool, **given: str | None) -> None:
    """Print every setting, as `serve` would use it with the same flags.

    0 and empty text stand for "chosen at start, to fit the machine".
    """
    loaded = load_settings(given)
    output = Output(as_json)
    tree: dict[str, dict[str, Any]] = msgspec.to_builtins(loaded.config)
    with contextlib.suppress(ConfigError):  # there is none: `serve` says so
        tree["cache"]["dir"] = str(cache_directory(loaded.config.cache.dir, os.environ))
    listed: list[dict[str, Any]] = tree["models"].pop("list", [])
    if as_json:
        output.document(
            {
                "file": None if loaded.file is None else str(loaded.file),
                "settings": {
                    f"{section}.{name}": {"value": value, "origin": str(loaded.origins[f"{section}.{name}"])}
                    for section, settings in tree.items()
                    for name, value in settings.items()
                }
                if origin
                else tree,
                "models": listed,
            }
        )
        return
    columns = [Column("setting"), Column("value", flexible=not origin)]
    rows = [[f"{s}.{name}", _text(value)] for s, settings in tree.items() for name, value in settings.items()]
    if origin:
        columns.append(Column("origin", flexible=True))
        for row in rows:
            row.append(str(loaded.origins[row[0]]))
    for index, settings in enumerate(listed):
        more = [[f"models.list[{index}].{name}", _text(value)] for name, value in settings.items()]
        rows += [[*row, str(loaded.file)] for row in more] if origin else more
    output.table(columns, rows)


@config.command()
@json_flag
@setting_flags(*SETTING_FLAGS)
def check(as_json: bool, **given: str | None) -> None:
    """Check file, environment and flags.

    Exit 2 where a setting is refused, 3 where the file of a model, an adapter or a control vector is.
    """
    loaded = load_settings(given)
    from ..models.catalog import Catalog

    catalog = Catalog.from_config(loaded.config.model, loaded.config.models)
    for spec in catalog.specs:
        if spec.problem and not spec.found:
            raise ModelError(spec.problem)
        _check_files(spec.settings)
    _check_server(loaded.config.server)
    output = Output(as_json)
    file = None if loaded.file is None else str(loaded.file)
    count = sum(origin.kind != "default" for origin in loaded.origins.values())
    if as_json:
        output.document({"ok": True, "file": file, "given": count})
    else:
        given_text = counted(count, "setting")
        output.line(f"ok: {file or 'no configuration file'}, {given_text} given, the others are defaults")


def _check_files(model: ModelConfig) -> None:
    """What is found out when the model is loaded, as far as it shows without it. Raises ModelError."""
    from ..models.adapters import problem_of

    for kind, setting, files in (
        ("adapter", "model.adapters", [Path(one.path) for one in model.adapters]),
        ("control vector", "model.control_vectors", [Path(one.path) for one in model.control_vectors]),
    ):
        for path in files:
            if not path.is_file():
                found = "is a directory" if path.is_dir() else "is no regular file" if path.exists() else "is missing"
                raise ModelError(f"the {kind} {path} (`{setting}`) {found}: it must be a GGUF file.")
            if kind == "adapter" and (problem := problem_of(path)):
                raise ModelError(f"an adapter (`{setting}`) cannot be used: {problem}")
            if kind == "control vector":
                read_metadata(path, lambda name: False)


def _check_server(server: ServerConfig) -> None:
    """What `serve` finds out when it looks at what is named. Raises ConfigError."""
    from ..api.keyring import ring_of
    from ..listen import check_host, tls

    ring_of(server.keys_file, os.environ.get("CREDENTIALS_DIRECTORY"), bytes)  # a secret is for requests only
    tls(server)
    check_host(server.host)


def _text(value: Any) -> str:
    """As it would be written in TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)
