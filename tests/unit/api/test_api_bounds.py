"""What one body may hold, in every dialect: nobody else is served while it is taken apart. And what tools must be."""

from __future__ import annotations

import io
import json
import time
from typing import Any

import jsonschema
import pytest
from aiohttp.test_utils import TestClient
from scripted_backend import ScriptedBackend

from homeprefixd.api import fields, openai
from homeprefixd.api.openapi import document
from homeprefixd.config import ServerConfig
from homeprefixd.errors import RequestError

USER = {"role": "user", "content": "a"}
TOO_MANY = fields.MAX_MESSAGES + 1


@pytest.fixture
def config() -> ServerConfig:
    return ServerConfig(max_body=10 << 20, keep_alive=10.0)


def chat(**more: Any) -> dict[str, Any]:
    return {"messages": [USER], **more}


def function(**more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **more}}


def parts(count: int) -> list[Any]:
    return [{"role": "user", "content": [{"type": "text", "text": ""}] * count}]


CHAT, RESPONSES, MESSAGES, OLLAMA = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"
MANY_TOOLS = fields.MAX_TOOLS + 1


async def refusal(client: TestClient, path: str, body: Any) -> str:
    reply = await client.post(path, json=body)
    assert reply.status == 400
    error = (await reply.json())["error"]
    return str(error["message"] if isinstance(error, dict) else error)


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        (CHAT, {"messages": [USER] * TOO_MANY}, "messages"),
        (CHAT, {"messages": parts(fields.MAX_PARTS + 1)}, "messages[0].content"),
        (CHAT, chat(tools=[function()] * MANY_TOOLS), "tools"),
        (CHAT, {"messages": [{**USER, "tool_calls": [{"function": {"name": "f"}}] * MANY_TOOLS}]}, "tool_calls"),
        (CHAT, chat(chat_template_kwargs={"a": [[]] * fields.MAX_VALUES}), "chat_template_kwargs"),
        (CHAT, chat(json_schema={"enum": [1] * fields.MAX_VALUES}), "json_schema"),
        (CHAT, chat(logit_bias=[[1, 0]] * (fields.MAX_BIASES + 1)), "logit_bias"),
        (RESPONSES, {"input": [USER] * TOO_MANY}, "input"),
        (RESPONSES, {"input": "x", "tools": [{"type": "function", "name": "f"}] * MANY_TOOLS}, "tools"),
        (RESPONSES, {"input": parts(fields.MAX_PARTS + 1)}, "input[0].content"),
        (MESSAGES, {"messages": [USER] * TOO_MANY, "max_tokens": 1}, "messages"),
        (MESSAGES, chat(tools=[{"name": "f", "input_schema": {}}] * MANY_TOOLS), "tools"),
        (MESSAGES, chat(system=parts(fields.MAX_PARTS + 1)[0]["content"]), "system"),
        (OLLAMA, {"messages": [USER] * TOO_MANY}, "messages"),
        (OLLAMA, chat(tools=[function()] * MANY_TOOLS), "tools"),
        ("/apply-template", {"messages": [USER] * TOO_MANY}, "messages"),
        ("/v1/messages/count_tokens", {"messages": [USER] * TOO_MANY}, "messages"),
        ("/completion", {"prompt": "x", "response_fields": ["a"] * 257}, "response_fields"),
        ("/completion", {"prompt": "x", "response_fields": ["a/" * 200]}, "response_fields[0]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_lists_have_bounds(
    client: TestClient, backend: ScriptedBackend, path: str, body: dict[str, Any], name: str
) -> None:
    message = await refusal(client, path, body)
    assert f"{name}`" in message
    assert "at most" in message
    assert backend.generations == []


CALL = {"function": {"name": "f", "arguments": {}}}
THOUGHT = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "a" * 400}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (RESPONSES, {"input": [USER] + [{"role": "developer", "content": "a" * 400}] * 9999}),
        (
            RESPONSES,
            {"input": [THOUGHT] * 9999},
        ),
        (RESPONSES, {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}] * 9999}),
        (
            OLLAMA,
            {
                "messages": [{"role": "assistant", "tool_calls": [CALL] * 1000}] * 20
                + [{"role": "tool", "content": "x", "tool_name": "g"}] * 1000
                + [{"role": "tool", "content": "x", "tool_call_id": "call00009"}] * 1000
            },
        ),
    ],
    ids=["system", "thoughts", "calls", "results"],
)
async def test_many_items_cost_no_more_than_their_length(
    client: TestClient, backend: ScriptedBackend, path: str, body: dict[str, Any]
) -> None:
    data = io.BytesIO(json.dumps(body).encode())
    before = time.process_time()
    assert (await client.post(path, data=data, headers={"Content-Type": "application/json"})).status == 200
    assert time.process_time() - before < 1
    assert backend.asked.messages


async def test_as_many_as_a_household_has_are_taken(client: TestClient, backend: ScriptedBackend) -> None:
    tools = [function()] * fields.MAX_TOOLS
    assert (await client.post(CHAT, json={"messages": [USER] * fields.MAX_MESSAGES, "tools": tools})).status == 200
    assert len(backend.asked.messages or ()) == fields.MAX_MESSAGES


