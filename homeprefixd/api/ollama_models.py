"""Ollama's dialect, what there is: `/api/version`, `/api/tags`, `/api/ps`, `/api/show`, and the greeting at `/`."""

from __future__ import annotations

import asyncio
import logging
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from .. import __version__
from ..errors import HomeprefixdError, ModelError, NotFoundError
from ..frames.worker import DescribeTemplate, ModelInfo
from ..gguf_header import read_metadata
from . import fields
from . import reply_shapes as shape
from .conversation import missing
from .errors import json_response, read_body
from .keys import BACKEND, IDENTITY
from .ollama_reply import time_text
from .operation import Operation

API_VERSION = "0.12.6"
"""Of Ollama, whose API this follows: clients ask for it to know what they may use."""

GREETING = "Ollama is running"

FOREVER = "2318-01-01T00:00:00Z"
"""When a model leaves memory that stays until the daemon ends."""

_LATEST = ":latest"
_TEMPLATE = "tokenizer.chat_template"
_LONGEST_TEMPLATE = 1 << 20  # bytes
_SHOWN = (
    "general.architecture", "general.parameter_count", ".context_length", ".embedding_length", ".vocab_size",
    ".pooling_type",
)  # fmt: skip
"""Ends of names of metadata that are shown of a model that is not loaded."""
_QUANTIZATION = re.compile(r"\b(I?Q\d\w*|T?Q\d_\w+|B?F16|F32|MXFP4)\b")


logger = logging.getLogger(__name__)


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


def resolve(request: web.Request, name: str | None) -> str:
    """The alias that `model` means; clients of Ollama may add ":latest". Raises as `Backend.resolve`."""
    backend = request.app[BACKEND]
    try:
        return backend.resolve(name)
    except NotFoundError:
        if name is None or not name.endswith(_LATEST):
            raise
        return backend.resolve(name.removesuffix(_LATEST))


def _count_text(count: int) -> str:
    """135M, 7.2B."""
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.0f}M"


def _details(path: str, info: ModelInfo | None) -> dict[str, Any]:
    found = (_QUANTIZATION.search(info.description) if info else None) or _QUANTIZATION.search(path.upper())
    return {
        "parent_model": "",
        "format": "gguf",
        "family": info.arch if info else "",
        "families": [info.arch] if info else [],
        "parameter_size": _count_text(info.n_params) if info else "",
        "quantization_level": found[0] if found else "unknown",
    }


def _entry(model: Listed) -> dict[str, Any]:
    return {
        "name": model.alias,
        "model": model.alias,
        "modified_at": time_text(model.created),
        "size": model.size,
        "digest": str(model.info.namespace.get("model_sha256", "")) if model.info else "",
        "details": _details(model.path, model.info),
    }


async def version(request: web.Request) -> web.Response:
    """`GET /api/version`."""
    return json_response({"version": API_VERSION, "homeprefixd": __version__})


async def tags(request: web.Request) -> web.Response:
    """`GET /api/tags`: the models that can be asked."""
    return json_response({"models": [_entry(model) for model in listed(request)]})


async def ps(request: web.Request) -> web.Response:
    """`GET /api/ps`: those in memory."""
    now = request.app[IDENTITY].clock()

    def leaves(model: Listed) -> str:
        return FOREVER if model.expires is None else time_text(now + model.expires)

    return json_response(
        {
            "models": [
                {
                    **_entry(model),
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
    """`POST /api/show`: what clients adapt to. No model is loaded for it: some ask for all in turn, to list them."""
    body = fields.decode(await read_body(request), ShowBody, frozenset({"verbose", "system", "template", "options"}))
    name = body.model or body.name
    if not name:
        raise missing("model")
    alias = resolve(request, name)
    known = next(one for one in request.app[BACKEND].known() if one.alias == alias)
    about = await _of_loaded(request, alias, known.info) if known.info is not None else None
    if about is None:
        about = await asyncio.to_thread(_of_file, Path(known.path), known.info)
    return json_response(
        {
            "modelfile": f"FROM {alias}\n",
            "parameters": "",
            "template": about.template,
            "details": about.details,
            "model_info": about.model_info,
            "capabilities": about.capabilities,
            "modified_at": time_text(known.created),
        }
    )


@dataclass(frozen=True)
class _About:
    """What is shown of a model, as its worker or its file tells it."""

    template: str
    details: dict[str, Any]
    model_info: dict[str, Any]
    capabilities: list[str]


async def _of_loaded(request: web.Request, alias: str, info: ModelInfo) -> _About | None:
    """None where it cannot be asked: it is just going, or makes embeddings only."""
    try:
        ask = DescribeTemplate(f"ask-{request.app[IDENTITY].token()}")
        template = (await request.app[BACKEND].convert(alias, ask)).text
    except HomeprefixdError:
        return None
    shown = {
        "general.architecture": info.arch,
        "general.parameter_count": info.n_params,
        f"{info.arch}.context_length": info.n_ctx,
        f"{info.arch}.embedding_length": info.n_embd,
        f"{info.arch}.vocab_size": info.n_vocab,
    }
    return _About(template, _details(info.path, info), shown, capabilities(template))


def _of_file(path: Path, info: ModelInfo | None) -> _About:
    """What its header says; of a file that is no GGUF, that nothing is known. Waits for the disk."""
    try:
        found = read_metadata(path, lambda name: name == _TEMPLATE or name.endswith(_SHOWN), _LONGEST_TEMPLATE)
    except ModelError as error:
        logger.info("of a model that is listed nothing can be shown: %s", error.message)
        found = {}
    arch = found.get("general.architecture", "unknown")
    shown = {name: value for name, value in found.items() if name != _TEMPLATE}
    template = str(found.get(_TEMPLATE, ""))
    details = _details(str(path), info)
    if info is None:
        count = found.get("general.parameter_count")
        details |= {
            "family": arch,
            "families": [arch],
            "parameter_size": _count_text(count) if isinstance(count, int) else "",
        }
    can = ["embedding"] if f"{arch}.pooling_type" in found else capabilities(template)
    return _About(template, details, {"general.architecture": arch, **shown}, can)


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
