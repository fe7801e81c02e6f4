"""Routes beside the chat: models, health, cache administration, errors of HTTP, and who may call."""

from __future__ import annotations

import gzip
import io
import zlib
from typing import Any

import pytest
from aiohttp.test_utils import TestClient
from scripted_backend import MemoryAdmin, ScriptedBackend

from homeprefixd.api.origin import is_local_origin
from homeprefixd.errors import NotFoundError, UnavailableError
from homeprefixd.frames.worker import Converted

CHAT = "/v1/chat/completions"


async def error_of(reply: Any) -> dict[str, Any]:
    assert reply.content_type == "application/json"
    body = await reply.json()
    assert {"message", "type", "param", "code"} <= set(body["error"])
    return dict(body["error"])


# ---------------------------------------------------------------------------------------------------- what there is


@pytest.mark.parametrize("path", ["/v1/models", "/models"])
async def test_rule_11_models(client: TestClient, path: str) -> None:
    assert await (await client.get(path)).json() == {
        "object": "list",
        "data": [
            {
                "id": "demo",
                "object": "model",
                "created": 1_700_000_000,
                "owned_by": "homeprefixd",
                "status": {"value": "loaded"},
                "meta": {
                    "n_vocab": 1000,
                    "n_ctx": 2048,
                    "n_ctx_train": 8192,
                    "n_embd": 576,
                    "n_params": 135_000_000,
                    "size": 98_000_000,
                },
            }
        ],
    }


async def test_models_and_health_while_loading(client: TestClient, backend: ScriptedBackend) -> None:
    backend.loaded = []
    backend.state = {"state": "loading", "progress": 0.25, "reason": ""}
    reply = await client.get("/v1/models")
    assert (reply.status, reply.headers["Retry-After"]) == (503, "1")
    assert (await error_of(reply))["message"] == "Loading model"
    reply = await client.get("/health")
    assert reply.status == 503
    body = await reply.json()
    assert body["error"] == {"code": 503, "message": "Loading model", "type": "unavailable_error"}
    assert (body["status"], body["progress"]) == ("loading", 0.25)


async def test_health(client: TestClient, backend: ScriptedBackend) -> None:
    reply = await client.get("/health")
    assert reply.status == 200
    assert (await reply.json())["status"] == "ok"
    backend.state = {"state": "error", "reason": "no such file: x.gguf"}
    reply = await client.get("/health")
    assert reply.status == 503
    assert (await reply.json())["error"]["message"] == "no such file: x.gguf"
    backend.loaded, backend.aliases = [], []
    backend.state = {"state": "no model", "reason": "this daemon has no model"}
    assert (await client.get("/health")).status == 200
    assert (await (await client.get("/v1/models")).json())["data"] == []


async def test_root(client: TestClient) -> None:
    reply = await client.get("/", headers={"Accept": "application/json"})
    assert (await reply.json())["name"] == "homeprefixd"
    assert (await client.head("/")).status == 200


# ---------------------------------------------------------------------------------------------------- administration


async def test_stats(client: TestClient, admin: MemoryAdmin) -> None:
    body = await (await client.get("/cache/stats")).json()
    assert (body["nodes"], body["warm"], body["daemon"]["state"]) == (3, {"bytes": 1000}, "ok")
    admin.refusal = UnavailableError("the cache's store is away", retry_after=2)
    reply = await client.get("/cache/stats")
    assert (reply.status, reply.headers["Retry-After"]) == (503, "2")


async def test_prefixes(client: TestClient, admin: MemoryAdmin) -> None:
    body = await (await client.get("/cache/prefixes?limit=7&model=demo")).json()
    assert admin.listed == (7, "demo")
    assert body["total"] == 3
    assert body["prefixes"] == [
        {
            "id": "00ff",
            "model": "demo",
            "tokens": 128,
            "own_tokens": 64,
            "bytes": 2000,
            "own_bytes": 1000,
            "tiers": ["hot", "warm"],
            "created": 1.0,
            "last_use": 2.0,
            "hits": 5,
            "preview": "You are",
            "pinned": 0,
            "labels": [],
            "request": "",
            "app": "",
        }
    ]
    await client.get("/cache/prefixes")
    assert admin.listed == (100, "")


@pytest.mark.parametrize("limit", ["0", "-1", "x", "", "10001", "1e3", "٣", "9" * 5000])
async def test_bad_limits(client: TestClient, limit: str) -> None:
    reply = await client.get("/cache/prefixes", params={"limit": limit})
    assert reply.status == 400
    assert (await error_of(reply))["param"] == "limit"


