"""llama-server's own routes beside the chat: text to tokens and back, templates, properties, slots.

Each is answered at `/x` and at `/v1/x`. Prompts of others are never shown, unlike with llama-server's `--slots`.
"""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from .. import __version__
from ..errors import UnavailableError
from ..frames.worker import ApplyTemplate, DescribeTemplate, Detokenize, ModelInfo, Sampling, Tokenize
from . import fields
from . import reply_shapes as shape
from .content_parts import check_ids, checked_content
from .errors import json_response, read_body
from .keys import BACKEND, IDENTITY, RECORDS
from .models import base_of
from .openai import ChatBody, chat_request, vocabulary
from .operation import Operation, both
from .records import Record


class TokenizeBody(msgspec.Struct):
    content: str | list[str | int] = ""
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None
    model: str | None = None


class DetokenizeBody(msgspec.Struct):
    tokens: list[int] = []
    model: str | None = None


def _ask_id(request: web.Request) -> str:
    return f"ask-{request.app[IDENTITY].token()}"


def _piece(data: bytes) -> str | list[int]:
    """A token's text; its bytes where they are no whole characters."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


async def tokenize(request: web.Request) -> web.Response:
    """`POST /tokenize`."""
    body = fields.decode(await read_body(request), TokenizeBody)
    backend = request.app[BACKEND]
    alias = backend.resolve(body.model)
    wanted = Tokenize(
        _ask_id(request),
        content=checked_content(body.content, vocabulary(request, alias)),
        add_special=bool(body.add_special),
        parse_special=body.parse_special is not False,
        with_pieces=bool(body.with_pieces),
    )
    found = await backend.convert(alias, wanted)
    if not wanted.with_pieces:
        return json_response({"tokens": found.tokens})
    pairs = zip(found.tokens, found.pieces, strict=True)
    return json_response({"tokens": [{"id": token, "piece": _piece(piece)} for token, piece in pairs]})


async def detokenize(request: web.Request) -> web.Response:
    """`POST /detokenize`. Bytes that are no characters become U+FFFD."""
    body = fields.decode(await read_body(request), DetokenizeBody)
    backend = request.app[BACKEND]
    alias = backend.resolve(body.model)
    check_ids("tokens", body.tokens, vocabulary(request, alias))
    found = await backend.convert(alias, Detokenize(_ask_id(request), body.tokens))
    return json_response({"content": found.text})


async def apply_template(request: web.Request) -> web.Response:
    """`POST /apply-template`: the prompt that `/chat/completions` would make of the same body."""
    body = fields.decode(await read_body(request), ChatBody)
    backend = request.app[BACKEND]
    alias = backend.resolve(body.model)
    chat = chat_request(body, _ask_id(request), None)
    wanted = ApplyTemplate(chat.rid, chat.messages or [], chat.tools, chat.template_kwargs)
    return json_response({"prompt": (await backend.convert(alias, wanted)).text})


def _info(request: web.Request, alias: str) -> ModelInfo:
    for info in request.app[BACKEND].models():
        if info.alias == alias:
            return info
    raise UnavailableError("Loading model", retry_after=1)


async def _loaded_info(request: web.Request) -> ModelInfo:
    """Of the model that is asked for, which is loaded if it is not."""
    backend = request.app[BACKEND]
    alias = backend.resolve(request.query.get("model"))
    if any(known.alias == alias and known.state == "unloaded" for known in backend.known()):
        await backend.load(alias)
    return _info(request, alias)


async def props(request: web.Request) -> web.Response:
    """`GET /props`: what clients adapt to."""
    backend = request.app[BACKEND]
    info = await _loaded_info(request)
    alias = info.alias
    template = await backend.convert(alias, DescribeTemplate(_ask_id(request)))
    bos, eos = (piece.decode(errors="replace") for piece in template.pieces)
    return json_response(
        {
            "default_generation_settings": {"n_ctx": info.n_ctx, "params": msgspec.to_builtins(Sampling())},
            "total_slots": info.parallel,
            "model_alias": alias,
            "model_path": info.path,
            "modalities": {"vision": False, "audio": False},
            "chat_template": template.text,
            "bos_token": bos,
            "eos_token": eos,
            "build_info": f"homeprefixd {__version__}",
        }
    )


async def slots(request: web.Request) -> web.Response:
    """`GET /slots`: the model's places for running requests, how far each is. With `fail_on_no_slot`: 503 if all are
    taken.
    """
    backend = request.app[BACKEND]
    alias = backend.resolve(request.query.get("model"))
    info = _info(request, alias)
    workers: list[dict[str, Any]] = backend.status().get("workers", [])
    base = base_of(backend, alias)
    running = next((int(worker["requests"]) for worker in workers if worker["alias"] == base), 0)
    if running >= info.parallel and request.query.get("fail_on_no_slot"):
        raise UnavailableError("no slot available", retry_after=1)
    records = request.app[RECORDS].running.values()
    taken = [one for one in records if one.state != "queued" and base_of(backend, one.model) == base]
    return json_response(
        [
            {
                "id": number,
                "n_ctx": info.n_ctx,
                "speculative": False,
                "is_processing": number < running,
                **(_sequence(taken[number]) if number < min(running, len(taken)) else {}),
            }
            for number in range(info.parallel)
        ]
    )


def _sequence(record: Record) -> dict[str, Any]:
    """How far it is, in tokens; who asked and what is not told. `request`, our own: the id of its reply."""
    return {
        "request": record.id,
        "n_prompt_tokens": record.prompt,
        "n_prompt_tokens_processed": max(0, record.done - record.reused),
        "n_prompt_tokens_cache": record.reused,
        "next_token": [{"has_next_token": True, "n_decoded": record.generated, "n_remain": -1}],
    }


async def lora_adapters(request: web.Request) -> web.Response:
    """`GET /lora-adapters`: what `lora` of a request may name, by `id` or `name`. `scale`: where it says nothing."""
    info = await _loaded_info(request)
    return json_response(
        [
            {"id": index, "name": one.id, "path": one.path, "scale": one.scale if one.default else 0.0}
            for index, one in enumerate(info.adapters)
        ]
    )


def routes() -> list[web.RouteDef]:
    """Each with and without `/v1`."""
    return [
        route
        for prefix in ("", "/v1")
        for route in (
            web.post(f"{prefix}/tokenize", tokenize),
            web.post(f"{prefix}/detokenize", detokenize),
            web.post(f"{prefix}/apply-template", apply_template),
            web.get(f"{prefix}/props", props),
            web.get(f"{prefix}/slots", slots),
            web.get(f"{prefix}/lora-adapters", lora_adapters),
        )
    ]


OPERATIONS = (
    *both(Operation("POST", "/tokenize", "Text to tokens", TokenizeBody, shape.Tokens)),
    *both(Operation("POST", "/detokenize", "Tokens to text", DetokenizeBody, shape.Content)),
    *both(Operation("POST", "/apply-template", "The prompt of a chat", ChatBody, shape.Prompt)),
    *both(Operation("GET", "/props", "What clients adapt to", query=("model",))),
    *both(Operation("GET", "/lora-adapters", "Adapters that `lora` of a request may name", query=("model",))),
    *both(Operation("GET", "/slots", "Places for running requests", query=("model", "fail_on_no_slot"))),
)
