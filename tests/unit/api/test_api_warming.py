"""`/cache/warm`, `match`, `pin` and `unpin`: what is asked of model and store, and what a client is told."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from aiohttp.test_utils import TestClient
from scripted_backend import MODEL, MemoryAdmin, ScriptedBackend

from homeprefixd.api.warming import description_of, predicted
from homeprefixd.errors import NotFoundError, UnavailableError
from homeprefixd.frames.store import Pin, Plan, PlanNode, Unpin
from homeprefixd.frames.worker import Converted, TokenizeRequest

CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
NAMESPACE = {"model_sha256": "ab", "salt": "house"}
RATES = {"call": 0.04, "token": 0.005, "depth": 1e-6, "batch": 64.0, "restore": 1e-5}


@pytest.fixture(autouse=True)
def known(backend: ScriptedBackend) -> None:
    """A loaded model whose file is known."""
    backend.loaded = [msgspec.structs.replace(MODEL, namespace=NAMESPACE, least=16)]
    backend.converted = Converted("", tokens=list(range(100)))
    backend.state["workers"] = [{"alias": "demo", "rates": RATES}]


class TestWarm:
    async def test_it_is_a_request_that_generates_nothing(self, client: TestClient, backend: ScriptedBackend) -> None:
        reply = await client.post("/cache/warm", json={**CHAT, "max_tokens": 50, "stream": True, "stop": ["x"]})
        body = await reply.json()
        assert (reply.status, body["prompt_tokens"], body["cached_tokens"], body["computed_tokens"]) == (
            200, 100, 64, 36,
        )  # fmt: skip
        assert body["least_tokens"] == 16
        asked = backend.asked
        assert (asked.max_tokens, asked.priority, asked.stream, asked.stop) == (0, "background", False, [])
        assert asked.warming
        assert asked.messages is not None
        assert asked.messages[0].content == "Hello"
        assert body["id"] == asked.rid == "warm-id0"

    async def test_it_says_how_much_is_kept(
        self, client: TestClient, backend: ScriptedBackend, admin: MemoryAdmin
    ) -> None:
        assert (await (await client.post("/cache/warm", json=CHAT)).json())["known_tokens"] == 84
        assert admin.matched == [(NAMESPACE, list(range(100)), 99, False)] * 5
        backend.converted = Converted("", tokens=list(range(85)))
        assert (await (await client.post("/cache/warm", json=CHAT)).json())["known_tokens"] == 85
        assert len(admin.matched) == 6
        admin.refusal = UnavailableError("the cache's store is away")
        reply = await client.post("/cache/warm", json=CHAT)
        assert (reply.status, (await reply.json())["known_tokens"]) == (200, None)

    async def test_a_prompt_as_text(self, client: TestClient, backend: ScriptedBackend) -> None:
        body = {"prompt": "Once", "echo": True, "logprobs": 2}
        assert (await client.post("/cache/warm", json=body)).status == 200
        assert (backend.asked.prompt, backend.asked.prompt_logprobs) == ("Once", -1)

    @pytest.mark.parametrize(
        ("body", "param"),
        [
            ({}, None),
            ({**CHAT, "prompt": "x"}, None),
            ({"messages": []}, "messages"),
            ({"messages": 5}, "messages"),
            ({**CHAT, "cache_prompt": False}, "cache_prompt"),
            ([], None),
        ],
    )
    async def test_what_it_refuses(
        self, client: TestClient, backend: ScriptedBackend, body: Any, param: str | None
    ) -> None:
        reply = await client.post("/cache/warm", json=body)
        assert reply.status == 400
        assert (await reply.json())["error"]["param"] == param
        assert not backend.generations

    async def test_nothing_is_computed_in_vain(self, client: TestClient, backend: ScriptedBackend) -> None:
        backend.loaded = [msgspec.structs.replace(MODEL, cache_mode="off", cache_reason="`cache.reuse` is off.")]
        reply = await client.post("/cache/warm", json=CHAT)
        assert (reply.status, (await reply.json())["error"]["message"]) == (503, "`cache.reuse` is off.")
        backend.loaded = [MODEL]  # its file's hash is not known yet
        assert (await client.post("/cache/warm", json=CHAT)).status == 503
        assert not backend.generations


class TestMatch:
    async def test_what_is_told(self, client: TestClient, backend: ScriptedBackend, admin: MemoryAdmin) -> None:
        reply = await client.post("/cache/match", json=CHAT)
        body = await reply.json()
        assert reply.status == 200
        assert (body["prompt_tokens"], body["cached_tokens"], body["computed_tokens"]) == (100, 84, 16)
        assert body["cache_tiers"] == {"hot": 64, "warm": 20}
        assert body["bytes"] == 3000
        # one call of 16 tokens behind 84; 128 tokens' state imported; 2,000 bytes at 1 MB/s
        seconds = 0.04 + 0.005 * 16 + 1e-6 * 16 * 92 + 128e-5 + 0.002
        assert body["predicted_ttft_ms"] == round(1e3 * seconds, 1)
        cold = 2 * 0.04 + 0.5 + 1e-6 * 100 * 50
        assert body["predicted_cold_ttft_ms"] == round(1e3 * cold, 1)
        assert admin.matched == [(NAMESPACE, list(range(100)), 99, False)]
        [asked] = backend.conversions
        assert isinstance(asked, TokenizeRequest)
        assert not backend.generations

    async def test_a_salt_has_a_namespace_of_its_own(self, client: TestClient, admin: MemoryAdmin) -> None:
        await client.post("/cache/match", json={**CHAT, "cache_salt": "mine"})
        assert admin.matched[0][0] == {**NAMESPACE, "salt": "5:housemine"}

    async def test_too_little_is_nothing(self, client: TestClient, admin: MemoryAdmin) -> None:
        admin.plan = Plan(0, [PlanNode(b"a" * 32, 0, 64, 15, "hot", 1000, True, -1)])
        assert (await (await client.post("/cache/match", json=CHAT)).json())["cached_tokens"] == 0

    async def test_without_rates_nothing_is_predicted(self, client: TestClient, backend: ScriptedBackend) -> None:
        backend.state["workers"] = []
        body = await (await client.post("/cache/match", json=CHAT)).json()
        assert (body["cached_tokens"], body["predicted_ttft_ms"], body["predicted_cold_ttft_ms"]) == (84, None, None)

    async def test_what_could_not_be_answered_is_refused(self, client: TestClient, backend: ScriptedBackend) -> None:
        backend.converted = Converted("", tokens=[1] * 2048)
        reply = await client.post("/cache/match", json=CHAT)
        assert (reply.status, (await reply.json())["error"]["code"]) == (400, "context_length_exceeded")

    async def test_the_store_may_be_away(self, client: TestClient, admin: MemoryAdmin) -> None:
        admin.refusal = UnavailableError("the cache's store is away", retry_after=1)
        assert (await client.post("/cache/match", json=CHAT)).status == 503


class TestPins:
    @pytest.mark.parametrize(
        ("body", "frame", "tokens"),
        [
            ({"prefix": "00ff"}, Pin(0, prefix="00ff"), 0),
            ({"request_id": "chatcmpl-1", "label": "a"}, Pin(0, request="chatcmpl-1", label="a"), 0),
            ({"prefix": "0", "ttl": "30d"}, Pin(0, prefix="0", ttl=30 * 86400.0), 0),
            ({"prefix": "0", "ttl": 5}, Pin(0, prefix="0", ttl=5.0), 0),
            ({**CHAT, "label": "house"}, Pin(0, label="house"), 100),
            ({"prompt": "x"}, Pin(0), 100),
            ({}, Pin(0), 0),
        ],
    )
    async def test_pin(
        self, client: TestClient, admin: MemoryAdmin, body: dict[str, Any], frame: Pin, tokens: int
    ) -> None:
        reply = await client.post("/cache/pin", json=body)
        assert reply.status == 200
        assert (await reply.json())["pins"][0]["tokens"] == 80
        [(asked, description, prompt)] = admin.pinned
        assert (asked, len(prompt)) == (frame, tokens)
        assert description == (NAMESPACE if tokens else None)

    @pytest.mark.parametrize(
        ("body", "frame"),
        [
            ({"label": "house"}, Unpin(0, label="house")),
            ({"all": True}, Unpin(0, all=True)),
            ({"prefix": "00"}, Unpin(0, prefix="00")),
            ({"request_id": "r"}, Unpin(0, request="r")),
            (CHAT, Unpin(0)),
        ],
    )
    async def test_unpin(self, client: TestClient, admin: MemoryAdmin, body: dict[str, Any], frame: Unpin) -> None:
        assert (await client.post("/cache/unpin", json=body)).status == 200
        assert admin.pinned[0][0] == frame

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("pin", {"prefix": "xyz"}),
            ("pin", {"prefix": ""}),
            ("pin", {"request_id": ""}),
            ("pin", {"prefix": "00", "request_id": "r"}),
            ("pin", {**CHAT, "prefix": "00"}),
            ("pin", {"label": "a"}),
            ("pin", {"prefix": "00", "label": "x" * 201}),
            ("pin", {"prefix": "00", "label": " "}),
            ("pin", {"prefix": "00", "ttl": 0}),
            ("pin", {"prefix": "00", "ttl": "soon"}),
            ("unpin", {}),
            ("unpin", {"all": False}),
            ("unpin", {"all": 5}),
            ("unpin", {"all": True, "label": "a"}),
            ("unpin", {"label": "a", "request_id": "r"}),
            ("unpin", {**CHAT, "label": "a"}),
        ],
    )
    async def test_what_is_refused(self, client: TestClient, admin: MemoryAdmin, path: str, body: Any) -> None:
        assert (await client.post(f"/cache/{path}", json=body)).status == 400
        assert not admin.pinned

    async def test_an_unknown_prefix(self, client: TestClient, admin: MemoryAdmin) -> None:
        admin.refusal = NotFoundError("no prefix '00'")
        assert (await client.post("/cache/pin", json={"prefix": "00"})).status == 404


def test_descriptions() -> None:
    info = msgspec.structs.replace(MODEL, namespace=NAMESPACE)
    assert description_of(info, "") == NAMESPACE
    assert description_of(info, "a") != description_of(msgspec.structs.replace(info, namespace={"salt": "housea"}), "")


def test_predictions_grow_with_what_is_left() -> None:
    nodes = [PlanNode(bytes([n]) * 32, 64 * n, 64, 64, "hot", 1000, True, -1) for n in range(8)]
    found = [predicted(Plan(0, nodes[:known]), 600, RATES) for known in range(9)]
    assert None not in found
    assert found == sorted(found, reverse=True)  # type: ignore[type-var]
