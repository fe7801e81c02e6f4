"""Calls and their parameters in tags, found in one pass from left to right, however often a tag begins or never ends.

Expressions here match no more than a tag: all that stands between tags is looked for as plain text. Texts in tags have
no quotation marks, so only a function's schema says whether `7` is a number: `parameters`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from .layout import MINIMAX_MARK
from .values import json_text, json_value

Call = tuple[str, dict[str, Any]]
Part = Call | str
"""Of a text with calls in tags: a call, or what stands between calls."""

Parameters = Callable[[str], Any]
"""The JSON schema of a function's parameters, by its name; None where it is not known."""

Pairs = list[tuple[str, str]]

NAME = re.compile(r"[\w.\-]{1,128}")
_FUNCTION = re.compile(r'<function=([^<>\s"]{1,128})\s{0,16}>')
_INVOKE = re.compile(r'<invoke name="([^"]{1,128})">')
_PARAMETER = re.compile(r"<parameter=([^>\s]{1,256})\s{0,16}>")
_NAMED = re.compile(r'<(param|parameter) name="([^"]{1,256})">')
_DSML = re.compile(r'<｜DSML｜parameter name="([^"]{1,256})"(?: string="(true|false)")?\s{0,16}>')
_M3_TAG = re.compile(rf'{re.escape(MINIMAX_MARK)}<(/?)([^/<>\s"]{{1,256}})(?: name="([^"]{{1,128}})")?>')
_SPACE = re.compile(r"\s*")
_CDATA = "<![CDATA["
_DEEPEST = 16  # levels of tags within tags


class _Mark:
    """Where a text has a mark. Asked from left to right, it reads the text once."""

    def __init__(self, text: str, mark: str) -> None:
        self._text, self._mark, self._found = text, mark, -1

    def after(self, at: int) -> int:
        """The first place from `at` on; the text's length if there is none."""
        if self._found < at:
            found = self._text.find(self._mark, at)
            self._found = len(self._text) if found < 0 else found
        return self._found


def _line(text: str) -> str:
    """Without one line end before and one after."""
    return text.removeprefix("\n").removesuffix("\n")


def _joined(strays: list[str]) -> str:
    return "".join(text for text in strays if text.strip()).strip()


# ---------------------------------------------------------------------------------------------- calls


def calls_of_tags(body: str, whole: bool, parameters: Parameters) -> list[Part]:
    """`<function=name><parameter=key>value</parameter></function>`, as Qwen's coders write, or GLM's
    `name<arg_key>key</arg_key><arg_value>value</arg_value>`.

    `whole`: the text was not cut short, so that a closing tag may be missing.
    """
    name = body.partition("<arg_key>")[0].strip()
    if whole and "<arg_key>" in body and NAME.fullmatch(name):
        pairs, stray = _glm_pairs(body)
        return [(name, typed(pairs, parameters(name))), stray] if pairs else [body]
    return _calls(body, _FUNCTION, "</function>", whole, lambda name, inner: _of_parameters(inner, parameters(name)))


def calls_of_invocations(body: str, parameters: Parameters) -> list[Part]:
    """`<invoke name="name"><parameter name="key">text</parameter></invoke>`, one after the other."""
    return _calls(body, _INVOKE, "</invoke>", False, lambda name, inner: arguments_of_tags(inner, parameters(name)))


def _calls(
    body: str,
    head: re.Pattern[str],
    closing: str,
    open_end: bool,
    read: Callable[[str, str], tuple[dict[str, Any] | None, str]],
) -> list[Part]:
    """`open_end`: the last one may lack its closing tag. `read`: the arguments (None: no call), and other text."""
    parts: list[Part] = []
    close = _Mark(body, closing)
    at = 0
    while tag := head.search(body, at):
        end = close.after(tag.end())
        if end == len(body) and not open_end:
            break
        arguments, stray = read(tag[1], body[tag.end() : end])
        if arguments is None:
            parts.append(body[at : end + len(closing)])
        else:
            parts += [body[at : tag.start()], (tag[1], arguments), stray]
        at = end + len(closing)
    return [*parts, body[at:]]


# ---------------------------------------------------------------------------------------------- parameters


def _of_parameters(inner: str, schema: Any) -> tuple[dict[str, Any] | None, str]:
    """`<parameter=key>value</parameter>`; a closing tag may be missing."""
    pairs: Pairs = []
    close = _Mark(inner, "</parameter>")
    opening = _Mark(inner, "<parameter=")
    strays = []
    at = 0
    while tag := _PARAMETER.search(inner, at):
        strays.append(inner[at : tag.start()])
        end = min(close.after(tag.end()), opening.after(tag.end()))
        pairs.append((tag[1], _line(inner[tag.end() : end])))
        at = end + len("</parameter>") if end == close.after(tag.end()) else end
    strays.append(inner[at:])
    stray = _joined(strays)
    return (None if stray and not pairs else typed(pairs, schema)), stray


def _glm_pairs(body: str) -> tuple[Pairs, str]:
    pairs: Pairs = []
    opening, close = _Mark(body, "<arg_key>"), _Mark(body, "</arg_key>")
    value, value_close = "<arg_value>", _Mark(body, "</arg_value>")
    strays: list[str] = []
    at = begin = opening.after(0)
    while begin < len(body):
        end = close.after(begin)
        space = _SPACE.match(body, min(end + len("</arg_key>"), len(body)))
        start = space.end() if space else len(body)
        if body.startswith(value, start):
            strays.append(body[at:begin])
            stop = value_close.after(start)
            key = body[begin + len("<arg_key>") : end].strip()
            pairs.append((key, body[start + len(value) : stop].strip("\n")))
            at = start = min(stop + len("</arg_value>"), len(body))
        begin = opening.after(start)
    return pairs, _joined([*strays, body[at:]])


