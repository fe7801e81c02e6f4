"""How long a prompt is, without computing it: OpenAI's `POST /v1/responses/input_tokens`, llama-server's for chats."""

from __future__ import annotations

from aiohttp import web

from ..frames.worker import Generate, TokenizeRequest
from . import fields
from . import reply_shapes as shape
from .errors import json_response, read_body
from .keys import BACKEND, IDENTITY
from .openai import ChatBody, chat_request, vocabulary
from .operation import COUNT, Operation, both
from .responses import ResponsesBody, request_of


async def _counted(request: web.Request, alias: str, generate: Generate) -> web.Response:
    converted = await request.app[BACKEND].convert(alias, TokenizeRequest(generate.rid, generate))
    return json_response({"object": "response.input_tokens", "input_tokens": len(converted.tokens)})


async def chat_tokens(request: web.Request) -> web.Response:
    """`POST /v1/chat/completions/input_tokens`: the body of a chat that is to come."""
    body = fields.decode(await read_body(request), ChatBody)
    alias = request.app[BACKEND].resolve(body.model)
    rid = f"ask-{request.app[IDENTITY].token()}"
    return await _counted(request, alias, chat_request(body, rid, vocabulary(request, alias)))


async def response_tokens(request: web.Request) -> web.Response:
    """`POST /v1/responses/input_tokens`."""
    body = fields.decode(await read_body(request), ResponsesBody)
    alias = request.app[BACKEND].resolve(body.model)
    rid = f"ask-{request.app[IDENTITY].token()}"
    return await _counted(request, alias, request_of(body, rid, vocabulary(request, alias)))


def routes() -> list[web.RouteDef]:
    return [
        web.post("/chat/completions/input_tokens", chat_tokens),
        web.post("/v1/chat/completions/input_tokens", chat_tokens),
        web.post("/v1/responses/input_tokens", response_tokens),
    ]


OPERATIONS = (
    *both(Operation("POST", "/chat/completions/input_tokens", COUNT, ChatBody, shape.PromptTokens)),
    Operation("POST", "/v1/responses/input_tokens", COUNT, ResponsesBody, shape.PromptTokens),
)
