"""Several models over HTTP: listed whether loaded or not, loaded and unloaded by hand; streams wait with comments."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer
from scripted_backend import MODEL, MemoryAdmin, ScriptedBackend

from homeprefixd.api.app import create_app
from homeprefixd.api.keys import LAST_LOADS
from homeprefixd.config import ServerConfig
from homeprefixd.errors import ModelError
from homeprefixd.last_loads import LastLoads


async def test_models_that_are_not_loaded_are_listed(client: TestClient, backend: ScriptedBackend) -> None:
    backend.aliases = ["demo", "folder/other"]
    data = (await (await client.get("/v1/models")).json())["data"]
    assert [(model["id"], model["status"]["value"], "meta" in model) for model in data] == [
        ("demo", "loaded", True),
        ("folder/other", "unloaded", False),
    ]
    backend.loaded = []  # all of them unloaded, and the daemon is well
    assert (await client.get("/v1/models")).status == 200
    one = await (await client.get("/v1/models/demo")).json()
    assert (one["id"], one["status"]) == ("demo", {"value": "unloaded"})
    backend.state = {**backend.state, "state": "error"}
    one = await (await client.get("/v1/models/demo")).json()
    assert (one["status"], backend.usable) == ({"value": "failed"}, False)
    backend.state = {**backend.state, "state": "loading"}
    assert (await client.get("/v1/models/demo")).status == 503


async def test_loading_and_unloading(client: TestClient, backend: ScriptedBackend) -> None:
    reply = await (await client.post("/models/load", json={"model": "demo", "keep_alive": -1})).json()
    assert reply["success"]
    assert (reply["model"]["path"], reply["model"]["memory"]) == ("/models/demo.gguf", 200_000_000)
    assert backend.loads == [("demo", -1.0)]
    assert await (await client.post("/models/unload", json={"model": "demo"})).json() == {
        "success": True,
        "unloaded": True,
    }
    backend.unloads_at_once = False
    assert not (await (await client.post("/models/unload", json={"model": "demo"})).json())["unloaded"]
    assert (await client.post("/models/load", json={"model": "x"})).status == 404
    assert (await client.post("/models/load", json={})).status == 400
    for path in ("/models/load", "/models/unload"):
        assert (await client.post(path, json={"model": ""})).status == 400
    assert (len(backend.loads), len(backend.unloads)) == (1, 2)
    assert (await client.post("/models/load", json={"model": "demo", "keep_alive": 1e300})).status == 400
    [model] = (await (await client.get("/models/details")).json())["models"]
    assert {"id", "path", "bytes", "memory", "expires", "namespace", "mismatch", "reason"} <= set(model)


async def test_one_that_is_not_loaded_is_described_as_it_was_last(
    backend: ScriptedBackend, admin: MemoryAdmin, tmp_path: Path
) -> None:
    model = tmp_path / "demo.gguf"
    model.write_bytes(b"GGUF")
    loads = LastLoads(tmp_path)
    loads.remember(model, MODEL)
    known = [replace(one, path=str(model)) for one in backend.known()]
    backend.known = lambda: known  # type: ignore[method-assign]
    app = create_app(backend, admin, ServerConfig())
    app[LAST_LOADS] = loads
    async with TestClient(TestServer(app)) as client:
        [found] = (await (await client.get("/models/details")).json())["models"]
        assert (found["as_of"], found["namespace"]) == (None, MODEL.namespace)
        known[0] = replace(known[0], info=None, state="unloaded")
        [found] = (await (await client.get("/models/details")).json())["models"]
        assert (found["as_of"] > 0, found["namespace"], "meta" in found) == (True, MODEL.namespace, False)
        model.write_bytes(b"GGUF and more")
        [found] = (await (await client.get("/models/details")).json())["models"]
        assert (found["as_of"], found["namespace"]) == (None, {})


@pytest.mark.parametrize("path", ["/models/load", "/models/unload", "/models/details"])
async def test_they_are_administration(client: TestClient, path: str) -> None:
    assert (await client.post(path, json={"model": "demo"}, headers={"Host": "evil.example"})).status == 403


class TestAStreamThatWaitsForItsModel:
    @pytest.fixture
    def config(self) -> ServerConfig:
        return ServerConfig(keep_alive=0.05)

    BODY = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}  # noqa: RUF012

    async def test_gets_comments_and_then_its_reply(self, client: TestClient, backend: ScriptedBackend) -> None:
        loaded = asyncio.Event()
        backend.script.insert(0, loaded.wait)  # type: ignore[arg-type]
        async with client.post("/v1/chat/completions", json=self.BODY) as reply:
            assert reply.status == 200
            assert (await reply.content.readuntil(b"\n\n")).startswith(b": waiting")
            assert (await reply.content.readuntil(b"\n\n")).startswith(b": waiting")
            loaded.set()
            text = (await reply.read()).decode()
        events = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        assert json.loads(events[0])["choices"][0]["delta"]["role"] == "assistant"
        assert text.count('"role"') == 1

    async def test_gets_an_error_event_once_it_has_begun(self, client: TestClient, backend: ScriptedBackend) -> None:
        loaded = asyncio.Event()
        backend.script = [loaded.wait, ModelError("/m.gguf is damaged")]  # type: ignore[list-item]
        async with client.post("/v1/chat/completions", json=self.BODY) as reply:
            assert reply.status == 200
            await reply.content.readuntil(b"\n\n")
            loaded.set()
            assert b'"/m.gguf is damaged"' in await reply.read()

    async def test_gets_a_status_if_it_fails_at_once(self, client: TestClient, backend: ScriptedBackend) -> None:
        backend.script = [ModelError("/m.gguf is damaged")]
        reply = await client.post("/v1/chat/completions", json=self.BODY)
        assert reply.status == 503


async def test_anthropics_clients_see_models_in_their_form(client: TestClient, backend: ScriptedBackend) -> None:
    backend.aliases = ["demo", "folder/other"]
    header = {"anthropic-version": "2023-06-01"}
    listed = await (await client.get("/v1/models", headers=header)).json()
    created = (await (await client.get("/v1/models/demo")).json())["created"]
    first, second = listed.pop("data")
    assert listed == {"has_more": False, "first_id": "demo", "last_id": "folder/other"}
    assert (first["type"], first["id"], first["display_name"]) == ("model", "demo", "demo")
    assert datetime.fromisoformat(first["created_at"]).timestamp() == created
    assert second["id"] == "folder/other"
    assert await (await client.get("/v1/models/demo", headers=header)).json() == first
    missing = await client.get("/v1/models/none", headers=header)
    assert missing.status == 404
    shown = await missing.json()
    assert (shown["type"], shown["error"]["type"]) == ("error", "not_found_error")
