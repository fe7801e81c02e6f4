"""Whose a request is and how urgent."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp.test_utils import TestClient
from scripted_backend import ScriptedBackend

CHAT = "/v1/chat/completions"
TITLE = "### Task:\nGenerate a concise, 3-5 word title with an emoji summarizing the chat history."


def body(text: str = "Hello", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **more}


@pytest.mark.parametrize(
    ("text", "more", "headers", "expected"),
    [
        ("Hello", {}, {}, "normal"),
        ("Hello", {}, {"X-Homeprefixd-Priority": "interactive"}, "interactive"),
        ("Hello", {}, {"X-Homeprefixd-Priority": " Background "}, "background"),
        ("Hello", {"service_tier": "priority"}, {}, "interactive"),
        ("Hello", {"service_tier": "flex"}, {}, "background"),
        ("Hello", {"service_tier": "auto"}, {}, "normal"),
        ("Hello", {"service_tier": 7}, {}, "normal"),
        ("Hello", {"service_tier": "flex"}, {"X-Homeprefixd-Priority": "normal"}, "normal"),
        (TITLE, {}, {}, "background"),
        (TITLE, {}, {"X-Homeprefixd-Priority": "interactive"}, "interactive"),
        (f"What does this mean? {TITLE}", {}, {}, "normal"),
    ],
)
async def test_priority(
    client: TestClient,
    backend: ScriptedBackend,
    text: str,
    more: dict[str, Any],
    headers: dict[str, str],
    expected: str,
) -> None:
    reply = await client.post(CHAT, json=body(text, **more), headers=headers)
    assert reply.status == 200
    assert backend.generations[0].request.priority == expected


async def test_a_priority_that_there_is_not_is_refused(client: TestClient, backend: ScriptedBackend) -> None:
    reply = await client.post(CHAT, json=body(), headers={"X-Homeprefixd-Priority": "urgent"})
    assert reply.status == 400
    error = (await reply.json())["error"]
    assert error["code"] == "bad_priority"
    assert "interactive, normal, background" in error["message"]
    assert not backend.generations


async def test_apps_are_told_apart_by_address_and_name(client: TestClient, backend: ScriptedBackend) -> None:
    for agent in ("HomeAssistant/2026.11 aiohttp/3.14", "OpenAI/Python 3.57", "x" * 5000):
        await client.post("/v1/completions", json={"prompt": "x"}, headers={"User-Agent": agent})
    clients = [generation.request.client for generation in backend.generations]
    assert clients[:2] == ["127.0.0.1 HomeAssistant/2026.11", "127.0.0.1 OpenAI/Python"]
    assert len(clients[2]) == 200
