"""Ollama's dialect, fields that more than one of its routes takes."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
from aiohttp import web

from ..errors import ForbiddenError, RequestError
from .access import key_of
from .fields import Number

MAX_KEEP_ALIVE = 1e9  # s

_PART = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(ns|us|µs|ms|s|m|h)")
_DURATION = re.compile(rf"[+-]?(?:{_PART.pattern})+")
_SECONDS = re.compile(r"[+-]?\d{1,9}")
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}

KeepAlive = (
    Number
    | Annotated[str, msgspec.Meta(extra_json_schema={"pattern": rf"^\s*({_SECONDS.pattern}|{_DURATION.pattern})\s*$"})]
)
"""As the body's field has it; what a text says is checked by `keep_alive_seconds`."""


def keep_alive_seconds(given: Number | str) -> float | None:
    """`keep_alive`: how long the model stays loaded unused, negative for ever, 0 not at all; None: as is usual.

    Raises RequestError if it is no time.
    """
    if given is None:
        return None
    if isinstance(given, str):
        text = given.strip()
        if _SECONDS.fullmatch(text):
            given = int(text)
        elif _DURATION.fullmatch(text):
            total = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text))
            given = -total if text.startswith("-") else total
        else:
            raise RequestError(
                f"`keep_alive` must be a number of seconds or a time such as '5m', not {given[:40]!r}.",
                param="keep_alive",
            )
    return -1.0 if given < 0 else min(float(given), MAX_KEEP_ALIVE)


def permitted_keep_alive(request: web.Request, given: Number | str, *, prompt: bool) -> float | None:
    """As `keep_alive_seconds`, for whoever asks: how long a model stays is for administrators to say.

    Clients send it along with each request, so that without `admin` it is only not heeded; but a request that has no
    `prompt` and asks for nothing else is refused. Raises RequestError, ForbiddenError.
    """
    seconds = keep_alive_seconds(given)
    key = key_of(request)
    if seconds is None or key is None or key.admin:
        return seconds
    if not prompt and seconds <= 0:
        raise ForbiddenError(
            f"The key {key.name!r} may not {'pin' if seconds else 'unload'} a model: it needs `admin = true` in the"
            " server's file of keys.",
            code="not_admin",
        )
    return None
