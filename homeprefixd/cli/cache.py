"""`stats`, `ls`, `purge`: look into a cache and empty it, with the daemon running or stopped."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from ..config_sources import cache_directory
from ..errors import HomeprefixdError, NotFoundError, UnavailableError
from ..program import typed
from ..sizes import size_text
from .output import Column, Output, age_text, count_text, counted, printable, seconds_text, shortened
from .reach import api_key, call, check_url, reach, remember, running_daemon
from .settings import json_flag, load_settings, setting_flags

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

_NAME = 24  # letters of an app, which may call itself anything; `top --json` has them all
_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def cache_flags(function: Decorated) -> Decorated:
    """Decorator: which cache is meant, and how the result is printed."""
    return key_flag(url_flag(json_flag(setting_flags("--cache-dir")(function))))


def url_flag(function: Decorated) -> Decorated:
    """Decorator: a daemon by its address."""

    def checked(_context: click.Context, _parameter: click.Parameter, given: str | None) -> str | None:
        if given is not None:
            check_url(given)
        return given

    return click.option(
        "--url", metavar="URL", callback=checked, help="A daemon to ask.  [default: the one on the cache directory]"
    )(function)


def key_flag(function: Decorated) -> Decorated:
    """Decorator: the key for a daemon that asks for one, shown by every call of the command."""

    def remembered(_context: click.Context, _parameter: click.Parameter, given: str | None) -> None:
        if given is not None:
            remember(key=api_key(given, os.environ))

    return click.option(
        "--api-key-file",
        metavar="FILE",
        expose_value=False,
        is_eager=True,
        callback=remembered,
        help="Holds the key for a daemon that asks.  [default: $HOMEPREFIXD_API_KEY]",
    )(function)


def daemon_of(url: str | None, given: Mapping[str, str | None]) -> str:
    """URL of the daemon that is meant. Raises UnavailableError if none runs."""
    if url is not None:
        return url
    directory = cache_directory(load_settings(given).config.cache.dir, os.environ)
    found = running_daemon(directory)
    if found is None:
        raise UnavailableError(f"no daemon runs on {directory}: start it with {typed('serve')}, or name one by --url")
    return found


def directory_of(url: str | None, given: Mapping[str, str | None]) -> Path | None:
    """The cache directory that is meant; None where a daemon is named by its URL."""
    return None if url is not None else cache_directory(load_settings(given).config.cache.dir, os.environ)


@click.command()
@cache_flags
def stats(url: str | None, as_json: bool, **given: str | None) -> None:
    """Show what the cache holds, and what it has saved today."""
    output = Output(as_json)
    with reach(url, directory_of(url, given)) as cache:
        figures = cache.stats()
        seen = None if as_json or "daemon" not in figures else _seen(cache.where)
    if as_json:
        output.document(figures)
        return
    rows = [*(today(seen) if seen is not None else []), *summary(figures)]
    output.table([Column("what"), Column("value", flexible=True)], rows)
    output.line("All figures: --json")


def _seen(where: str) -> Mapping[str, Any] | None:
    """What a running daemon has seen (`GET /cache/overview`); None if it does not say."""
    try:
        found = call(where, "/cache/overview")
    except HomeprefixdError:
        return None
    return found if isinstance(found, Mapping) and "today" in found else None


def today(seen: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a person wants to know of today (`GET /cache/overview`), as (name, text)."""
    day, first = seen["today"], seen["first_ms"]
    share = f" ({day['reused'] / day['prompt']:.0%})" if day["prompt"] else ""
    waits = [f"{name} {seconds_text(first[name] / 1e3)}" for name in ("cold", "warm") if first[name]]
    failed = f", {count_text(day['failed'])} failed" if day["failed"] else ""
    rows = [
        ("saved today", _saved(day)),
        ("requests today", count_text(day["requests"]) + failed),
        ("prompt tokens reused today", f"{count_text(day['reused'])} of {count_text(day['prompt'])}{share}"),
        ("first token, median", ", ".join(waits) or "nothing was asked since the start"),
    ]
    lost = [app for app in seen["apps"] if app["lost_s"] >= 0.05]
    rows += [(f"lost by {shortened(printable(app['app']), _NAME)}", app["text"]) for app in lost]
    return rows


