"""Which texts a schema's grammar takes, compiled with a vocabulary of bytes: none that the schema's reader refuses."""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Iterator
from decimal import Context, Decimal
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from homeprefixd.chat.forcing import json_rule
from homeprefixd.engine.limits import parser_limits

BYTES = LLTokenizer("byte")
LONG = Context(prec=1000)


class Grammar:
    def __init__(self, schema: dict[str, Any]) -> None:
        text = '%llguidance {"no_forcing": true}\nstart: ' + json_rule(schema)
        self._matcher = LLMatcher(BYTES, LLMatcher.grammar_from_lark(text), log_level=0, limits=parser_limits())
        assert not self._matcher.is_error(), self._matcher.get_error()

    def takes(self, text: str) -> bool:
        """As a whole reply."""
        data = list(text.encode())
        return self._matcher.validate_tokens(data) == len(data) and self._ends(data)

    def _ends(self, data: list[int]) -> bool:
        matcher = self._matcher.deep_copy()
        return matcher.consume_tokens(data) and matcher.is_accepting()


@pytest.mark.parametrize(
    "pattern", [r"^\W$", r"^[^\w]$", r"^[\W]$", r"^[^a\w]$", r"^[^\W]$", r"^\w$", r"^\D$", r"^\S$"]
)
def test_a_class_takes_nothing_that_python_or_ecma_does_not(pattern: str) -> None:
    grammar = Grammar({"type": "string", "pattern": pattern})
    taken = 0
    for char in [*map(chr, range(32, 0x600)), *"€앐①²Ⅷ\u203f\u200d\u3000\u2028朙\U0001d7d8\U0001f600\ufeff"]:
        if grammar.takes(json.dumps(char, ensure_ascii=False)):
            taken += 1
            assert re.search(pattern, char), ascii(char)
            assert re.search(pattern, char, re.ASCII), ascii(char)
    assert taken >= 30


def days() -> Iterator[str]:
    for year in ("0001", "0004", "0100", "0400", "1900", "1996", "2000", "2023", "2024", "2100", "9999"):
        for month in range(14):
            for day in range(33):
                yield f"{year}-{month:02}-{day:02}"


def is_date(text: str) -> bool:
    try:
        datetime.date.fromisoformat(text)
    except ValueError:
        return False
    return True


def test_dates_are_those_of_the_calendar() -> None:
    date, moment = (Grammar({"type": "string", "format": name}) for name in ("date", "date-time"))
    for text in days():
        assert date.takes(f'"{text}"') is is_date(text), text
        assert moment.takes(f'"{text}T23:59:59Z"') is is_date(text), text
    assert not date.takes('"0000-08-10"')
    both = Grammar({"type": "string", "format": "date", "pattern": "^2023-02-2.$"})
    assert both.takes('"2023-02-28"')
    assert not both.takes('"2023-02-29"')
    assert not both.takes('"2024-02-28"')


def test_what_only_a_reference_makes_a_schema_is_read_as_one() -> None:
    grammar = Grammar({"$ref": "#/components/dates/0", "components": {"dates": [{"type": "string", "format": "date"}]}})
    assert grammar.takes('"2024-02-29"')
    assert not grammar.takes('"2023-02-29"')


@pytest.mark.parametrize("text", ["00:00:00Z", "23:59:59.123456+23:59", "12:00:00-00:30"])
def test_times(text: str) -> None:
    assert Grammar({"format": "time"}).takes(f'"{text}"')
    assert Grammar({"format": "date-time"}).takes(f'"2024-02-29T{text}"')


@pytest.mark.parametrize("text", ["12:00:60Z", "23:59:60Z", "24:00:00Z", "12:00:00", "12:00:00z", "12:00:00+24:00"])
def test_times_that_no_clock_shows(text: str) -> None:
    assert not Grammar({"type": "string", "format": "time"}).takes(f'"{text}"')
    assert not Grammar({"type": "string", "format": "date-time"}).takes(f'"2024-02-29T{text}"')
    assert not Grammar({"type": "string", "format": "time", "pattern": "^[12]"}).takes(f'"{text}"')


@pytest.mark.parametrize(
    ("schema", "texts"),
    [
        ({"properties": {"\u6719": {"type": "integer"}}}, ['{"\\u6719":false}']),
        ({"properties": {"a": {}}, "required": ["a"], "minProperties": 2}, ['{"a":1,"\\u0061":2}']),
        ({"patternProperties": {"^x": {"type": "integer"}}}, ['{"\\u0078":"s"}']),
        ({"properties": {"\x1f": {"type": "integer"}}}, ['{"\\u001F":"s"}', '{"\\u001f":"s"}']),
        ({"properties": {"\x7f": {"type": "integer"}}}, ['{"\\u007f":"s"}', '{"\x7f":"s"}']),
        ({"properties": {"a\n/": {"type": "integer"}}}, ['{"a\\u000a/":"s"}', '{"a\\n\\/":"s"}', '{"a\\n/":"s"}']),
    ],
    ids=lambda value: ascii(value)[:50],
)
def test_a_name_is_written_in_one_way(schema: dict[str, Any], texts: list[str]) -> None:
    grammar = Grammar({"type": "object", **schema})
    assert not [text for text in texts if grammar.takes(text)]
    assert Grammar({"type": "object", "properties": {"\x1f\n": {"const": 1}}}).takes('{"\\u001f\\n":1}')
    assert grammar.takes(json.dumps({**dict.fromkeys(schema.get("properties", {}), 1), "xé": 7}, ensure_ascii=False))


@pytest.mark.parametrize(
    "bound", [0, 1, -1, 0.1, 0.3, 1e-7, -2.5, 7, 1e10, 123456789.123, 99999999999999, 10**14, 2**53]
)
@pytest.mark.parametrize("key", ["exclusiveMinimum", "exclusiveMaximum"])
def test_a_number_that_is_read_keeps_an_exclusive_bound(key: str, bound: float) -> None:
    sign = 1 if key == "exclusiveMinimum" else -1
    grammar = Grammar({"type": "number", key: bound})
    near = [bound, math.nextafter(bound, sign * math.inf), bound + sign * 1e-5, bound + sign, bound + sign * 1e-15]
    taken = 0
    for value in near:
        for digits in (20, 40, 400):
            text = f"{LONG.add(Decimal(value), Decimal((sign < 0, (1,), -digits))):f}"
            if grammar.takes(text):
                taken += 1
                assert float(text) * sign > bound * sign, text
    assert taken
    assert not grammar.takes(f"{bound:.30f}")
    assert not grammar.takes(f"{bound:.400f}"[:-1] + "1")


@pytest.mark.parametrize("bound", [0.9999999999999999, 0.1234567890123456, 1.0000000000000002])
def test_a_bound_of_many_digits_is_kept(bound: float) -> None:
    upper, lower = Grammar({"type": "number", "maximum": bound}), Grammar({"type": "number", "minimum": bound})
    assert upper.takes(str(bound - 1e-10))
    assert lower.takes(str(bound + 1e-10))
    assert not upper.takes(str(bound + 1e-15))
    assert not lower.takes(str(bound - 1e-15))
    assert bound >= 1 or not upper.takes("1")
