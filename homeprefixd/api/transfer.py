"""Prefixes between machines: `POST /cache/export` gives one as a file, `POST /cache/import` takes it.

Bytes go through a pipe between the store and the client, as fast as the slower of the two; none of it stays here.
"""

from __future__ import annotations

import asyncio
import os

from aiohttp import web

from ..errors import HomeprefixdError, RequestError
from ..frames.store import Export
from . import fields
from .errors import json_response, read_body
from .keys import ADMIN
from .operation import Operation
from .warming import PROMPTS, PinBody, one_name, prompt_of

_READ = 256 << 10
KIND = "application/vnd.homeprefixd.prefix"


async def export(request: web.Request) -> web.StreamResponse:
    """`POST /cache/export`: a prefix, named as in `/cache/pin`, as a file for `/cache/import`."""
    body = await read_body(request)
    wanted = fields.decode(body, PinBody)
    asked = one_name(request, wanted, body)
    if asked is None and not (wanted.prefix or wanted.request_id):
        raise RequestError(
            "Say what to export: by `prefix` (an id of /cache/prefixes), `request_id`, or a request with `messages` or"
            " `prompt`.",
            code="missing_field",
        )
    frame = Export(0, prefix=wanted.prefix or "", request=wanted.request_id or "")
    description, tokens = None, list[int]()
    if asked is not None:
        _, description, tokens = await prompt_of(request, *asked)
    ours, theirs = os.pipe()
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(_READ)
    try:
        transport, _protocol = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(ours, "rb", 0)
        )
    except BaseException:
        os.close(theirs)
        raise
    try:
        done = asyncio.create_task(request.app[ADMIN].export(frame, description, tokens, theirs))
        try:
            return await _send(request, reader, done)
        finally:
            done.cancel()
            await asyncio.gather(done, return_exceptions=True)
    finally:
        transport.close()


async def _send(request: web.Request, reader: asyncio.StreamReader, done: asyncio.Task[object]) -> web.StreamResponse:
    """What comes from the pipe. An error that comes before it is the answer; one that comes later cuts it short."""
    piece = await reader.read(_READ)
    if not piece:
        await done  # it says why
        raise HomeprefixdError("the store has written nothing")
    response = web.StreamResponse(headers={"Content-Type": KIND})
    await response.prepare(request)
    while piece:
        await response.write(piece)
        piece = await reader.read(_READ)
    try:
        await done
    except HomeprefixdError:
        response.force_close()
        if request.transport is not None:
            request.transport.abort()
        return response
    await response.write_eof()
    return response


async def import_(request: web.Request) -> web.Response:
    """`POST /cache/import`: take in a file of `/cache/export`. A file of a model that does not run here is refused."""
    theirs, ours = os.pipe()
    loop = asyncio.get_running_loop()
    try:
        transport, protocol = await loop.connect_write_pipe(
            lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader()), os.fdopen(ours, "wb", 0)
        )
    except BaseException:
        os.close(theirs)
        raise
    writer = asyncio.StreamWriter(transport, protocol, None, loop)
    try:
        done = asyncio.create_task(request.app[ADMIN].import_(theirs))
        sending = asyncio.create_task(_receive(request, writer))
        try:
            found = await done  # also where the store has refused it before its end
        finally:
            sending.cancel()
            done.cancel()
            await asyncio.gather(sending, done, return_exceptions=True)
    finally:
        if not transport.is_closing():
            transport.abort()
    return json_response(
        {
            "nodes": found.nodes,
            "tokens": found.tokens,
            "bytes": found.bytes,
            "known_nodes": found.known,
            "kept": found.kept,
            "not_kept": found.not_kept,
        }
    )


async def _receive(request: web.Request, writer: asyncio.StreamWriter) -> None:
    """The body into the pipe, and its end."""
    try:
        async for piece in request.content.iter_chunked(_READ):
            writer.write(piece)
            await writer.drain()
    except OSError:
        return  # the store does not read any more: it says why
    finally:
        writer.close()


def routes() -> list[web.RouteDef]:
    return [web.post("/cache/export", export), web.post("/cache/import", import_)]


OPERATIONS = (
    Operation("POST", "/cache/export", "A prefix as a file", (PinBody, *PROMPTS), media=KIND),
    Operation("POST", "/cache/import", "Take in such a file"),
)
