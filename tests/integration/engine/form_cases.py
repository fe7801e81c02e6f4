"""Schemas, grammars and functions for tests of forms, hostile ones too."""

from __future__ import annotations

from typing import Any

S = {"type": "string"}
I = {"type": "integer"}  # noqa: E741


def obj(properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
        **more,
    }


SCHEMAS: list[dict[str, Any]] = [
    {"type": "string"},
    {"type": "string", "minLength": 3, "maxLength": 7},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "email"},
    {"type": "integer"},
    {"type": "integer", "minimum": 17, "maximum": 113},
    {"type": "integer", "exclusiveMinimum": -5, "exclusiveMaximum": 3},
    {"type": "integer", "minimum": -20, "maximum": 20, "multipleOf": 7},
    {"type": "number", "minimum": 0.5, "maximum": 2.25},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"type": "boolean"},
    {"type": "null"},
    {"type": ["string", "null"], "maxLength": 5},
    {"type": ["integer", "boolean"]},
    {"const": {"a": [1, "ü", None]}},
    {"enum": ["red", 7, None, {"x": 1.5}]},
    {"type": "array", "items": I, "minItems": 2, "maxItems": 4},
    {"type": "array", "prefixItems": [S, I], "items": False, "minItems": 2},
    {"type": "array", "prefixItems": [{"const": 1}], "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    {"type": "array", "items": {"type": "array", "items": {"enum": [0, 1]}, "maxItems": 2}, "maxItems": 2},
    obj({"name": S, "age": I}),
    obj({"a": S, "b": I, "c": {"type": "boolean"}}, ["b"]),
    obj({"x": {"type": "number"}}, []),
    {"type": "object", "additionalProperties": {"type": "integer", "minimum": 5}, "maxProperties": 3},
    {"type": "object", "additionalProperties": I, "minProperties": 1, "maxProperties": 2},
    {"type": "object", "patternProperties": {"^k[0-9]$": {"type": "boolean"}}, "additionalProperties": False},
    {"type": "object", "properties": {"id": I}, "required": ["id", "other"], "additionalProperties": S},
    obj({"list": {"type": "array", "items": obj({"n": I, "tags": {"type": "array", "items": S, "maxItems": 2}})}}),
    {"anyOf": [obj({"kind": {"const": "cat"}, "lives": I}), obj({"kind": {"const": "dog"}, "good": {"const": True}})]},
    {"oneOf": [obj({"a": {"const": 1}}), obj({"b": {"const": 2}})]},
    {"oneOf": [{"type": "integer"}, {"type": "boolean"}]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
    {"allOf": [obj({"a": I}, additionalProperties=True), {"properties": {"b": S}, "required": ["b"]}]},
    {
        "$ref": "#/$defs/node",
        "$defs": {"node": obj({"v": I, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}})},
    },
    {
        "$ref": "#/definitions/p",
        "definitions": {"p": obj({"x": I, "y": {"$ref": "#/definitions/q"}}), "q": {"enum": ["l", "r"]}},
    },
    obj({"child": {"$ref": "#"}, "n": I}, ["n"]),
    {
        "title": "Light",
        "description": "a lamp",
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **obj({"on": {"type": "boolean", "default": False, "examples": [True]}}),
    },
    obj({'quote"d': S, "sp ace": I, "ümläut": {"type": "null"}}),
    obj({"empty": obj({}), "any": {"type": "array", "maxItems": 0}}),
    obj({"deep": obj({"er": obj({"st": obj({"here": {"enum": ["x"]}})})})}),
    {"type": "object"},
    {"type": "array", "maxItems": 3},
    {"type": "string", "enum": ["a", "b"]},
    {
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "type": "object",
        "maxProperties": 4,
        "minProperties": 1,
    },
    {
        "anyOf": [
            {"type": "string", "maxLength": 2},
            {"type": "array", "items": {"type": "null"}, "maxItems": 2},
            {"type": "null"},
        ]
    },
    {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 4},
    # what says nothing
    {"type": "array", "items": {"enum": [0, 1]}, "maxItems": 3, "uniqueItems": False},
    {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": I, "maxProperties": 2},
    {"type": "object", "propertyNames": {}, "unevaluatedProperties": True, "maxProperties": 1},
    {"type": "object", "dependentRequired": {}, "dependentSchemas": {"a": {}}, "maxProperties": 1},
    {"type": "boolean", "not": False, "then": {"const": 1}},
    {"type": "boolean", "if": {"const": True}},
    {"type": "array", "items": I, "contains": S, "minContains": 0, "maxItems": 2, "unevaluatedItems": True},
    {"allOf": [{"type": "array", "items": {"type": "null"}, "uniqueItems": False, "maxItems": 2}]},
    {"type": "string", "format": "password", "maxLength": 5},
    {"type": "string", "format": "uri-reference", "maxLength": 5},
    # numbers that no float is
    {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 5},
    {"type": "integer", "exclusiveMinimum": 2**60 - 1, "maximum": 2**60 + 700},
    {"const": 2**60},
    {"type": "number", "minimum": 0, "maximum": 1e300},
]

UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"type": "array", "items": I, "uniqueItems": True}, "uniqueItems"),
    ({"not": {"type": "string"}}, "not"),
    ({"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}}, "if"),
    ({"type": "array", "contains": {"const": 1}}, "contains"),
    ({"type": "object", "propertyNames": {"maxLength": 3}}, "propertyNames"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 1}, "`minimum`"),
    ({"type": "integer", "minimum": 2**64}, "`minimum`"),
    ({"const": {"a": [2**53 + 1]}}, "`const`"),
    ({"enum": [1, 12345678901234567890]}, "`enum`"),
    ({"items": {"multipleOf": 2**53 + 1}}, "`multipleOf`"),
    ({"type": "integer", "multipleOf": -3}, "`multipleOf`"),
    ({"oneOf": [{"properties": {"k": I}}, {"properties": {"k": S}}]}, "`oneOf`"),
    ({"not": {"uniqueItems": False}}, "not"),
    ({"type": "object", "propertyNames": {"enum": ["a"]}}, "propertyNames"),
    ({"if": {"type": "object"}, "then": {"required": ["a"]}}, "if"),
    ({"$ref": "https://example.com/schema.json"}, "example.com"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, ""),
    ({"type": "string", "pattern": "(?=a)b"}, "look-ahead"),
    ({"$ref": "#"}, "no text at all"),
    ({"allOf": [{"anyOf": [{"minimum": i}, {"maximum": -i}]} for i in range(14)]}, "too large"),
    ({"type": "integer", "multipleOf": 982451653}, "fuel"),
]


