"""Tool calls that are not JSON: Python's syntax, tags with parameters, Gemma's braces. Each whole text at once.

Texts in tags have no quotation marks, so only a function's schema says whether `7` is a number: `parameters`.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable
from typing import Any

Call = tuple[str, dict[str, Any]]
Parameters = Callable[[str], Any]
"""The JSON schema of a function's parameters, by its name; None where it is not known."""

MAX_CODE = 1 << 16
"""Characters of calls in Python's syntax that are looked at."""

_FUNCTION = re.compile(r"<function=([^>\s]+)\s*>(.*?)(</function>|$)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)\s*>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|$)", re.DOTALL)
_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)(</arg_value>|$)", re.DOTALL)
_NAME = re.compile(r"[\w.\-]{1,128}")
_DSML = re.compile(
    r'<｜DSML｜parameter name="([^"]+)"(?: string="(true|false)")?\s*>(.*?)</｜DSML｜parameter>', re.DOTALL
)
_NAMED = re.compile(
    r'<(param|parameter) name="([^"]+)">(?:<!\[CDATA\[(.*?)\]\]>|\n?(.*?)\n?)</\1>',
    re.DOTALL,
)
_BRACES = re.compile(r"\s*call:\s*([\w.\-]+)\s*(\{.*\})\s*$", re.DOTALL)
_BARE = re.compile(r"[^,{}\[\]:]+")


def calls_of_python(code: str) -> list[Call]:
    """`f(a=1)`, `f.call(a=1)`, `print(f(a=1))` or a list of these; [] if it is anything else. Nothing is run."""
    if len(code) > MAX_CODE:
        return []
    try:
        tree = ast.parse(code.strip())
        nodes: list[ast.expr] = []
        for statement in tree.body:
            if not isinstance(statement, ast.Expr):
                return []
            value = statement.value
            nodes += value.elts if isinstance(value, ast.List) else [value]
        return [_python_call(node) for node in nodes]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _python_call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call):
        raise ValueError("no call")
    target = node.func
    if isinstance(target, ast.Name) and target.id == "print" and len(node.args) == 1 and not node.keywords:
        return _python_call(node.args[0])
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        raise ValueError("arguments without names")
    if isinstance(target, ast.Attribute) and target.attr == "call" and isinstance(target.value, ast.Name):
        target = target.value
    if not isinstance(target, ast.Name):
        raise ValueError("no name")
    arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
    json.dumps(arguments)  # sets and bytes have no form there
    return target.id, arguments


def calls_of_tags(body: str, whole: bool, parameters: Parameters) -> list[Call]:
    """`<function=name><parameter=key>value</parameter></function>`, as Qwen's coders write, or GLM's
    `name<arg_key>key</arg_key><arg_value>value</arg_value>`.

    `whole`: the text was not cut short, so that a closing tag may be missing.
    """
    name = body.partition("<arg_key>")[0].strip()
    if whole and "<arg_key>" in body and _NAME.fullmatch(name):
        pairs = [(key.strip(), text.strip("\n")) for key, text, _ in _PAIR.findall(body)]
        return [(name, _arguments(pairs, parameters(name)))]
    return [
        (found[1], _arguments(_PARAMETER.findall(found[2]), parameters(found[1])))
        for found in _FUNCTION.finditer(body)
        if whole or found[3]
    ]


def arguments_of_dsml(body: str, schema: Any) -> dict[str, Any]:
    """`<｜DSML｜parameter name="key" string="true">text</｜DSML｜parameter>`, one after the other. `schema`: of all."""
    found: dict[str, Any] = {}
    for key, is_text, text in _DSML.findall(body):
        found |= {key: text} if is_text == "true" else _arguments([(key, text)], None if is_text else schema)
    return found


def arguments_of_tags(body: str, schema: Any) -> dict[str, Any]:
    """`<parameter name="key">text</parameter>` or `<param name="key"><![CDATA[text]]></param>`, one after the other."""
    return _arguments([(key, plain or text) for _, key, plain, text in _NAMED.findall(body)], schema)


def _arguments(pairs: Iterable[tuple[str, str]], schema: Any) -> dict[str, Any]:
    properties = schema.get("properties") if isinstance(schema, dict) else None
    known = properties if isinstance(properties, dict) else {}
    return {key: _typed_value(text, _kinds(known.get(key))) for key, text in pairs}


def _kinds(schema: Any) -> frozenset[str] | None:
    """The types that a value may have; None where a schema does not say."""
    if not isinstance(schema, dict):
        return None
    kind = schema.get("type")
    if isinstance(kind, str | list) and kind:
        return frozenset([kind] if isinstance(kind, str) else map(str, kind))
    if isinstance(schema.get("enum"), list):
        return frozenset(_kind_of(value) for value in schema["enum"])
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list):
            each = [_kinds(one) for one in schema[keyword]]
            return None if None in each else frozenset().union(*(one for one in each if one is not None))
    return None


def _kind_of(value: Any) -> str:
    for kind, types in (("boolean", bool), ("null", type(None)), ("string", str), ("object", dict), ("array", list)):
        if isinstance(value, types):
            return kind
    return "integer" if isinstance(value, int) else "number"


def _typed_value(text: str, kinds: frozenset[str] | None) -> Any:
    """What a text stands for: itself, where a text may stand and nothing else that it could be."""
    value = _value(text)
    if kinds is None or "string" not in kinds:
        return value
    kind = _kind_of(value)
    fits = kind != "string" and (kind in kinds or (kind == "integer" and "number" in kinds))
    return value if fits else text


def _value(text: str) -> Any:
    """What is no JSON is text; a text needs no quotation marks here."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def arguments_of_braces(body: str, quote: str) -> Call | None:
    """`call:name{key:<escape>text<escape>,other:1}`, `quote` standing around texts; None if it is anything else."""
    found = _BRACES.match(body)
    if found is None:
        return None
    try:
        value, rest = _braces_value(found[2], quote, 0)
    except (ValueError, RecursionError):
        return None
    return (found[1], value) if isinstance(value, dict) and not rest.strip() else None


def _braces_value(text: str, quote: str, depth: int) -> tuple[Any, str]:
    """The value that begins `text`, and what follows it. Raises ValueError."""
    if depth > 64:
        raise ValueError("nested too deeply")
    text = text.lstrip()
    if text.startswith(quote):
        value, closed, rest = text[len(quote) :].partition(quote)
        if not closed:
            raise ValueError("a text without an end")
        return value, rest
    if text.startswith("{"):
        members: dict[str, Any] = {}
        text = text[1:].lstrip()
        while not text.startswith("}"):
            if text.startswith(quote):
                key, text = _braces_value(text, quote, depth)
                text = text.lstrip()
                if not text.startswith(":"):
                    raise ValueError("a key without a value")
                text = text[1:]
            else:
                key, colon, text = text.partition(":")
                if not colon:
                    raise ValueError("a key without a value")
            members[key.strip().strip('"')], text = _braces_value(text, quote, depth + 1)
            text = text.lstrip().removeprefix(",").lstrip()
        return members, text[1:]
    if text.startswith("["):
        items: list[Any] = []
        text = text[1:].lstrip()
        while not text.startswith("]"):
            item, text = _braces_value(text, quote, depth + 1)
            items.append(item)
            text = text.lstrip().removeprefix(",").lstrip()
        return items, text[1:]
    found = _BARE.match(text)
    if found is None:
        raise ValueError("no value")
    return _value(found[0].strip()), text[found.end() :]
