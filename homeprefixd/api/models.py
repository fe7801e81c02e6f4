"""What this server is, which models it has, and whether they can be used: `/`, `/v1/models`, `/health`."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from .. import __version__
from ..errors import UnavailableError
from ..frames import ModelInfo
from .errors import json_response
from .keys import BACKEND
from .ollama_models import GREETING


def _model(info: ModelInfo, created: int) -> dict[str, Any]:
    meta = {
        "n_vocab": info.n_vocab,
        "n_ctx": info.n_ctx,
        "n_ctx_train": info.n_ctx_train,
        "n_embd": info.n_embd,
        "n_params": info.n_params,
        "size": info.size,
    }
    return {"id": info.alias, "object": "model", "created": created, "owned_by": "homeprefixd", "meta": meta}


async def models(request: web.Request) -> web.Response:
    """`GET /v1/models`. 503 while nothing is loaded yet, as llama-server has it."""
    backend = request.app[BACKEND]
    loaded = backend.models()
    status = backend.status()
    if not loaded and status.get("state") not in ("ok", "no model"):
        raise _unavailable(status)
    return json_response({"object": "list", "data": [_model(info, backend.created(info.alias)) for info in loaded]})


async def model(request: web.Request) -> web.Response:
    """`GET /v1/models/{id}`. 404 for an unknown one, 503 while it loads."""
    backend = request.app[BACKEND]
    alias = backend.resolve(request.match_info["id"])
    for info in backend.models():
        if info.alias == alias:
            return json_response(_model(info, backend.created(alias)))
    raise _unavailable(backend.status())


def _reason(status: dict[str, Any]) -> str:
    """What `/health` says; the words for loading are llama-server's, which clients compare."""
    return "Loading model" if status.get("state") == "loading" else str(status.get("reason") or status.get("state"))


def _unavailable(status: dict[str, Any]) -> UnavailableError:
    return UnavailableError(_reason(status), retry_after=1)


async def health(request: web.Request) -> web.Response:
    """`GET /health`: 200 when requests are served (or none ever will be, without a model), else 503."""
    status = request.app[BACKEND].status()
    state = status.get("state")
    if state in ("ok", "no model"):
        return json_response({**status, "status": state, "version": __version__})
    error = {"code": 503, "message": _reason(status), "type": "unavailable_error"}
    return json_response({"error": error, **status, "status": state}, 503, {"Retry-After": "1"})


async def root(request: web.Request) -> web.Response:
    """`GET /`: what is this? For programs that ask for nothing special it is what Ollama's clients look for."""
    accept = request.headers.get("Accept", "")
    if "application/json" not in accept and "text/html" not in accept:
        return web.Response(text=GREETING)
    return json_response(
        {
            "name": "homeprefixd",
            "version": __version__,
            "description": "A llama.cpp server whose long prompts cost nothing the second time.",
            "api": ["/v1/models", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat", "/health"],
            "description_of_the_api": "/openapi.json",
            "admin": ["/cache/stats", "/cache/prefixes", "/cache/purge", "/metrics"],
        }
    )


def routes() -> list[web.RouteDef]:
    return [
        web.get("/", root),
        web.get("/health", health),
        web.get("/v1/health", health),
        web.get("/v1/models", models),
        web.get("/models", models),
        web.get("/v1/models/{id}", model),
        web.get("/models/{id}", model),
    ]
