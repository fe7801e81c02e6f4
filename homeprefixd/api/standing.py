"""Whose a request is and how urgent: what the scheduler needs to be fair. The same for every dialect.

An app is its API key; where no keys are asked for, an address and what it calls itself (`User-Agent`).
"""

from __future__ import annotations

from typing import Literal

import msgspec
from aiohttp import web

from ..errors import RequestError
from ..frames.worker import Generate
from .access import KEYS, key_of

PRIORITY_HEADER = "X-Homeprefixd-Priority"

Priority = Literal["interactive", "normal", "background"]
_PRIORITIES: dict[str, Priority] = {"interactive": "interactive", "normal": "normal", "background": "background"}
_ORDER: list[Priority] = list(_PRIORITIES.values())  # the most urgent first
_TIERS: dict[str, Priority] = {"priority": "interactive", "flex": "background"}
"""OpenAI's `service_tier`; its other values are normal."""

_SIDE_REQUEST = "### Task:"
"""How Open WebUI's prompts for titles, tags, follow-up questions and completions of what is being typed begin."""

_NAME_LETTERS = 200  # of a client's name that are kept: it chooses them


def with_standing(request: web.Request, generate: Generate, service_tier: object) -> Generate:
    """`generate` with its priority, its client and its namespace. Raises RequestError for a priority that there is not.

    The header counts most, then `service_tier`; a side request that nobody waits for is background by itself. A key's
    priority is the most that its requests can have, and what they have unless they say less.
    """
    key = key_of(request)
    given = request.headers.get(PRIORITY_HEADER)
    if given is not None:
        priority = _PRIORITIES.get(given.strip().lower())
        if priority is None:
            raise RequestError(
                f"The header {PRIORITY_HEADER} is {given!r}: it must be {', '.join(_PRIORITIES)}.", code="bad_priority"
            )
    elif isinstance(service_tier, str) and service_tier in _TIERS:
        priority = _TIERS[service_tier]
    else:
        usual = "normal" if key is None or key.priority is None else key.priority
        priority = "background" if _is_side_request(generate) else usual
    if key is None:
        return msgspec.structs.replace(generate, priority=priority, client=_client(request))
    if key.priority is not None:
        priority = _ORDER[max(_ORDER.index(priority), _ORDER.index(key.priority))]
    salt = request.app[KEYS].salt(key, generate.salt)
    return msgspec.structs.replace(generate, priority=priority, client=f"key {key.name}", salt=salt)


def _is_side_request(generate: Generate) -> bool:
    messages = generate.messages or []
    return any(m.role == "user" and (m.content or "").startswith(_SIDE_REQUEST) for m in messages[:2])


def _client(request: web.Request) -> str:
    agent = request.headers.get("User-Agent", "").split(" ", 1)[0]
    agent = agent.encode("utf-8", "surrogateescape").decode("utf-8", "replace")  # headers may have any bytes
    return f"{request.remote or ''} {agent}"[:_NAME_LETTERS]
