"""The description of the API is that of the routes, and replies are as it says."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from aiohttp.test_utils import TestClient
from scripted_backend import MemoryAdmin, ScriptedBackend

from homeprefixd.api.app import create_app
from homeprefixd.api.openapi import all_operations, document
from homeprefixd.config import ServerConfig
from homeprefixd.frames.worker import Converted

SAMPLES: dict[str, Any] = {
    "/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/chat/completions/input_tokens": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/completions": {"prompt": "x"},
    "/v1/responses/input_tokens": {"input": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "x"}]},
    "/api/chat": {"messages": [{"role": "user", "content": "x"}], "stream": False},
    "/api/generate": {"prompt": "x", "stream": False},
    "/api/show": {"model": "demo"},
    "/api/embed": {"input": "x"},
    "/api/embeddings": {"prompt": ""},
    "/tokenize": {"content": "x"},
    "/detokenize": {"tokens": [1]},
    "/apply-template": {"messages": [{"role": "user", "content": "x"}]},
    "/cache/purge": {"all": True},
    "/cache/verify": {},
}
"""A body for each route that takes one; those under /v1 take the same."""


def test_every_route_is_described_and_no_other(backend: ScriptedBackend, admin: MemoryAdmin) -> None:
    router = create_app(backend, admin, ServerConfig()).router
    routes = {
        (route.method, route.resource.canonical)
        for route in router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    assert {(operation.method, operation.path) for operation in all_operations()} == routes


async def test_it_is_served_and_whole(client: TestClient) -> None:
    served = await (await client.get("/openapi.json")).json()
    assert served == json.loads(json.dumps(document()))
    assert served["openapi"] == "3.1.0"
    identifiers = [one["operationId"] for path in served["paths"].values() for one in path.values()]
    assert len(set(identifiers)) == len(identifiers)
    schemas = served["components"]["schemas"]
    for reference in set(json.dumps(served).split('"#/components/schemas/')[1:]):
        assert reference.split('"')[0] in schemas
    body = served["paths"]["/v1/messages"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "stop_sequences" in schemas[body["$ref"].rsplit("/", 1)[1]]["properties"]


@pytest.mark.parametrize("path", ["/cache/warm", "/cache/match", "/cache/pin", "/cache/unpin", "/cache/export"])
def test_where_a_prompt_counts_a_chat_or_a_text_may_be_sent(path: str) -> None:
    body = document()["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    names = {one["$ref"].rsplit("/", 1)[1] for one in body["anyOf"]}
    properties = [document()["components"]["schemas"][name]["properties"] for name in names]
    assert any("messages" in one for one in properties)
    assert any("prompt" in one and "messages" not in one for one in properties)


@pytest.mark.parametrize(
    "operation", [one for one in all_operations() if one.reply is not None], ids=lambda one: f"{one.method} {one.path}"
)
async def test_replies_are_as_described(client: TestClient, backend: ScriptedBackend, operation: Any) -> None:
    backend.converted = Converted("", "x", tokens=[1], pieces=[b"", b""])
    path = operation.path.replace("{id}", "demo")
    sample = SAMPLES.get(path, SAMPLES.get(path.removeprefix("/v1")))
    reply = await client.request(operation.method, path, json=sample)
    told = operation.error if path == "/v1/responses/demo" else operation.reply
    assert reply.status == (404 if path == "/v1/responses/demo" else 200)
    assert reply.content_type == "application/json"
    msgspec.json.decode(await reply.read(), type=told)
    if operation.body is not None:
        refused = await client.request(operation.method, path, data=b"[]")
        assert refused.status == 400
        msgspec.json.decode(await refused.read(), type=operation.error)
