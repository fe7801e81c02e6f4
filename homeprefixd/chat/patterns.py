"""Regular expressions of JSON schemas (ECMA-262) in the words of the compiler of grammars, which reads Rust's.

What both read differently is written out: classes, escapes, the point. Where ECMA and Python, with which many readers
check a reply, differ, what comes out matches only what fits both. Knows nothing of schemas.
"""

from __future__ import annotations

import re

_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v", "0": "\0"}

_SPACE = r"\t\n\v\f\r\x20\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"
_MORE_SPACE = rf"{_SPACE}\x{{feff}}\x{{1c}}-\x{{1f}}\x{{85}}"

_WORD = r"\p{Alphabetic}\p{L}\p{M}\p{N}\p{Pc}\x{200c}\x{200d}"
"""What any reader may take for a part of a word. The compiler's own class of words is that of ASCII."""

_CLASSES = {
    "d": ("0-9", r"\p{Nd}"),
    "D": (r"\P{Nd}", "[^0-9]"),
    "w": ("0-9A-Za-z_", _WORD),
    "W": (f"[^{_WORD}]", "[^0-9A-Za-z_]"),
    "s": (_SPACE, _MORE_SPACE),
    "S": (f"[^{_MORE_SPACE}]", f"[^{_SPACE}]"),
}
"""Classes with a letter, as members of a class: what fits them in both readings, and what fits in either."""

_REFERENCES = "123456789k"
_ANY = r"[^\n\r\x{2028}\x{2029}]"
_GROUP = re.compile(r"\((?:\?:|\?<(?![=!])\w+>|\?P<\w+>|(?!\?))")
_LOOK = re.compile(r"\(\?<?[=!]")
_COUNT = re.compile(r"\{\d+(?:,\d*)?\}")
_LETTER = re.compile("[A-Za-z]")
_AT_MOST = re.compile(r"\{,\d+\}")
_PROPERTY = re.compile(r"[pP](?:\{\^?[\w=]+\})")


class PatternError(ValueError):
    """Why an expression cannot be used, as the end of a sentence."""


def translated(pattern: str) -> str:
    """Raises PatternError."""
    return _Translation(pattern).whole()


def _literal(char: str) -> str:
    if char.isascii() and not char.isalnum():
        return f"\\x{{{ord(char):x}}}"
    if "\ud800" <= char <= "\udfff":
        raise PatternError("has half of a character")
    return char


