"""The description of the whole API (OpenAPI 3.1), made from the types that the routes really decode: `/openapi.json`.

A route that no room's `OPERATIONS` has, or the other way round, fails a test.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from .. import __version__
from .errors import encode
from .operation import JSON, Operation
from .origin import ADMIN
from .rooms import rooms

_REFUSALS = ("400", "401", "403", "404", "405", "408", "413", "429", "500", "503")


def all_operations() -> list[Operation]:
    """What every route takes and answers."""
    return [operation for room in rooms() for operation in room.operations]


def document(operations: Sequence[Operation] | None = None) -> dict[str, Any]:
    """The description of all operations, or of these, as plain objects."""
    operations = all_operations() if operations is None else operations
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
        "tags": ["Administration" if operation.path.startswith(ADMIN) else operation.dialect],
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
        described["requestBody"] = {"required": operation.body_needed, "content": {JSON: {"schema": schema}}}
    if not operation.key:
        described["security"] = []
    return described


async def openapi(request: web.Request) -> web.Response:
    """`GET /openapi.json`."""
    return web.Response(body=encode(document()), content_type=JSON)


def routes() -> list[web.RouteDef]:
    return [web.get("/openapi.json", openapi)]


OPERATIONS = (Operation("GET", "/openapi.json", "This description", key=False),)
