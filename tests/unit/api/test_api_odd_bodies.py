"""What clients send that is not wrong, only odd or old: it is understood, in the same sense everywhere."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from aiohttp.test_utils import TestClient
from scripted_backend import ScriptedBackend

from homeprefixd.frames.worker import Converted

CHAT = "/v1/chat/completions"


async def messages_of(client: TestClient, backend: ScriptedBackend, said: list[dict[str, Any]]) -> list[Any]:
    reply = await client.post(CHAT, json={"messages": said})
    assert reply.status == 200, await reply.text()
    return backend.asked.messages or []


async def test_a_refusal_in_the_history_is_text(client: TestClient, backend: ScriptedBackend) -> None:
    parts = [{"type": "refusal", "refusal": "I won't."}, {"type": "text", "text": "Sorry."}]
    said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": parts}, {"role": "user", "content": "y"}]
    assert (await messages_of(client, backend, said))[1].content == "I won't.\nSorry."


async def test_calls_of_the_older_form_are_calls(client: TestClient, backend: ScriptedBackend) -> None:
    said = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a":1}'}},
        {"role": "function", "name": "f", "content": "5"},
    ]
    found = await messages_of(client, backend, said)
    assert found[1].tool_calls == [{"type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}]
    assert (found[2].role, found[2].name) == ("tool", "f")


async def test_no_arguments_are_none(client: TestClient, backend: ScriptedBackend) -> None:
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": None}}]
    found = await messages_of(client, backend, [{"role": "assistant", "content": None, "tool_calls": calls}])
    assert found[0].tool_calls[0]["function"]["arguments"] == ""


async def test_any_tool_is_a_tool_that_is_required(client: TestClient, backend: ScriptedBackend) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"messages": [{"role": "user", "content": "x"}], "tools": tools, "tool_choice": "any"}
    assert (await client.post(CHAT, json=body)).status == 200
    assert backend.asked.tool_choice == "required"


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (rb"cut \ud83d", "cut �"),
        (rb"\ude00 cut", "� cut"),
        (rb"\ud83d\ude00 whole", "😀 whole"),
        (rb"\ud83d\ud83d\ude00", "�😀"),
        (rb"\\ud83d is no escape, \ud83d\n is one", "\\ud83d is no escape, �\n is one"),
        (rb"\\\ud83d", "\\�"),
    ],
)
async def test_texts_that_were_cut_within_a_character(
    client: TestClient, backend: ScriptedBackend, written: bytes, meant: str
) -> None:
    body = b'{"messages":[{"role":"user","content":"' + written + b'"}]}'
    reply = await client.post(CHAT, data=body)
    assert reply.status == 200, await reply.text()
    assert (backend.asked.messages or [])[0].content == meant


async def test_minus_one_is_the_whole_context(client: TestClient, backend: ScriptedBackend) -> None:
    assert (await client.post("/completion", json={"prompt": "x", "repeat_last_n": -1})).status == 200
    assert backend.asked.sampling.repeat_last_n == -1


SAMPLERS = {
    "top_n_sigma": 1.5, "xtc_probability": 0.5, "xtc_threshold": 0.2, "dynatemp_range": 0.3, "dynatemp_exponent": 2.0,
    "mirostat": 2, "mirostat_tau": 4.0, "mirostat_eta": 0.2, "dry_multiplier": 0.8, "dry_base": 2.0,
    "dry_allowed_length": 3, "dry_penalty_last_n": -1, "dry_sequence_breakers": ["\n", "é"],
    "samplers": ["temperature", "top_k"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/completion", {"prompt": "x", **SAMPLERS}),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], **SAMPLERS}),
        ("/api/generate", {"prompt": "x", "stream": False, "options": SAMPLERS}),
    ],
)
async def test_llama_servers_samplers(
    client: TestClient, backend: ScriptedBackend, path: str, body: dict[str, Any]
) -> None:
    assert (await client.post(path, json=body)).status == 200
    asked = msgspec.json.decode(msgspec.json.encode(backend.asked.sampling))
    assert {name: asked[name] for name in SAMPLERS} == SAMPLERS


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("kpt", ("top_k", "top_p", "temperature")),
        ("edsyxmi", ("penalties", "dry", "top_n_sigma", "typ_p", "xtc", "min_p", "infill")),
        (["Top-K", "topp", "temp", "typical_p", "nucleus"], ("top_k", "top_p", "temperature", "typ_p", "top_p")),
        ([], ()),
    ],
)
async def test_samplers_as_llama_cpp_spells_them(
    client: TestClient, backend: ScriptedBackend, given: Any, meant: tuple[str, ...]
) -> None:
    reply = await client.post("/completion", json={"prompt": "x", "samplers": given})
    assert backend.asked.sampling.samplers == meant
    assert (await reply.json())["generation_settings"]["samplers"] == list(meant)


async def test_a_base_of_dry_below_one_is_the_usual_one(client: TestClient, backend: ScriptedBackend) -> None:
    assert (await client.post("/completion", json={"prompt": "x", "dry_base": 0.5})).status == 200
    assert backend.asked.sampling.dry_base == 1.75


async def test_ollamas_suffix_fills_a_gap(client: TestClient, backend: ScriptedBackend) -> None:
    body = {"prompt": "def f(", "suffix": "return y", "stream": False}
    assert (await client.post("/api/generate", json=body)).status == 200
    asked = backend.asked
    assert (asked.prompt, asked.suffix, asked.messages) == ("def f(", "return y", None)


async def test_anthropics_search_results_are_named(client: TestClient) -> None:
    block = {"type": "search_result", "source": "https://a", "title": "t", "content": []}
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": [block]}]}
    reply = await client.post("/v1/messages", json=body)
    assert reply.status == 400
    assert "'search_result'" in (await reply.json())["error"]["message"]


@pytest.mark.parametrize("given", [[["ab", -5], [7, 1], ["9", False]], {"ab": -5, "7": 1, "9": False}])
async def test_llama_servers_bias_on_a_text_is_one_on_its_tokens(
    client: TestClient, backend: ScriptedBackend, given: Any
) -> None:
    backend.converted = Converted("", tokens=[3, 4])
    reply = await client.post("/completion", json={"prompt": "x", "logit_bias": given})
    assert reply.status == 200, await reply.text()
    assert backend.asked.sampling.logit_bias == {3: -5.0, 4: -5.0, 7: 1.0, 9: -math.inf}
    told = (await reply.json())["generation_settings"]["logit_bias"]
    assert {one["token"]: one["bias"] for one in told} == {3: -5.0, 4: -5.0, 7: 1.0, 9: None}
    assert (
        await client.post(CHAT, json={"messages": [{"role": "user", "content": "x"}], "logit_bias": given})
    ).status == 400


async def test_too_many_texts_with_a_bias(client: TestClient) -> None:
    reply = await client.post("/completion", json={"prompt": "x", "logit_bias": [[f"a{n}", 1] for n in range(1001)]})
    assert reply.status == 400
    assert "at most 1000 texts" in (await reply.json())["error"]["message"]
