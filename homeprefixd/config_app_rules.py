"""Rules of `[stable]` that are for one app, as tables or a variable give them: checked, as `config` has them."""

from __future__ import annotations

from typing import Any

from .config_tables import TablesError, tables_of
from .expressions import is_expression

_FORM = '[{ app = "HomeAssistant", move_volatile_line = "on" }]'
_SWITCHES = ("drop_billing_line", "move_volatile_line", "sort_tools", "sort_keys")
_EXPRESSIONS = ("custom", "move")
_MAX_APPS = 256


def parse_app_rules(value: Any) -> list[dict[str, Any]]:
    """Tables in the order given, each for an app of its own. Raises TablesError."""
    found = [_of_app(one) for one in tables_of(value, _FORM, _MAX_APPS, "apps")]
    names = [one["app"].lower() for one in found]
    for name in names:
        if names.count(name) > 1:
            raise TablesError(f"two tables are for the app {name!r}: put their rules into one")
    return found


def _of_app(given: dict[str, Any]) -> dict[str, Any]:
    app = given.get("app", "")
    if not isinstance(app, str) or not app.strip():  # any letters: what clients call themselves may have any
        raise TablesError(f"a table needs app, the name that `homeprefixd explain` shows, as in {_FORM}")
    for name, value in given.items():
        if name in _SWITCHES and value not in ("on", "off"):
            raise TablesError(f"{name} of {app!r} cannot be {value!r}; allowed: on, off")
        if name in _EXPRESSIONS and not (isinstance(value, str) and "\0" not in value and is_expression(value)):
            raise TablesError(f"{name} of {app!r} cannot be {value!r}; allowed: a regular expression of Python's `re`")
        if name not in ("app", *_SWITCHES, *_EXPRESSIONS):
            all_of_them = ", ".join((*_SWITCHES, *_EXPRESSIONS))
            raise TablesError(f"an app's rules have no {name}; there is app, {all_of_them}")
    return {**given, "app": app.strip()}