def arguments_of_tags(inner: str, schema: Any) -> tuple[dict[str, Any] | None, str]:
    """`<parameter name="key">text</parameter>` or `<param name="key"><![CDATA[text]]></param>`, one after the other.
    None where there is only other text, which comes second."""
    pairs: Pairs = []
    strays: list[str] = []
    closings = {kind: _Mark(inner, f"</{kind}>") for kind in ("param", "parameter")}
    data_ends = {kind: _Mark(inner, f"]]></{kind}>") for kind in closings}
    at = 0
    while tag := _NAMED.search(inner, at):
        strays.append(inner[at : tag.start()])
        begin, closing = tag.end(), f"</{tag[1]}>"
        is_data = inner.startswith(_CDATA, begin) and data_ends[tag[1]].after(begin) < len(inner)
        if is_data:
            end = data_ends[tag[1]].after(begin)
            pairs.append((tag[2], inner[begin + len(_CDATA) : end]))
            at = end + len("]]>") + len(closing)
            continue
        end = closings[tag[1]].after(begin)
        at = end + len(closing)
        if end == len(inner) and (following := _NAMED.search(inner, begin)):
            at = end = following.start()
        pairs.append((tag[2], _line(inner[begin:end])))
    stray = _joined([*strays, inner[at:]])
    return (None if stray and not pairs else typed(pairs, schema)), stray


def arguments_of_dsml(inner: str, schema: Any) -> tuple[dict[str, Any] | None, str]:
    """`<｜DSML｜parameter name="key" string="true">text</｜DSML｜parameter>`, one after the other. `schema`: of all.
    None where there is only other text, which comes second."""
    found: dict[str, Any] = {}
    strays: list[str] = []
    closing = "</｜DSML｜parameter>"
    close = _Mark(inner, closing)
    at = 0
    while tag := _DSML.search(inner, at):
        strays.append(inner[at : tag.start()])
        end = close.after(tag.end())
        at = end + len(closing)
        if end == len(inner) and (following := _DSML.search(inner, tag.end())):
            at = end = following.start()
        key, is_text, text = tag[1], tag[2], inner[tag.end() : end]
        found |= {key: text} if is_text == "true" else typed([(key, text)], None if is_text else schema)
    stray = _joined([*strays, inner[at:]])
    return (None if stray and not found else found), stray


# ---------------------------------------------------------------------------------------------- MiniMax-M3


class _Node:
    """A tag with what is between it and its end, which is at `end`; -1: it has none."""

    def __init__(self, tag: str, name: str, start: int, begin: int) -> None:
        self.tag, self.name, self.start, self.begin = tag, name, start, begin
        self.end = self.stop = -1
        self.inner: list[_Node] = []


def calls_of_trees(body: str, parameters: Parameters) -> list[Part]:
    """MiniMax-M3's: values within values are tags within tags, and lists are tags that are all called `item`."""
    parts: list[Part] = []
    at = 0
    for node in _trees(body):
        if node.tag != "invoke" or not node.name or node.end < 0:
            continue
        pairs = [(inner.tag, _tree_text(inner, body)) for inner in node.inner]
        if not pairs and body[node.begin : node.end].strip():
            continue
        edges = [node.begin, *(edge for inner in node.inner for edge in (inner.start, inner.stop)), node.end]
        stray = _joined([body[edges[i] : edges[i + 1]] for i in range(0, len(edges), 2)])
        parts += [body[at : node.start], (node.name, typed(pairs, parameters(node.name))), stray]
        at = node.stop
    return [*parts, body[at:]]


def _trees(body: str) -> list[_Node]:
    root = _Node("", "", 0, 0)
    stack = [root]
    opened: dict[str, int] = {}
    skipped: dict[str, int] = {}  # tags that lie too deep, which are text
    for found in _M3_TAG.finditer(body):
        tag = found[2]
        if not found[1]:
            if len(stack) > _DEEPEST:
                skipped[tag] = skipped.get(tag, 0) + 1
                continue
            node = _Node(tag, found[3] or "", found.start(), found.end())
            stack[-1].inner.append(node)
            stack.append(node)
            opened[tag] = opened.get(tag, 0) + 1
        elif skipped.get(tag):
            skipped[tag] -= 1
        elif opened.get(tag):
            skipped.clear()
            while True:
                node = stack.pop()
                opened[node.tag] -= 1
                node.end = found.start()
                node.stop = found.end() if node.tag == tag else found.start()
                if node.tag == tag:
                    break
    return root.inner


def _tree_text(node: _Node, body: str) -> str:
    """A value as text: what has tags in it as JSON."""
    return json_text(_tree_value(node, body)) if node.inner else body[node.begin : node.end]


def _tree_value(node: _Node, body: str) -> Any:
    if not node.inner:
        return value_of(body[node.begin : node.end])
    if all(inner.tag == "item" for inner in node.inner):
        return [_tree_value(inner, body) for inner in node.inner]
    return {inner.tag: _tree_value(inner, body) for inner in node.inner}


# ---------------------------------------------------------------------------------------------- types


def typed(pairs: Iterable[tuple[str, str]], schema: Any) -> dict[str, Any]:
    """Arguments, of texts; `schema`: of all of them."""
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
    value = value_of(text)
    if kinds is None or "string" not in kinds:
        return value
    kind = _kind_of(value)
    fits = kind != "string" and (kind in kinds or (kind == "integer" and "number" in kinds))
    return value if fits else text


def value_of(text: str) -> Any:
    """What is no JSON is text; a text needs no quotation marks here."""
    try:
        return json_value(text)
    except (ValueError, RecursionError):
        return text