@pytest.mark.parametrize(
    ("body", "field", "value"),
    [
        ({"all": True}, "all", True),
        ({"prefix": "00ff", "all": None}, "prefix", "00ff"),
        ({"older_than": 90}, "older_than", 90.0),
        ({"older_than": "30d", "all": False}, "older_than", 30 * 86400.0),
        ({"older_than": "1.5 h"}, "older_than", 5400.0),
        ({"model": "demo"}, "model", "demo"),
    ],
)
async def test_purge(client: TestClient, admin: MemoryAdmin, body: dict[str, Any], field: str, value: Any) -> None:
    reply = await client.post("/cache/purge", json=body)
    assert (reply.status, await reply.json()) == (200, {"nodes": 3, "bytes": 1000})
    assert getattr(admin.purged[0], field) == value
    unset = {"all": False, "prefix": "", "older_than": 0.0, "model": ""}
    assert all(getattr(admin.purged[0], name) == empty for name, empty in unset.items() if name != field)


@pytest.mark.parametrize(
    ("body", "asked"),
    [({}, (False, 100e6)), ({"repair": True}, (True, 100e6)), ({"repair": False, "rate": 0}, (False, 0.0))],
)
async def test_verify(client: TestClient, admin: MemoryAdmin, body: dict[str, Any], asked: tuple[bool, float]) -> None:
    reply = await client.post("/cache/verify", json=body)
    assert reply.status == 200
    found = await reply.json()
    assert (found["nodes"], found["damaged"], found["removed"]) == (3, 1, asked[0])
    assert admin.verified == asked


@pytest.mark.parametrize("body", [{"repair": "yes"}, {"rate": -1}, {"rate": "fast"}, []])
async def test_verify_refuses(client: TestClient, admin: MemoryAdmin, body: Any) -> None:
    reply = await client.post("/cache/verify", json=body)
    assert reply.status == 400
    assert admin.verified is None


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"all": False},
        {"all": "yes"},
        {"all": True, "model": "demo"},
        {"prefix": ""},
        {"prefix": "../x"},
        {"older_than": 0},
        {"older_than": -5},
        {"older_than": "soon"},
        {"older_than": "9999999999d"},
        {"older_than": 10**400},
        {"model": ""},
        [],
    ],
)
async def test_bad_purges_remove_nothing(client: TestClient, admin: MemoryAdmin, body: Any) -> None:
    assert (await client.post("/cache/purge", json=body)).status == 400
    assert not admin.purged


async def test_purge_of_an_unknown_prefix(client: TestClient, admin: MemoryAdmin) -> None:
    admin.refusal = NotFoundError("There is no prefix 00.", param="prefix")
    reply = await client.post("/cache/purge", json={"prefix": "00"})
    assert reply.status == 404
    assert (await error_of(reply))["message"] == "There is no prefix 00."


# ---------------------------------------------------------------------------------------------------- who may call


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:8080"}, 200),
        ({"Host": "LOCALHOST."}, 200),
        ({"Host": "192.168.1.5:8080"}, 200),
        ({"Host": "[::1]:8080"}, 200),
        ({"Host": "127.0.0.1:8080", "Origin": "http://127.0.0.1:8080"}, 200),
        ({"Host": "evil.example:8080"}, 403),
        ({"Host": "localhost.evil.example"}, 403),
        ({"Host": "evil.example:8080", "Origin": "http://evil.example:8080"}, 403),
        ({"Host": "["}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://["}, 403),
        ({"Host": "127.0.0.1:8080", "Origin": "http://127.0.0.1:9090"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
    ],
)
async def test_rule_14_admin_routes_are_guarded(
    client: TestClient, admin: MemoryAdmin, headers: dict[str, str], status: int
) -> None:
    reply = await client.post("/cache/purge", json={"all": True}, headers=headers)
    assert reply.status == status
    assert bool(admin.purged) == (status == 200)
    if status == 403:
        assert (await error_of(reply))["type"] == "permission_error"
    assert (await client.get("/cache/stats", headers=headers)).status == status
    assert "Access-Control-Allow-Origin" not in reply.headers


@pytest.mark.parametrize("path", ["/slots", "/props", "/v1/slots", "/v1/props", "/lora-adapters", "/api/ps"])
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "nas:8080"}, 200),
        ({"Host": "host.docker.internal:8080"}, 200),
        ({"Host": "nas.local"}, 200),
        ({"Origin": "http://localhost:3000"}, 200),
        ({"Host": "evil.com"}, 403),
        ({"Host": "internal.evil.com:8080"}, 403),
        ({"Host": "["}, 403),
        ({"Origin": "http://evil.com"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
    ],
)
async def test_strangers_pages_are_not_told_of_others(
    client: TestClient, backend: ScriptedBackend, path: str, headers: dict[str, str], status: int
) -> None:
    backend.converted = Converted("", pieces=[b"<s>", b"</s>"])
    reply = await client.get(path, headers=headers)
    assert reply.status == status, await reply.text()


