"""Rules of what clients send and read that hold in every dialect: 9 (what is taken), 10 (reuse), 12 (thoughts)."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from aiohttp.test_utils import TestClient
from scripted_backend import TIMINGS, ScriptedBackend

from homeprefixd.frames.worker import Accepted, Converted, Delta, Finished

MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = {"messages": MESSAGES}

TAKEN: list[tuple[str, dict[str, Any]]] = [
    *(
        ("/v1/chat/completions", {**CHAT, **more})
        for more in (
            {"max_tokens": 5},
            {"max_completion_tokens": 5},
            {"stop": "x"},
            {"stop": ["x", "y"]},
            {"messages": [{"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}, *MESSAGES]},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {}}]}]},
            {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto"},
            {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
            {"parallel_tool_calls": False},
            {"response_format": {"type": "text"}},
            {"response_format": {"type": "json_object"}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}},
            {"seed": 7},
            {"logprobs": True, "top_logprobs": 3},
            {"logit_bias": {"5": -100}},
            {"n": 2},
            {"top_k": 40, "min_p": 0.1, "typical_p": 0.9, "repeat_penalty": 1.1, "repeat_last_n": 32},
            {"grammar": 'root ::= "x"'},
            {"json_schema": {"type": "object"}},
            {"chat_template_kwargs": {"enable_thinking": False}},
            {"reasoning_effort": "low"},
            {"cache_prompt": True},
            {"timings_per_token": True},
            {"return_progress": True, "stream": True},
            {"user": "01J", "prompt_cache_key": "k", "prompt_cache_retention": "24h", "cache_salt": "s"},
            {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
            {"no_such_field": {"x": [1]}, "min_tokens": 0, "store": True, "metadata": {"a": "b"}},
        )
    ),
    (
        "/v1/messages",
        {**CHAT, "max_tokens": 5, "no_such_field": 1, "metadata": {"user_id": "x"}, "service_tier": "auto"},
    ),
    ("/api/chat", {**CHAT, "stream": False, "no_such_field": 1, "options": {"num_ctx": 4096, "num_gpu": 9, "x": 1}}),
    ("/v1/responses", {"input": "Hi", "no_such_field": 1, "store": False, "include": []}),
    ("/completion", {"prompt": "Hi", "no_such_field": 1, "samplers": ["top_k"], "t_max_predict_ms": 0}),
]


@pytest.mark.parametrize(("path", "body"), TAKEN, ids=lambda value: json.dumps(value)[:70])
async def test_rule_9_what_clients_send_is_taken(
    client: TestClient, backend: ScriptedBackend, caplog: pytest.LogCaptureFixture, path: str, body: dict[str, Any]
) -> None:
    with caplog.at_level(logging.DEBUG, "homeprefixd"):
        reply = await client.post(path, json=body)
        assert reply.status == 200, await reply.text()
    assert backend.generations
    if "no_such_field" in body:
        assert "no_such_field" in caplog.text
    else:
        assert "ignored fields" not in caplog.text


SHOWN: list[tuple[str, dict[str, Any], Any]] = [
    ("/v1/chat/completions", CHAT, lambda said: said["usage"]["prompt_tokens_details"]["cached_tokens"]),
    ("/v1/chat/completions", CHAT, lambda said: said["timings"]["cache_n"]),
    ("/v1/completions", {"prompt": "x"}, lambda said: said["usage"]["prompt_tokens_details"]["cached_tokens"]),
    ("/completion", {"prompt": "x"}, lambda said: said["timings"]["cache_n"]),
    ("/v1/responses", {"input": "x"}, lambda said: said["usage"]["input_tokens_details"]["cached_tokens"]),
    ("/v1/messages", {**CHAT, "max_tokens": 5}, lambda said: said["usage"]["cache_read_input_tokens"]),
    ("/api/chat", {**CHAT, "stream": False}, lambda said: said["prompt_cached_count"]),
    ("/api/generate", {"prompt": "x", "stream": False}, lambda said: said["prompt_cached_count"]),
]


@pytest.mark.parametrize(("path", "body", "shown"), SHOWN, ids=[case[0] for case in SHOWN])
async def test_rule_10_reuse_is_where_clients_look(
    client: TestClient, path: str, body: dict[str, Any], shown: Any
) -> None:
    assert shown(await (await client.post(path, json=body)).json()) == TIMINGS.cache_n == 64


THOUGHTS: list[tuple[str, dict[str, Any], Any]] = [
    ("/v1/chat/completions", CHAT, lambda said: said["choices"][0]["message"]["reasoning_content"]),
    ("/v1/messages", {**CHAT, "max_tokens": 5}, lambda said: said["content"][0]["thinking"]),
    ("/api/chat", {**CHAT, "stream": False}, lambda said: said["message"]["thinking"]),
    ("/v1/responses", {"input": "x"}, lambda said: said["output"][0]["content"][0]["text"]),
]


@pytest.mark.parametrize(("path", "body", "shown"), THOUGHTS, ids=[case[0] for case in THOUGHTS])
async def test_rule_12_thoughts_have_a_field_of_their_own(
    client: TestClient, backend: ScriptedBackend, path: str, body: dict[str, Any], shown: Any
) -> None:
    backend.script = [Accepted("", 100), Delta("", "Yes.", 2, reasoning="Hm."), Finished("", "stop", "", None, TIMINGS)]
    said = await (await client.post(path, json=body)).json()
    assert shown(said) == "Hm."


async def test_the_usage_chunk_has_timings_too(client: TestClient, backend: ScriptedBackend) -> None:
    backend.script = [Accepted("", 100), Delta("", "Hi", 1), Finished("", "stop", "", None, TIMINGS)]
    body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    text = await (await client.post("/v1/chat/completions", json=body)).text()
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["timings"]["cache_n"] == chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 64
    assert {chunk["system_fingerprint"][0] for chunk in chunks} == {"b"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chat/completions/input_tokens", CHAT),
        ("/v1/chat/completions/input_tokens", CHAT),
        ("/v1/responses/input_tokens", {"input": "Hi"}),
    ],
)
async def test_prompts_are_counted(client: TestClient, backend: ScriptedBackend, path: str, body: Any) -> None:
    backend.converted = Converted("", tokens=[1, 2, 3])
    said = await (await client.post(path, json=body)).json()
    assert said == {"object": "response.input_tokens", "input_tokens": 3}
    assert not backend.generations
