"""Who may call: keys in every dialect, namespaces, priorities, limits, pages of other origins."""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from scripted_backend import MemoryAdmin, ScriptedBackend

from homeprefixd.api.access import Turnstile
from homeprefixd.api.app import create_app
from homeprefixd.api.keyring import KeyRing
from homeprefixd.config import ServerConfig
from homeprefixd.errors import HomeprefixdError
from homeprefixd.frames.worker import Converted

CHAT = "/v1/chat/completions"
ALICE, BOB, CAMERA = "alice-0123456789abc", "bob-0123456789abcde", "camera-0123456789ab"
KEYS = f"""
[[key]]
name = "alice"
key = "{ALICE}"
admin = true

[[key]]
name = "bob"
key = "{BOB}"
namespace = "own"

[[key]]
name = "camera"
key = "{CAMERA}"
priority = "background"
requests = 1
queued = 1
"""


@pytest.fixture
def keys(tmp_path: Path) -> KeyRing:
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    return KeyRing(file, lambda: b"s" * 32)


@pytest.fixture
async def client(backend: ScriptedBackend, admin: MemoryAdmin, keys: KeyRing) -> AsyncIterator[TestClient]:
    config = ServerConfig(cors_origins="https://chat.home.lan, https://other.home.lan")
    async with TestClient(TestServer(create_app(backend, admin, config, keys=keys))) as client:
        yield client


def bearer(key: str, **more: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}", **more}


def chat(text: str = "Hello", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **more}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat()),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", chat(max_tokens=5)),
        ("/api/chat", chat(stream=False)),
    ],
)
@pytest.mark.parametrize("wrong", [{}, bearer("wrong"), {"x-api-key": "wrong"}, bearer(""), bearer("\xff" * 20)])
async def test_rule_8_without_its_key_nobody_is_served(
    client: TestClient, backend: ScriptedBackend, path: str, body: Any, wrong: dict[str, str]
) -> None:
    reply = await client.post(path, json=body, headers=wrong)
    said = await reply.json()
    assert reply.status == 401
    assert reply.headers["WWW-Authenticate"] == "Bearer"
    if path.startswith("/api/"):
        assert "key" in said["error"]
    elif path == "/v1/messages":
        assert (said["type"], said["error"]["type"]) == ("error", "authentication_error")
    else:
        assert said["error"]["type"] == "authentication_error"
        assert said["error"]["code"] in ("invalid_api_key", "missing_api_key")
    assert not backend.generations
    for right in (bearer(ALICE), {"x-api-key": ALICE}, {"Authorization": f"bearer  {ALICE} "}):
        assert (await client.post(path, json=body, headers=right)).status == 200


async def test_with_a_key_it_may_be_called_by_any_name(client: TestClient, backend: ScriptedBackend) -> None:
    """A stranger's page has none."""
    backend.converted = Converted("", pieces=[b"<s>", b"</s>"])
    assert (await client.get("/props", headers=bearer(ALICE, Host="llm.example.com"))).status == 200
    assert (await client.get("/props", headers={"Host": "llm.example.com"})).status == 401
    assert (await client.get("/props", headers=bearer(ALICE, Origin="http://evil.com"))).status == 403


async def test_the_models_ask_for_a_key_and_health_does_not(client: TestClient) -> None:
    for path in ("/v1/models", "/api/tags", "/props", "/nothing"):
        assert (await client.get(path)).status == 401
    for path in ("/", "/health", "/v1/health", "/api/version", "/openapi.json"):
        assert (await client.get(path)).status == 200
    assert (await client.head("/")).status == 200
    assert "demo" not in await (await client.get("/", headers={"Accept": "application/json"})).text()


async def test_health_tells_its_state_only_without_a_key(client: TestClient, backend: ScriptedBackend) -> None:
    for headers in ({}, bearer("wrong")):
        assert set(await (await client.get("/health", headers=headers)).json()) == {"status", "version"}
    for key in (ALICE, BOB):
        assert "model" in await (await client.get("/v1/health", headers=bearer(key))).json()
    backend.state = {"state": "error", "reason": "no such file: x.gguf"}
    assert "x.gguf" not in await (await client.get("/health")).text()
    assert "x.gguf" in await (await client.get("/health", headers=bearer(BOB))).text()


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/api/chat", chat(stream=False)),
        ("/api/generate", {"prompt": "x", "stream": False}),
        ("/api/embed", {"input": "x"}),
        ("/api/embeddings", {"prompt": "x"}),
    ],
)
@pytest.mark.parametrize("keep_alive", [0, "0s", -1, "1h"])
async def test_how_long_a_model_stays_is_for_admins_to_say(
    client: TestClient, backend: ScriptedBackend, path: str, prompt: dict[str, Any], keep_alive: Any
) -> None:
    backend.converted = Converted("", tokens=[1], vectors=[b"\0" * 8])
    asked = {**prompt, "keep_alive": keep_alive}
    assert (await client.post(path, json=asked, headers=bearer(BOB))).status == 200  # clients send it with everything
    assert (backend.loads, backend.unloads) == ([], [])
    reply = await client.post(path, json={"model": "demo", "keep_alive": keep_alive}, headers=bearer(BOB))
    assert (reply.status, backend.unloads) == (200 if keep_alive == "1h" else 403, [])
    assert backend.loads == ([("demo", None)] if keep_alive == "1h" and path != "/api/embeddings" else [])
    assert (await client.post(path, json=asked, headers=bearer(ALICE))).status == 200
    assert backend.loads[-1:] == [("demo", 3600.0)] if keep_alive == "1h" else backend.loads or backend.unloads


