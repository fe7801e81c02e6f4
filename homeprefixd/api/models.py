"""What this server is, which models it has, and whether they can be used: `/`, `/v1/models`, `/health`.

Models are loaded and unloaded here by hand, too: `/models/load` and `/models/unload`, which are administration.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import msgspec
from aiohttp import web

from .. import __version__
from ..errors import UnavailableError
from ..last_loads import LastLoad, described
from ..models.backend import Backend, KnownModel
from . import fields, page
from . import reply_shapes as shape
from .access import is_stranger
from .anthropic_reply import CLIENTS_HEADER, model_object, models_object
from .errors import json_response, read_body
from .fields import Number
from .keys import BACKEND, LAST_LOADS
from .ollama_models import GREETING
from .operation import PLAIN, Operation, both
from .origin import GUARD

MAX_KEEP_ALIVE = 1e9  # s

_STATUS = {"ok": "loaded", "loading": "loading", "unloaded": "unloaded", "error": "failed"}
"""As llama-server calls them."""


class ModelBody(msgspec.Struct):
    """`keep_alive`: seconds that it stays loaded unused, this time; negative: for ever."""

    model: Annotated[str, msgspec.Meta(min_length=1)]
    keep_alive: Number = None


def _model(known: KnownModel) -> dict[str, Any]:
    shown = {
        "id": known.alias,
        "object": "model",
        "created": known.created,
        "owned_by": "homeprefixd",
        "status": {"value": _STATUS[known.state]},
    }
    info = known.info
    if info is not None:
        shown["meta"] = {
            "n_vocab": info.n_vocab,
            "n_ctx": info.n_ctx,
            "n_ctx_train": info.n_ctx_train,
            "n_embd": info.n_embd,
            "n_params": info.n_params,
            "size": info.size,
        }
    return shown


def _details(known: KnownModel, last: LastLoad | None = None) -> dict[str, Any]:
    """For those who administrate. `last`: what it was when it was loaded last, where it is not now."""
    info = known.info or (last.info if last is not None else None)
    return {
        **_model(known),
        "as_of": None if known.info is not None or last is None else last.at,
        "path": known.path,
        "bytes": known.size,
        "progress": known.progress,
        "reason": known.reason,
        "pinned": known.pinned,
        "memory": known.memory,
        "requests": known.requests,
        "expires": known.expires,
        **described(info),
    }


def base_of(backend: Backend, alias: str) -> str:
    """The model itself where `alias` is one with an adapter."""
    return next((known.of or alias for known in backend.known() if known.alias == alias), alias)


def _known(request: web.Request, alias: str) -> KnownModel:
    """Raises UnavailableError if it has gone this moment."""
    for known in request.app[BACKEND].known():
        if known.alias == alias:
            return known
    raise UnavailableError(f"the model {alias} is gone", retry_after=1)


async def models(request: web.Request) -> web.Response:
    """`GET /v1/models`. 503 while the only model loads, as llama-server has it. Anthropic's clients get their form."""
    backend = request.app[BACKEND]
    known = backend.known()
    status = backend.status()
    if status.get("state") not in ("ok", "no model") and not any(model.info for model in known):
        raise _unavailable(status)
    if CLIENTS_HEADER in request.headers:
        return json_response(models_object([model_object(model.alias, model.created) for model in known]))
    return json_response({"object": "list", "data": [_model(model) for model in known]})


async def model(request: web.Request) -> web.Response:
    """`GET /v1/models/{id}`. 404 for an unknown one, 503 while it loads. One that cannot be used is told of, too."""
    backend = request.app[BACKEND]
    known = _known(request, backend.resolve(request.match_info["id"], usable=False))
    if known.info is None and known.state == "loading":
        raise _unavailable({"state": known.state, "reason": known.reason})
    if CLIENTS_HEADER in request.headers:
        return json_response(model_object(known.alias, known.created))
    return json_response(_model(known))


