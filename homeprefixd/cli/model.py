"""`model ls|load|unload|show|pull`: which models there are, and which are loaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import click

from ..config_sources import cache_directory
from ..errors import ConfigError, NotFoundError
from ..program import typed
from ..sizes import size_text
from .cache import daemon_of, key_flag, url_flag
from .output import Column, Output, counted, printable, seconds_text
from .reach import call, running_daemon
from .settings import json_flag, load_settings, setting_flags

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

LOAD_TIMEOUT = 3600.0
"""Seconds that loading a model may take: hundreds of GB from a slow disk."""


@click.group(invoke_without_command=True)
@click.pass_context
def model(context: click.Context) -> None:
    """List, load, unload, show and fetch models."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def daemon_flags(function: Decorated) -> Decorated:
    """Decorator: which daemon is meant, and how the result is printed."""
    return url_flag(key_flag(json_flag(setting_flags("--cache-dir")(function))))


def _details(url: str) -> list[dict[str, Any]]:
    return list(call(url, "/models/details")["models"])


@model.command()
@daemon_flags
def ls(url: str | None, as_json: bool, **given: str | None) -> None:
    """List the models that a daemon serves, or would serve with these settings if none runs."""
    output = Output(as_json)
    if url is None:
        loaded = load_settings(given)
        url = running_daemon(cache_directory(loaded.config.cache.dir, os.environ))
    models = _details(url) if url is not None else _configured(given)
    if as_json:
        output.document({"models": models})
        return
    if not models:
        output.line(f"no models; {typed('model pull')} fetches one into models.dir")
        return
    columns = [
        Column("model", flexible=True),
        Column("state"),
        Column("file", right=True),
        Column("memory", right=True),
        Column("running", right=True, optional=1),
        Column("unloaded in", right=True, optional=2),
    ]
    rows = []
    for one in models:
        state = one["status"]["value"]
        if state == "loading":
            state += f" {one['progress']:.0%}"
        expires = "never" if one["pinned"] else "" if one["expires"] is None else seconds_text(one["expires"])
        memory = size_text(one["memory"]) if one["memory"] else ""
        if memory and one["status"]["value"] not in ("loaded", "loading"):
            memory = f"needs {memory}"
        rows.append([one["id"], state, size_text(one["bytes"]), memory, str(one["requests"]), expires])
    output.table(columns, rows)
    for one in models:
        if one["reason"]:
            output.line(printable(f"{one['id']}: {one['reason']}"))


def _configured(given: Mapping[str, str | None]) -> list[dict[str, Any]]:
    """What a daemon with these settings would have, none of it loaded; as it was loaded last."""
    from ..last_loads import LastLoads, described
    from ..models.catalog import Catalog

    config = load_settings(given).config
    specs = Catalog.from_config(config.model, config.models).specs
    directory = cache_directory(config.cache.dir, os.environ)
    last = LastLoads(directory).recall((spec.alias, spec.path) for spec in specs)
    return [
        {
            "id": spec.alias,
            "with_adapters": list(spec.adapted),
            "status": {"value": "failed" if spec.problem else "unloaded"},
            "path": str(spec.path),
            "bytes": spec.size,
            "progress": 0.0,
            "reason": spec.problem,
            "pinned": spec.pinned,
            "memory": 0,
            "requests": 0,
            "expires": None,
            "as_of": last[spec.alias].at if spec.alias in last else None,
            **described(last[spec.alias].info if spec.alias in last else None),
        }
        for spec in specs
    ]


@model.command()
@click.argument("name")
@click.option("--keep-alive", type=float, metavar="SECONDS", help="Unload it when unused so long; -1: never.")
@daemon_flags
def load(name: str, keep_alive: float | None, url: str | None, as_json: bool, **given: str | None) -> None:
    """Load a model now, rather than with its first request."""
    body = {"model": name, **({} if keep_alive is None else {"keep_alive": keep_alive})}
    done = call(daemon_of(url, given), "/models/load", body, timeout=LOAD_TIMEOUT)
    output = Output(as_json)
    if as_json:
        output.document(done)
    else:
        memory = done.get("model", {}).get("memory", 0)
        output.line(f"{name} is loaded" + (f", with {size_text(memory)} of memory" if memory else ""))


@model.command()
@click.argument("name")
@daemon_flags
def unload(name: str, url: str | None, as_json: bool, **given: str | None) -> None:
    """Unload a model. One that is in use goes when its last request ends; its cached prefixes stay."""
    done = call(daemon_of(url, given), "/models/unload", {"model": name})
    output = Output(as_json)
    if as_json:
        output.document(done)
    elif done["unloaded"]:
        output.line(f"{name} is unloaded")
    else:
        output.line(f"{name} is in use; it is unloaded when its last request ends")


