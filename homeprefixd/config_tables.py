"""Settings that are lists of tables, as tables of the file or a variable give them."""

from __future__ import annotations

import tomllib
from typing import Any


class TablesError(Exception):
    """What is wrong, as a sentence without its subject."""


def tables_of(value: Any, form: str, most: int, what: str) -> list[dict[str, Any]]:
    """At most `most` tables. `form`: an example of such a list; `what` they are. Raises TablesError."""
    if isinstance(value, str):
        try:
            value = tomllib.loads(f"x = {value}")["x"]
        except tomllib.TOMLDecodeError as error:
            raise TablesError(f"{value[:100]!r} is not TOML ({error}); allowed: a list such as {form}") from error
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise TablesError(f"it is a list of tables, such as {form}")
    if len(value) > most:
        raise TablesError(f"it has {len(value)} {what}, at most {most} are allowed")
    return value
