"""`POST /v1/embeddings`: what may be asked, and how vectors are shown."""

from __future__ import annotations

import base64
import struct
from typing import Any

import pytest
from aiohttp.test_utils import TestClient
from scripted_backend import ScriptedBackend

from homeprefixd.errors import RequestError
from homeprefixd.frames.worker import Converted, Embed

PATH = "/v1/embeddings"
VECTORS = [struct.pack("<2f", 0.6, 0.8), struct.pack("<2f", 1.0, 0.0)]


def asked(backend: ScriptedBackend) -> Embed:
    wanted = backend.conversions[-1]
    assert isinstance(wanted, Embed)
    return wanted


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ("a text", ["a text"]),
        (["one", "two"], ["one", "two"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (["a", [1]], ["a", [1]]),
        ([7, "a", 8], [[7, "a", 8]]),
        ([[7, "a", 8]], [[7, "a", 8]]),
        ({"prompt_string": "a text"}, ["a text"]),
        (["a", {"content": [{"type": "text", "text": "b "}, {"type": "text", "text": "c"}]}], ["a", "b c"]),
    ],
)
async def test_inputs(client: TestClient, backend: ScriptedBackend, given: Any, inputs: Any) -> None:
    backend.converted = Converted("", tokens=[2, 3], vectors=VECTORS)
    reply = await client.post(PATH, json={"input": given, "model": "demo", "dimensions": 2})
    assert reply.status == 200
    assert asked(backend).inputs == inputs
    assert asked(backend).dimensions == 2
    body = await reply.json()
    assert body["data"][0] == {"object": "embedding", "index": 0, "embedding": pytest.approx([0.6, 0.8])}
    assert body["data"][1]["index"] == 1
    assert (body["object"], body["model"]) == ("list", "demo")
    assert body["usage"] == {"prompt_tokens": 5, "total_tokens": 5}


async def test_base64(client: TestClient, backend: ScriptedBackend) -> None:
    backend.converted = Converted("", tokens=[2], vectors=VECTORS[:1])
    body = await (await client.post(PATH, json={"input": "x", "encoding_format": "base64"})).json()
    assert base64.b64decode(body["data"][0]["embedding"]) == VECTORS[0]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", 1.5]}, "input[1]"),
        ({"input": [1, [2]]}, "input"),
        ({"input": ["a", 1000]}, "input"),
        ({"input": {"content": "a"}}, "input"),
        ({"input": {"content": [{"type": "image_url"}]}}, "input"),
        ({"input": {"prompt_string": "a", "multimodal_data": ["b"]}}, "input"),
        ({"input": 3}, "input"),
        ({"input": [1000]}, "input"),
        ({"input": [[-1]]}, "input"),
        ({"input": ["x"] * 2049}, "input"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "x", "dimensions": 0}, "dimensions"),
        ({"input": "x", "dimensions": 1.5}, "dimensions"),
    ],
)
async def test_refusals_name_the_field(client: TestClient, body: dict[str, Any], param: str) -> None:
    reply = await client.post(PATH, json=body)
    assert reply.status == 400
    assert (await reply.json())["error"]["param"] == param


async def test_what_the_worker_refuses(client: TestClient, backend: ScriptedBackend) -> None:
    backend.converted = RequestError("`dimensions` is 3000", param="dimensions")
    assert (await client.post(PATH, json={"input": "x", "dimensions": 3000})).status == 400
    assert (await client.post(PATH, json={"input": "x", "model": "gpt-4"})).status == 404