JSON_GBNF = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}   # as llama.cpp has it
"""

GRAMMARS: list[tuple[str, str | None]] = [
    ('root ::= "yes" | "no"', "yes|no"),
    ('root ::= [a-c]{3} [0-9]+ "!"?', "[a-c]{3}[0-9]+!?"),
    ('root ::= [a-z]{1,4} "x" "é"', "[a-z]{1,4}xé"),  # a lexeme of its own would swallow the x
    ('root ::= ("ab" | [a-z] "bc")+', "(ab|[a-z]bc)+"),
    (
        'root ::= item ("," item)* # end\nitem ::= [^,\\n\\]"]\n    [0-9]{2,3}',
        '[^,\\n\\]"][0-9]{2,3}(,[^,\\n\\]"][0-9]{2,3})*',
    ),
    ('root ::= "\\x41\\u00e9\\U0001F600\\t" .{2}', "Aé😀\t(?s:.{2})"),
    ('root ::= "a" ("b" (("c")))? [\\]-]', "a(bc)?[]-]"),
    ('root ::= "(" root ")" | "x"', None),
    ('root ::= expr\nexpr ::= term ([-+*/] term)*\nterm ::= [0-9]{1,3} | "(" expr ")"', None),
]


HOSTILE: list[tuple[str, str]] = [
    ("root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000, "nested more than 64"),
    ("root ::= " + "(" * 20_000, "nested more than 64"),
    ("root ::= " + " ".join(f"r{i}" for i in range(5000)), "not defined"),
    ("\n".join(f'r{i} ::= "a" r{i + 1}' for i in range(5000)), "more than 4000"),
    ('root ::= "a"{5000}', "more than 2000"),
    ('root ::= (("a"{100}){100}){100}', "more than 2000"),
    ("root ::= root", ""),
    ("root ::= [", "`]` is expected"),
    ('root ::= "a', '`"` is expected'),
    ("root ::= *", "to repeat"),
    ('root ::= "\\q"', "escape"),
    ("root ::= [z-a]", "range"),
    ('other ::= "a"', "no rule named `root`"),
    ("hello", "line 1"),
    ("", "no rule named"),
    ("x" * 200_000, "more than 131072 characters"),
    ("root ::= <|nothing-like-it|>", "no single token"),
]


AMBIGUOUS = [
    'root ::= root root | "a" | ""',
    'root ::= x*\nx ::= y*\ny ::= "a"*',
    'root ::= (("a"?)*)* x\nx ::= x x | "b" | "bb" | x',
    'root ::= e\ne ::= e e | e "+" e | "(" e ")" | [a-z]* | [a-z]+ [a-z]+ | e',
    "root ::= (.* .* .* .* .*){1,50}",
]


FUNCTIONS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "name": "get_weather",
        "parameters": obj(
            {"city": {"enum": ["Paris", 'Br"ügge']}, "days": {"type": "integer", "minimum": 1, "maximum": 9}}
        ),
    },
    "turn_on": {"name": "turn_on", "parameters": {"$ref": "#/$defs/x", "$defs": {"x": obj({"id": I})}}},
    "stop": {"name": "stop"},
}
