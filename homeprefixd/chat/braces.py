"""A grammar of a call's arguments as Gemma writes them: `{city:<escape>Paris<escape>,days:3}`, from a JSON schema.

Texts stand between marks and are not escaped; all else is JSON. In llguidance's variant of Lark, as `forcing.py`.
"""

from __future__ import annotations

import json
import re
from typing import Any

from ..errors import RequestError
from .member_names import members

MAX_ITEMS = 64
"""Of an array whose schema sets no bound."""

_MAX_LENGTH = 2000  # characters of a text whose bounds are kept

_PLAIN_KEY = re.compile(r"[\w.\-]+")
_CONTROL = re.compile(r"<\[\d+\]>")
_SAID = frozenset({"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$schema"})
_KEPT = {
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "minItems", "maxItems"}),
    "string": frozenset({"minLength", "maxLength"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
}
_KEPT["integer"] = _KEPT["number"]
_ANYWHERE = frozenset({"type", "enum", "const", "anyOf", "oneOf", "$ref", "$defs", "definitions", "strict"})


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def shared_rules(quote: str) -> list[str]:
    """Rules that the others refer to. `quote`: the expression for the mark around a text."""
    return [
        *_text_rules("brace_text", quote, ""),
        'brace_scalar: %json {"type": ["number", "boolean", "null"]}',
        "brace_key: /[A-Za-z_][A-Za-z0-9_]{0,40}/",
        'brace_object: "{" (brace_member ("," brace_member){0,15})? "}"',
        'brace_member: brace_key ":" brace_any',
        f'brace_array: "[" (brace_any ("," brace_any){{0,{MAX_ITEMS - 1}}})? "]"',
        "brace_any: brace_text | brace_scalar | brace_object | brace_array",
    ]


def _text_rules(name: str, quote: str, bounds: str) -> list[str]:
    """`name` becomes a text between marks; `bounds`: of its length, as `{2,5}`."""
    anything = f"/(?s:.{bounds or '*'})/"
    if _CONTROL.fullmatch(quote):
        return [f"{name}: {quote} {anything} {quote}"]
    return [f"{name}: {quote} {name}_rest", f"{name}_rest[suffix={quote}]: {anything}"]


class BraceRules:
    """Rules of one function's arguments, in `lines`; their names begin with `prefix`.

    `strict`: what a schema asks for and these rules cannot keep is an error, else it is left out.
    """

    def __init__(self, prefix: str, quote: str, schema: Any, *, strict: bool) -> None:
        self.lines: list[str] = []
        self._prefix, self._quote, self._strict = prefix, quote, strict
        self._root = schema if isinstance(schema, dict) else {}
        self._count = 0
        self._known: dict[str, str] = {}  # $ref -> rule
        properties = members(self._root)
        whole = {**self._root, "type": "object"} if "$ref" not in self._root else self._root
        self.start = self._value(whole) if properties or self._strict or "$ref" in self._root else self._free_object()

    def _rule(self, expression: str) -> str:
        self._count += 1
        name = f"{self._prefix}_{self._count}"
        self.lines.append(f"{name}: {expression}")
        return name

    def _free_object(self) -> str:
        return '"{" "}"' if self._root.get("additionalProperties") is False else "brace_object"

    def _refuse(self, keyword: str) -> None:
        """Raises RequestError where nothing may be left out."""
        if self._strict:
            raise RequestError(
                f"A strict function's parameters use `{keyword}`, which cannot be enforced in this model's form of a"
                " call: leave it out.",
                param="tools",
                code="unsupported_schema",
            )

    def _value(self, schema: Any) -> str:
        """The expression for a value by a schema."""
        if not isinstance(schema, dict):
            return "brace_any"
        if "$ref" in schema:
            return self._referred(str(schema["$ref"]))
        if "const" in schema:
            return self._literal(schema["const"])
        if isinstance(schema.get("enum"), list) and schema["enum"]:
            return f"({' | '.join(self._literal(value) for value in schema['enum'])})"
        for keyword in ("anyOf", "oneOf"):
            if isinstance(schema.get(keyword), list) and schema[keyword]:
                return f"({' | '.join(self._value(one) for one in schema[keyword])})"
        kind = schema.get("type")
        if isinstance(kind, list) and kind:
            return f"({' | '.join(self._value({**schema, 'type': one}) for one in kind)})"
        if kind is None:
            kind = "object" if "properties" in schema else "array" if "items" in schema else None
        self._check(schema, kind)
        if kind == "object":
            return self._object(schema)
        if kind == "array":
            return self._array(schema)
        if kind == "string":
            return self._string(schema)
        if kind in ("integer", "number", "boolean", "null"):
            kept = {key: value for key, value in schema.items() if key in _KEPT.get(kind, ())}
            return self._rule(f"%json {json.dumps({'type': kind, **kept})}")
        return "brace_any"

    def _check(self, schema: dict[str, Any], kind: Any) -> None:
        for keyword in schema:
            if keyword not in _SAID and keyword not in _ANYWHERE and keyword not in _KEPT.get(str(kind), ()):
                self._refuse(keyword)

    def _literal(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self._quote} {_text(value)} {self._quote}" if value else f"{self._quote} {self._quote}"
        if isinstance(value, dict):
            members = ' "," '.join(f"{self._key(key)} {self._literal(one)}" for key, one in value.items())
            return f'"{{" {members} "}}"'
        if isinstance(value, list):
            items = ' "," '.join(self._literal(one) for one in value)
            return f'"[" {items} "]"'
        return _text(json.dumps(value))

    def _key(self, name: str) -> str:
        if _PLAIN_KEY.fullmatch(name):
            return _text(f"{name}:")
        return f'{self._literal(name)} ":"'

    def _referred(self, reference: str) -> str:
        if reference not in self._known:
            target: Any = self._root
            for part in reference.removeprefix("#").strip("/").split("/"):
                part = part.replace("~1", "/").replace("~0", "~")
                target = target if not part else target.get(part) if isinstance(target, dict) else None
            if target is None or not reference.startswith("#"):
                self._refuse("$ref")
                return "brace_any"
            self._count += 1
            name = f"{self._prefix}_{self._count}"
            self._known[reference] = name
            self.lines.append(f"{name}: {self._value(target)}")
        return self._known[reference]

    def _string(self, schema: dict[str, Any]) -> str:
        low, high = schema.get("minLength", 0), schema.get("maxLength")
        if not (low or high is not None) or not all(isinstance(n, int) for n in (low, high or 0)):
            return "brace_text"
        if max(low, high or 0) > _MAX_LENGTH:
            self._refuse("maxLength")
            return "brace_text"
        self._count += 1
        name = f"{self._prefix}_{self._count}"
        self.lines += _text_rules(name, self._quote, f"{{{low},{'' if high is None else high}}}")
        return name

    def _array(self, schema: dict[str, Any]) -> str:
        item = self._rule(self._value(schema.get("items")))
        low, high = schema.get("minItems", 0), schema.get("maxItems", MAX_ITEMS)
        if not isinstance(low, int) or not isinstance(high, int) or not 0 <= low <= high:
            low, high = 0, MAX_ITEMS
        if high == 0:
            return '"[" "]"'
        more = f'{item} ("," {item}){{{max(low - 1, 0)},{high - 1}}}'
        return f'"[" {more} "]"' if low else f'"[" ({more})? "]"'

    def _object(self, schema: dict[str, Any]) -> str:
        """Members in the schema's order, which is what makes the commas hard: none before the first that is there."""
        properties = members(schema)
        if not properties:
            return '"{" "}"' if schema.get("additionalProperties") is False else "brace_object"
        required = schema.get("required")
        required = set(required) if isinstance(required, list) else set()
        first = more = ""  # what may follow, from this member on: where none was written yet, and where one was
        for name, value in reversed(properties.items()):
            member = self._rule(f"{self._key(name)} {self._value(value)}")
            if name in required:
                first, more = f"{member} {more}", f'"," {member} {more}'
            else:
                first = f"{member} {more} | {first}" if first else f"({member} {more})?"
                more = f'("," {member})? {more}'
            first, more = self._rule(first), self._rule(more)
        return f'"{{" {first} "}}"'
