"""The description of the whole API (OpenAPI 3.1), made from the types that the routes really decode: `/openapi.json`.

A route that is not in `OPERATIONS`, or the other way round, fails a test.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from .. import __version__
from . import (
    admin,
    anthropic,
    embeddings,
    llamacpp,
    llamacpp_completion,
    models,
    ollama,
    ollama_embed,
    ollama_models,
    openai,
    responses,
    transfer,
    warming,
)
from . import reply_shapes as shape
from .errors import encode
from .origin import ADMIN

EVENTS = "text/event-stream"
LINES = "application/x-ndjson"
PLAIN = "text/plain"
JSON = "application/json"


class Operation(msgspec.Struct, frozen=True):
    """What one route takes and answers."""

    method: str
    path: str
    summary: str
    body: type[msgspec.Struct] | tuple[type[msgspec.Struct], ...] | None = None  # several: any of them
    reply: type[msgspec.Struct] | None = None  # None: any JSON, or not JSON
    stream: str = ""  # media type of a reply that comes in pieces, "" where there is none
    media: str = JSON
    query: tuple[str, ...] = ()
    key: bool = True  # is a key asked for, where there are keys?

    @property
    def tag(self) -> str:
        """Which dialect it belongs to."""
        if self.path.startswith("/api/"):
            return "Ollama"
        if self.path.startswith("/v1/messages"):
            return "Anthropic"
        if self.path.startswith(ADMIN):
            return "Administration"
        return "OpenAI and llama.cpp"

    @property
    def bodies(self) -> tuple[type[msgspec.Struct], ...]:
        """What may be sent."""
        if self.body is None:
            return ()
        return self.body if isinstance(self.body, tuple) else (self.body,)

    @property
    def error(self) -> type[msgspec.Struct]:
        """How its errors look."""
        forms: dict[str, type[msgspec.Struct]] = {"Ollama": shape.OllamaError, "Anthropic": shape.AnthropicError}
        return forms.get(self.tag, shape.Error)


def _both(operation: Operation) -> tuple[Operation, Operation]:
    """Under its path, and the same under /v1."""
    return operation, msgspec.structs.replace(operation, path=f"/v1{operation.path}")


_COUNT = "How long a prompt is"
_PROMPTS = (openai.ChatBody, openai.CompletionBody)
"""Bodies of which only the prompt counts."""

OPERATIONS: Sequence[Operation] = (
    Operation("GET", "/", "What this is; plain text unless JSON or HTML is asked for", media=PLAIN, key=False),
    Operation("GET", "/openapi.json", "This description", key=False),
    *_both(Operation("GET", "/health", "Can requests be served?", reply=shape.Health, key=False)),
    *_both(Operation("GET", "/models", "The models", reply=shape.Models)),
    *_both(Operation("GET", "/models/{id}", "One model", reply=shape.Model)),
    *_both(Operation("POST", "/chat/completions", "Chat", openai.ChatBody, shape.ChatCompletion, EVENTS)),
    Operation("POST", "/v1/completions", "Text", openai.CompletionBody, shape.TextCompletion, EVENTS),
    Operation("POST", "/v1/responses", "Chat, item by item", responses.ResponsesBody, shape.Response, EVENTS),
    *_both(Operation("POST", "/chat/completions/input_tokens", _COUNT, openai.ChatBody, shape.PromptTokens)),
    Operation("POST", "/v1/responses/input_tokens", _COUNT, responses.ResponsesBody, shape.PromptTokens),
    Operation("GET", "/v1/responses/{id}", "Always 404: nothing is stored", reply=shape.Response),
    Operation("DELETE", "/v1/responses/{id}", "Always 404: nothing is stored"),
    *_both(Operation("POST", "/embeddings", "Texts to vectors", embeddings.EmbeddingsBody)),
    Operation("GET", "/models/details", "All of each model"),
    Operation("POST", "/models/load", "Load a model", models.ModelBody),
    Operation("POST", "/models/unload", "Unload a model", models.ModelBody),
    *_both(Operation("POST", "/completion", "Text", llamacpp_completion.CompletionBody, stream=EVENTS)),
    Operation("POST", "/completions", "Text", llamacpp_completion.CompletionBody, stream=EVENTS),
    *_both(Operation("POST", "/infill", "What stands between", llamacpp_completion.InfillBody, stream=EVENTS)),
    *_both(Operation("POST", "/tokenize", "Text to tokens", llamacpp.TokenizeBody, shape.Tokens)),
    *_both(Operation("POST", "/detokenize", "Tokens to text", llamacpp.DetokenizeBody, shape.Content)),
    *_both(Operation("POST", "/apply-template", "The prompt of a chat", openai.ChatBody, shape.Prompt)),
    *_both(Operation("GET", "/props", "What clients adapt to", query=("model",))),
    *_both(Operation("GET", "/lora-adapters", "Adapters that `lora` of a request may name", query=("model",))),
    *_both(Operation("GET", "/slots", "Places for running requests", query=("model", "fail_on_no_slot"))),
    Operation("POST", "/v1/messages", "A message", anthropic.MessagesBody, shape.AnthropicMessage, EVENTS),
    Operation("POST", "/v1/messages/count_tokens", _COUNT, anthropic.PromptBody, shape.TokenCount),
    Operation("POST", "/api/chat", "Chat", ollama.ChatBody, shape.OllamaChat, LINES),
    Operation("POST", "/api/generate", "Text", ollama.GenerateBody, shape.OllamaText, LINES),
    Operation("GET", "/api/version", "The version of Ollama's API", reply=shape.OllamaVersion, key=False),
    Operation("GET", "/api/tags", "The models", reply=shape.OllamaModels),
    Operation("GET", "/api/ps", "The models in memory", reply=shape.OllamaModels),
    Operation("POST", "/api/show", "About a model", ollama_models.ShowBody, shape.OllamaShown),
    Operation("POST", "/api/embed", "Texts to vectors", ollama_embed.EmbedBody, shape.OllamaEmbedded),
    Operation("POST", "/api/embeddings", "A text to a vector", ollama_embed.EmbeddingsBody, shape.OllamaEmbedding),
    *(
        Operation("DELETE" if path == "/api/delete" else "POST", path, f"Always 400: {why}")
        for path, why in ollama.ABSENT.items()
    ),
    Operation("GET", "/cache/stats", "Figures of the cache"),
    Operation("GET", "/cache/prefixes", "What is kept", reply=shape.Prefixes, query=("limit", "model")),
    Operation("POST", "/cache/purge", "Remove from every tier", admin.PurgeBody, shape.Purged),
    Operation("POST", "/cache/verify", "Read and check all that is stored", admin.VerifyBody, shape.Verified),
    Operation("POST", "/cache/compact", "Give the disk back what the store's file does not need"),
    Operation("POST", "/cache/warm", "Compute a prompt now", _PROMPTS),
    Operation("POST", "/cache/match", "How much of a prompt is known", _PROMPTS),
    Operation("POST", "/cache/pin", "Keep a prefix", (warming.PinBody, *_PROMPTS)),
    Operation("POST", "/cache/unpin", "Let a prefix be evicted again", (warming.PinBody, *_PROMPTS)),
    Operation("POST", "/cache/export", "A prefix as a file", (warming.PinBody, *_PROMPTS), media=transfer.KIND),
    Operation("POST", "/cache/import", "Take in such a file"),
    Operation("GET", "/cache/records", "The last requests"),
    Operation("GET", "/cache/overview", "What the page shows"),
    Operation("GET", "/cache/events", "The same, as it changes", media=EVENTS),
    Operation("GET", "/cache/explain/{id}", "Why a request did not reuse more"),
    Operation("POST", "/cache/explain/{id}/apply", "Use the rule that would help"),
    *_both(Operation("GET", "/metrics", "For Prometheus", media=PLAIN)),
)

_REFUSALS = ("400", "401", "403", "404", "405", "413", "429", "500", "503")


def document(operations: Sequence[Operation] = OPERATIONS) -> dict[str, Any]:
    """The description, as plain objects."""
    types: dict[type, None] = {}
    for operation in operations:
        for kind in (*operation.bodies, operation.reply, operation.error):
            if kind is not None:
                types[kind] = None
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    known = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation, known)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "homeprefixd",
            "version": __version__,
            "description": "A home AI server whose long prompts cost nothing the second time. Dialects: OpenAI's,"
            " Anthropic's, Ollama's, llama.cpp's. Unknown fields are ignored.",
            "license": {"name": "MIT", "identifier": "MIT"},
        },
        "security": [{}, {"bearer": []}, {"header": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(operation: Operation, known: dict[type, dict[str, Any]]) -> dict[str, Any]:
    schema = {} if operation.reply is None else known[operation.reply]
    content: dict[str, Any] = {operation.media: {"schema": schema}}
    if operation.stream:
        content[operation.stream] = {"schema": {"type": "string"}}
    if operation.path == "/":
        content[JSON] = {"schema": {"type": "object"}}
    refusal = {"description": "A refusal", "content": {JSON: {"schema": known[operation.error]}}}
    described: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{operation.method.lower()}{operation.path}").rstrip("_"),
        "summary": operation.summary,
        "tags": [operation.tag],
        "responses": {"200": {"description": "Well", "content": content}, **dict.fromkeys(_REFUSALS, refusal)},
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", operation.path)
    ] + [{"name": name, "in": "query", "schema": {"type": "string"}} for name in operation.query]
    if parameters:
        described["parameters"] = parameters
    if operation.bodies:
        wanted = [known[body] for body in operation.bodies]
        schema = wanted[0] if len(wanted) == 1 else {"anyOf": wanted}
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
    if not operation.key:
        described["security"] = []
    return described


async def openapi(request: web.Request) -> web.Response:
    """`GET /openapi.json`."""
    return web.Response(body=encode(document()), content_type=JSON)


def routes() -> list[web.RouteDef]:
    return [web.get("/openapi.json", openapi)]
