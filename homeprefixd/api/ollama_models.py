"""Ollama's dialect, what there is: `/api/version`, `/api/tags`, `/api/ps`, `/api/show`, and the greeting at `/`."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from .. import __version__
from ..errors import ModelError, NotFoundError
from ..frames.worker import ModelInfo
from ..last_loads import LastLoad
from ..models.file_facts import FileFacts
from . import fields
from . import reply_shapes as shape
from .conversation import missing
from .errors import json_response, read_body
from .keys import BACKEND, IDENTITY, LAST_LOADS
from .ollama_reply import time_text
from .operation import Operation

API_VERSION = "0.12.6"
"""Of Ollama, whose API this follows: clients ask for it to know what they may use."""

GREETING = "Ollama is running"

FOREVER = "2318-01-01T00:00:00Z"
"""When a model leaves memory that stays until the daemon ends."""

logger = logging.getLogger(__name__)

_READING = 1.0
"""Seconds that a list of models may read in their files, each of which is read once: the next list tells of more."""

_LATEST = ":latest"
_QUANTIZATION = re.compile(r"\b(I?Q\d\w*|T?Q\d_\w+|B?F16|F32|MXFP4)\b")


@dataclass(frozen=True)
class Listed:
    """A model as it is listed. `size`: bytes, `created`: Unix time, s; `info`: where it is loaded. `expires`: seconds
    until it is unloaded if nobody asks for it; None: never, or it is in use.
    """

    alias: str
    path: str
    size: int
    created: int
    info: ModelInfo | None
    expires: float | None


def listed(request: web.Request) -> list[Listed]:
    """All models, loaded or not."""
    known = request.app[BACKEND].known()
    return [Listed(one.alias, one.path, one.size, one.created, one.info, one.expires) for one in known]


class ShowBody(msgspec.Struct):
    """`POST /api/show`; `name` is what `model` was called before."""

    model: str | None = None
    name: str | None = None


def resolve(request: web.Request, name: str | None, *, usable: bool = True) -> str:
    """The alias that `model` means, as `Backend.resolve` has it; clients of Ollama may add ":latest"."""
    backend = request.app[BACKEND]
    try:
        return backend.resolve(name, usable=usable)
    except NotFoundError:
        if name is None or not name.endswith(_LATEST):
            raise
        return backend.resolve(name.removesuffix(_LATEST), usable=usable)


def _count_text(count: int) -> str:
    """135M, 7.2B."""
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.0f}M"


def _details(path: str, info: ModelInfo | FileFacts | None) -> dict[str, Any]:
    found = (_QUANTIZATION.search(info.description) if info else None) or _QUANTIZATION.search(path.upper())
    return {
        "parent_model": "",
        "format": "gguf",
        "family": info.arch if info else "",
        "families": [info.arch] if info else [],
        "parameter_size": _count_text(info.n_params) if info else "",
        "quantization_level": found[0] if found else "unknown",
    }


def _entry(model: Listed, info: ModelInfo | None, what: ModelInfo | FileFacts | None) -> dict[str, Any]:
    """`info`: of this or its last load. `what`: what is known of it."""
    return {
        "name": model.alias,
        "model": model.alias,
        "modified_at": time_text(model.created),
        "size": model.size,
        "digest": str(info.namespace.get("model_sha256", "")) if info else "",
        "details": _details(model.path, what),
    }


async def version(request: web.Request) -> web.Response:
    """`GET /api/version`."""
    return json_response({"version": API_VERSION, "homeprefixd": __version__})


async def tags(request: web.Request) -> web.Response:
    """`GET /api/tags`: the models that can be asked. None is loaded for it."""
    models = listed(request)
    last = await _last_loads(request, [model for model in models if model.info is None])
    until = time.monotonic() + _READING
    entries = []
    for model in models:
        remembered = last.get(model.alias)
        info = model.info or (remembered.info if remembered is not None else None)
        facts = await _facts(request, model.alias) if time.monotonic() < until else None
        entries.append(_entry(model, info, facts or info))
    return json_response({"models": entries})


async def _facts(request: web.Request, alias: str) -> FileFacts | None:
    """What its file says; None if it cannot be read."""
    try:
        return await request.app[BACKEND].file_facts(alias)
    except (ModelError, NotFoundError) as error:
        logger.info("of the file of %s nothing can be shown: %s", alias, error.message)
        return None


async def ps(request: web.Request) -> web.Response:
    """`GET /api/ps`: those in memory."""
    now = request.app[IDENTITY].clock()

    def leaves(model: Listed) -> str:
        return FOREVER if model.expires is None else time_text(now + model.expires)

    return json_response(
        {
            "models": [
                {
                    **_entry(model, model.info, model.info),
                    "expires_at": leaves(model),
                    "size_vram": 0,
                    "context_length": model.info.n_ctx,
                }
                for model in listed(request)
                if model.info is not None
            ]
        }
    )


async def show(request: web.Request) -> web.Response:
    """`POST /api/show`: what clients adapt to. No model is loaded for it: some ask for all in turn, to list them.

    None is an error, not one that cannot be used either, or VS Code lists no model at all.
    """
    body = fields.decode(await read_body(request), ShowBody, frozenset({"verbose", "system", "template", "options"}))
    name = body.model or body.name
    if not name:
        raise missing("model")
    alias = resolve(request, name, usable=False)
    model = next(one for one in listed(request) if one.alias == alias)
    facts = await _facts(request, alias)
    if facts is None:
        return json_response(_shown(model, None, 0))
    n_ctx = facts.n_ctx
    if model.info is not None:
        n_ctx = model.info.n_ctx
    elif not facts.ctx_is_set and (last := await _last_loads(request, [model])):
        n_ctx = last[alias].info.n_ctx
    return json_response(_shown(model, facts, n_ctx))


async def _last_loads(request: web.Request, models: list[Listed]) -> dict[str, LastLoad]:
    """What is remembered of those models, by alias."""
    loads = request.app.get(LAST_LOADS)
    if loads is None or not models:
        return {}
    return await asyncio.to_thread(loads.recall, [(model.alias, Path(model.path)) for model in models])


def _shown(model: Listed, facts: FileFacts | None, n_ctx: int) -> dict[str, Any]:
    """`facts`: None where its file cannot be read. `n_ctx`: tokens that one request may use."""
    what = facts or model.info
    able = capabilities(facts.template if facts else "")
    figures: dict[str, Any] = {
        "general.architecture": what.arch if what else "unknown",
        "general.basename": model.alias,  # what VS Code calls it
    }
    if what is not None:
        figures |= {
            "general.parameter_count": what.n_params,
            f"{what.arch}.context_length": n_ctx or what.n_ctx,
            f"{what.arch}.embedding_length": what.n_embd,
            f"{what.arch}.vocab_size": what.n_vocab,
        }
    return {
        "modelfile": f"FROM {model.alias}\n",
        "parameters": "",
        "template": facts.template if facts else "",
        "details": _details(model.path, what),
        "model_info": figures,
        "capabilities": ["embedding"] if facts and facts.only_embeds else able,
        "modified_at": time_text(model.created),
    }


def capabilities(template: str) -> list[str]:
    """What the model can, as its chat template tells."""
    found = ["completion"]
    if re.search(r"\btools\b", template):
        found.append("tools")
    if re.search(r"<think>|\benable_thinking\b|\breasoning_(content|effort)\b", template):
        found.append("thinking")
    return found


def routes() -> list[web.RouteDef]:
    return [
        web.get("/api/version", version),
        web.get("/api/tags", tags),
        web.get("/api/ps", ps),
        web.post("/api/show", show),
    ]


_operation = partial(Operation, dialect="Ollama", error=shape.OllamaError)

OPERATIONS = (
    _operation("GET", "/api/version", "The version of Ollama's API", reply=shape.OllamaVersion, key=False),
    _operation("GET", "/api/tags", "The models", reply=shape.OllamaModels),
    _operation("GET", "/api/ps", "The models in memory", reply=shape.OllamaModels),
    _operation("POST", "/api/show", "About a model", ShowBody, shape.OllamaShown),
)
