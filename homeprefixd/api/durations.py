"""Durations in bodies: a number of seconds, or "90m", "30d"."""

from __future__ import annotations

import re

from ..errors import RequestError
from . import fields
from .fields import Number

_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}
_AGE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*(s|min|m|h|d|w)", re.ASCII)


def seconds(name: str, value: Number | str, most: float) -> float | None:
    """Field `name` in seconds, more than 0 and at most `most`; None stays None. Raises RequestError."""
    if isinstance(value, str):
        match = _AGE.fullmatch(value.strip())
        if match is None:
            raise RequestError(
                f"`{name}` must be a number of seconds, or a number with s, m, h, d or w, as in '30d'.", param=name
            )
        value = float(match[1]) * _UNITS[match[2]]
    return fields.number(name, value, 0, most, open_low=True)
