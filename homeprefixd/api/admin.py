"""Administration of the cache: `/cache/stats`, `/cache/prefixes`, `/cache/purge`, `/cache/verify`, `/cache/compact`."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
from aiohttp import web

from ..errors import NotFoundError, RequestError
from ..frames.store import LEAST_RATE, Purge
from . import fields
from . import reply_shapes as shape
from .durations import seconds
from .errors import json_response, read_body
from .fields import Number
from .keys import ADMIN, BACKEND, RECORDS
from .operation import Operation
from .records import Records

DEFAULT_LIMIT = 100
MAX_LIMIT = 10_000

_PREFIX = re.compile(r"[0-9a-f]{1,64}", re.ASCII)
DEFAULT_RATE = 100e6
"""Bytes a second that a verification reads, where the request does not say."""

_MAX_RATE = 1e12
_MAX_AGE = 100 * 365 * 86400.0  # s


class PurgeBody(msgspec.Struct):
    """Exactly one of these is set."""

    all: bool | None = None
    prefix: str | None = None
    older_than: Number | str = None
    model: Annotated[str, msgspec.Meta(min_length=1)] | None = None


class VerifyBody(msgspec.Struct):
    """`rate`: bytes a second that are read at most; 0: as fast as it goes."""

    repair: bool | None = None
    rate: Number = None


class CompactBody(msgspec.Struct):
    """Nothing is to be said."""


def purge_request(body: PurgeBody) -> Purge:
    """Checked. Raises RequestError."""
    if body.all is False:
        body.all = None
    given = [name for name in ("all", "prefix", "older_than", "model") if getattr(body, name) is not None]
    if len(given) != 1:
        raise RequestError(
            "Say what to remove by exactly one of `all` (true), `prefix` (an id of /cache/prefixes), `older_than`"
            f" (seconds, or as '30d'), `model`; this has {' and '.join(given) or 'none'}.",
            code="ambiguous_purge",
        )
    if body.prefix is not None and not _PREFIX.fullmatch(body.prefix):
        raise RequestError("`prefix` must be an id from /cache/prefixes: hexadecimal digits.", param="prefix")
    return Purge(
        ticket=0,
        all=bool(body.all),
        prefix=body.prefix or "",
        older_than=seconds("older_than", body.older_than, _MAX_AGE) or 0.0,
        model=body.model or "",
    )


async def stats(request: web.Request) -> web.Response:
    """`GET /cache/stats`: the store's figures, and the daemon's under `daemon`."""
    return json_response({**await request.app[ADMIN].stats(), "daemon": request.app[BACKEND].status()})


async def prefixes(request: web.Request) -> web.Response:
    """`GET /cache/prefixes?limit=&model=`: what is kept, last used first."""
    text = request.query.get("limit", str(DEFAULT_LIMIT))
    if not (text.isascii() and text.isdigit() and len(text) < 9 and 1 <= int(text) <= MAX_LIMIT):
        raise RequestError(f"`limit` must be a whole number from 1 to {MAX_LIMIT}.", param="limit", code="out_of_range")
    found = await request.app[ADMIN].prefixes(int(text), request.query.get("model", ""))
    kept = request.app[RECORDS]
    shown = [{**msgspec.to_builtins(prefix), "app": _app(kept, prefix.request)} for prefix in found.prefixes]
    return json_response({"prefixes": shown, "total": found.total})


def _app(kept: Records, rid: str) -> str:
    """Who sent a request; "" if that is not remembered."""
    record = kept.find(rid) if rid else None
    return record.app if record is not None else ""


async def purge(request: web.Request) -> web.Response:
    """`POST /cache/purge`: remove from every tier."""
    wanted = purge_request(fields.decode(await read_body(request), PurgeBody))
    done = await request.app[ADMIN].purge(wanted)
    if done.error:
        raise NotFoundError(done.error, param="prefix" if wanted.prefix else None)
    return json_response({"nodes": done.nodes, "bytes": done.bytes})


async def verify(request: web.Request) -> web.Response:
    """`POST /cache/verify`: read and check all that is stored; the reply comes at the end."""
    body = fields.decode(await read_body(request), VerifyBody)
    rate = fields.number("rate", body.rate, 0, _MAX_RATE)
    if rate is not None and 0 < rate < LEAST_RATE:
        raise RequestError(
            f"`rate` must be 0 or at least {LEAST_RATE} bytes a second.", param="rate", code="out_of_range"
        )
    done = await request.app[ADMIN].verify(bool(body.repair), DEFAULT_RATE if rate is None else rate)
    names = ("nodes", "bytes", "damaged", "removed", "problems", "seconds", "complete")
    return json_response({name: getattr(done, name) for name in names})


async def compact(request: web.Request) -> web.Response:
    """`POST /cache/compact`: give the disk back what the store's file does not need; the reply comes at the end."""
    fields.decode(await read_body(request) or b"{}", CompactBody)
    done = await request.app[ADMIN].compact()
    return json_response({"before": done.before, "after": done.after})


def routes() -> list[web.RouteDef]:
    return [
        web.get("/cache/stats", stats),
        web.get("/cache/prefixes", prefixes),
        web.post("/cache/purge", purge),
        web.post("/cache/verify", verify),
        web.post("/cache/compact", compact),
    ]


OPERATIONS = (
    Operation("GET", "/cache/stats", "Figures of the cache"),
    Operation("GET", "/cache/prefixes", "What is kept", reply=shape.Prefixes, query=("limit", "model")),
    Operation("POST", "/cache/purge", "Remove from every tier", PurgeBody, shape.Purged),
    Operation("POST", "/cache/verify", "Read and check all that is stored", VerifyBody, shape.Verified),
    Operation("POST", "/cache/compact", "Give the disk back what the store's file does not need"),
)
