"""OpenAI's dialect, embeddings: `POST /v1/embeddings`. Any model that is loaded can make them."""

from __future__ import annotations

import base64
from array import array
from typing import Any

import msgspec
from aiohttp import web

from ..errors import RequestError
from ..frames import Embed
from . import fields
from .content_parts import check_ids
from .errors import json_response, read_body
from .fields import Number
from .keys import BACKEND, IDENTITY
from .openai import vocabulary

MAX_INPUTS = 2048
"""As OpenAI has it."""

MAX_TEXT = 4 << 20
"""Characters of all inputs together."""

MAX_DIMENSIONS = 1 << 20

_IGNORED = frozenset({"user", "encoding_format"})


class EmbeddingsBody(msgspec.Struct):
    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: str | None = None
    dimensions: Number = None


def inputs_of(given: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """One text, the tokens of one, or several of these. Raises RequestError."""
    if isinstance(given, str):
        return [given]
    texts = [part for part in given if isinstance(part, str)]
    tokens = [part for part in given if isinstance(part, int)]
    if not given or len(tokens) not in (0, len(given)):
        raise RequestError(
            "`input` must be a text, a list of token ids, or a list of texts and such lists; not empty.",
            param="input",
            code="wrong_type",
        )
    inputs: list[str | list[int]] = [tokens] if tokens else [part for part in given if not isinstance(part, int)]
    if len(inputs) > MAX_INPUTS or sum(map(len, texts)) > MAX_TEXT:
        raise RequestError(
            f"`input` must have at most {MAX_INPUTS} texts of at most {MAX_TEXT} characters in all: send it in pieces.",
            param="input",
            code="out_of_range",
        )
    return inputs


def floats(vector: bytes) -> list[float]:
    """The numbers of a vector as the worker sends it."""
    numbers = array("f")
    numbers.frombytes(vector)
    return numbers.tolist()


def _shown(vector: bytes, encoded: bool) -> Any:
    return base64.b64encode(vector).decode() if encoded else floats(vector)


async def embeddings(request: web.Request) -> web.Response:
    """`POST /v1/embeddings`."""
    body = fields.decode(await read_body(request), EmbeddingsBody, _IGNORED)
    if body.encoding_format not in (None, "float", "base64"):
        raise RequestError(
            f"`encoding_format` must be 'float' or 'base64', not {body.encoding_format[:40]!r}.",
            param="encoding_format",
            code="unsupported_value",
        )
    inputs = inputs_of(body.input)
    backend = request.app[BACKEND]
    alias = backend.resolve(body.model)
    n_vocab = vocabulary(request, alias)
    for given in inputs:
        if isinstance(given, list):
            check_ids("input", given, n_vocab)
    dimensions = fields.whole("dimensions", body.dimensions, 1, MAX_DIMENSIONS) or 0
    rid = f"embd-{request.app[IDENTITY].token()}"
    found = await backend.convert(alias, Embed(rid, inputs, dimensions))
    count = sum(found.tokens)
    encoded = body.encoding_format == "base64"
    return json_response(
        {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": _shown(vector, encoded)}
                for index, vector in enumerate(found.vectors)
            ],
            "model": alias,
            "usage": {"prompt_tokens": count, "total_tokens": count},
        }
    )


def routes() -> list[web.RouteDef]:
    """As OpenAI and llama-server spell it."""
    return [web.post("/v1/embeddings", embeddings), web.post("/embeddings", embeddings)]
