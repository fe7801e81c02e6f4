"""A grammar of a call's arguments as DeepSeek writes them since V3.2, each in a tag of its own, from a JSON schema.

A text stands there as it is (`string="true"`), all else as JSON (`string="false"`). In llguidance's variant of Lark, as
`forcing.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from .keywords import NAMED, VALUES
from .member_names import is_divided, members, target
from .unkept import refusal, typed, unkept

MAX_PARAMETERS = 16
"""Of a function whose schema names none and allows any."""

_CONTROL = re.compile(r"<\[\d+\]>")
_SAID = frozenset({"type", "title", "description", "default", "examples", "deprecated"})
"""Keys of a schema that leave a text free."""
_KEPT = frozenset({"type", "properties", "required", "additionalProperties"})
"""What is kept of the whole schema, which is an object's; the grammar of JSON keeps those of the parameters."""

_WHOLE = "whole"
"""Name of the whole schema among a parameter's definitions."""
_OF_DOCUMENT = frozenset({"$id", "id", "$schema"})


def _refers(schema: Any) -> bool:
    """Is there a reference in it?"""
    return isinstance(schema, dict) and (
        isinstance(schema.get("$ref"), str) or any(_refers(one) for _, one in _below(schema))
    )


def _below(schema: dict[str, Any]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Where something stands in it that may be a schema, and what; not in values."""
    for key, one in schema.items():
        if isinstance(one, list) and key not in VALUES:
            yield from (((key, number), item) for number, item in enumerate(one))
        elif isinstance(one, dict) and key in NAMED:
            yield from (((key, name), item) for name, item in one.items())
        elif key not in VALUES:
            yield (key,), one


def _moved(schema: Any) -> Any:
    """A part of a whole schema, as it stands among the definitions of a parameter's: what it refers to is there."""
    if not isinstance(schema, dict):
        return schema
    found = {key: one.copy() if isinstance(one, dict | list) else one for key, one in schema.items()}
    for path, one in _below(schema):
        place: Any = found if len(path) == 1 else found[path[0]]
        place[path[-1]] = _moved(one)
    reference = schema.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        found["$ref"] = f"#/$defs/{_WHOLE}{reference[1:]}"
    return found


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


class ParameterRules:
    """Rules of one function's arguments, in `lines`; their names begin with `prefix`.

    `mark`: the expression for the mark that begins the names of tags. `json_rule`: that for JSON by a schema. What
    only JSON's grammar can keep of a text (its length, a pattern) makes it a text in JSON, which reads the same.
    """

    def __init__(self, prefix: str, mark: str, schema: Any, strict: bool, json_rule: Callable[..., str]) -> None:
        self.lines: list[str] = []
        self._prefix, self._mark, self._strict, self._json_rule = prefix, mark, strict, json_rule
        self._root = schema if isinstance(schema, dict) else {}
        self._count = 0
        if strict and is_divided(self._root):
            raise refusal("$id")
        self.start = self._all()

    def _rule(self, expression: str, attribute: str = "") -> str:
        self._count += 1
        name = f"{self._prefix}_{self._count}"
        self.lines.append(f"{name}{attribute}: {expression}")
        return name

    def _refuse(self, keyword: str) -> None:
        """Raises RequestError where nothing may be left out."""
        if self._strict:
            raise refusal(keyword)

    def _all(self) -> str:
        """Parameters in the schema's order; those that are not required may be missing."""
        schema = self._resolved(self._root)
        for keyword in unkept(schema, "object", _KEPT):
            self._refuse(keyword)
        for keyword, kind in (("properties", dict), ("required", list)):
            if keyword in schema and not isinstance(schema[keyword], kind):
                self._refuse(keyword)
        required = schema.get("required")
        required = set(required) if isinstance(required, list) else set()
        properties = members(schema)
        if any(name not in properties or properties[name] is False for name in required):
            self._refuse("required")
        if not properties:
            other = schema.get("additionalProperties", True)
            if other is False:
                return '""'
            value = self._rule(self._json(other))
            any_one = self._rule(f"{self._opening()} /[A-Za-z_][A-Za-z0-9_]{{0,40}}/ {self._closing(value)}")
            return f"{any_one}{{0,{MAX_PARAMETERS}}}"
        parts = []
        for name, value in properties.items():
            if value is False:
                continue
            one = self._rule(self._parameter(str(name), value))
            parts.append(one if name in required else f"({one})?")
        return " ".join(parts) or '""'

    def _opening(self) -> str:
        return f'"<" {self._mark} "parameter name=\\""'

    def _closing(self, value: str) -> str:
        """From the end of the name on, with JSON as the value."""
        return f'"\\" string=\\"false\\">" {value} "</" {self._mark} "parameter>\\n"'

    def _parameter(self, name: str, schema: Any) -> str:
        head = f"{self._opening()} {_text(name)}"
        texts = self._texts(schema)
        if texts is None:
            return f"{head} {self._closing(self._rule(self._json(schema)))}"
        return f'{head} "\\" string=\\"true\\">" {texts} "\\n"'

    def _texts(self, schema: Any) -> str | None:
        """The expression for a text with its closing tag; None if it is something else, or a text with bounds."""
        if not isinstance(schema, dict):
            return None
        end = f'"</" {self._mark} "parameter>"'
        if "const" in schema and "enum" in schema:
            return None
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
            if schema.keys() <= _SAID | {"const", "enum"} and schema.get("type", "string") == "string":
                return f"({' | '.join(map(_text, values))}) {end}"
            return None
        if schema.get("type") != "string" or not schema.keys() <= _SAID:
            return None
        if _CONTROL.fullmatch(self._mark):
            return f"/(?s:.*)/ {end}"
        closing = f"</{json.loads(self._mark)}parameter>"
        return self._rule("/(?s:.*)/", f"[suffix={_text(closing)}]")

    def _json(self, schema: Any) -> str:
        """With the whole schema among its definitions where it refers to a part of that."""
        if isinstance(schema, dict) and _refers(schema):
            whole = {key: value for key, value in self._root.items() if key not in _OF_DOCUMENT}
            own = {key: value for key, value in self._root.items() if key == "$schema"}
            schema = {**own, **_moved(schema), "$defs": {_WHOLE: _moved(whole)}}
        return self._json_rule(schema if isinstance(schema, dict | bool) else True, lenient=not self._strict)

    def _resolved(self, schema: dict[str, Any]) -> dict[str, Any]:
        """What a schema that is a reference refers to."""
        for _ in range(8):
            if "$ref" not in schema:
                return schema
            for keyword in unkept(schema, None, {"$ref", "type"}):
                self._refuse(keyword)
            found = typed(target(self._root, schema["$ref"]), schema.get("type", "object"))
            if found is None:
                break
            schema = found
        self._refuse("$ref")
        return {}