@pytest.mark.parametrize("path", ["/cache/stats", "/cache/prefixes", "/metrics", "/v1/metrics"])
async def test_administration_needs_an_admins_key(client: TestClient, path: str) -> None:
    assert (await client.get(path)).status == 401
    reply = await client.get(path, headers=bearer(BOB))
    assert (reply.status, (await reply.json())["error"]["code"]) == (403, "not_admin")
    assert (await client.get(path, headers=bearer(ALICE))).status == 200


async def test_administration_takes_the_key_from_a_browsers_dialog(client: TestClient, admin: MemoryAdmin) -> None:
    def basic(key: str, **more: str) -> dict[str, str]:
        return {"Authorization": f"Basic {base64.b64encode(f'me:{key}'.encode()).decode()}", **more}

    reply = await client.get("/cache/stats")
    assert (reply.status, "Basic realm=" in reply.headers["WWW-Authenticate"]) == (401, True)
    assert (await client.get("/cache/stats", headers=basic(ALICE))).status == 200
    for wrong in (basic("wrong"), {"Authorization": "Basic !"}, {"Authorization": "Basic"}):
        assert (await client.get("/cache/stats", headers=wrong)).status == 401
    evil = basic(ALICE, Origin="https://chat.home.lan")
    assert (await client.post("/cache/purge", json={"all": True}, headers=evil)).status == 403
    assert admin.purged == []
    reply = await client.post(CHAT, json=chat(), headers=basic(ALICE))
    assert (reply.status, reply.headers["WWW-Authenticate"]) == (401, "Bearer")


async def test_a_purge_needs_an_admins_key(client: TestClient, admin: MemoryAdmin) -> None:
    for headers, status in (({}, 401), (bearer(CAMERA), 403), (bearer(ALICE, Host="evil.example"), 403)):
        assert (await client.post("/cache/purge", json={"all": True}, headers=headers)).status == status
    assert admin.purged == []
    assert (await client.post("/cache/purge", json={"all": True}, headers=bearer(ALICE))).status == 200


async def test_namespaces(client: TestClient, backend: ScriptedBackend) -> None:
    salts = {}
    for name, key in (("alice", ALICE), ("bob", BOB), ("camera", CAMERA)):
        for wished in ("", "x"):
            await client.post(CHAT, json=chat(cache_salt=wished), headers=bearer(key))
            salts[name, wished] = backend.asked.salt
            assert backend.asked.client == f"key {name}"
    assert (salts["alice", ""], salts["alice", "x"]) == ("", "x")
    assert (salts["camera", ""], salts["camera", "x"]) == ("", "x")
    assert len({salts["bob", ""], salts["bob", "x"], "", "x"}) == 4
    for path, body in (("/v1/messages", chat()), ("/api/chat", chat()), ("/v1/responses", {"input": "x"})):
        await client.post(path, json=body, headers=bearer(BOB))
        assert backend.asked.salt == salts["bob", ""]
    await client.post(CHAT, json=chat(cache_salt=salts["bob", ""]), headers=bearer(CAMERA))
    assert backend.asked.salt == salts["bob", ""]  # who knows the secret's MAC needs no more; nobody is told it


async def test_a_keys_priority_is_the_most_that_its_requests_have(client: TestClient, backend: ScriptedBackend) -> None:
    for key, asked, expected in (
        (CAMERA, {}, "background"),
        (CAMERA, {"X-Homeprefixd-Priority": "interactive"}, "background"),
        (ALICE, {}, "normal"),
        (ALICE, {"X-Homeprefixd-Priority": "interactive"}, "interactive"),
        (ALICE, {"X-Homeprefixd-Priority": "background"}, "background"),
    ):
        await client.post(CHAT, json=chat(), headers=bearer(key, **asked))
        assert backend.asked.priority == expected


