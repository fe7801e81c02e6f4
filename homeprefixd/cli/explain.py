"""`explain`: why a request did not reuse more of its prompt, and what to do about it."""

from __future__ import annotations

import os
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from ..config_sources import find_file, user_file
from ..errors import ConfigError, HomeprefixdError
from ..explain.causes import GATE
from .cache import cache_flags, daemon_of
from .output import Output, count_text, printable, seconds_text
from .reach import call
from .settings import load_settings


@click.command()
@click.argument("request_id", metavar="[ID|last]", default="last")
@click.option("--apply", is_flag=True, help="Write the rule that is proposed into the configuration file.")
@cache_flags
def explain(request_id: str, apply: bool, url: str | None, as_json: bool, **given: str | None) -> None:
    """Say why a request did not reuse more of its prompt.

    ID is the `id` of its reply; `last` is the last request.
    """
    output = Output(as_json)
    found = call(daemon_of(url, given), f"/cache/explain/{urllib.parse.quote(request_id, safe='')}")
    if as_json:
        output.document(found)
    else:
        for line in sentences(found["record"], found["explanation"]):
            output.line(line)
    if apply:
        rule = (found["explanation"] or {}).get("rule")
        if not rule:
            raise HomeprefixdError("there is no rule that would help here: nothing was written")
        place = apply_rule(rule, _file(given))
        if not as_json:
            output.line(f'Written: {rule} = "on" in {place}. Restart the daemon to use it.')


def sentences(record: Mapping[str, Any], explanation: Mapping[str, Any] | None) -> list[str]:
    """What a person wants to know, line by line."""
    lines = [f"{record['id']} of {printable(record['app'])}, {record['model']}"]
    if record.get("state") not in ("finished", None):
        lines.append(f"It is {record['state']}" + (f": {printable(record['error'])}" if record.get("error") else "."))
    if record.get("first_ms"):
        reused = ", ".join(f"{count_text(count)} {tier}" for tier, count in record.get("tiers", {}).items()) or "none"
        lines.append(
            f"First token after {seconds_text(record['first_ms'] / 1e3)}:"
            f" {count_text(record.get('prompt', 0))} tokens of prompt, reused: {reused}"
        )
    gate = record.get("gate")
    if gate and gate["known"]:
        read = f"; all from disk and RAM {seconds_text(gate['load_s'])}" if gate.get("load_s") is not None else ""
        computed = f", computed {seconds_text(gate['compute_s'])}" if gate.get("compute_s") is not None else ""
        lines.append(
            f"Of {count_text(gate['known'])} known tokens {count_text(gate['restored'])} were to be restored:"
            f" {GATE.get(gate['reason'], gate['reason'])}{read}{computed}"
        )
    if explanation is None:
        return [*lines, "Nothing more is known of it: `records.explain` is off, or it has not ended."]
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
        lines.append(f'The rule that does it: {explanation["rule"]} = "on" in section [stable]; --apply writes it.')
    return lines


def _file(given: Mapping[str, str | None]) -> Path:
    """The configuration file that is in use, else the user's own. Raises ConfigError."""
    loaded = load_settings(given)
    found = loaded.file or find_file(os.environ) or user_file(os.environ)
    if found is None:
        raise ConfigError("there is no configuration file, and no home for one: name one with --config")
    return found


def apply_rule(rule: str, file: Path) -> str:
    """Turn a rule on in a TOML file, whose other lines stay as they are. Raises ConfigError."""
    try:
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        lines = text.splitlines()
        header = next((i for i, line in enumerate(lines) if line.split("#")[0].strip() == "[stable]"), None)
        if header is None:
            lines += [*([""] if lines else []), "[stable]", f'{rule} = "on"']
        else:
            end = next((i for i in range(header + 1, len(lines)) if lines[i].lstrip().startswith("[")), len(lines))
            own = next((i for i in range(header + 1, end) if lines[i].split("=")[0].strip() == rule), None)
            if own is None:
                lines.insert(header + 1, f'{rule} = "on"')
            else:
                lines[own] = f'{rule} = "on"'
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f"{file.name}.{os.getpid()}")
        part.write_text("\n".join(lines) + "\n", encoding="utf-8")
        if file.exists():
            part.chmod(file.stat().st_mode & 0o777)
        part.replace(file)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror or error}") from error
    return str(file)
