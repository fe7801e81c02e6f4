"""`explain`: why a request did not reuse more of its prompt, and what to do about it."""

from __future__ import annotations

import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from ..config_file import apply_rule, by_hand, quoted, rule_line
from ..errors import ConfigError, HomeprefixdError, RequestError
from ..explain.causes import GATE
from .cache import cache_flags, daemon_of
from .output import Output, count_text, printable, seconds_text
from .reach import call
from .settings import file_for

_QUEUED = "it waited for its turn, behind other requests"
_WAIT_TOLD = 100.0  # ms


@click.command()
@click.argument("request_id", metavar="[ID|last]", default="last")
@click.option(
    "--apply",
    is_flag=True,
    help="Have the daemon use the rule that is proposed, and write it into its configuration; with --config into that"
    " file.",
)
@cache_flags
def explain(request_id: str, apply: bool, url: str | None, as_json: bool, **given: str | None) -> None:
    """Say why a request did not reuse more of its prompt.

    ID is the `id` of its reply; `last` is the last request.
    """
    output = Output(as_json)
    daemon = daemon_of(url, given)
    found = call(daemon, f"/cache/explain/{urllib.parse.quote(request_id, safe='')}")
    if as_json:
        output.document(found)
    else:
        for line in sentences(found["record"], found["explanation"], found.get("outdated", "")):
            output.line(line)
    if not apply:
        return
    explanation = found["explanation"] or {}
    if not explanation.get("rule"):
        raise HomeprefixdError("there is no rule that would help here: nothing was written")
    if found.get("outdated") and given.get("config"):  # else the daemon refuses it
        raise RequestError(printable(found["outdated"]))
    said = _write(explanation, given) if given.get("config") else _have_it_used(daemon, found["record"]["id"])
    if not as_json:
        output.line(said)


def _have_it_used(daemon: str, request_id: str) -> str:
    """By the daemon, which knows its own file. What was done."""
    done = call(daemon, f"/cache/explain/{urllib.parse.quote(request_id, safe='')}/apply", {})
    rule, setting, app = done["rule"], done["setting"], done.get("app", "")
    of_app = f" for {printable(app)}" if app else ""
    if done["file"]:
        return f"In force from the next request on: {rule_line(rule, setting)}{of_app}, written to {done['file']}."
    return f"In force until the daemon ends: {rule_line(rule, setting)}{of_app}. It was not written: {done['reason']}"


def _write(explanation: Mapping[str, Any], given: Mapping[str, str | None]) -> str:
    """Into the file that was named. What was done. Raises ConfigError."""
    rule, setting, app = explanation["rule"], explanation.get("setting") or "on", explanation.get("app", "")
    try:
        wanted = _wanted(given)
    except ConfigError as error:
        raise ConfigError(
            f"{error.message}. Nothing was written; {by_hand(rule, setting, app, _text_of(given))}"
        ) from error
    place = apply_rule(rule, wanted, setting, app=app)
    of_app = f" for {printable(app)}" if app else ""
    return f"Written: {rule_line(rule, setting)}{of_app} in {place}. Reload or restart the daemon to use it."


def _text_of(given: Mapping[str, str | None]) -> str:
    """Of the file that was named; "" if it cannot be read."""
    try:
        return Path(given.get("config") or "").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def sentences(record: Mapping[str, Any], explanation: Mapping[str, Any] | None, outdated: str = "") -> list[str]:
    """What a person wants to know, line by line. `outdated`: why the rule is not applied any more."""
    lines = [f"{record['id']} of {printable(record['app'])}, {record['model']}"]
    if record.get("state") not in ("finished", None):
        lines.append(f"It is {record['state']}" + (f": {printable(record['error'])}" if record.get("error") else "."))
    if record.get("first_ms"):
        reused = ", ".join(f"{count_text(count)} {tier}" for tier, count in record.get("tiers", {}).items()) or "none"
        lines.append(
            f"First token after {seconds_text(record['first_ms'] / 1e3)}:"
            f" {count_text(record.get('prompt', 0))} tokens of prompt, reused: {reused}"
        )
    waits = ((record.get("load_ms", 0.0), "the model was loaded first"), (record.get("queue_ms", 0.0), _QUEUED))
    of_it = " of it" if record.get("first_ms") else ""
    lines += [f"{seconds_text(ms / 1e3)}{of_it}: {why}" for ms, why in waits if ms >= _WAIT_TOLD]
    gate = record.get("gate")
    if gate and gate["known"]:
        read = f"; all from disk and RAM {seconds_text(gate['load_s'])}" if gate.get("load_s") is not None else ""
        computed = f", computed {seconds_text(gate['compute_s'])}" if gate.get("compute_s") is not None else ""
        lines.append(
            f"Of {count_text(gate['known'])} known tokens {count_text(gate['restored'])} were to be restored:"
            f" {GATE.get(gate['reason'], gate['reason'])}{read}{computed}"
        )
    if explanation is None:
        return [*lines, "Nothing more is known of it: `records.explain` is off, or it was refused, or has not ended."]
    lines += ["", explanation["text"]]
    if explanation["before"] or explanation["after"]:
        lines += [
            "",
            f"  both      …{printable(explanation['lead'])}",
            f"  then      {printable(explanation['before'])}",
            f"  now       {printable(explanation['after'])}",
        ]
    if explanation["advice"]:
        lines += ["", explanation["advice"]]
    if explanation["rule"]:
        line = rule_line(explanation["rule"], explanation.get("setting") or "on")
        app = explanation.get("app", "")
        where = f"in a table [[stable.per_app]] with app = {quoted(app)}" if app else "in section [stable]"
        lines.append(
            f"The rule that was proposed: {line} {where}. {printable(outdated)}"
            if outdated
            else f"The rule that does it: {line} {where}; --apply writes it."
        )
    return lines


def _wanted(given: Mapping[str, str | None]) -> Path:
    """Raises ConfigError."""
    found = file_for(given)
    if found is None:
        raise ConfigError("there is no configuration file, and no home for one: name one with --config")
    return found
