"""What was asked and how it went: `/cache/records`, `/cache/explain/{id}`, `/cache/overview`, `/cache/events`.

The page and `homeprefixd top` show nothing that these do not give. Guarded as all of `/cache` is.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import msgspec
from aiohttp import web

from .. import __version__
from ..config_file import by_hand, rule_lines
from ..errors import NotFoundError, RequestError
from .errors import encode, json_response
from .keys import APPLY_RULE, BACKEND, CONFIG, RECORDS
from .operation import EVENTS, Operation
from .record_file import without_text
from .records import Record, Records, first_token_ms
from .sse import EventStream
from .store_figures import store_figures

DEFAULT_LIMIT = 50
MAX_LIMIT = 10_000

FASTEST = 0.4
"""Seconds between two events of `/cache/events` at least."""

SLOWEST = 3.0
"""Seconds after which one comes though no request has changed: the tiers may have."""

_RUNNING = 1.0  # seconds between events while requests run: their replies grow without a word


_OPTIONAL = {"/models/details": "models", "/cache/pin": "pin", "/cache/warm": "warm"}
"""Routes of other rooms that the page uses where they are there."""


def shown(record: Record) -> dict[str, Any]:
    """A record for lists: without text of prompts."""
    built: dict[str, Any] = msgspec.to_builtins(without_text(record))
    return built


def _limit(request: web.Request) -> int:
    text = request.query.get("limit", str(DEFAULT_LIMIT))
    if not (text.isascii() and text.isdigit() and len(text) < 9 and 1 <= int(text) <= MAX_LIMIT):
        raise RequestError(f"`limit` must be a whole number from 1 to {MAX_LIMIT}.", param="limit", code="out_of_range")
    return int(text)


async def records(request: web.Request) -> web.Response:
    """`GET /cache/records?limit=`: the last requests, newest first, and those that run."""
    kept = request.app[RECORDS]
    running = [shown(record) for record in kept.running.values()]
    return json_response({"running": running, "records": [shown(record) for record in kept.newest(_limit(request))]})


def _record(request: web.Request) -> Record:
    """The one that a path names. Raises NotFoundError."""
    name = request.match_info["id"]
    kept = request.app[RECORDS]
    record = kept.find(name)
    if record is None:
        known = "no request was answered yet" if name == "last" else f"of the last {len(kept.recent)} requests none is"
        raise NotFoundError(f"There is no record {name[:80]!r}: {known}.", param="id", code="unknown_record")
    return record


async def explain(request: web.Request) -> web.Response:
    """`GET /cache/explain/{id}`: the record of a request and why it did not reuse more; `last` is the last one.

    `lines`: the rule that would help, as a configuration that has nothing of it has it. `outdated`: why that rule is
    not applied any more, in a sentence; "" if nothing speaks against it.
    """
    record = _record(request)
    found = record.explanation
    lines = rule_lines(found.rule, found.setting or "on", found.app) if found is not None and found.rule else []
    told = {"record": shown(record), "explanation": msgspec.to_builtins(found), "lines": lines}
    return json_response({**told, "outdated": _outdated(request.app[RECORDS], record)})


def _outdated(kept: Records, record: Record) -> str:
    """Why a record's rule must not be applied any more; "" if nothing speaks against it."""
    newer = kept.corrected(record)
    if newer is None:
        return ""
    return f"By what was asked since then this rule is not the right one any more: see the request {newer.id}."


async def apply(request: web.Request) -> web.Response:
    """`POST /cache/explain/{id}/apply`: put the rule that an explanation proposes in force, and keep it if possible."""
    record = _record(request)
    explanation = record.explanation
    if explanation is None or not explanation.rule:
        raise RequestError("There is no rule that would help here.", param="id", code="no_rule")
    outdated = _outdated(request.app[RECORDS], record)
    if outdated:
        raise RequestError(outdated, param="id", code="outdated")
    setting, app = explanation.setting or "on", explanation.app
    use = request.app.get(APPLY_RULE)
    if use is None:
        raise RequestError(
            "This daemon cannot change its settings. Before you start it again with a configuration file,"
            f" {by_hand(explanation.rule, setting, app)}",
            code="not_supported",
        )
    done = await use(explanation.rule, setting, app)
    told = {"rule": explanation.rule, "setting": setting, "app": app, "file": done.file, "reason": done.reason}
    return json_response(told)


async def overview(request: web.Request) -> web.Response:
    """`GET /cache/overview`: everything that the page shows, once."""
    return json_response(_overview(request.app, await _store(request.app), after=0))


async def events(request: web.Request) -> web.StreamResponse:
    """`GET /cache/events`: the same as server-sent events, `recent` with what is new since the last one only."""
    app = request.app
    kept = app[RECORDS]
    last, looked = 0, 0.0
    store: dict[str, Any] | None = None
    with EventStream(request, app[CONFIG].keep_alive) as stream, kept.watch() as changed:
        await stream.start()
        while True:
            changed.clear()
            if time.monotonic() >= looked + SLOWEST:  # the store looks at each of its blocks to answer
                store, looked = await _store(app), time.monotonic()
            state = _overview(app, store, after=last)
            last = max([last, *(record["number"] for record in state["recent"])])
            await stream.send(b"data: " + encode(state) + b"\n\n")
            if state["daemon"].get("state") == "stopping":
                break
            await asyncio.sleep(FASTEST)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_RUNNING if kept.running else SLOWEST):
                    await changed.wait()
        await stream.end()
    return stream.response


def _paths(app: web.Application) -> set[str]:
    return {resource.canonical for resource in app.router.resources()}


async def _store(app: web.Application) -> dict[str, Any] | None:
    """Figures of the tiers; None while the store is away."""
    stats = await store_figures(app)
    if stats is None:
        return None
    return {key: stats.get(key) for key in ("hot", "warm", "queue", "writes")}


def _overview(app: web.Application, store: dict[str, Any] | None, after: int) -> dict[str, Any]:
    kept: Records = app[RECORDS]
    return {
        "now": time.time(),
        "version": __version__,
        "can": sorted(
            [*(name for path, name in _OPTIONAL.items() if path in _paths(app)), *["rules"] * (APPLY_RULE in app)]
        ),
        "daemon": app[BACKEND].status(),
        "store": store,
        "today": msgspec.to_builtins(kept.today()),
        "first_ms": {
            "cold": first_token_ms(kept.recent, warm=False),
            "warm": first_token_ms(kept.recent, warm=True),
        },
        "apps": [msgspec.to_builtins(found) for found in kept.apps()],
        "running": [shown(record) for record in kept.running.values()],
        "recent": [shown(record) for record in kept.newest(DEFAULT_LIMIT, after)],
    }


def routes() -> list[web.RouteDef]:
    return [
        web.get("/cache/records", records),
        web.get("/cache/explain/{id}", explain),
        web.post("/cache/explain/{id}/apply", apply),
        web.get("/cache/overview", overview),
        web.get("/cache/events", events),
    ]


OPERATIONS = (
    Operation("GET", "/cache/records", "The last requests"),
    Operation("GET", "/cache/overview", "What the page shows"),
    Operation("GET", "/cache/events", "The same, as it changes", media=EVENTS),
    Operation("GET", "/cache/explain/{id}", "Why a request did not reuse more"),
    Operation("POST", "/cache/explain/{id}/apply", "Use the rule that would help"),
)