def test_a_body_of_millions_of_values_is_no_long_work() -> None:
    """Without care the collector of garbage takes ten times as long as all the rest."""
    body = b'{"messages":[{"role":"user","content":"a"}],"chat_template_kwargs":{"a":[' + b"[]," * 990_000 + b"1]}}"
    before = time.process_time()
    value = fields.decode(body, openai.ChatBody)
    decoding = time.process_time() - before
    before = time.process_time()
    with pytest.raises(RequestError, match="`chat_template_kwargs` must have at most"):
        openai.chat_request(value, "r", None)
    assert time.process_time() - before < 0.5
    assert decoding < 1


@pytest.mark.parametrize(("piece", "count", "word"), [(b"[],", 1_000_001, "lists"), (b"1,", 10_000_001, "values")])
def test_a_body_of_too_many_values_is_not_taken_apart(piece: bytes, count: int, word: str) -> None:
    body = b'{"unknown":[' + piece * count + b"1]}"
    before = time.process_time()
    with pytest.raises(RequestError, match=word):
        fields.decode(body, openai.ChatBody)
    assert time.process_time() - before < 0.3
    assert fields.decode(b'{"messages":[{"role":"user","content":"' + b"a " * 5_000_000 + b'"}]}', openai.ChatBody)


# ---------------------------------------------------------------------------------------------------- tools

NO_OBJECT: list[Any] = [
    {"type": "string"},
    {"const": 5},
    {"type": "array", "maxItems": 0},
    {"enum": [1, "x"]},
    {"type": ["string", "null"]},
    {"$ref": "#/$defs/a", "$defs": {"a": {"type": "string"}}},
    {"anyOf": [{"type": "string"}, {"type": "integer"}]},
    {"oneOf": [{"type": "array"}, {"const": None}]},
    {"allOf": [{"type": "object"}, {"anyOf": [{"type": "array"}]}]},
]


def with_parameters(schema: Any) -> list[tuple[str, dict[str, Any], str]]:
    return [
        (CHAT, chat(tools=[function(parameters=schema)]), "tools[0].function.parameters"),
        (RESPONSES, {"input": "x", "tools": [{"type": "function", "name": "f", "parameters": schema}]},
         "tools[0].parameters"),
        (MESSAGES, chat(max_tokens=5, tools=[{"name": "f", "input_schema": schema}]), "tools[0].input_schema"),
        (OLLAMA, chat(tools=[function(parameters=schema)], stream=False), "tools[0].function.parameters"),
        ("/v1/messages/count_tokens", chat(tools=[{"name": "f", "input_schema": schema}]), "tools[0].input_schema"),
    ]  # fmt: skip


@pytest.mark.parametrize("schema", [*NO_OBJECT, 5], ids=str)
async def test_parameters_are_those_of_an_object(client: TestClient, schema: Any) -> None:
    for path, body, name in with_parameters(schema):
        assert f"`{name}` must be" in await refusal(client, path, body)


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": ["null", "object"]},
        {"anyOf": [{}]},
        {"properties": {}},
        {"enum": [1, {}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object"}}},
        {"anyOf": [{"type": "string"}, {"type": "object"}]},
        {"allOf": [{"$ref": "#"}] * 50},  # in circles
    ],
    ids=str,
)
async def test_whatever_may_be_an_object_is_taken(client: TestClient, schema: Any) -> None:
    for path, body, _ in with_parameters(schema)[:4]:
        assert (await client.post(path, json=body)).status == 200


# ---------------------------------------------------------------------------------------------------- as described


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": []}),
        (CHAT, {"messages": [{"role": "", "content": "a"}]}),
        (MESSAGES, {"messages": []}),
        (MESSAGES, {"messages": [{"role": "x", "content": "a"}]}),
        (OLLAMA, {"messages": [{"role": "", "content": "a"}]}),
        (OLLAMA, chat(keep_alive="")),
        ("/api/generate", {"prompt": "x", "keep_alive": "soon"}),
        ("/v1/completions", {"prompt": ""}),
        ("/v1/completions", {"prompt": []}),
        ("/completion", {"prompt": ""}),
        (RESPONSES, {"input": []}),
        ("/v1/embeddings", {"input": "x", "dimensions": 0}),
        ("/api/embed", {"input": "x", "dimensions": 0}),
        ("/cache/purge", {"model": ""}),
        ("/models/load", {"model": ""}),
    ],
)
async def test_what_is_refused_is_not_described(client: TestClient, path: str, body: Any) -> None:
    assert (await client.post(path, json=body)).status == 400
    described = document()
    [content] = described["paths"][path]["post"]["requestBody"]["content"].values()
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(body, {**content["schema"], "components": described["components"]})


@pytest.mark.parametrize("text", ["5m", "-1", "300s", "1h30m", " 7 "])
async def test_times_are_described(client: TestClient, text: str) -> None:
    body = chat(keep_alive=text, stream=False)
    assert (await client.post(OLLAMA, json=body)).status == 200
    schema = document()["paths"][OLLAMA]["post"]["requestBody"]["content"]["application/json"]["schema"]
    jsonschema.validate(body, {**schema, "components": document()["components"]})


@pytest.mark.parametrize(("path", "needed"), [("/cache/pin", False), ("/cache/unpin", True), (CHAT, True)])
async def test_whether_a_body_is_needed_is_described(client: TestClient, path: str, needed: bool) -> None:
    assert document()["paths"][path]["post"]["requestBody"]["required"] is needed
    assert (await client.post(path)).status == (400 if needed else 200)
