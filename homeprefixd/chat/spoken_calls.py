"""Tool calls in Python's syntax and in Gemma's braces. Each whole text at once."""

from __future__ import annotations

import ast
import re
from typing import Any

from .tags import Call, value_of
from .values import json_text

MAX_CODE = 1 << 16
"""Characters of calls in Python's syntax that are looked at."""

_BRACES = re.compile(r"\s*call:\s*([\w.\-]{1,128})\s*(?=\{)")
_BARE = re.compile(r"[^,{}\[\]:]+")
_SPACE = re.compile(r"\s*")
_DEEPEST = 64  # levels of braces


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
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []


def _python_call(node: ast.expr) -> Call:
    """Raises ValueError, TypeError, RecursionError."""
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
    json_text(arguments)  # sets, bytes and infinite numbers have no form there
    return target.id, arguments


def arguments_of_braces(body: str, quote: str) -> Call | None:
    """`call:name{key:<escape>text<escape>,other:1}`, `quote` standing around texts; None if it is anything else."""
    found = _BRACES.match(body)
    if found is None:
        return None
    try:
        value, end = _Braces(body, quote).value(found.end(), 0)
    except (ValueError, RecursionError):
        return None
    return (found[1], value) if isinstance(value, dict) and not body[end:].strip() else None


class _Braces:
    """A text with values in braces. Methods take where something begins, and return also where it ends."""

    def __init__(self, text: str, quote: str) -> None:
        self._text, self._quote = text, quote

    def value(self, at: int, depth: int) -> tuple[Any, int]:
        """Raises ValueError."""
        if depth > _DEEPEST:
            raise ValueError("nested too deeply")
        text, at = self._text, self._space(at)
        if text.startswith(self._quote, at):
            begin = at + len(self._quote)
            end = self._find(self._quote, begin)
            return text[begin:end], end + len(self._quote)
        if text.startswith("{", at):
            return self._members(at + 1, depth)
        if text.startswith("[", at):
            return self._items(at + 1, depth)
        found = _BARE.match(text, at)
        if found is None:
            raise ValueError("no value")
        return value_of(found[0].strip()), found.end()

    def _members(self, at: int, depth: int) -> tuple[dict[str, Any], int]:
        text = self._text
        members: dict[str, Any] = {}
        at = self._space(at)
        while not text.startswith("}", at):
            if text.startswith(self._quote, at):
                key, at = self.value(at, depth)
                at = self._space(at)
                if not text.startswith(":", at):
                    raise ValueError("a key without a value")
            else:
                begin, at = at, self._find(":", at)
                key = text[begin:at]
            members[key.strip().strip('"')], at = self.value(at + 1, depth + 1)
            at = self._separator(at)
        return members, at + 1

    def _items(self, at: int, depth: int) -> tuple[list[Any], int]:
        items: list[Any] = []
        at = self._space(at)
        while not self._text.startswith("]", at):
            item, at = self.value(at, depth + 1)
            items.append(item)
            at = self._separator(at)
        return items, at + 1

    def _separator(self, at: int) -> int:
        at = self._space(at)
        return self._space(at + 1) if self._text.startswith(",", at) else at

    def _space(self, at: int) -> int:
        found = _SPACE.match(self._text, at)
        return at if found is None else found.end()

    def _find(self, mark: str, at: int) -> int:
        found = self._text.find(mark, at)
        if found < 0:
            raise ValueError(f"no {mark}")
        return found