class _Translation:
    def __init__(self, pattern: str) -> None:
        self._text, self._at = pattern, 0

    def whole(self) -> str:
        found: list[str] = []
        repeatable = False  # may a quantifier follow?
        while self._at < len(self._text):
            char = self._text[self._at]
            count = _COUNT.match(self._text, self._at)
            if char in "*+?" or count is not None:
                if not repeatable:
                    raise PatternError(f"repeats nothing at {self._at}")
                found.append(self._take(count[0] if count is not None else char))
                if self._next("?"):
                    found.append("?")
                repeatable = False
                continue
            found.append(self._one(char))
            repeatable = found[-1] not in ("^", "$", "|") and not found[-1].startswith("(")
        return "".join(found)

    def _take(self, text: str) -> str:
        self._at += len(text)
        return text

    def _next(self, text: str) -> bool:
        """Take it, if it is what comes next."""
        found = self._text.startswith(text, self._at)
        self._at += len(text) if found else 0
        return found

    def _one(self, char: str) -> str:
        """Anything but a quantifier."""
        if char == "(":
            return self._group()
        if char == "[":
            return self._class()
        if char == "\\":
            return self._escape()
        if char == "{" and _AT_MOST.match(self._text, self._at):
            raise PatternError("has `{,n}`, which is read in two ways: write `{0,n}`")
        self._at += 1
        if char == ".":
            return _ANY
        return char if char in "^$|)" else _literal(char)

    def _group(self) -> str:
        group = _GROUP.match(self._text, self._at)
        if group is None:
            look = _LOOK.match(self._text, self._at)
            raise PatternError(
                "uses look-ahead or look-behind, which cannot be enforced while a reply is written"
                if look is not None
                else f"has a kind of group that is unknown: {self._text[self._at :][:4]}"
            )
        self._take(group[0])
        return "(" if group[0] == "(" else "(?:"  # names are for references, of which there are none

    def _escape(self) -> str:
        following = self._text[self._at + 1 : self._at + 2]
        if following in _CLASSES and following:
            self._at += 2
            return f"[{_CLASSES[following][0]}]"
        if following in ("b", "B") and following:
            raise PatternError(f"uses `\\{following}`, which cannot be enforced while a reply is written")
        if following in _REFERENCES and following:
            raise PatternError("uses a back-reference, which cannot be enforced while a reply is written")
        single = self._property()
        return single or _literal(self._character())

    def _property(self) -> str:
        found = _PROPERTY.match(self._text, self._at + 1)
        if found is None:
            return ""
        self._at += 1
        return "\\" + self._take(found[0])

    def _character(self) -> str:
        """The one that an escape stands for."""
        self._at += 1
        if self._at == len(self._text):
            raise PatternError("ends with `\\`")
        char = self._take(self._text[self._at])
        if char == "0" and self._text[self._at : self._at + 1].isdigit():
            raise PatternError("has an octal escape")
        if char in _CONTROLS:
            return _CONTROLS[char]
        if char == "x":
            return self._hexadecimal(r"[0-9a-fA-F]{2}", "x")
        if char == "u":
            return self._unicode()
        if char == "c" and _LETTER.match(self._text, self._at):
            return chr(ord(self._take(self._text[self._at])) % 32)
        if char.isalnum():
            raise PatternError(f"has `\\{char}`, which is no escape")
        return char

    def _hexadecimal(self, digits: str, kind: str) -> str:
        found = re.compile(digits).match(self._text, self._at)
        if found is None or (value := int(found[0].strip("{}"), 16)) > 0x10FFFF:
            raise PatternError(f"has `\\{kind}` without its digits")
        self._take(found[0])
        return chr(value)

    def _unicode(self) -> str:
        char = self._hexadecimal(r"[0-9a-fA-F]{4}|\{[0-9a-fA-F]{1,8}\}", "u")
        if "\ud800" <= char <= "\udbff" and self._next("\\u"):
            low = self._hexadecimal("[dD][c-fC-F][0-9a-fA-F]{2}", "u")
            return (char + low).encode("utf-16-le", "surrogatepass").decode("utf-16-le")
        return char

    def _class(self) -> str:
        self._at += 1
        negated = self._next("^")
        if self._text.startswith("]", self._at):
            raise PatternError("has an empty class, which is read in two ways")
        found: list[str] = []
        while not self._next("]"):
            if self._at >= len(self._text):
                raise PatternError("has a class without an end")
            first = self._member(negated)
            ranged = self._text[self._at : self._at + 1] == "-" and self._text[self._at + 1 : self._at + 2] not in (
                "]",
                "",
            )
            if not ranged:
                found.append(_literal(first) if len(first) == 1 else first)
                continue
            self._at += 1
            last = self._member(negated)
            if len(first) != 1 or len(last) != 1 or first > last:
                raise PatternError(f"has a range that is none before {self._at}")
            found.append(f"{_literal(first)}-{_literal(last)}")
        return f"[{'^' if negated else ''}{''.join(found)}]"

    def _member(self, negated: bool) -> str:
        """A single character, or a class as it stands in one of ours."""
        char = self._text[self._at]
        if char != "\\":
            return self._take(char)
        following = self._text[self._at + 1 : self._at + 2]
        if following in _CLASSES and following:
            self._at += 2
            return _CLASSES[following][negated]
        if following == "b":
            self._at += 2
            return "\b"
        return self._property() or self._character()
