"""A grammar of a call's arguments as Gemma writes them: `{city:<escape>Paris<escape>,days:3}`, from a JSON schema.

Texts stand between marks and are not escaped; all else is JSON. In llguidance's variant of Lark, as `forcing.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import combinations
from typing import Any

from .member_names import is_divided, members, target
from .unkept import KINDS, are_apart, is_of, refusal, typed, unkept

MAX_ITEMS = 64
"""Of an array whose schema sets no bound."""

MAX_MEMBERS = 16
"""Of an object whose schema names none."""

_MAX_LENGTH = 2000  # characters of a text whose bounds are kept

_PLAIN_KEY = re.compile(r"[\w.\-]+")
_CONTROL = re.compile(r"<\[\d+\]>")
_KEPT = {
    "object": frozenset({"type", "properties", "required", "additionalProperties"}),
    "array": frozenset({"type", "items", "minItems", "maxItems"}),
    "string": frozenset({"type", "minLength", "maxLength"}),
    "number": frozenset({"type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "boolean": frozenset({"type"}),
    "null": frozenset({"type"}),
}
_KEPT["integer"] = _KEPT["number"]
"""What is kept of a schema of one kind that has none of `$ref`, `const`, `enum`, `anyOf`, `oneOf`."""


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def shared_rules(quote: str) -> list[str]:
    """Rules that the others refer to. `quote`: the expression for the mark around a text."""
    return [
        *_text_rules("brace_text", quote, ""),
        'brace_scalar: %json {"type": ["number", "boolean", "null"]}',
        "brace_key: /[A-Za-z_][A-Za-z0-9_]{0,40}/",
        f'brace_object: "{{" (brace_member ("," brace_member){{0,{MAX_MEMBERS - 1}}})? "}}"',
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

    `strict`: what a schema asks for and these rules cannot keep is an error, else it is left out. `json_rule`: the
    expression for JSON by a schema.
    """

    def __init__(self, prefix: str, quote: str, schema: Any, strict: bool, json_rule: Callable[..., str]) -> None:
        self.lines: list[str] = []
        self._prefix, self._quote, self._strict, self._json_rule = prefix, quote, strict, json_rule
        self._root = schema if isinstance(schema, dict) else {}
        self._count = 0
        if strict and is_divided(self._root):
            raise refusal("$id")
        self._known: dict[tuple[str, str], str] = {}  # $ref, and the type beside it -> rule
        self._waiting: list[tuple[str, Any]] = []  # rules that are referred to and not yet written, with their schemas
        self.start = self._value({**self._root, "type": "object"})
        while self._waiting:
            name, referred = self._waiting.pop()
            self.lines.append(f"{name}: {self._value(referred)}")

    def _rule(self, expression: str) -> str:
        self._count += 1
        name = f"{self._prefix}_{self._count}"
        self.lines.append(f"{name}: {expression}")
        return name

    def _refuse(self, keyword: str) -> None:
        """Raises RequestError where nothing may be left out."""
        if self._strict:
            raise refusal(keyword)

    def _value(self, schema: Any) -> str:
        """The expression for a value by a schema."""
        if not isinstance(schema, dict):
            if schema is False:
                self._refuse("false")
            return "brace_any"
        found = self._referred(schema) or self._one_of_values(schema) or self._one_of_schemas(schema)
        if found:
            return found
        kind = schema.get("type")
        if isinstance(kind, list) and kind:
            return f"({' | '.join(self._value({**schema, 'type': one}) for one in kind)})"
        if kind is None:
            kind = _implied(schema)
        if kind is not None and (not isinstance(kind, str) or kind not in KINDS):
            self._refuse("type")
            return "brace_any"
        for keyword in unkept(schema, kind, _KEPT[kind] if kind else frozenset()):
            self._refuse(keyword)
        if kind == "object":
            return self._object(schema)
        if kind == "array":
            return self._array(schema)
        if kind == "string":
            return self._string(schema)
        if kind is not None:
            kept = {key: value for key, value in schema.items() if key in _KEPT[kind]}
            return self._rule(self._json_rule({**kept, "type": kind}, lenient=not self._strict))
        return "brace_any"

    def _referred(self, schema: dict[str, Any]) -> str:
        """What a `$ref` refers to; "" if there is none, or it cannot be kept."""
        if "$ref" not in schema:
            return ""
        for keyword in unkept(schema, None, {"$ref", "type"}):
            self._refuse(keyword)
        reference, kind = schema["$ref"], schema.get("type")
        found = target(self._root, reference)
        if kind is not None:
            found = typed(found, kind)
        if not isinstance(found, dict | bool):
            self._refuse("$ref")
            return ""
        key = (reference, str(kind))
        if key not in self._known:
            self._count += 1
            self._known[key] = name = f"{self._prefix}_{self._count}"
            self._waiting.append((name, found))
        return self._known[key]

    def _one_of_values(self, schema: dict[str, Any]) -> str:
        """By `const` or `enum`, and `type`; "" if there is none, or none fits."""
        keyword = "const" if "const" in schema else "enum"
        if keyword not in schema:
            return ""
        for other in unkept(schema, None, {keyword, "type"}):
            self._refuse(other)
        values = [schema[keyword]] if keyword == "const" else schema[keyword]
        values = values if isinstance(values, list) else []
        fitting = [value for value in values if "type" not in schema or is_of(value, schema["type"])]
        if not fitting:
            self._refuse(keyword)
            return ""
        return f"({' | '.join(self._literal(value) for value in fitting)})"

    def _one_of_schemas(self, schema: dict[str, Any]) -> str:
        """By `anyOf` or `oneOf`, and `type`; "" if there is none, or what stands beside it says more."""
        keyword = "anyOf" if "anyOf" in schema else "oneOf"
        if keyword not in schema:
            return ""
        others = list(unkept(schema, None, {keyword, "type"}))
        if others:
            is_less = _implied(schema) is not None or "type" in schema
            self._refuse(keyword if is_less else others[0])
            if is_less:
                return ""
        listed = schema[keyword] if isinstance(schema[keyword], list) else []
        fitting = [one for one in listed if one is not False]
        if "type" in schema:
            fitting = [found for one in fitting if (found := typed(one, schema["type"])) is not None]
        if not fitting:
            self._refuse(keyword)
            return ""
        if keyword == "oneOf" and not all(are_apart(self._root, *pair) for pair in combinations(fitting, 2)):
            self._refuse(keyword)
        return f"({' | '.join(self._value(one) for one in fitting)})"

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

    def _string(self, schema: dict[str, Any]) -> str:
        low, high = _count(schema, "minLength"), _count(schema, "maxLength")
        if low is None and high is None:
            return "brace_text"
        for keyword, count in (("minLength", low), ("maxLength", high)):
            if count is not None and not (low or 0) <= count <= _MAX_LENGTH:
                self._refuse(keyword)
                return "brace_text"
        self._count += 1
        name = f"{self._prefix}_{self._count}"
        self.lines += _text_rules(name, self._quote, f"{{{low or 0},{'' if high is None else high}}}")
        return name

    def _array(self, schema: dict[str, Any]) -> str:
        items = schema.get("items", True)
        if not isinstance(items, dict | bool):
            self._refuse("items")
        low, high = _count(schema, "minItems") or 0, _count(schema, "maxItems")
        if items is False:
            items, high = True, 0
        if high is None:
            high = max(low, MAX_ITEMS)
        if low > high:
            self._refuse("minItems")
            low, high = 0, MAX_ITEMS
        if high == 0:
            return '"[" "]"'
        item = self._rule(self._value(items))
        more = f'{item} ("," {item}){{{max(low - 1, 0)},{high - 1}}}' if high > 1 else item
        return f'"[" {more} "]"' if low else f'"[" ({more})? "]"'

    def _object(self, schema: dict[str, Any]) -> str:
        """Members in the schema's order, which is what makes the commas hard: none before the first that is there."""
        for keyword, kind in (("properties", dict), ("required", list)):
            if keyword in schema and not isinstance(schema[keyword], kind):
                self._refuse(keyword)
        required = schema.get("required")
        required = set(required) if isinstance(required, list) else set()
        properties = members(schema)
        if any(name not in properties or properties[name] is False for name in required):
            self._refuse("required")
        if not properties:
            return self._any_members(schema.get("additionalProperties", True))
        first = more = ""  # what may follow, from this member on: where none was written yet, and where one was
        for name, value in reversed(properties.items()):
            if value is False:
                continue
            member = self._rule(f"{self._key(name)} {self._value(value)}")
            if name in required:
                first, more = f"{member} {more}", f'"," {member} {more}'
            else:
                first = f"{member} {more} | {first}" if first else f"({member} {more})?"
                more = f'("," {member})? {more}'
            first, more = self._rule(first), self._rule(more)
        return f'"{{" {first} "}}"'

    def _any_members(self, schema: Any) -> str:
        """An object's whose names are free."""
        if schema is False:
            return '"{" "}"'
        if schema is True:
            return "brace_object"
        member = self._rule(f'brace_key ":" {self._value(schema)}')
        return f'"{{" ({member} ("," {member}){{0,{MAX_MEMBERS - 1}}})? "}}"'


def _implied(schema: dict[str, Any]) -> str | None:
    """The kind of value that is meant where a schema says none."""
    return "object" if "properties" in schema else "array" if "items" in schema else None


def _count(schema: dict[str, Any], key: str) -> int | None:
    """None where there is no bound, or none that makes sense."""
    count = schema.get(key)
    is_whole = isinstance(count, int | float) and not isinstance(count, bool) and count >= 0 and count == int(count)
    return int(count) if is_whole and count is not None else None
