"""Ollama's dialect, embeddings: `POST /api/embed`, and `/api/embeddings`, which came before it."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from ..frames.worker import Converted, Embed
from . import fields
from . import reply_shapes as shape
from .embeddings import MAX_DIMENSIONS, Dimensions, check_size, floats
from .errors import json_response, read_body
from .keys import BACKEND, IDENTITY
from .ollama_fields import KeepAlive, permitted_keep_alive
from .ollama_models import resolve
from .operation import Operation
from .origin import GUARD

_IGNORED = frozenset({"options"})  # about memory and threads, which are the server's


class EmbedBody(msgspec.Struct):
    """`truncate`: what is too long loses its end, unless it is false. No input only loads the model."""

    model: str | None = None
    input: str | list[str] | None = None
    truncate: bool | None = None
    dimensions: Dimensions = None
    keep_alive: KeepAlive = None


class EmbeddingsBody(msgspec.Struct):
    """The older route: one text."""

    model: str | None = None
    prompt: str | None = None
    keep_alive: KeepAlive = None


async def _kept(request: web.Request, alias: str, keep_alive: KeepAlive, given: object) -> float | None:
    """See to it that the model is loaded for so long; the seconds. Only `given` texts are for any page to send."""
    if keep_alive is not None or not given:
        request.app[GUARD].check_client(request)
    seconds = permitted_keep_alive(request, keep_alive, prompt=bool(given))
    if seconds:
        await request.app[BACKEND].load(alias, seconds)
    return seconds


async def embed(request: web.Request) -> web.Response:
    """`POST /api/embed`."""
    began = time.monotonic()
    body = fields.decode(await read_body(request), EmbedBody, _IGNORED)
    alias = resolve(request, body.model)
    dimensions = fields.whole("dimensions", body.dimensions, 1, MAX_DIMENSIONS) or 0
    seconds = await _kept(request, alias, body.keep_alive, body.input)
    found = Converted("")
    if body.input:
        texts = [body.input] if isinstance(body.input, str) else body.input
        check_size(len(texts), texts)
        rid = f"embd-{request.app[IDENTITY].token()}"
        wanted = Embed(rid, [*texts], dimensions, truncate=body.truncate is not False)
        found = await request.app[BACKEND].convert(alias, wanted)
    elif seconds is None:
        await request.app[BACKEND].load(alias, None)
    if seconds == 0:
        await request.app[BACKEND].unload(alias)
    return json_response(
        {
            "model": alias,
            "embeddings": [floats(vector) for vector in found.vectors],
            "total_duration": round(1e9 * (time.monotonic() - began)),
            "load_duration": 0,
            "prompt_eval_count": sum(found.tokens),
        }
    )


async def embeddings(request: web.Request) -> web.Response:
    """`POST /api/embeddings`."""
    body = fields.decode(await read_body(request), EmbeddingsBody, _IGNORED)
    alias = resolve(request, body.model)
    seconds = await _kept(request, alias, body.keep_alive, body.prompt)
    shown: dict[str, Any] = {"embedding": []}
    if body.prompt:
        rid = f"embd-{request.app[IDENTITY].token()}"
        found = await request.app[BACKEND].convert(alias, Embed(rid, [body.prompt], truncate=True))
        shown = {"embedding": floats(found.vectors[0])}
    if seconds == 0:
        await request.app[BACKEND].unload(alias)
    return json_response(shown)


def routes() -> list[web.RouteDef]:
    return [web.post("/api/embed", embed), web.post("/api/embeddings", embeddings)]


_operation = partial(Operation, dialect="Ollama", error=shape.OllamaError)

OPERATIONS = (
    _operation("POST", "/api/embed", "Texts to vectors", EmbedBody, shape.OllamaEmbedded),
    _operation("POST", "/api/embeddings", "A text to a vector", EmbeddingsBody, shape.OllamaEmbedding),
)
