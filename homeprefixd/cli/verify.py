"""`verify`, `compact`: is what is stored what was written, and does its file take no more room than it needs?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from ..config_sources import cache_directory
from ..config_values import parse_size
from ..errors import NotFoundError, StoreError, UnavailableError
from ..frames.store import LEAST_RATE
from ..sizes import size_text
from .cache import cache_flags
from .output import Output, count_text, seconds_text
from .reach import STORE_FILE, call, running_daemon
from .settings import load_settings

_PATIENCE = 7 * 86_400.0  # s


def _directory(given: Mapping[str, str | None]) -> Path:
    return cache_directory(load_settings(given).config.cache.dir, os.environ)


def _need_store(directory: Path) -> None:
    if not os.path.exists(directory / STORE_FILE):
        raise NotFoundError(
            f"there is no cache in {directory}, and no daemon runs on it;"
            " name another directory with --cache-dir, or a daemon with --url"
        )


@click.command()
@click.option("--repair", is_flag=True, help="Remove what is damaged, with all that follows it.")
@click.option(
    "--rate", metavar="SIZE", help="Read so much in a second at most, as 50MB.  [default: 100MB; closed: all]"
)
@cache_flags
def verify(url: str | None, as_json: bool, repair: bool, rate: str | None, **given: str | None) -> int:
    """Read all that is stored and check it.

    With the daemon running or stopped; requests do not wait for it. Exit code 1: something is damaged and still there.
    """
    speed = parse_size(rate) if rate is not None else None
    if rate is not None and speed is None:
        raise click.UsageError(f"--rate cannot be {rate!r}; allowed: a size such as 50MB, each second")
    if speed is not None and 0 < speed < LEAST_RATE:
        raise click.UsageError(f"--rate is at least {LEAST_RATE} bytes, each second")
    output = Output(as_json)
    found = _verify(url, given, repair, speed)
    if as_json:
        output.document(found)
    else:
        for problem in found["problems"]:
            output.line(problem)
        size, time = size_text(found["bytes"]), seconds_text(found["seconds"])
        output.line(f"{count_text(found['nodes'])} blocks, {size}, verified in {time}: {_outcome(found, repair)}")
    return 1 if found["damaged"] and not repair else 0


def _outcome(found: Mapping[str, Any], repair: bool) -> str:
    cut = "" if found["complete"] else "; it was ended early"
    if not found["damaged"]:
        return f"all as written{cut}"
    removed = (
        f"; {count_text(found['removed'])} removed, with those that follow" if repair else "; --repair removes them"
    )
    return f"{count_text(found['damaged'])} damaged{removed}{cut}"


def _verify(url: str | None, given: Mapping[str, str | None], repair: bool, rate: int | None) -> dict[str, Any]:
    directory = None
    if url is None:
        directory = _directory(given)
        url = running_daemon(directory)
    if url is not None:
        body = {"repair": repair, **({"rate": rate} if rate is not None else {})}
        return dict(call(url, "/cache/verify", body, timeout=_PATIENCE))
    if directory is None:
        raise UnavailableError("no cache is named")
    _need_store(directory)
    from ..prefix.client import AdminClient

    with AdminClient.start(directory) as client:
        done = client.verify(repair=repair, rate=float(rate or 0))
    if done.error:
        raise StoreError(done.error)
    names = ("nodes", "bytes", "damaged", "removed", "problems", "seconds", "complete")
    return {name: getattr(done, name) for name in names}


@click.command()
@cache_flags
def compact(url: str | None, as_json: bool, **given: str | None) -> None:
    """Give the disk back what the store's file does not need.

    With the daemon running or stopped; requests do not wait for it. What was deleted is used again anyway; this is for
    a budget that was made smaller.
    """
    output = Output(as_json)
    directory = _directory(given) if url is None else None
    url = running_daemon(directory) if directory is not None else url
    if url is not None:
        sizes = dict(call(url, "/cache/compact", {}, timeout=_PATIENCE))
    else:
        sizes = _compact_closed(directory, given)
    if as_json:
        output.document(sizes)
    else:
        freed = max(0, sizes["before"] - sizes["after"])
        output.line(
            f"{size_text(sizes['before'])} before, {size_text(sizes['after'])} now: {size_text(freed)} given back"
        )


def _compact_closed(directory: Path | None, given: Mapping[str, str | None]) -> dict[str, Any]:
    """By a process of its own. Raises StoreError."""
    from ..budgets import disk_budget

    if directory is None:
        raise UnavailableError("no cache is named")
    _need_store(directory)
    try:
        min_free = disk_budget(load_settings(given).config.cache, directory).min_free
    except OSError as error:
        raise StoreError(f"{directory}: its disk cannot be asked what is free: {error}") from error
    command = [sys.executable, "-P", "-m", "homeprefixd.prefix.compactor", str(directory), str(min_free)]
    home = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH", ""))))}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        words = done.stderr.strip().splitlines()
        raise StoreError(words[-1] if words else f"{directory}: its file cannot be read (signal {-done.returncode})")
    found: dict[str, Any] = json.loads(done.stdout)
    return found
