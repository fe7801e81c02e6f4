"""`stats`, `ls`, `purge`: look into a cache and empty it, with the daemon running or stopped."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from ..config_sources import cache_directory
from ..errors import HomeprefixdError
from .output import Column, Output, age_text, count_text, size_text
from .reach import reach
from .settings import json_flag, load_settings, setting_flags

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

_UNITS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def cache_flags(function: Decorated) -> Decorated:
    """Decorator: which cache is meant, and how the result is printed."""
    function = json_flag(setting_flags("--cache-dir")(function))
    return click.option("--url", metavar="URL", help="A daemon to ask.  [default: the one on the cache directory]")(
        function
    )


def _directory(url: str | None, given: Mapping[str, str | None]) -> Path | None:
    return None if url is not None else cache_directory(load_settings(given).config.cache.dir, os.environ)


@click.command()
@cache_flags
def stats(url: str | None, as_json: bool, **given: str | None) -> None:
    """Show what the cache holds, tier by tier."""
    output = Output(as_json)
    with reach(url, _directory(url, given)) as cache:
        figures = cache.stats()
    if as_json:
        output.document(figures)
    else:
        output.table([Column("what"), Column("value", right=True)], list(figure_rows(figures)))


def figure_rows(figures: Mapping[str, Any], above: str = "") -> list[tuple[str, str]]:
    """Nested figures as (name, text), in their order: {"hot": {"bytes": 1024}} is ("hot bytes", "1.0 KiB").

    A namespace's description is left out.
    """
    rows: list[tuple[str, str]] = []
    for name, value in figures.items():
        if name == "description":
            continue  # of a namespace: some thirty lines that belong into --json
        title = f"{above} {name}".strip().replace("_", " ")
        if isinstance(value, Mapping):
            rows.extend(figure_rows(value, title))
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            for number, item in enumerate(value, start=1):
                rows.extend(figure_rows(item, f"{title} {number}"))
        elif isinstance(value, list):
            rows.append((title, ", ".join(map(str, value)) if value else "-"))
        else:
            rows.append((title, _figure(name, value)))
    return rows


def _figure(name: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float) or name == "pid":
        return "-" if value in (None, "") else str(value)
    if name in ("bytes", "limit") or name.endswith("_bytes"):
        return size_text(value)
    return count_text(value) if isinstance(value, int) else f"{value:,.3g}" if value < 1000 else count_text(value)


@click.command()
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True, help="Most to list.")
@click.option("--model", metavar="NAME", default="", help="Only of this model: its alias or the start of its SHA-256.")
@cache_flags
def ls(url: str | None, as_json: bool, limit: int, model: str, **given: str | None) -> None:
    """List cached prefixes, last used first.

    A prefix is a path from the start of a prompt to the last thing that followed it; "own" is what it shares with
    no other.
    """
    output = Output(as_json)
    with reach(url, _directory(url, given)) as cache:
        found = cache.prefixes(limit, model)
    if as_json:
        output.document(found)
        return
    prefixes = found["prefixes"]
    if not prefixes:
        output.line(f"no prefixes in {cache.where}" + (f" of model {model}" if model else ""))
        return
    columns = [
        Column("id"),
        Column("model"),
        Column("tokens", right=True),
        Column("own", right=True),
        Column("size", right=True),
        Column("tiers"),
        Column("last use", right=True),
        Column("hits", right=True),
        Column("preview", flexible=True),
    ]
    output.table(columns, [_prefix_row(prefix) for prefix in prefixes])


def _prefix_row(prefix: Mapping[str, Any]) -> list[str]:
    return [
        prefix["id"],
        prefix["model"],
        count_text(prefix["tokens"]),
        count_text(prefix["own_tokens"]),
        size_text(prefix["bytes"]),
        "+".join(prefix["tiers"]),
        age_text(prefix["last_use"]),
        count_text(prefix["hits"]),
        prefix["preview"],
    ]


@click.command()
@click.option("--all", "everything", is_flag=True, help="Remove everything.")
@click.option("--prefix", metavar="ID", help="Remove one prefix, by its id from `ls` or a unique start of it.")
@click.option("--older-than", metavar="AGE", help="Remove what was last used longer ago, as 30d, 12h, 90min, 45s.")
@click.option("--model", metavar="NAME", help="Remove all of one model: its alias or the start of its SHA-256.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@cache_flags
def purge(
    url: str | None,
    as_json: bool,
    everything: bool,
    prefix: str | None,
    older_than: str | None,
    model: str | None,
    yes: bool,
    **given: str | None,
) -> None:
    """Remove prefixes from every tier.

    Takes exactly one of --all, --prefix, --older-than and --model. Asks first where it runs on a terminal.
    """
    what, text = _filter(everything, prefix, older_than, model)
    output = Output(as_json)
    with reach(url, _directory(url, given)) as cache:
        if not yes and sys.stdin.isatty() and not click.confirm(f"Remove {text} from {cache.where}?", err=True):
            raise HomeprefixdError("nothing was removed")
        done = cache.purge(what)
    if as_json:
        output.document(done)
    else:
        output.line(f"removed {count_text(done['nodes'])} blocks, {size_text(done['bytes'])}")


def _filter(
    everything: bool, prefix: str | None, older_than: str | None, model: str | None
) -> tuple[dict[str, Any], str]:
    """The body of a purge, and what it removes in words. Raises click.UsageError unless exactly one is given."""
    filters: list[tuple[dict[str, Any], str]] = []
    if everything:
        filters.append(({"all": True}, "everything"))
    if prefix is not None:
        filters.append(({"prefix": _identifier(prefix)}, f"prefix {prefix}"))
    if older_than is not None:
        filters.append(({"older_than": age_seconds(older_than)}, f"what was not used for {older_than}"))
    if model is not None:
        filters.append(({"model": _text("--model", model)}, f"all of model {model}"))
    if len(filters) != 1:
        raise click.UsageError(
            "give exactly one of --all, --prefix, --older-than and --model", click.get_current_context()
        )
    return filters[0]


def _text(flag: str, value: str) -> str:
    if not value.strip():
        raise click.UsageError(f"{flag} cannot be empty", click.get_current_context())
    return value.strip()


def _identifier(text: str) -> str:
    found = re.fullmatch(r"[0-9a-f]{1,64}", text.strip().lower())
    if not found:
        raise click.UsageError(f"--prefix cannot be {text!r}; allowed: an id from `homeprefixd ls`, hexadecimal digits")
    return found[0]


def age_seconds(text: str) -> float:
    """Seconds of `30d`, `12h`, `90min`, `45s` or `45`. Raises click.UsageError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if not found or found[2] not in _UNITS or not float(found[1]):
        raise click.UsageError(f"--older-than cannot be {text!r}; allowed: an age such as 30d, 12h, 90min or 45s")
    return float(found[1]) * _UNITS[found[2]]
