"""Regular expressions of schemas: what they say to a reader of JSON, and what is handed to the compiler of grammars."""

from __future__ import annotations

import pytest

from homeprefixd.chat.patterns import PatternError, translated


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("^[A-Z]{2}$", "^[A-Z]{2}$"),
        ("^(?:a|b)+?c*d?$", "^(?:a|b)+?c*d?$"),
        ("^(?<year>[0-9]{4,})$", "^(?:[0-9]{4,})$"),
        # what Rust reads as something else
        ("[[:alpha:]]", r"[\x{5b}\x{3a}alpha\x{3a}]\x{5d}"),
        ("[a-z&&[^b]]", r"[a-z\x{26}\x{26}\x{5b}\x{5e}b]\x{5d}"),
        ("[a~~b]", r"[a\x{7e}\x{7e}b]"),
        ("[ --]", r"[\x{20}-\x{2d}]"),
        ("a{b}", r"a\x{7b}b\x{7d}"),
        # escapes
        (r"\x41B\u{43}\cA\t\0", r"ABC\x{1}\x{9}\x{0}"),
        (r"\ud83d\ude00", "\U0001f600"),
        (r"\$\/\-\_", r"\x{24}\x{2f}\x{2d}\x{5f}"),
        (r"[\b\]]", r"[\x{8}\x{5d}]"),
        # where ECMA and Python differ, what fits both
        (r"\d[^\d]", r"[0-9][^\p{Nd}]"),
        (r"[\w]", r"[0-9A-Za-z_]"),
        (".", r"[^\n\r\x{2028}\x{2029}]"),
        (r"\p{L}", r"\p{L}"),
    ],
)
def test_what_is_read_differently_is_written_out(pattern: str, expected: str) -> None:
    assert translated(pattern) == expected


@pytest.mark.parametrize(
    ("pattern", "word"),
    [
        (r"^\x{41}$", r"`\x`"),
        (r"^\a$", r"`\a`"),
        (r"^(?x) a b$", "group"),
        ("(?=a)b", "look-ahead"),
        ("(?<!a)b", "look-behind"),
        (r"(a)\1", "back-reference"),
        (r"(?<n>a)\k<n>", "back-reference"),
        (r"\bword", r"`\b`"),
        ("a*+", "repeats nothing"),
        ("*a", "repeats nothing"),
        ("(+a)", "repeats nothing"),
        ("a{,3}", "{,n}"),
        ("[]a]", "empty class"),
        ("[z-a]", "range"),
        (r"[\d-z]", "range"),
        ("[a", "without an end"),
        ("a\\", "ends with"),
        (r"\ud83d", "half of a character"),
        (r"\u{110000}", "digits"),
        (r"\01", "octal"),
    ],
)
def test_what_cannot_be_kept_is_refused(pattern: str, word: str) -> None:
    with pytest.raises(PatternError) as caught:
        translated(pattern)
    assert word in str(caught.value)
