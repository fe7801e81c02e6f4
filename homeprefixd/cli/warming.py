"""`warm`, `match`, `pin`, `unpin`: prefixes by hand. Prompts need the running daemon; pins by id or label do not."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from ..program import typed
from ..sizes import size_text
from .cache import age_seconds, cache_flags, daemon_of, directory_of, identifier
from .output import Column, Output, age_text, count_text, counted, seconds_text
from .reach import call, reach

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

_PATIENCE = 86_400.0  # s; a long prompt on a slow machine
_MOST = 64 << 20  # bytes of a request's file


def prompt_flags(function: Decorated) -> Decorated:
    """Decorator: which prompt is meant."""
    function = click.option("--model", metavar="NAME", help="The model, where the daemon has several.")(function)
    function = click.option("--text", metavar="TEXT", help="The prompt itself, as for /v1/completions.")(function)
    return click.argument("request_file", metavar="[FILE]", required=False)(function)


def body_of(request_file: str | None, text: str | None, model: str | None, *, or_id: bool = False) -> dict[str, Any]:
    """The body of the request that is meant; {} where none is. Raises click.UsageError.

    A file is a request as JSON (with `messages` or `prompt`), or else a prompt's text; `-` is standard input. What
    begins as an object of JSON and is no request is refused: it is a request with a mistake in it, and taken as text
    it would be computed and kept for nothing. `or_id`: the command takes ids of prefixes too, so that one may be given
    in a file's place.
    """
    if request_file is not None and text is not None:
        raise click.UsageError("give a FILE or --text, not both", click.get_current_context())
    body: dict[str, Any] = {}
    if text is not None:
        body = {"prompt": text}
    elif request_file is not None:
        if or_id and request_file != "-" and not os.path.lexists(request_file):
            raise click.UsageError(_no_file(request_file))
        body = _from_file(request_file)
    if body and model is not None:
        body["model"] = model
    return body


def _no_file(name: str) -> str:
    form = f"hexadecimal digits, as {typed('ls')} shows them"
    if re.fullmatch(r"[0-9a-fA-F]{1,64}", name):
        return f"there is no file {name!r}; an id ({form}) is given as --prefix {name}"
    return f"{name!r} is no id ({form}; given with --prefix), and there is no such file"


def _from_file(name: str) -> dict[str, Any]:
    try:
        data = sys.stdin.buffer.read(_MOST + 1) if name == "-" else _read(Path(name))
        if len(data) > _MOST:
            raise click.UsageError(f"{name} has more than {_MOST >> 20} MiB: that is no request")
        text = data.decode()
    except OSError as error:
        raise click.UsageError(f"{name} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{name} is neither JSON nor text in UTF-8") from error
    found, problem = _as_json(text.removeprefix("\ufeff"))
    if isinstance(found, dict) and ("messages" in found or "prompt" in found):
        return found
    if isinstance(found, dict | list):
        raise click.UsageError(
            f"{name} is JSON, but no request: it has neither `messages` nor `prompt`; {_as_text_anyway(name)}"
        )
    if problem and text.removeprefix("\ufeff").lstrip().startswith("{"):
        raise click.UsageError(
            f"{name} begins with a brace, as a request in JSON does, but is none: {problem}; correct it, or,"
            f" {_as_text_anyway(name)}"
        )
    return {"prompt": text}


def _as_json(text: str) -> tuple[Any, str]:
    """The value, and why there is none; "" if there is."""
    try:
        return json.loads(text), ""
    except json.JSONDecodeError as error:
        return None, f"line {error.lineno}, column {error.colno}: {error.msg[:1].lower()}{error.msg[1:]}"
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets in brackets
        return None, "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


def _as_text_anyway(name: str) -> str:
    read = "cat" if name == "-" else f"cat {shlex.quote(name)}"
    return f'if it is meant as a prompt\'s text, give it as --text "$({read})"'


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_MOST + 1)


def _needed(body: Mapping[str, Any]) -> None:
    if not body:
        raise click.UsageError(
            "give a FILE (a request as JSON, or a prompt's text; - is standard input) or --text",
            click.get_current_context(),
        )


@click.command()
@prompt_flags
@cache_flags
def warm(
    url: str | None, as_json: bool, request_file: str | None, text: str | None, model: str | None, **given: str | None
) -> None:
    """Compute a prompt now, so that the next request finds it.

    FILE is the request that is to come, as JSON with `messages` or `prompt`, or else a prompt's text (one that begins
    with a brace is given by --text); - is standard input. It goes the way of every request, at background priority, and
    generates nothing.
    """
    body = body_of(request_file, text, model)
    _needed(body)
    done = dict(call(daemon_of(url, given), "/cache/warm", body, timeout=_PATIENCE))
    output = Output(as_json)
    if as_json:
        output.document(done)
    else:
        output.line(_warmed(done))


def _warmed(done: Mapping[str, Any]) -> str:
    count = done["prompt_tokens"]
    tokens, least = counted(count, "token"), done.get("least_tokens", 0)
    if count < least:
        return f"{tokens}: too short to be kept, which begins at {counted(least, 'token')}"
    known, computed = count_text(done["cached_tokens"]), count_text(done["computed_tokens"])
    were = "was" if done["cached_tokens"] == 1 else "were"
    time_taken = seconds_text(done["seconds"])
    kept = done.get("known_tokens")
    if kept is not None and kept < count:
        return (
            f"{count_text(kept)} of {tokens} are kept, for the rest there was no room (`cache.hot`, `cache.warm`):"
            f" {known} {were} known, {computed} computed in {time_taken}"
        )
    return f"{tokens} {'is' if count == 1 else 'are'} warm: {known} {were}, {computed} computed in {time_taken}"


@click.command()
@prompt_flags
@cache_flags
def match(
    url: str | None, as_json: bool, request_file: str | None, text: str | None, model: str | None, **given: str | None
) -> None:
    """Say how much of a prompt is known, and when its first token would come.

    FILE as for `warm`. Nothing is computed, loaded or touched.
    """
    body = body_of(request_file, text, model)
    _needed(body)
    found = dict(call(daemon_of(url, given), "/cache/match", body))
    output = Output(as_json)
    if as_json:
        output.document(found)
        return
    tiers = ", ".join(f"{count_text(count)} {tier}" for tier, count in found["cache_tiers"].items()) or "none"
    output.table(
        [Column("what"), Column("value", flexible=True)],
        [
            ("tokens", count_text(found["prompt_tokens"])),
            ("known", f"{count_text(found['cached_tokens'])} ({tiers}), {size_text(found['bytes'])}"),
            ("to compute", count_text(found["computed_tokens"])),
            ("first token after", _time(found["predicted_ttft_ms"])),
            ("without the cache", _time(found["predicted_cold_ttft_ms"])),
        ],
    )


def _time(milliseconds: float | None) -> str:
    return (
        "not known: too little was computed since the model was loaded"
        if milliseconds is None
        else (f"about {seconds_text(milliseconds / 1e3)}")
    )


@click.command()
@prompt_flags
@click.option("--prefix", metavar="ID", help="A prefix, by its id from `ls` or a unique start of it.")
@click.option("--request", "request_id", metavar="ID", help="The prompt of a request, by the id of its reply.")
@click.option("--label", metavar="NAME", help="What to call it.")
@click.option("--ttl", metavar="TIME", help="For how long, as 30d or 12h.  [default: until it is unpinned]")
@cache_flags
def pin(
    url: str | None,
    as_json: bool,
    request_file: str | None,
    text: str | None,
    model: str | None,
    prefix: str | None,
    request_id: str | None,
    label: str | None,
    ttl: str | None,
    **given: str | None,
) -> None:
    """Keep a prefix on disk, whatever else is stored; alone: list what is pinned.

    What is pinned is not evicted, nor what comes before it, as long as the budget can be kept. FILE as for `warm`.
    With the daemon stopped, a prefix is named by --prefix.
    """
    body = body_of(request_file, text, model, or_id=True)
    names = names_of(body, prefix, request_id)
    if names > 1:
        raise click.UsageError("name one prefix: by FILE, --text, --prefix or --request", click.get_current_context())
    if not names and (label or ttl):
        raise click.UsageError("say what to pin: FILE, --text, --prefix or --request", click.get_current_context())
    body |= named(prefix, request_id, label)
    if ttl is not None:
        body["ttl"] = age_seconds(ttl, "--ttl")
    with reach(url, directory_of(url, given)) as cache:
        found = cache.pin(body)
    output = Output(as_json)
    if as_json:
        output.document(found)
    elif not names:
        _list(output, found["pins"])
    else:
        for one in found["pins"]:
            rest = found.get("prompt_tokens", 0) - one["tokens"]
            note = f"; {count_text(rest)} more are not stored: {typed('warm')} it first" if rest > 0 else ""
            output.line(f"pinned {one['id']}, {counted(one['tokens'], 'token')}{note}")
            if one.get("not_kept"):
                output.line(f"only {count_text(one['kept'])} of them are on disk: {one['not_kept']}")


@click.command()
@prompt_flags
@click.option("--prefix", metavar="ID", help="A prefix, by its id from `ls` or from `pin`.")
@click.option("--request", "request_id", metavar="ID", help="The prompt of a request, by the id of its reply.")
@click.option("--label", metavar="NAME", help="All that are called so.")
@click.option("--all", "everything", is_flag=True, help="All.")
@cache_flags
def unpin(
    url: str | None,
    as_json: bool,
    request_file: str | None,
    text: str | None,
    model: str | None,
    prefix: str | None,
    request_id: str | None,
    label: str | None,
    everything: bool,
    **given: str | None,
) -> None:
    """Let a pinned prefix be evicted again.

    With the daemon stopped, by --prefix, --label or --all.
    """
    body = body_of(request_file, text, model, or_id=True)
    if names_of(body, prefix, request_id) + bool(label) + everything != 1:
        raise click.UsageError(
            "give exactly one of FILE, --text, --prefix, --request, --label and --all", click.get_current_context()
        )
    body |= named(prefix, request_id, label)
    if everything:
        body["all"] = True
    with reach(url, directory_of(url, given)) as cache:
        found = cache.unpin(body)
    output = Output(as_json)
    if as_json:
        output.document(found)
    else:
        output.line(f"{count_text(len(found['pins']))} unpinned")


def names_of(body: Mapping[str, Any], prefix: str | None, request_id: str | None) -> int:
    return [bool(body), prefix is not None, request_id is not None].count(True)


def named(prefix: str | None, request_id: str | None, label: str | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if prefix is not None:
        found["prefix"] = identifier(prefix)
    if request_id is not None:
        found["request_id"] = request_id
    if label is not None:
        found["label"] = label
    return found


def _list(output: Output, pins: Sequence[Mapping[str, Any]]) -> None:
    if not pins:
        output.line("nothing is pinned")
        return
    columns = [
        Column("id"),
        Column("label"),
        Column("model", optional=1),
        Column("tokens", right=True),
        Column("where"),
        Column("pinned", right=True, optional=2),
        Column("until", right=True),
        Column("preview", flexible=True),
    ]
    rows = [
        [
            one["id"] or "-",
            one["label"],
            one["model"],
            count_text(one["tokens"]),
            "+".join(one["tiers"]) or "not stored",
            age_text(one["created"]),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(one["expires"])) if one["expires"] else "for ever",
            one["preview"],
        ]
        for one in pins
    ]
    output.table(columns, rows)
    for one in pins:
        if one.get("not_kept"):
            kept, tokens = count_text(one["kept"]), count_text(one["tokens"])
            output.line(f"{one['id'] or one['label'] or '-'}: {kept} of {tokens} tokens are on disk: {one['not_kept']}")