async def test_health_tells_strangers_pages_its_state_only(client: TestClient) -> None:
    said = await (await client.get("/health", headers={"Host": "evil.com"})).json()
    assert said["status"] == "ok"
    assert not {"workers", "models", "model"} & set(said)
    assert "model" in await (await client.get("/health")).json()


@pytest.mark.parametrize(
    "origin", ["http://localhost:3000", "https://localhost", "http://127.0.0.1:8081", "http://[::1]:1"]
)
async def test_rule_14_local_pages_may_call(client: TestClient, origin: str) -> None:
    asked = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    reply = await client.options(CHAT, headers={**asked, "Access-Control-Request-Private-Network": "true"})
    assert reply.status == 200
    assert reply.headers["Access-Control-Allow-Origin"] == origin
    assert reply.headers["Access-Control-Allow-Headers"] == "authorization"
    assert "POST" in reply.headers["Access-Control-Allow-Methods"]
    assert reply.headers["Access-Control-Allow-Private-Network"] == "true"
    body = {"messages": [{"role": "user", "content": "x"}]}
    for more in ({}, {"stream": True}, {"messages": []}):
        reply = await client.post(CHAT, json={**body, **more}, headers={"Origin": origin})
        assert reply.headers["Access-Control-Allow-Origin"] == origin
        assert reply.headers["Vary"] == "Origin"


async def test_rule_14_other_pages_may_not(client: TestClient) -> None:
    origin = {"Origin": "http://evil.example"}
    reply = await client.options(CHAT, headers={**origin, "Access-Control-Request-Method": "POST"})
    assert reply.status == 403
    assert "Access-Control-Allow-Origin" not in (await client.get("/v1/models", headers=origin)).headers


@pytest.mark.parametrize(
    "origin",
    ["null", "", "http://localhost.evil.example", "http://evil.example/localhost", "http://localhost@evil.example",
     "http://x@localhost", "file://localhost", "http://[", "http://192.168.1.5"],
)  # fmt: skip
def test_what_is_no_local_origin(origin: str) -> None:
    assert not is_local_origin(origin)


# ---------------------------------------------------------------------------------------------------- errors of HTTP


@pytest.mark.parametrize("path", ["/nothing", "/v1/nothing", "/v1/chat", "/cache/nothing"])
async def test_unknown_routes(client: TestClient, path: str) -> None:
    reply = await client.get(path)
    assert reply.status == 404
    error = await error_of(reply)
    assert (error["type"], error["code"]) == ("not_found_error", "unknown_route")
    assert path in error["message"]


async def test_wrong_methods(client: TestClient) -> None:
    reply = await client.get(CHAT)
    assert (reply.status, reply.headers["Allow"]) == (405, "POST")
    assert (await error_of(reply))["message"] == f"{CHAT} takes POST, not GET."
    assert (await client.delete("/v1/models")).status == 405
    assert (await client.options(CHAT)).status == 405  # no preflight without Origin


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"x",
        b"null",
        b"[]",
        b"3",
        b'"x"',
        b"\xef\xbb\xbf{}",
        b"{}\0",
        b'{"messages":[{"role":"user","content":"\xff"}]}',
        b'{"a":' + b"[" * 100_000,
        b'{"messages":' + b'[{"x":' * 100_000,
        b'{"temperature":1e999,"messages":[]}',
        b'{"temperature":NaN}',
    ],
)
async def test_broken_json(client: TestClient, body: bytes) -> None:
    for path in (CHAT, "/v1/completions", "/cache/purge"):
        reply = await client.post(path, data=body)
        assert reply.status == 400
        assert (await error_of(reply))["type"] == "invalid_request_error"


@pytest.mark.parametrize("chunked", [False, True])
async def test_rule_8_too_large(client: TestClient, chunked: bool) -> None:
    data = b'{"messages":[{"role":"user","content":"' + b"x" * (3 << 20)

    async def pieces() -> Any:
        for at in range(0, len(data), 65536):
            yield data[at : at + 65536]

    reply = await client.post(CHAT, data=pieces() if chunked else io.BytesIO(data))
    assert reply.status == 413
    error = await error_of(reply)
    assert "server.max_body" in error["message"]
    assert "1048576" in error["message"]


async def test_compressed_bodies(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    plain = b'{"messages":[{"role":"user","content":"x"}]}'
    for coding, data, status in [
        ("gzip", gzip.compress(plain), 200),
        ("deflate", zlib.compress(plain), 200),
        ("gzip", b"not gzip", 400),
        ("gzip", gzip.compress(b" " * (64 << 20)), 413),
    ]:
        reply = await client.post(CHAT, data=data, headers={"Content-Encoding": coding})
        assert reply.status == status, (coding, data[:10], await reply.text())
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
