"""Rules of `[stable]` that are written into a configuration file, whose other lines stay as they are."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import NamedTuple

from .errors import ConfigError

EXPRESSIONS = ("move", "custom")
"""Rules that are regular expressions: a second one is added to the first."""


class Applied(NamedTuple):
    """What became of a rule that is in force now."""

    file: str  # where it was written; "": nowhere, so it counts until the daemon ends or reads its settings again
    reason: str  # why it was not; "": it was


def rule_line(rule: str, setting: str) -> str:
    """As it stands in the file."""
    plain = "'" not in setting and setting.isprintable() and setting != "on"
    return f"{rule} = '{setting}'" if plain else f"{rule} = {json.dumps(setting, ensure_ascii=False)}"


def joined(old: str, new: str) -> str:
    """One regular expression for both."""
    if not old or old == new:
        return new
    known = f"|{old}|"
    return old if f"|{new}|" in known else f"{old}|{new}"


def apply_rule(rule: str, file: Path, setting: str = "on") -> str:
    """Set a rule in a TOML file. Its path. Raises ConfigError."""
    try:
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        if rule in EXPRESSIONS:
            setting = joined(_expression(rule, text), setting)
        line = rule_line(rule, setting)
        lines = text.splitlines()
        header = next((i for i, line in enumerate(lines) if line.split("#")[0].strip() == "[stable]"), None)
        if header is None:
            lines += [*([""] if lines else []), "[stable]", line]
        else:
            end = next((i for i in range(header + 1, len(lines)) if lines[i].lstrip().startswith("[")), len(lines))
            own = next((i for i in range(header + 1, end) if lines[i].split("=")[0].strip() == rule), None)
            if own is None:
                lines.insert(header + 1, line)
            else:
                lines[own] = line
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f"{file.name}.{os.getpid()}")
        part.write_text("\n".join(lines) + "\n", encoding="utf-8")
        if file.exists():
            part.chmod(file.stat().st_mode & 0o777)
        part.replace(file)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror or error}") from error
    return str(file)


def _expression(rule: str, text: str) -> str:
    try:
        found = tomllib.loads(text).get("stable", {}).get(rule, "")
    except (tomllib.TOMLDecodeError, AttributeError):
        return ""
    return found if isinstance(found, str) else ""
