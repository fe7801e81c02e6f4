"""From llama.cpp's grammars (GBNF) to rules in llguidance's variant of Lark. Pure text.

llama.cpp's own parser and matcher never see a client's grammar: deep nesting overflows their stack, ambiguous rules
never end, and a token that does not fit ends the process. Sizes are bounded here, before anything is built.

llguidance reads lexemes greedily, so what is not recursive becomes one lexeme, which keeps its meaning exactly. Within
recursive rules a lexeme takes as much as it can: such a grammar may allow less than in llama.cpp, never more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from ..errors import RequestError

MAX_TEXT = 1 << 17
"""Characters of a grammar."""

MAX_DEPTH = 64
"""Parentheses within parentheses, and rules within rules that are not recursive."""

MAX_REPEAT = 2000
"""As in llama.cpp, of one repetition and of those within each other together."""

MAX_RULES = 4000

_NAME = re.compile(r"[A-Za-z0-9-]+")
_SPACE = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_RULE = re.compile(r"([A-Za-z0-9_-]+)[ \t]*::=")
_BOUNDS = re.compile(r"\{\s*(\d{1,9})\s*(?:(,)\s*(\d{1,9})?\s*)?\}")
_TOKEN_ID = re.compile(r"<\[(\d{1,9})\]>")
_TOKEN_TEXT = re.compile(r"<([^<>\n]{1,64})>")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-"}
_HEX = {"x": 2, "u": 4, "U": 8}


@dataclass
class _Text:
    value: str


@dataclass
class _Class:
    ranges: list[tuple[int, int]]
    negated: bool


@dataclass
class _Token:
    ids: str  # as in `<[...]>`


@dataclass
class _Reference:
    name: str


@dataclass
class _Repeat:
    item: _Node
    least: int
    most: int | None


@dataclass
class _Choice:
    """Alternatives, each a sequence."""

    options: list[list[_Node]] = field(default_factory=lambda: [[]])


_Node = _Text | _Class | _Token | _Reference | _Repeat | _Choice


def translate(grammar: str, token_id: Callable[[str], int | None], root: str = "form") -> str:
    """Rules of which `root` stands for the grammar's `root`. `token_id`: a token's text -> its id, None if it is none.

    Raises RequestError, which says where.
    """
    if len(grammar) > MAX_TEXT:
        raise _refusal(f"it has more than {MAX_TEXT} characters")
    return _Writer(_Parser(grammar, token_id).rules()).write(root)


def _refusal(reason: str) -> RequestError:
    return RequestError(f"The grammar cannot be used: {reason}.", param="grammar", code="bad_grammar")


class _Parser:
    """One pass over the text; groups are kept on a stack of its own, so that no nesting ends anything."""

    def __init__(self, text: str, token_id: Callable[[str], int | None]) -> None:
        self._text, self._token_id = text, token_id
        self._at = 0

    def rules(self) -> dict[str, _Choice]:
        rules: dict[str, _Choice] = {}
        self._skip()
        while self._at < len(self._text):
            found = _RULE.match(self._text, self._at)
            if found is None:
                raise self._error("a rule (`name ::= ...`) is expected")
            self._at = found.end()
            self._skip()
            rules[found[1]] = self._choice()
            if len(rules) > MAX_RULES:
                raise _refusal(f"it has more than {MAX_RULES} rules")
        if "root" not in rules:
            raise _refusal("it has no rule named `root`")
        return rules

    def _error(self, what: str) -> RequestError:
        line = self._text.count("\n", 0, self._at) + 1
        near = self._text[self._at : self._at + 20]
        return _refusal(f"line {line}: {what}, not {near!r}" if near else f"line {line}: {what}, but it ends")

    def _skip(self) -> None:
        found = _SPACE.match(self._text, self._at)
        if found is not None:
            self._at = found.end()

    def _choice(self) -> _Choice:
        """Up to where the next rule begins or the text ends."""
        stack = [_Choice()]
        while True:
            char = self._text[self._at : self._at + 1]
            sequence = stack[-1].options[-1]
            if not char or (char not in '"[(' and _RULE.match(self._text, self._at)):
                if len(stack) > 1:
                    raise self._error("`)` is expected")
                return stack[0]
            if char == "|":
                self._at += 1
                stack[-1].options.append([])
            elif char == "(":
                self._at += 1
                if len(stack) > MAX_DEPTH:
                    raise _refusal(f"its parentheses are nested more than {MAX_DEPTH} deep")
                stack.append(_Choice())
            elif char == ")":
                if len(stack) == 1:
                    raise self._error("`)` closes nothing")
                self._at += 1
                group = stack.pop()
                stack[-1].options[-1].append(group)
            elif char in "*+?{":
                self._repeat(sequence)
            else:
                sequence.append(self._item(char))
            self._skip()

    def _repeat(self, sequence: list[_Node]) -> None:
        if not sequence:
            raise self._error("something to repeat is expected")
        char = self._text[self._at]
        least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(char, (0, None))
        if char == "{":
            found = _BOUNDS.match(self._text, self._at)
            if found is None:
                raise self._error("a repetition is `{n}`, `{n,}` or `{n,m}`")
            least = int(found[1])
            most = int(found[3]) if found[3] else None if found[2] else least
            self._at = found.end()
            if most is not None and most < least:
                raise _refusal(f"a repetition goes from {least} to {most}")
            if max(least, most or 0) > MAX_REPEAT:
                raise _refusal(f"something is repeated more than {MAX_REPEAT} times")
        else:
            self._at += 1
        sequence.append(_Repeat(sequence.pop(), least, most))

    def _item(self, char: str) -> _Node:
        if char == '"':
            self._at += 1
            value = []
            while (char := self._text[self._at : self._at + 1]) != '"':
                if not char or char == "\n":
                    raise self._error('`"` is expected')
                value.append(chr(self._character()))
            self._at += 1
            return _Text("".join(value))
        if char == "[":
            return self._class()
        if char == ".":
            self._at += 1
            return _Class([], negated=True)
        if char in "<!":
            return self._token(char)
        found = _NAME.match(self._text, self._at)
        if found is None:
            raise self._error("a text, a class, a rule's name or a group is expected")
        self._at = found.end()
        return _Reference(found[0])

    def _class(self) -> _Class:
        self._at += 1
        negated = self._text.startswith("^", self._at)
        self._at += negated
        ranges: list[tuple[int, int]] = []
        while not self._text.startswith("]", self._at):
            if self._at >= len(self._text):
                raise self._error("`]` is expected")
            low = high = self._character()
            if self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
                self._at += 1
                high = self._character()
            if high < low:
                raise _refusal(f"a class has the range {chr(low)!r} to {chr(high)!r}")
            ranges.append((low, high))
        self._at += 1
        if not ranges and not negated:
            raise _refusal("a class is empty")
        return _Class(ranges, negated)

    def _character(self) -> int:
        """A character or an escape, as a code point."""
        char = self._text[self._at : self._at + 1]
        if not char:
            raise self._error("a character is expected")
        self._at += 1
        if char != "\\":
            return self._checked(ord(char))
        kind = self._text[self._at : self._at + 1]
        self._at += 1
        if kind in _ESCAPES and kind:
            return ord(_ESCAPES[kind])
        digits = self._text[self._at : self._at + _HEX.get(kind, 0)]
        if kind not in _HEX or len(digits) < _HEX[kind] or not re.fullmatch("[0-9a-fA-F]+", digits):
            self._at -= 2
            raise self._error("a known escape is expected")
        self._at += len(digits)
        return self._checked(int(digits, 16))

    def _checked(self, point: int) -> int:
        if point > 0x10FFFF or 0xD800 <= point < 0xE000:
            raise self._error(f"U+{point:X} is no character")
        return point

    def _token(self, char: str) -> _Token:
        negated = char == "!"
        at = self._at + negated
        found = _TOKEN_ID.match(self._text, at)
        if found is not None:
            token: int | None = int(found[1])
        else:
            found = _TOKEN_TEXT.match(self._text, at)
            if found is None:
                raise self._error("a token (`<text>` or `<[id]>`) is expected")
            token = self._token_id(found[0])
            if token is None:
                raise _refusal(f"{found[0]!r} is no single token of this model")
        self._at = found.end()
        return _Token(f"^{token}" if negated else str(token))


class _Writer:
    """Rules that can be one lexeme are named in capitals, the others in small letters, as Lark has it."""

    def __init__(self, rules: dict[str, _Choice]) -> None:
        self._rules = rules
        self._lexemes: dict[str, bool] = {}  # name -> can it be one lexeme?
        self._empty: dict[str, bool] = {}
        self._names: dict[str, str] = {}

    def write(self, root: str) -> str:
        reachable = self._reachable()
        self._classify(reachable)
        for index, name in enumerate(reachable):
            self._names[name] = f"G{index}" if self._lexemes[name] else f"g{index}"
        lines = [f"{self._names[name]}: {self._choice(self._rules[name], self._lexemes[name])}" for name in reachable]
        return "\n".join([f"{root}: {self._names['root']}", *lines])

    def _reachable(self) -> list[str]:
        """Names, `root` first. Raises RequestError for one that is not defined."""
        order, seen, waiting = [], {"root"}, ["root"]
        while waiting:
            name = waiting.pop()
            order.append(name)
            for other in _references(self._rules[name]):
                if other not in self._rules:
                    raise _refusal(f"the rule `{name}` uses `{other}`, which is not defined")
                if other not in seen:
                    seen.add(other)
                    waiting.append(other)
        return order

    def _classify(self, names: list[str]) -> None:
        """A rule is no lexeme if it is recursive, has a token, or uses a rule that is no lexeme."""
        uses = {name: set(_references(self._rules[name])) for name in names}
        lexemes = dict.fromkeys(names, False)
        left = {name for name in names if not _has_token(self._rules[name])}
        depth: dict[str, int] = {}
        weight: dict[str, int] = {}
        while True:
            ready = [name for name in left if all(lexemes[other] for other in uses[name])]
            if not ready:
                break
            for name in ready:
                depth[name] = 1 + max((depth[other] for other in uses[name]), default=0)
                weight[name] = _weight(self._rules[name], weight)
                if depth[name] > MAX_DEPTH:
                    raise _refusal(f"its rules use each other more than {MAX_DEPTH} deep")
                lexemes[name] = True
            left.difference_update(ready)
        for name in names:
            _weight(self._rules[name], weight)
        self._lexemes = lexemes

    def _choice(self, choice: _Choice, lexeme: bool) -> str:
        return " | ".join(" ".join(self._node(node, lexeme) for node in option) or '""' for option in choice.options)

    def _node(self, node: _Node, lexeme: bool) -> str:
        match node:
            case _Text(value):
                return json.dumps(value, ensure_ascii=False)
            case _Class():
                return f"/{_class(node)}/"
            case _Token(ids):
                return f"<[{ids}]>"
            case _Reference(name):
                return self._names[name]
            case _Choice():
                return f"({self._choice(node, lexeme)})"
            case _Repeat(item, least, most):
                inner = self._node(item, lexeme)
                inner = f"({inner})" if isinstance(item, _Repeat) else inner
                if not lexeme and isinstance(item, _Class):
                    return (
                        f"/{_class(item)}{_bounds(least, most)}/" if least else f"(/{_class(item)}{_bounds(1, most)}/)?"
                    )
                return inner + _bounds(least, most)


def _bounds(least: int, most: int | None) -> str:
    if most is None:
        return {0: "*", 1: "+"}.get(least, f"{{{least},}}")
    return "?" if (least, most) == (0, 1) else f"{{{least},{most}}}"


def _class(node: _Class) -> str:
    """As a regular expression."""

    def point(value: int) -> str:
        char = chr(value)
        return char if char.isalnum() and char.isascii() else f"\\x{{{value:X}}}"

    if not node.ranges:
        return "(?s:.)"
    inner = "".join(point(low) if low == high else f"{point(low)}-{point(high)}" for low, high in node.ranges)
    return f"[{'^' if node.negated else ''}{inner}]"


def _parts(choice: _Choice) -> list[_Node]:
    """All nodes, at any depth."""
    found: list[_Node] = []
    waiting: list[_Node] = [node for option in choice.options for node in option]
    while waiting:
        node = waiting.pop()
        found.append(node)
        if isinstance(node, _Repeat):
            waiting.append(node.item)
        elif isinstance(node, _Choice):
            waiting += [inner for option in node.options for inner in option]
    return found


def _references(choice: _Choice) -> list[str]:
    return [node.name for node in _parts(choice) if isinstance(node, _Reference)]


def _has_token(choice: _Choice) -> bool:
    return any(isinstance(node, _Token) for node in _parts(choice))


def _weight(node: _Node, of_rules: dict[str, int]) -> int:
    """How often it repeats what is in it, at most, where that has a bound. Raises RequestError if that is too much."""
    if isinstance(node, _Reference):
        return of_rules.get(node.name, 1)
    if isinstance(node, _Choice):
        return max((_weight(inner, of_rules) for option in node.options for inner in option), default=1)
    if isinstance(node, _Repeat):
        weight = _weight(node.item, of_rules) * max(node.least, node.most or 1, 1)
        if weight > MAX_REPEAT:
            raise _refusal(f"repetitions within each other come to more than {MAX_REPEAT}")
        return weight
    return 1
