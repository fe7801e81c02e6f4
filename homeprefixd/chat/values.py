"""Values as a model writes them, made such that every client can read them as JSON."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn


def whole_text(text: str) -> str:
    """Without lone surrogates, which no UTF-8 has: halves of a character that follow each other are joined, others
    become U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits} is too large")
    return value


_decoder = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite)  # stateless


def json_value(text: str) -> Any:
    """As `json.loads`, but without NaN and infinite numbers. Raises ValueError, RecursionError."""
    return _decoder.decode(text)


def json_text(value: Any) -> str:
    """Raises ValueError, TypeError or RecursionError for what JSON does not have."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def is_object(text: str) -> bool:
    """Is it an object, as JSON?"""
    try:
        return isinstance(json_value(text), dict)
    except (ValueError, RecursionError):
        return False


def finite_scalar(word: str) -> str:
    """A word that stands in JSON outside of texts: null for a number that is none, or is too large."""
    sign = word.lstrip("+-")
    if sign in ("NaN", "Infinity", "nan", "inf"):
        return "null"
    if "e" in sign or "E" in sign:
        try:
            return word if math.isfinite(float(word)) else "null"
        except ValueError:
            return word
    return word