async def details(request: web.Request) -> web.Response:
    """`GET /models/details`: all models, with what is known of each: path, memory, namespace, and
    its names with an adapter.

    Of one that is not loaded, as it was loaded last; `as_of` says when that was (Unix time), else it is null.
    """
    every = request.app[BACKEND].known()
    found = [known for known in every if not known.of]
    loads = request.app.get(LAST_LOADS)
    unloaded = [(known.alias, Path(known.path)) for known in found if known.info is None]
    last = await asyncio.to_thread(loads.recall, unloaded) if loads is not None and unloaded else {}
    return json_response(
        {
            "models": [
                {
                    **_details(known, last.get(known.alias)),
                    "with_adapters": [one.alias for one in every if one.of == known.alias],
                }
                for known in found
            ]
        }
    )


async def load(request: web.Request) -> web.Response:
    """`POST /models/load`: load a model; the reply comes when it is loaded, at once if it is already."""
    body = fields.decode(await read_body(request), ModelBody)
    keep_alive = fields.number("keep_alive", body.keep_alive, -MAX_KEEP_ALIVE, MAX_KEEP_ALIVE)
    await request.app[BACKEND].load(body.model, keep_alive)
    known = next((k for k in request.app[BACKEND].known() if k.alias == body.model), None)
    return json_response({"success": True, **({"model": _details(known)} if known is not None else {})})


async def unload(request: web.Request) -> web.Response:
    """`POST /models/unload`. `unloaded` is false where requests run: it goes when the last of them ends."""
    body = fields.decode(await read_body(request), ModelBody)
    return json_response({"success": True, "unloaded": await request.app[BACKEND].unload(body.model)})


def _reason(status: dict[str, Any]) -> str:
    """What `/health` says; the words for loading are llama-server's, which clients compare."""
    return "Loading model" if status.get("state") == "loading" else str(status.get("reason") or status.get("state"))


def _unavailable(status: dict[str, Any]) -> UnavailableError:
    return UnavailableError(_reason(status), retry_after=1)


async def health(request: web.Request) -> web.Response:
    """`GET /health`: 200 when requests are served (or none ever will be, without a model), else 503."""
    status = request.app[BACKEND].status()
    state, message = status.get("state"), _reason(status)
    if is_stranger(request):  # a reason may name files
        message = message if state == "loading" else str(state)
        status = {}
    elif not request.app[GUARD].is_known_to_clients(request):  # what others ask for is not for a stranger's page
        status = {name: status[name] for name in ("progress", "reason") if name in status}
    if state in ("ok", "no model"):
        return json_response({**status, "status": state, "version": __version__})
    error = {"code": 503, "message": message, "type": "unavailable_error"}
    return json_response({"error": error, **status, "status": state}, 503, {"Retry-After": "1"})


async def root(request: web.Request) -> web.Response:
    """`GET /`: what is this? For a browser, the page; for programs that take a text, what Ollama's clients look for."""
    if page.is_wanted(request):
        return page.response()
    accepted = request.headers.get("Accept", "*/*")
    if "application/json" not in accepted or "text/plain" in accepted or "*/*" in accepted:  # axios names all three
        return web.Response(text=GREETING)
    return json_response(
        {
            "name": "homeprefixd",
            "version": __version__,
            "description": "A llama.cpp server whose long prompts cost nothing the second time.",
            "api": ["/v1/models", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat", "/health"],
            "description_of_the_api": "/openapi.json",
            "admin": ["/cache/stats", "/cache/prefixes", "/cache/purge", "/models/load", "/models/unload", "/metrics"],
        }
    )


def routes() -> list[web.RouteDef]:
    return [
        web.get("/", root),
        web.get("/health", health),
        web.get("/v1/health", health),
        web.get("/v1/models", models),
        web.get("/models", models),
        web.get("/models/details", details),
        web.post("/models/load", load),
        web.post("/models/unload", unload),
        web.get("/v1/models/{id:.+}", model),
        web.get("/models/{id:.+}", model),
    ]


OPERATIONS = (
    Operation("GET", "/", "What this is; plain text unless JSON or HTML is asked for", media=PLAIN, key=False),
    *both(Operation("GET", "/health", "Can requests be served?", reply=shape.Health, key=False)),
    *both(Operation("GET", "/models", "The models", reply=shape.Models)),
    *both(Operation("GET", "/models/{id}", "One model", reply=shape.Model)),
    Operation("GET", "/models/details", "All of each model"),
    Operation("POST", "/models/load", "Load a model", ModelBody),
    Operation("POST", "/models/unload", "Unload a model", ModelBody),
)
