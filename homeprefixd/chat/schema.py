"""JSON schemas as llguidance takes them: without what says nothing, and with numbers and patterns that it keeps as they
are.

llguidance refuses keywords that it cannot enforce wherever they stand, reads every number as a float of 64 bits and
every regular expression as one of Rust's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from decimal import ROUND_CEILING, Context, Decimal
from typing import Any, TypeGuard

from ..errors import RequestError
from .keywords import LISTED, NAMED, ONE, VALUES
from .member_names import may_repeat_to_count
from .moments import MOMENTS
from .patterns import PatternError, translated

FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "unknown"}
)
"""Those that are enforced. JSON Schema has all others as a note to the reader, as it has `password` and `int32`."""

_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")

_NOTES = frozenset({"title", "description", "$comment", "default", "examples", "readOnly", "writeOnly", "deprecated"})

_LARGEST = math.nextafter(2.0**63, 0)
"""The float of 64 bits below the first number that llguidance has no bounds for."""

_DIGITS = 15
"""Of a decimal number that is told from all others of as many digits once it is a float of 64 bits."""

_CEILING = Context(prec=_DIGITS, rounding=ROUND_CEILING)
_TINY = 1e-20  # what is more than 0

_NUMBERED = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""What stands in a text of JSON as `\\u001f` or not at all; the grammar has no such escapes."""

_UPPER, _LOWER = ("maximum", "exclusiveMaximum"), ("minimum", "exclusiveMinimum")


def prepared(schema: dict[str, Any] | bool, *, lenient: bool) -> dict[str, Any] | bool:
    """`schema` means what it meant, or a part of it: where bounds lie between floats, or an expression is read in two
    ways. Its depth must be bounded.

    Raises RequestError for numbers, patterns and counts that cannot be kept, or with `lenient` leaves out their
    keywords.
    """
    if not lenient and isinstance(schema, dict) and may_repeat_to_count(schema):
        raise _refused(
            "minProperties",
            "counts members whose names may repeat while a reply is written: name them in `properties` and `required`,"
            " or leave it out",
        )
    return _prepared(schema, lenient)


def _prepared(schema: dict[str, Any] | bool, lenient: bool) -> dict[str, Any] | bool:
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ONE and isinstance(value, dict | bool):
            found[key] = _prepared(value, lenient)
        elif key in LISTED and isinstance(value, list):
            found[key] = [_prepared(one, lenient) for one in value]
        elif key in NAMED and isinstance(value, dict):
            found[key] = {name: _prepared(one, lenient) for name, one in value.items()}
        else:
            found[key] = value if key in VALUES else _referable(value, lenient)
    found = without_idle(found)
    for fit, keys in (
        (_fit_values, ("const", "enum", "multipleOf", *_UPPER, *_LOWER)),
        (_fit_counts, _COUNTS),
        (_fit_patterns, ("pattern", "patternProperties")),
    ):
        try:
            fit(found)
        except RequestError:
            if not lenient:
                raise
            for key in keys:
                found.pop(key, None)
    _write_out_format(found)
    return found


def _referable(value: Any, lenient: bool) -> Any:
    """What stands under a keyword that has no schemas: a `$ref` may make it one all the same."""
    if isinstance(value, list):
        return [_referable(one, lenient) for one in value]
    return _prepared(value, lenient) if isinstance(value, dict) else value


# ---------------------------------------------------------------------------------------------- what says nothing


def without_idle(schema: dict[str, Any]) -> dict[str, Any]:
    """One schema object without keywords that say nothing; those within it are left as they are."""
    found = {key: value for key, value in schema.items() if key not in _IDLE or not _IDLE[key](value)}
    _leave_conditions(found)
    return found


def _is_anything(schema: Any) -> bool:
    return schema is True or (isinstance(schema, dict) and schema.keys() <= _NOTES)


def _is_any_name(schema: Any) -> bool:
    """All names are texts."""
    if not isinstance(schema, dict):
        return schema is True
    kinds = schema.get("type", "string")
    return schema.keys() <= _NOTES | {"type"} and (kinds == "string" or (isinstance(kinds, list) and "string" in kinds))


def _requires_nothing(names: Any) -> bool:
    """Of each property: no other one, or what any object fits."""
    return isinstance(names, dict) and all(value == [] or _is_anything(value) for value in names.values())


_IDLE: dict[str, Callable[[Any], bool]] = {
    "uniqueItems": lambda value: value is False,
    "propertyNames": _is_any_name,
    "unevaluatedProperties": _is_anything,
    "unevaluatedItems": _is_anything,
    "dependentRequired": _requires_nothing,
    "dependentSchemas": _requires_nothing,
    "dependencies": _requires_nothing,
    "not": lambda value: value is False,
    "format": lambda value: isinstance(value, str) and value not in FORMATS,
}
"""Keyword -> does this value of it say nothing?"""


def _leave_conditions(schema: dict[str, Any]) -> None:
    """Without keywords that need another one, or of which every outcome is the same."""
    if "if" not in schema or all(_is_anything(schema.get(key, True)) for key in ("then", "else")):
        for key in ("if", "then", "else"):
            schema.pop(key, None)
    if "contains" in schema and schema.get("minContains") == 0 and "maxContains" not in schema:
        del schema["contains"]
    if "contains" not in schema:
        for key in ("minContains", "maxContains"):
            schema.pop(key, None)


# ---------------------------------------------------------------------------------------------- values