@model.command()
@click.argument("name")
@daemon_flags
def show(name: str, url: str | None, as_json: bool, **given: str | None) -> None:
    """Show what is known of a model, and what its cached prefixes depend on (its namespace).

    Where prefixes are stored for the same file that cannot be used, the fields in which they differ are named. Of one
    that is not loaded, or where no daemon runs, it is shown as it was loaded last.
    """
    if url is None:
        loaded = load_settings(given)
        url = running_daemon(cache_directory(loaded.config.cache.dir, os.environ))
    models = _details(url) if url is not None else _configured(given)
    one = next((found for found in models if name in (found["id"], *found.get("with_adapters", []))), None)
    if one is None:
        known = ", ".join(found["id"] for found in models) or "none"
        raise NotFoundError(f"there is no model {name}; there is: {known}")
    output = Output(as_json)
    if as_json:
        output.document(one)
        return
    rows = [("model", one["id"]), ("file", one["path"]), ("size", size_text(one["bytes"]))]
    rows += [("state", one["status"]["value"] + (f": {one['reason']}" if one["reason"] else ""))]
    rows += [(key, str(value)) for key, value in one.get("meta", {}).items() if key != "size"]
    if one.get("as_of"):
        when = datetime.fromtimestamp(one["as_of"], UTC).astimezone()
        rows.append(("as of the last load", f"{when:%Y-%m-%d %H:%M}: all that follows"))
    if one.get("cache_mode"):
        rows.append(("reuse", one["cache_mode"] + (f": {one['cache_reason']}" if one["cache_reason"] else "")))
    for adapter in one.get("adapters", []):
        content = adapter["problem"] or f"sha256 {adapter['sha256'] or 'not known yet'}"
        usual = ", used where a request names none" if adapter["default"] else ""
        rows.append((f"adapter {adapter['id']}", f"{adapter['path']} at {adapter['scale']:g}{usual}: {content}"))
    for vector in one.get("control_vectors", []):
        layers = f"layers {vector['first']} to {vector['last']}"
        text = f"{vector['path']} at {vector['scale']:g} on {layers}: sha256 {vector['sha256']}"
        rows.append(("control vector", text))
    namespace = one.get("namespace") or {}
    rows += [(f"namespace {key}", text) for key, text in flat(namespace)]
    output.table([Column("what"), Column("value", flexible=True)], rows)
    if not namespace:
        output.line("its namespace is known when it is loaded and its file has been read once")
    for line in one.get("mismatch", []):
        output.line(printable(f"not usable: {line}"))


def flat(namespace: Mapping[str, Any], above: str = "") -> list[tuple[str, str]]:
    """A description's fields as (dotted name, text)."""
    rows: list[tuple[str, str]] = []
    for key, value in namespace.items():
        if isinstance(value, Mapping):
            rows += flat(value, f"{above}{key}.")
        elif isinstance(value, list):
            rows.append((f"{above}{key}", ", ".join(map(_shown, value)) or "none"))
        else:
            rows.append((f"{above}{key}", str(value)))
    return rows


def _shown(item: Any) -> str:
    """Of a list. An adapter is one by its content and scale, a control vector by its layers, too."""
    if not isinstance(item, Mapping):
        return str(item)
    layers = f" on layers {item['first_layer']} to {item['last_layer']}" if "first_layer" in item else ""
    return f"{item['sha256'][:12]} at {item['scale']:g}{layers}"


@model.command()
@click.argument("repository")
@click.argument("file", required=False)
@click.option("--to", metavar="DIR", help="Where it is put.  [default: models.dir]")
@click.option("--revision", metavar="NAME", help="A branch, tag or commit.  [default: main]")
@json_flag
@setting_flags()
def pull(
    repository: str, file: str | None, to: str | None, revision: str | None, as_json: bool, **given: str | None
) -> None:
    """Fetch a GGUF from Hugging Face: REPOSITORY is owner/name, FILE a file in it.

    All parts of a split model are fetched. What was cut off goes on where it was. HF_ENDPOINT names another server,
    HF_TOKEN is for models that need one. A running daemon finds what lies in its models.dir within seconds.
    """
    from ..config import ModelConfig
    from ..models.catalog import Catalog
    from ..models.pull import Hub

    folder = to or load_settings(given).config.models.dir
    if not folder:
        raise ConfigError("where to? Set models.dir in the configuration, or name a folder with --to")
    if as_json:
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    hub = Hub()
    output = Output(as_json)
    parts = hub.choose(repository, file, revision)
    paths = [hub.fetch(repository, part, Path(os.path.expanduser(folder)).absolute(), revision) for part in parts]
    found = Catalog.from_config(ModelConfig(path=str(paths[0])))
    alias, size = found.specs[0].alias, found.specs[0].size
    if as_json:
        output.document({"model": alias, "paths": [str(path) for path in paths], "bytes": size})
    else:
        output.line(f"{alias}: {size_text(size)} in {counted(len(paths), 'file')}, {paths[0]}")
