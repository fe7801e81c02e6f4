"""llama-server's routes beside the chat, over a backend that answers what a test sets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp.test_utils import TestClient
from scripted_backend import ScriptedBackend

from homeprefixd.api.content_parts import MAX_TEXT, MAX_TOKENS, check_ids, checked_content
from homeprefixd.errors import RequestError, UnavailableError
from homeprefixd.frames.worker import ApplyTemplate, Converted, DescribeTemplate, Detokenize, Message, Tokenize

PREFIXES = pytest.mark.parametrize("prefix", ["", "/v1"])


@PREFIXES
async def test_tokenize(client: TestClient, backend: ScriptedBackend, prefix: str) -> None:
    backend.converted = Converted("", tokens=[5, 6])
    reply = await client.post(f"{prefix}/tokenize", json={"content": "Hi", "model": "demo"})
    assert await reply.json() == {"tokens": [5, 6]}
    assert backend.conversions == [Tokenize("ask-id0", ["Hi"], False, True, False)]
    backend.converted = Converted("", tokens=[5, 6], pieces=["é".encode(), b"\xc3"])
    body = {"content": ["a", 7, "b"], "add_special": True, "parse_special": False, "with_pieces": True}
    reply = await client.post(f"{prefix}/tokenize", json=body)
    assert await reply.json() == {"tokens": [{"id": 5, "piece": "é"}, {"id": 6, "piece": [0xC3]}]}
    assert backend.conversions[-1] == Tokenize("ask-id1", ["a", 7, "b"], True, False, True)


@PREFIXES
async def test_detokenize(client: TestClient, backend: ScriptedBackend, prefix: str) -> None:
    backend.converted = Converted("", text="Hi \ufffd")
    reply = await client.post(f"{prefix}/detokenize", json={"tokens": [5, 6]})
    assert await reply.json() == {"content": "Hi \ufffd"}
    assert backend.conversions == [Detokenize("ask-id0", [5, 6])]


@PREFIXES
async def test_apply_template(client: TestClient, backend: ScriptedBackend, prefix: str) -> None:
    backend.converted = Converted("", text="<user>x")
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"messages": [{"role": "developer", "content": "x"}], "tools": tools, "chat_template_kwargs": {"a": 1}}
    reply = await client.post(f"{prefix}/apply-template", json=body)
    assert await reply.json() == {"prompt": "<user>x"}
    assert backend.conversions == [ApplyTemplate("ask-id0", [Message("system", "x")], tools, {"a": 1})]


@PREFIXES
async def test_props(client: TestClient, backend: ScriptedBackend, prefix: str) -> None:
    backend.converted = Converted("", text="{{ messages }}", pieces=[b"<s>", b"</s>"])
    shown = await (await client.get(f"{prefix}/props")).json()
    assert shown["default_generation_settings"]["n_ctx"] == 2048
    assert shown["default_generation_settings"]["params"]["temperature"] == 0.8
    expected = {"total_slots": 4, "model_alias": "demo", "bos_token": "<s>", "eos_token": "</s>"}
    assert expected.items() <= shown.items()
    assert (shown["chat_template"], shown["model_path"]) == ("{{ messages }}", "/models/demo.gguf")
    assert backend.conversions == [DescribeTemplate("ask-id0")]


async def test_slots_show_the_sequences(client: TestClient, backend: ScriptedBackend) -> None:
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        reached.set()
        await go_on.wait()

    backend.script[3:3] = [wait]
    backend.state["workers"] = [{"alias": "demo", "requests": 1}]
    body = {"prompt": "x", "stream": True}
    task = asyncio.create_task(client.post("/v1/completions", json=body))
    async with asyncio.timeout(5):
        await reached.wait()
    first, second, *_ = await (await client.get("/slots")).json()
    go_on.set()
    await (await task).text()
    assert first == {
        **second,
        "id": 0,
        "is_processing": True,
        "request": "cmpl-id0",
        "n_prompt_tokens": 100,
        "n_prompt_tokens_processed": 36,
        "n_prompt_tokens_cache": 64,
        "next_token": [{"has_next_token": True, "n_decoded": 1, "n_remain": -1}],
    }
    assert set(second) == {"id", "n_ctx", "speculative", "is_processing"}


@PREFIXES
async def test_slots(client: TestClient, backend: ScriptedBackend, prefix: str) -> None:
    backend.state["workers"] = [{"alias": "demo", "requests": 3}]
    shown = await (await client.get(f"{prefix}/slots?fail_on_no_slot=1")).json()
    assert [slot["is_processing"] for slot in shown] == [True, True, True, False]
    assert shown[3] == {"id": 3, "n_ctx": 2048, "speculative": False, "is_processing": False}
    backend.state["workers"] = [{"alias": "demo", "requests": 4}]
    assert (await client.get(f"{prefix}/slots")).status == 200
    reply = await client.get(f"{prefix}/slots?fail_on_no_slot=1")
    assert (reply.status, (await reply.json())["error"]["message"]) == (503, "no slot available")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"content": 7}, "content"),
        ("/tokenize", {"content": [1.5]}, "content[0]"),
        ("/tokenize", {"content": [-1]}, "content"),
        ("/tokenize", {"content": ["x", 1000]}, "content"),
        ("/tokenize", {"content": "x", "with_pieces": "yes"}, "with_pieces"),
        ("/tokenize", {"content": [""] * 10_001}, "content"),
        ("/tokenize", {"content": "x", "model": "nope"}, "model"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [5, 1000]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]"),
        ("/apply-template", {"messages": []}, "messages"),
        ("/apply-template", {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ("/apply-template", {}, "messages"),
    ],
)
async def test_bad_fields(
    client: TestClient, backend: ScriptedBackend, path: str, body: dict[str, Any], param: str
) -> None:
    reply = await client.post(path, json=body)
    assert reply.status == (404 if param == "model" else 400)
    assert (await reply.json())["error"]["param"] == param
    assert not backend.conversions


def test_too_much_at_once() -> None:
    with pytest.raises(RequestError, match="send it in pieces"):
        checked_content(["x" * MAX_TEXT, "y"], None)
    assert checked_content("x" * MAX_TEXT, None) == ["x" * MAX_TEXT]
    with pytest.raises(RequestError, match=f"at most {MAX_TOKENS} tokens"):
        check_ids("tokens", [1] * (MAX_TOKENS + 1), None)


async def test_what_the_worker_refuses_and_a_model_that_loads(client: TestClient, backend: ScriptedBackend) -> None:
    backend.converted = RequestError("there is no token 999", param="tokens")
    reply = await client.post("/detokenize", json={"tokens": [999]})
    assert (reply.status, (await reply.json())["error"]["message"]) == (400, "there is no token 999")
    backend.loaded = []
    for path in ("/props", "/slots"):
        assert (await client.get(path)).status == 503
    backend.converted = UnavailableError("loading", retry_after=3)
    reply = await client.post("/tokenize", json={"content": "x"})
    assert (reply.status, reply.headers["Retry-After"]) == (503, "3")