async def test_limits_of_a_key(client: TestClient, backend: ScriptedBackend) -> None:
    gate = asyncio.Event()
    backend.script[1:1] = [gate.wait]

    async def begun(count: int) -> None:
        async with asyncio.timeout(5):
            while len(backend.generations) < count:  # noqa: ASYNC110  # it has no event
                await asyncio.sleep(0.01)

    def ask(key: str) -> asyncio.Task[Any]:
        return asyncio.create_task(client.post(CHAT, json=chat(), headers=bearer(key)))

    first = ask(CAMERA)
    await begun(1)
    second = ask(CAMERA)
    await asyncio.sleep(0.05)
    async with asyncio.timeout(5):
        third = await ask(CAMERA)
    assert third.status == 429
    assert int(third.headers["Retry-After"]) >= 1
    assert (await third.json())["error"]["code"] == "key_limit"
    ollama = await client.post("/api/chat", json=chat(), headers=bearer(CAMERA))
    assert (ollama.status, set(await ollama.json())) == (429, {"error"})
    other = ask(ALICE)
    await begun(2)
    assert len(backend.generations) == 2
    gate.set()
    assert [(await task).status for task in (first, second, other)] == [200, 200, 200]
    assert len(backend.generations) == 3


async def test_a_client_that_leaves_the_queue_takes_no_place(backend: ScriptedBackend, keys: KeyRing) -> None:
    camera = keys.find(CAMERA)
    assert camera is not None
    turnstile = Turnstile()
    async with turnstile.passing(camera):

        async def enter() -> None:
            async with turnstile.passing(camera):
                pass

        waiting = asyncio.create_task(enter())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        last = asyncio.create_task(enter())
        await asyncio.sleep(0)
        late = asyncio.create_task(enter())
        assert isinstance((await asyncio.gather(late, return_exceptions=True))[0], Exception)
    last_cancelled = asyncio.create_task(enter())
    await last
    await last_cancelled
    assert turnstile.running == 0


async def test_a_client_may_leave_the_queue_just_as_another_leaves(keys: KeyRing) -> None:
    camera = keys.find(CAMERA)
    assert camera is not None
    turnstile = Turnstile()

    async def enter() -> None:
        async with turnstile.passing(camera):
            pass

    async with turnstile.passing(camera):
        waiting = asyncio.create_task(enter())
        await asyncio.sleep(0)
        waiting.cancel()  # it has not run since when the place is free
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert turnstile.running == 0


async def test_prompts_and_keys_are_not_in_the_log(
    client: TestClient, backend: ScriptedBackend, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "the safe is behind the mirror"
    backend.script[3:] = [HomeprefixdError("the worker died"), ValueError("a bug")]
    with caplog.at_level(logging.INFO):
        for stream in (True, False):
            for path, body in (
                (CHAT, chat(secret)),
                ("/v1/messages", chat(secret, system=secret)),
                ("/v1/responses", {"input": secret, "instructions": secret}),
                ("/api/chat", chat(secret)),
                (CHAT, {"messages": secret}),
                ("/v1/messages", {"messages": [{"role": secret, "content": secret}]}),
                ("/api/chat", {"messages": [{"role": secret, "content": secret}]}),
            ):
                await client.post(path, json={**body, "stream": stream}, headers=bearer(ALICE))
        await client.post(CHAT, json=chat(secret), headers=bearer("wrong-key-0123456789"))
    assert "the worker died" in caplog.text  # else this sees no log
    for word in (secret, "mirror", ALICE, "wrong-key"):
        assert word not in caplog.text


async def test_rule_14_preflight_needs_no_key(client: TestClient) -> None:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    for origin, status in (
        ("https://chat.home.lan", 200),
        ("https://other.home.lan", 200),
        ("http://localhost:3000", 200),
        ("https://evil.example", 403),
    ):
        reply = await client.options("/v1/messages", headers={"Origin": origin, **asked})
        assert reply.status == status
        assert reply.headers.get("Access-Control-Allow-Origin") == (origin if status == 200 else None)
    reply = await client.post(CHAT, json=chat(), headers={"Origin": "https://chat.home.lan"})
    assert (reply.status, reply.headers["Access-Control-Allow-Origin"]) == (401, "https://chat.home.lan")


async def test_every_page_may_call_if_that_is_wished(backend: ScriptedBackend, admin: MemoryAdmin) -> None:
    app = create_app(backend, admin, ServerConfig(cors_origins="*"))
    async with TestClient(TestServer(app)) as client:
        reply = await client.get("/v1/models", headers={"Origin": "https://any.example"})
        assert reply.headers["Access-Control-Allow-Origin"] == "https://any.example"
        reply = await client.get("/cache/stats", headers={"Origin": "https://any.example"})
        assert reply.status == 403