def _saved(day: Mapping[str, Any]) -> str:
    """What reuse has saved, as far as it is known how long computing takes."""
    unknown = day.get("unmeasured", 0)
    if not unknown:
        return seconds_text(day["saved_s"])
    if not day["saved_s"]:
        return "not known yet: how fast this model computes was not measured"
    return f"{seconds_text(day['saved_s'])}, and what {counted(unknown, 'request')} saved before it could be measured"


def summary(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a person wants to know of a store's figures (`GET /cache/stats`), as (name, text)."""
    hot, warm, counters = figures["hot"], figures["warm"], figures["counters"]
    rows: list[tuple[str, str]] = []
    for worker in figures.get("daemon", {}).get("workers", []):
        reason = worker.get("reason") or worker.get("cache_reason") or ""
        rows.append((f"model {worker['alias']}", ": ".join(filter(None, (worker["state"], reason)))))
    if "daemon" in figures:
        rows.append(("hot, in RAM", _tier(hot, f"{size_text(hot['bytes'])} of {allowed(hot)}")))
        disk = f"{size_text(warm['bytes'])} of {size_text(warm['limit'])}"
    else:
        disk = size_text(warm["bytes"])  # the limit is the daemon's, and it is not running
    state = "" if warm["state"] == "ok" else f" ({warm['state']}: {warm.get('reason') or 'no reason is known'})"
    rows.append(("warm, on disk", _tier(warm, disk) + state))
    if figures.get("pins", {}).get("count"):
        given_up = figures["pins"]["given_up"]
        lost = f" ({counted(given_up, 'block')} evicted: the budget is too small)" if given_up else ""
        rows.append(("pinned", counted(figures["pins"]["count"], "pin") + lost))
    for share in figures.get("shares", ()):
        text = f"{size_text(share['bytes'])} of {size_text(share['limit'])}"
        rows.append((f"share of {share['kind']} {share['name']}", text))
    if figures["queue"]["nodes"]:
        waiting = f"{counted(figures['queue']['nodes'], 'block')}, {size_text(figures['queue']['bytes'])}"
        rows.append(("waiting to be written", waiting))
    if figures.get("writes", {}).get("since"):
        rows.append(("disk writes", _wear(figures["writes"])))
    if "daemon" in figures and "scrub" in figures:
        rows.append(("checked by itself", _scrubbed(figures["scrub"])))
    if "daemon" in figures:
        lookups, hits = counters["lookups"], counters["hits"]
        share = f" ({hits / lookups:.0%})" if lookups else ""
        reused = counters["tokens_matched_hot"], counters["tokens_matched_warm"]
        rows += [
            ("running for", age_text(time.time() - figures["uptime_s"]).removesuffix(" ago")),
            ("requests that found something", f"{count_text(hits)} of {count_text(lookups)}{share}"),
            ("tokens found", f"{count_text(reused[0])} hot, {count_text(reused[1])} warm"),
            ("written", size_text(counters["written_bytes"])),
            ("evicted", f"{count_text(counters['evicted_hot'])} hot, {count_text(counters['evicted_warm'])} warm"),
            ("damaged, lost, errors", ", ".join(count_text(counters[name]) for name in ("damaged", "lost", "errors"))),
        ]
    return rows


def allowed(tier: Mapping[str, Any]) -> str:
    """The bytes that a tier may use now; they are fewer after a reload that says so, and while memory is short."""
    now, limit = tier.get("allowance", tier["limit"]), tier["limit"]
    return size_text(limit) if now >= limit else f"{size_text(now)} ({size_text(limit)} at the start)"


def _wear(writes: Mapping[str, Any]) -> str:
    """What flash wears by."""
    bound = f" of {size_text(writes['daily_limit'])}" if writes["daily_limit"] else ""
    return f"{size_text(writes['today'])}{bound} today, {size_text(writes['per_day'])} a day on average"


def _scrubbed(scrub: Mapping[str, Any]) -> str:
    """How the store checks what it holds while nothing else happens."""
    last = f"last {age_text(scrub['last'])}" if scrub["last"] else "never to the end"
    damaged = f", {count_text(scrub['damaged'])} damaged and removed" if scrub["damaged"] else ""
    if scrub["running"]:
        return f"running: {counted(scrub['nodes'], 'block')}, {size_text(scrub['bytes'])}{damaged}; {last}"
    return f"off (cache.scrub_rate = 0); {last}" if not scrub["rate"] else last + damaged


def _tier(tier: Mapping[str, Any], size: str) -> str:
    return f"{size}, {counted(tier['nodes'], 'block')}"


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
    with reach(url, directory_of(url, given)) as cache:
        found = cache.prefixes(limit, model)
        if model and not found["prefixes"]:
            _check_model(cache.stats(), model)
    if as_json:
        output.document(found)
        return
    prefixes = found["prefixes"]
    if not prefixes:
        output.line(f"no prefixes in {cache.where}" + (f" of model {model}" if model else ""))
        return
    pins = any(prefix.get("pinned") for prefix in prefixes)
    columns = [
        Column("id"),
        Column("model", optional=2),
        Column("tokens", right=True),
        Column("own", right=True, optional=1),
        Column("size", right=True),
        Column("tiers", optional=3),
        Column("last use", right=True),
        Column("hits", right=True, optional=1),
        *([Column("pinned", optional=1)] if pins else []),
        Column("preview", flexible=True),
    ]
    output.table(columns, [_prefix_row(prefix, pins) for prefix in prefixes])


def _check_model(figures: Mapping[str, Any], model: str) -> None:
    """Raises NotFoundError, as `purge` does, where `model` is neither stored of nor served."""
    names = {worker["alias"] for worker in figures.get("daemon", {}).get("workers", [])}
    for namespace in figures.get("namespaces", []):
        names.add(namespace["model"])
        if len(model) >= 4 and str(namespace["description"].get("model_sha256", "")).startswith(model.lower()):
            return
    if model not in names:
        known = ", ".join(sorted(names)) or "none"
        raise NotFoundError(f"nothing is stored of a model {model!r}; known: {known}", param="model")


def _prefix_row(prefix: Mapping[str, Any], pins: bool) -> list[str]:
    return [
        prefix["id"],
        prefix["model"],
        count_text(prefix["tokens"]),
        count_text(prefix["own_tokens"]),
        size_text(prefix["bytes"]),
        "+".join(prefix["tiers"]),
        age_text(prefix["last_use"]),
        count_text(prefix["hits"]),
        *([_pinned(prefix)] if pins else []),
        prefix["preview"],
    ]


def _pinned(prefix: Mapping[str, Any]) -> str:
    """How many tokens of it are, and what the pins are called."""
    if not prefix.get("pinned"):
        return ""
    return ", ".join((count_text(prefix["pinned"]), *prefix.get("labels", [])))


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
    with reach(url, directory_of(url, given)) as cache:
        if not yes and sys.stdin.isatty() and not click.confirm(f"Remove {text} from {cache.where}?", err=True):
            raise HomeprefixdError("nothing was removed")
        done = cache.purge(what)
    if as_json:
        output.document(done)
    else:
        output.line(f"removed {counted(done['nodes'], 'block')}, {size_text(done['bytes'])}")


def _filter(
    everything: bool, prefix: str | None, older_than: str | None, model: str | None
) -> tuple[dict[str, Any], str]:
    """The body of a purge, and what it removes in words. Raises click.UsageError unless exactly one is given."""
    filters: list[tuple[dict[str, Any], str]] = []
    if everything:
        filters.append(({"all": True}, "everything"))
    if prefix is not None:
        filters.append(({"prefix": identifier(prefix)}, f"prefix {prefix}"))
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


def identifier(text: str) -> str:
    """An id of a prefix as typed. Raises click.UsageError."""
    found = re.fullmatch(r"[0-9a-f]{1,64}", text.strip().lower())
    if not found:
        raise click.UsageError(f"--prefix cannot be {text!r}; allowed: an id from {typed('ls')}, hexadecimal digits")
    return found[0]


def age_seconds(text: str, flag: str = "--older-than") -> float:
    """Seconds of `30d`, `12h`, `90min`, `45s`; a number alone could mean anything. Raises click.UsageError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if not found or found[2] not in _UNITS or not float(found[1]):
        raise click.UsageError(f"{flag} cannot be {text!r}; allowed: a time such as 30d, 12h, 90min or 45s")
    return float(found[1]) * _UNITS[found[2]]
