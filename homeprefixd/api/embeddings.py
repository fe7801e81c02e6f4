"""OpenAI's dialect, embeddings: `POST /v1/embeddings`. Any model that is loaded can make them."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from aiohttp import web

from ..errors import RequestError
from ..frames.worker import Embed
from . import fields
from .content_parts import checked_content, object_text
from .errors import json_response, read_body
from .fields import Number
from .keys import BACKEND, IDENTITY
from .openai import vocabulary
from .operation import Operation, both

MAX_INPUTS = 2048
"""As OpenAI has it."""

MAX_TEXT = 4 << 20
"""Characters of all inputs together."""

MAX_DIMENSIONS = 1 << 20

Dimensions = Annotated[Number, msgspec.Meta(extra_json_schema={"minimum": 1, "maximum": MAX_DIMENSIONS})]

_IGNORED = frozenset({"user", "encoding_format"})


class EmbeddingsBody(msgspec.Struct):
    input: str | dict[str, Any] | list[str | int | list[str | int] | dict[str, Any]]
    model: str | None = None
    encoding_format: str | None = None
    dimensions: Dimensions = None


def inputs_of(given: str | dict[str, Any] | Sequence[Any]) -> list[str | list[int | str]]:
    """One input or several. One is a text, token ids, both mixed, or an object with a text. Raises RequestError."""
    if isinstance(given, str | dict):
        return [_input(given)]
    if any(isinstance(part, int) for part in given):
        return [_input(given)]
    inputs = [_input(part) for part in given]
    if not inputs:
        raise _wrong()
    check_size(len(inputs), [part for one in inputs for part in ([one] if isinstance(one, str) else one)])
    return inputs


def check_size(count: int, parts: Sequence[str | int]) -> None:
    """Refuse too many inputs, or too much text in all of them. Raises RequestError."""
    if count > MAX_INPUTS or sum(len(part) for part in parts if isinstance(part, str)) > MAX_TEXT:
        raise RequestError(
            f"`input` must have at most {MAX_INPUTS} texts of at most {MAX_TEXT} characters in all: send it in pieces.",
            param="input",
            code="out_of_range",
        )


def _input(given: Any) -> str | list[int | str]:
    if isinstance(given, dict):
        return object_text("input", given)
    if isinstance(given, str) or (isinstance(given, list) and all(isinstance(part, str | int) for part in given)):
        return given
    raise _wrong()


def _wrong() -> RequestError:
    return RequestError(
        "`input` must be a text, token ids, an object with one, or a list of these; not empty.",
        param="input",
        code="wrong_type",
    )


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
            checked_content(given, n_vocab, "input")
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


OPERATIONS = (*both(Operation("POST", "/embeddings", "Texts to vectors", EmbeddingsBody)),)