def _fit_values(schema: dict[str, Any]) -> None:
    """Raises RequestError."""
    for key in ("const", "enum"):
        if key not in schema:
            continue
        if (number := _changed(schema[key])) is not None:
            raise _refused(key, f"has {number}, which has more digits than can be kept")
        if any(isinstance(item, str) and _NUMBERED.search(item) for item in _within(schema[key])):
            raise _refused(key, "has a control character that JSON writes only by its number")
    step = schema.get("multipleOf")
    if _is_number(step):
        if step <= 0:
            raise _refused("multipleOf", f"is {step}, and must be more than 0")
        if _changed(step) is not None:
            raise _refused("multipleOf", f"is {step}, which has more digits than can be kept")
    lower = _fit_bounds(schema, *_LOWER, -1)
    upper = _fit_bounds(schema, *_UPPER, 1)
    if lower and upper and schema[_LOWER[0]] > schema[_UPPER[0]]:
        raise _refused(lower, f"and `{upper}` leave no number of {_DIGITS} digits or float of 64 bits between them")


def _fit_bounds(schema: dict[str, Any], key: str, exclusive: str, sign: int) -> str:
    """Makes both kinds of a bound one that includes its number; the keyword it came from, "" if there was none.

    `sign`: 1 of an upper bound. Raises RequestError.
    """
    found = [(_least(key, -sign * schema[key], False), key)] if _is_number(schema.get(key)) else []
    other = schema.get(exclusive)
    if _is_number(other):
        found.append((_least(exclusive, -sign * other, True), exclusive))
    elif other is True and found:  # as it was written up to draft 4
        found = [(_least(key, -sign * schema[key], True), key)]
    if not found:
        return ""
    bound, name = max(found)
    schema.pop(exclusive, None)
    schema[key] = -sign * bound
    return name


def _least(key: str, bound: float, is_exclusive: bool) -> float:
    """The least number from `bound` on, or one step beyond it, of 15 digits; of large ones the least whole float.

    What is written is held against the bound digit by digit. With more digits it could keep an exclusive bound, and be
    read as the bound itself; and the compiler misreads the last digits of longer ones.
    """
    if abs(bound) == math.inf:
        return _above(key, bound)
    if abs(bound) >= 10 ** (_DIGITS - 1):
        return _above(key, math.floor(bound) + 1 if is_exclusive else math.ceil(bound))
    if bound == 0 and is_exclusive:
        return _TINY
    digits = Decimal(repr(bound))
    found = _CEILING.plus(digits)
    if found == digits and is_exclusive:
        found = _CEILING.next_plus(digits)
    return bound if found == digits else float(found)


def _above(key: str, bound: float) -> float:
    """The least number from `bound` on that is a float."""
    if bound > _LARGEST:
        raise _refused(key, "leaves only numbers of more than 64 bits")
    if abs(bound) <= 2**53:
        return bound
    found = -_LARGEST if bound < -_LARGEST else float(bound)
    return int(found if found >= bound else math.nextafter(found, math.inf))


def _changed(value: Any) -> float | None:
    """A number in it that the compiler reads as another: a whole one that no float is, a fraction of many digits."""
    return next((item for item in _within(value) if isinstance(item, int | float) and not _is_kept(item)), None)


def _within(value: Any) -> Iterator[Any]:
    """All in a JSON value that is no list and no object."""
    level = [value]
    while level:
        item = level.pop()
        if isinstance(item, dict):
            level.extend(item.values())
        elif isinstance(item, list):
            level.extend(item)
        else:
            yield item


def _is_kept(number: float) -> bool:
    if isinstance(number, int) or number.is_integer():
        return _is_float(int(number))
    digits = Decimal(repr(number))
    return _CEILING.plus(digits) == digits


def _fit_counts(schema: dict[str, Any]) -> None:
    """Whole ones, which may be written as 2.0. Raises RequestError."""
    for key in _COUNTS:
        count = schema.get(key)
        is_whole = _is_number(count) and count >= 0 and (isinstance(count, int) or count.is_integer())
        if key in schema and not is_whole:
            raise _refused(key, f"must be a whole number of at least 0, not {str(count)[:40]}")
        if isinstance(count, float):
            schema[key] = int(count)


def _fit_patterns(schema: dict[str, Any]) -> None:
    """Raises RequestError."""
    key = "pattern"
    try:
        if isinstance(pattern := schema.get(key), str):
            schema[key] = translated(pattern)
        key = "patternProperties"
        if isinstance(named := schema.get(key), dict):
            schema[key] = {translated(pattern): value for pattern, value in named.items()}
    except PatternError as error:
        raise _refused(key, f"has an expression that {error}") from error
    if isinstance(named, dict) and len(schema[key]) < len(named):
        raise _refused(key, "has the same expression twice")


def _write_out_format(schema: dict[str, Any]) -> None:
    """A moment's format as an expression, beside the schema's own."""
    if not isinstance(format_ := schema.get("format"), str) or format_ not in MOMENTS:
        return
    del schema["format"]
    if "pattern" in schema:
        every = schema.get("allOf")
        schema["allOf"] = [*(every if isinstance(every, list) else []), {"pattern": MOMENTS[format_]}]
    else:
        schema["pattern"] = MOMENTS[format_]


def _is_float(number: int) -> bool:
    try:
        return int(float(number)) == number
    except OverflowError:  # there are whole numbers of any length
        return False


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _refused(key: str, why: str) -> RequestError:
    return RequestError(f"The JSON schema cannot be used: `{key}` {why}.", code="unsupported_schema")
