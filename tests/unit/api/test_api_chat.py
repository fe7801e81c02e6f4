"""Chat completions and completions: replies, streams, and every rule of clients that concerns them."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import ClientResponse
from aiohttp.test_utils import TestClient
from scripted_backend import TIMINGS, ScriptedBackend

from homeprefixd.api.openai import ChatBody
from homeprefixd.api.openai_reply import FINGERPRINT
from homeprefixd.config import ServerConfig
from homeprefixd.errors import BusyError, ContextOverflowError, UnavailableError, WorkerDiedError
from homeprefixd.frames.worker import Accepted, Delta, Finished, Message, Progress, Sampling

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}


def events(text: str) -> list[Any]:
    """Data of each event; comments are left out."""
    found: list[Any] = []
    for block in text.split("\n\n"):
        if block.startswith("data: "):
            assert "\n" not in block
            data = block.removeprefix("data: ")
            found.append(data if data == "[DONE]" else json.loads(data))
        else:
            assert block == "" or block.startswith(": ")
    return found


async def stream(client: TestClient, path: str = CHAT, **body: Any) -> list[Any]:
    reply = await client.post(path, json={**({} if path == COMPLETIONS else HELLO), "stream": True, **body})
    assert reply.status == 200, await reply.text()
    return events(await reply.text())


async def error_of(reply: ClientResponse) -> dict[str, Any]:
    body = await reply.json()
    assert set(body) == {"error"}
    assert {"message", "type", "param", "code"} <= set(body["error"])
    return dict(body["error"])


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged, except the list of requests."""
    return [record.getMessage() for record in caplog.records if record.name != "aiohttp.access"]


# ---------------------------------------------------------------------------------------------------- whole replies


async def test_a_whole_reply(client: TestClient) -> None:
    reply = await client.post(CHAT, json=HELLO)
    assert reply.status == 200
    assert reply.content_type == "application/json"
    body = await reply.json()
    assert body["timings"].pop("prompt_per_second") == pytest.approx(2000)
    assert body["timings"].pop("predicted_per_second") == pytest.approx(50)
    assert body == {
        "id": "chatcmpl-id0",
        "object": "chat.completion",
        "created": 1_800_000_000,
        "model": "demo",
        "system_fingerprint": FINGERPRINT,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": 'Hello "wörld"\n!'},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 100,
            "completion_tokens": 3,
            "total_tokens": 103,
            "prompt_tokens_details": {"cached_tokens": 64},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
        "timings": {
            "cache_n": 64,
            "prompt_n": 36,
            "prompt_ms": 18.0,
            "restore_ms": 1.5,
            "queue_ms": 0.5,
            "predicted_n": 3,
            "predicted_ms": 60.0,
            "cache_tiers": {"hot": 64},
        },
    }


async def test_a_whole_completion(client: TestClient, backend: ScriptedBackend) -> None:
    body = await (await client.post(COMPLETIONS, json={"prompt": "Once"})).json()
    assert body["object"] == "text_completion"
    assert body["id"] == "cmpl-id0"
    assert body["choices"] == [{"text": 'Hello "wörld"\n!', "index": 0, "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 64}
    assert (backend.asked.prompt, backend.asked.messages) == ("Once", None)


@pytest.mark.parametrize(("reason", "shown"), [("stop", "stop"), ("length", "length"), ("cancelled", "length")])
async def test_finish_reasons(client: TestClient, backend: ScriptedBackend, reason: Any, shown: str) -> None:
    backend.script = [Accepted("", 1), Finished("", reason, "", None, TIMINGS)]
    body = await (await client.post(CHAT, json=HELLO)).json()
    assert body["choices"][0]["finish_reason"] == shown
    assert (await stream(client))[-2]["choices"][0]["finish_reason"] == shown


# ---------------------------------------------------------------------------------------------------- streams


async def test_rule_1_to_4_a_stream(client: TestClient) -> None:
    chunks = await stream(client)
    assert chunks.pop() == "[DONE]"
    assert {(c["id"], c["object"], c["created"], c["model"]) for c in chunks} == {
        ("chatcmpl-id0", "chat.completion.chunk", 1_800_000_000, "demo")
    }
    assert [c["choices"][0]["delta"] for c in chunks] == [
        {"role": "assistant", "content": None},
        {"content": "Hel"},
        {"content": 'lo "wörld"\n'},
        {"content": "!"},
        {},
    ]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, None, None, None, "stop"]
    assert all(len(c["choices"]) == 1 and c["choices"][0]["index"] == 0 for c in chunks)
    assert not any("usage" in c for c in chunks)
    assert chunks[-1]["timings"]["cache_tiers"] == {"hot": 64}
    assert not any("timings" in c for c in chunks[:-1])


async def test_rule_4_usage_only_where_asked_for(client: TestClient) -> None:
    *_, finish, usage, done = await stream(client, stream_options={"include_usage": True})
    assert done == "[DONE]"
    assert finish["choices"][0]["finish_reason"] == "stop"
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 103
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 64}
    assert (usage["id"], usage["model"]) == (finish["id"], finish["model"])
    for off in (None, {}, {"include_usage": False}, {"include_usage": None}):
        assert not any("usage" in c for c in (await stream(client, stream_options=off))[:-1])


async def test_a_completion_stream(client: TestClient) -> None:
    chunks = await stream(client, COMPLETIONS, prompt="Once", stream_options={"include_usage": True})
    assert chunks.pop() == "[DONE]"
    assert chunks.pop()["choices"] == []
    assert [c["choices"][0]["text"] for c in chunks] == ["Hel", 'lo "wörld"\n', "!", ""]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, None, None, "stop"]
    assert {c["object"] for c in chunks} == {"text_completion"}


async def test_rule_7_headers_of_a_stream(client: TestClient) -> None:
    reply = await client.post(CHAT, json={**HELLO, "stream": True}, headers={"Accept-Encoding": "gzip, deflate, br"})
    assert reply.headers["Content-Type"] == "text/event-stream"
    assert reply.headers["Cache-Control"] == "no-cache"
    assert reply.headers["X-Accel-Buffering"] == "no"
    assert "Content-Encoding" not in reply.headers
    assert "Content-Length" not in reply.headers


async def test_progress_chunks_where_asked_for(client: TestClient) -> None:
    chunks = await stream(client, return_progress=True)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[1]["prompt_progress"] == {"total": 100, "cache": 64, "processed": 100}
    assert chunks[1]["choices"][0]["delta"] == {}


def pause(seconds: float) -> Callable[[], Awaitable[None]]:
    async def wait() -> None:
        await asyncio.sleep(seconds)

    return wait


class TestKeepAlive:
    @pytest.fixture
    def config(self) -> ServerConfig:
        return ServerConfig(keep_alive=0.05)

    async def test_rule_7_comments_with_progress_while_waiting(
        self, client: TestClient, backend: ScriptedBackend
    ) -> None:
        end = Finished("", "stop", "", None, TIMINGS)
        backend.script = [
            Accepted("", 100),
            pause(0.17),
            Progress("", 64, 80, 100),
            pause(0.17),
            Delta("", "x", 1),
            end,
        ]
        text = await (await client.post(CHAT, json={**HELLO, "stream": True})).text()
        comments = [line for line in text.split("\n\n") if line.startswith(":")]
        assert comments[0] == ": waiting: 100 tokens"
        assert comments[-1] == ": prefill: 80 of 100 tokens, 64 of them reused"
        assert 4 <= len(comments) <= 7
        assert [c["choices"][0]["delta"] for c in events(text)[:-1]] == [
            {"role": "assistant", "content": None},
            {"content": "x"},
            {},
        ]

    async def test_headers_come_before_the_first_text(self, client: TestClient, backend: ScriptedBackend) -> None:
        go = asyncio.Event()
        end = Finished("", "stop", "", None, TIMINGS)

        async def wait() -> None:
            await go.wait()

        backend.script = [Accepted("", 100), wait, Delta("", "x", 1), end]
        async with asyncio.timeout(5), client.post(COMPLETIONS, json={"prompt": "x", "stream": True}) as reply:
            assert reply.status == 200
            go.set()
            assert events(await reply.text())[0]["choices"][0]["text"] == "x"


class TestFlowing:
    @pytest.fixture
    def config(self) -> ServerConfig:
        return ServerConfig(keep_alive=0.5)

    async def test_no_comment_while_text_flows(self, client: TestClient, backend: ScriptedBackend) -> None:
        steps = [step for i in range(15) for step in (pause(0.05), Delta("", "x", i))]
        backend.script = [Accepted("", 100), *steps, Finished("", "stop", "", None, TIMINGS)]
        text = await (await client.post(CHAT, json={**HELLO, "stream": True})).text()
        assert ": " not in [block[:2] for block in text.split("\n\n")]


# ---------------------------------------------------------------------------------------------------- leaving


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_client_that_leaves_ends_its_generation(
    client: TestClient, backend: ScriptedBackend, streaming: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    waiting = asyncio.Event()

    async def forever() -> None:
        waiting.set()
        await asyncio.Event().wait()

    backend.script = [Accepted("", 100), Delta("", "x", 1), forever]
    task = asyncio.create_task(client.post(CHAT, json={**HELLO, "stream": streaming}))
    async with asyncio.timeout(5):
        await waiting.wait()
        if streaming:
            (await task).close()
        else:
            task.cancel()
        await backend.generations[0].left.wait()
    assert not backend.generations[0].finished
    await asyncio.sleep(0.05)
    assert not said(caplog)


async def test_a_client_that_leaves_while_text_flows(
    client: TestClient, backend: ScriptedBackend, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    backend.script = [Accepted("", 100), *[step for i in range(5000) for step in (pause(0), Delta("", "x" * 500, i))]]
    reply = await client.post(CHAT, json={**HELLO, "stream": True})
    await reply.content.read(1000)
    reply.close()
    async with asyncio.timeout(5):
        await backend.generations[0].left.wait()
    await asyncio.sleep(0.05)
    assert not said(caplog)


async def test_rule_5_leaving_after_finish_reason_is_normal(
    client: TestClient, backend: ScriptedBackend, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    reply = await client.post(CHAT, json={**HELLO, "stream": True})
    while b'"finish_reason":"stop"' not in (line := await reply.content.readline()):
        assert line
    reply.close()
    await asyncio.sleep(0.05)
    generation = backend.generations[0]
    assert generation.finished
    assert generation.left.is_set()
    assert not said(caplog)


async def test_a_slow_reader_waits_and_others_do_not(client: TestClient, backend: ScriptedBackend) -> None:
    """The first client reads nothing of 64 MB; the second gets its reply meanwhile."""
    end = Finished("", "stop", "", None, TIMINGS)
    big = [Delta("", "x" * 65536, i) for i in range(1000)]
    backend.script = [Accepted("", 100), *big, end]
    async with asyncio.timeout(20):
        slow = await client.post(CHAT, json={**HELLO, "stream": True})
        await asyncio.sleep(0.1)
        assert not backend.generations[0].finished
        backend.script = [Accepted("", 100), Delta("", "quick", 1), end]
        assert (await stream(client))[1]["choices"][0]["delta"]["content"] == "quick"
        slow.close()
        await backend.generations[0].left.wait()


async def test_two_streams_at_once(client: TestClient, backend: ScriptedBackend) -> None:
    """Each event of one is only given once the other has got its own: neither can wait for the other's end."""
    turn = [asyncio.Event() for _ in range(20)]

    def ping(mine: int, other: int) -> Callable[[], Awaitable[None]]:
        async def wait() -> None:
            turn[mine].set()
            await turn[other].wait()

        return wait

    end = Finished("", "stop", "", None, TIMINGS)
    tasks = []
    for who in (0, 1):
        steps = [s for i in range(10) for s in (ping(2 * i + who, 2 * i + 1 - who), Delta("", f"{who}{i} ", i))]
        backend.script = [Accepted("", 100), *steps, end]
        tasks.append(asyncio.create_task(stream(client)))
        await asyncio.sleep(0.05)
    async with asyncio.timeout(5):
        for who, task in enumerate(tasks):
            chunks = (await task)[1:-2]
            assert [c["choices"][0]["delta"]["content"] for c in chunks] == [f"{who}{i} " for i in range(10)]


# ---------------------------------------------------------------------------------------------------- errors later on


@pytest.mark.parametrize("streaming", [True, False])
async def test_rule_6_and_8_an_error_before_the_first_byte_is_a_status(
    client: TestClient, backend: ScriptedBackend, streaming: bool
) -> None:
    backend.script = [ContextOverflowError("100 tokens do not fit 64.", n_prompt_tokens=100, n_ctx=64)]
    reply = await client.post(CHAT, json={**HELLO, "stream": streaming})
    assert (reply.status, reply.content_type) == (400, "application/json")
    assert await error_of(reply) == {
        "message": "100 tokens do not fit 64.",
        "type": "exceed_context_size_error",
        "param": None,
        "code": "context_length_exceeded",
        "n_prompt_tokens": 100,
        "n_ctx": 64,
    }
    assert backend.generations[0].left.is_set()


async def test_rule_6_an_error_after_the_first_byte_is_an_event(client: TestClient, backend: ScriptedBackend) -> None:
    backend.script = [Accepted("", 1), Delta("", "x", 1), WorkerDiedError("The worker died. Send it again.")]
    chunks = await stream(client)
    assert [c.get("choices", [{}])[0].get("delta") for c in chunks[:2]] == [
        {"role": "assistant", "content": None},
        {"content": "x"},
    ]
    assert chunks[2:] == [
        {
            "error": {
                "message": "The worker died. Send it again.",
                "type": "server_error",
                "param": None,
                "code": "worker_died",
            }
        }
    ]
    assert backend.generations[0].left.is_set()


async def test_our_own_bugs_are_logged_and_not_shown(
    client: TestClient, backend: ScriptedBackend, caplog: pytest.LogCaptureFixture
) -> None:
    backend.script = [ZeroDivisionError("secret")]
    for streaming in (True, False):
        reply = await client.post(CHAT, json={**HELLO, "stream": streaming})
        assert reply.status == 500
        assert "secret" not in json.dumps(await error_of(reply))
    backend.script = [Accepted("", 1), ZeroDivisionError("secret")]
    last = (await stream(client))[-1]
    assert last["error"]["code"] == "internal_error"
    assert "secret" not in json.dumps(last)
    assert [record.exc_info is not None for record in caplog.records if record.levelno >= logging.WARNING] == [
        True,
        True,
        True,
    ]


async def test_a_broken_link_to_the_worker_is_not_a_client_that_left(
    client: TestClient, backend: ScriptedBackend
) -> None:
    backend.script = [ConnectionResetError("the worker's socket")]
    assert (await client.post(CHAT, json={**HELLO, "stream": True})).status == 500
    backend.script = [Accepted("", 1), ConnectionResetError("the worker's socket")]
    assert (await stream(client))[-1]["error"]["code"] == "internal_error"


async def test_a_generation_without_an_end_is_our_bug(client: TestClient, backend: ScriptedBackend) -> None:
    backend.script = [Accepted("", 1)]
    assert (await client.post(CHAT, json=HELLO)).status == 500
    assert "error" in (await stream(client))[-1]


@pytest.mark.parametrize(
    ("error", "status", "retry"),
    [
        (BusyError("The queue is full.", retry_after=2.4), 429, "3"),
        (BusyError("The queue is full."), 429, "1"),
        (UnavailableError("Loading.", retry_after=5), 503, "5"),
    ],
)
async def test_rule_8_busy_and_loading(
    client: TestClient, backend: ScriptedBackend, error: Any, status: int, retry: str
) -> None:
    backend.refusal = error
    reply = await client.post(CHAT, json={**HELLO, "stream": True})
    assert (reply.status, reply.headers["Retry-After"]) == (status, retry)
    assert (await error_of(reply))["message"] == error.message


async def test_rule_8_unknown_model(client: TestClient) -> None:
    reply = await client.post(CHAT, json={**HELLO, "model": "gpt-4"})
    assert reply.status == 404
    error = await error_of(reply)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "demo" in error["message"]


# ---------------------------------------------------------------------------------------------------- fields


async def test_fields_reach_the_engine(client: TestClient, backend: ScriptedBackend) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"z": 1, "a": 2}}}]
    two_parts = [{"type": "text", "text": "a", "cache_control": {}}, {"type": "text", "text": "b"}]
    body = {
        "model": "demo",
        "messages": [
            {"role": "developer", "content": two_parts},
            {"role": "user", "content": "q", "name": "me"},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "hm",
                "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}],
            },
            {"role": "tool", "content": "3", "tool_call_id": "c1"},
            {"role": "function", "content": "4", "name": "f"},
        ],
        "tools": tools,
        "tool_choice": "auto",
        "max_completion_tokens": 7.0,
        "stop": ["a", "", "b"],
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.1,
        "typical_p": 0.9,
        "repeat_penalty": 1.1,
        "repeat_last_n": 5,
        "presence_penalty": -1.5,
        "frequency_penalty": 1.5,
        "seed": 42,
        "logit_bias": {"5": 1, "6": False},
        "n": 1,
        "cache_prompt": False,
        "cache_salt": "me",
        "chat_template_kwargs": {"enable_thinking": False},
        "reasoning_effort": "low",
        "ignore_eos": True,
        "min_tokens": 2,
        "response_format": {"type": "text"},
        "logprobs": False,
        "user": "someone",
        "timings_per_token": True,
        "parallel_tool_calls": True,
        "a_field_that_nobody_knows": {"x": [1]},
    }  # fmt: skip
    reply = await client.post(CHAT, json=body)
    assert reply.status == 200, await reply.text()
    asked = backend.asked
    assert asked.messages == [
        Message("system", "a\nb"),
        Message("user", "q", "me"),
        Message(
            "assistant",
            None,
            tool_calls=[{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}],
            reasoning_content="hm",
        ),
        Message("tool", "3", tool_call_id="c1"),
        Message("tool", "4", name="f"),
    ]
    assert asked.tools == tools
    assert list(asked.tools[0]["function"]["parameters"]) == ["z", "a"]
    assert asked.template_kwargs == {"enable_thinking": False, "reasoning_effort": "low"}
    assert (asked.max_tokens, asked.stop, asked.stream, asked.cache, asked.salt) == (7, ["a", "b"], False, False, "me")
    assert asked.rid == "chatcmpl-id0"
    assert asked.sampling == Sampling(
        0.0, 3, 0.5, 0.1, 0.9, 1.1, 5, -1.5, 1.5, 42, {5: 1.0, 6: -math.inf}, True, 2
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            {"reasoning_effort": "none", "enable_thinking": True},
        ),
    ],
)
async def test_no_effort_is_no_thinking(
    client: TestClient, backend: ScriptedBackend, fields: dict[str, Any], found: dict[str, Any]
) -> None:
    assert (await client.post(CHAT, json={**HELLO, **fields})).status == 200
    assert backend.asked.template_kwargs == found


async def test_samplers_of_other_versions_are_left_out(client: TestClient, backend: ScriptedBackend) -> None:
    """As llama.cpp does: SillyTavern sends its whole list."""
    names = ["penalties", "dry", "tfs_z", "top_k", "typ_p", "temperature", "adaptive_p"]
    assert (await client.post(CHAT, json={**HELLO, "samplers": names})).status == 200
    assert backend.asked.sampling.samplers == ("penalties", "dry", "top_k", "typ_p", "temperature")
    assert (await client.post(CHAT, json={**HELLO, "samplers": "kzt"})).status == 200
    assert backend.asked.sampling.samplers == ("top_k", "temperature")


async def test_neutral_values_are_as_absent(client: TestClient, backend: ScriptedBackend) -> None:
    names = [name for name in ChatBody.__struct_fields__ if name != "messages"]
    assert len(names) > 25
    reply = await client.post(CHAT, json={**HELLO, **dict.fromkeys(names)})
    assert reply.status == 200, await reply.text()
    given = backend.asked
    await client.post(CHAT, json=HELLO)
    backend.asked.rid = given.rid
    assert backend.asked == given
    assert given.sampling == Sampling()
    assert (given.max_tokens, given.stop, given.cache, given.salt, given.tools) == (-1, [], True, "", None)


@pytest.mark.parametrize(
    ("sent", "limit"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_tokens": -1}, -1),
        ({"max_tokens": 5, "max_completion_tokens": 6}, 6),
        ({"n_predict": 4, "max_tokens": 5}, 4),
        ({"max_tokens": 10**15}, 2**31 - 1),
    ],
)
async def test_limits(client: TestClient, backend: ScriptedBackend, sent: dict[str, int], limit: int) -> None:
    assert (await client.post(CHAT, json={**HELLO, **sent})).status == 200
    assert backend.asked.max_tokens == limit


@pytest.mark.parametrize(("seed", "expected"), [(-1, -1), (0, 0), (2**32, 0), (2**40 + 7, 7), (-(2**40), -1)])
async def test_seeds(client: TestClient, backend: ScriptedBackend, seed: int, expected: int) -> None:
    await client.post(CHAT, json={**HELLO, "seed": seed})
    assert backend.asked.sampling.seed == expected


@pytest.mark.parametrize(
    ("prompt", "expected"), [("x", "x"), ([1, 2], [1, 2]), (["x"], "x"), ([[1, 2]], [1, 2]), ([999], [999])]
)
async def test_prompts(client: TestClient, backend: ScriptedBackend, prompt: Any, expected: Any) -> None:
    assert (await client.post(COMPLETIONS, json={"prompt": prompt})).status == 200
    assert backend.asked.prompt == expected


BAD_CHAT: list[tuple[dict[str, Any], str | None, str]] = [
    ({"messages": []}, "messages", "empty"),
    ({"messages": None}, "messages", "array, not null"),
    ({"messages": "x"}, "messages", "array, not string"),
    ({"messages": [1]}, "messages[0]", "object, not integer"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "missing"),
    ({"messages": [{"role": "", "content": "x"}]}, "messages[0].role", "must be system"),
    (
        {"messages": [{"role": "user", "content": "x"}, {"role": "wizard", "content": "x"}]},
        "messages[1].role",
        "must be system, developer, user, assistant, tool or function, not 'wizard'",
    ),
    ({"messages": [{"role": "User", "content": "x"}]}, "messages[0].role", "not 'User'"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
    ({"messages": [{"role": "assistant"}]}, "messages[0].content", "missing"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content", "not integer"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0].type",
        "'image_url'",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "missing"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function", "missing"),
    ({"max_tokens": "7"}, "max_tokens", "number or null, not string"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_tokens": -2}, "max_tokens", "at least -1"),
    ({"max_tokens": 1.5}, "max_tokens", "whole number"),
    ({"max_tokens": True}, "max_tokens", "not boolean"),
    ({"stop": 7}, "stop", "string, array or null"),
    ({"stop": ["x"] * 33}, "stop", "at most 32"),
    ({"stop": "x" * 1025}, "stop", "1024"),
    ({"temperature": -0.1}, "temperature", "at least 0"),
    ({"temperature": "hot"}, "temperature", "number"),
    ({"top_p": 1.01}, "top_p", "at most 1"),
    ({"min_p": -1}, "min_p", "at least 0"),
    ({"typical_p": 2}, "typical_p", "at most 1"),
    ({"top_k": -2}, "top_k", "at least -1"),
    ({"repeat_penalty": 0}, "repeat_penalty", "more than 0"),
    ({"repeat_last_n": -2}, "repeat_last_n", "at least -1"),
    ({"presence_penalty": 1000}, "presence_penalty", "at most 100"),
    ({"frequency_penalty": -1000}, "frequency_penalty", "at least -100"),
    ({"mirostat": 3}, "mirostat", "from 0 to 2"),
    ({"xtc_probability": 2}, "xtc_probability", "at most 1"),
    ({"samplers": ["zebra"]}, "samplers", "'zebra', and nothing in it is a sampler: take penalties, dry,"),
    ({"samplers": "z"}, "samplers", "'z', and nothing in it is a sampler: take e (penalties), d (dry),"),
    ({"samplers": ["top_k"] * 33}, "samplers", "at most 32"),
    ({"dry_multiplier": -1}, "dry_multiplier", "at least 0"),
    ({"dry_allowed_length": -1}, "dry_allowed_length", "at least 0"),
    ({"dry_penalty_last_n": -2}, "dry_penalty_last_n", "at least -1"),
    ({"dry_sequence_breakers": []}, "dry_sequence_breakers", "1 to 16 texts"),
    ({"dry_sequence_breakers": ["x" * 41]}, "dry_sequence_breakers", "1 to 40 bytes"),
    ({"dry_sequence_breakers": ["a\0"]}, "dry_sequence_breakers", "without NUL"),
    ({"seed": "x"}, "seed", "number"),
    ({"seed": 10**30}, "seed", "from"),
    ({"logit_bias": {"hello": 1}}, "logit_bias", "token ids below 1000"),
    ({"logit_bias": {"1000": 1}}, "logit_bias", "token ids below 1000"),
    ({"logit_bias": {"1": True}}, "logit_bias", "finite"),
    ({"logit_bias": {"1": "x"}}, "logit_bias[...]", "not string"),
    ({"n": 0}, "n", "from 1 to 64"),
    ({"n": 65}, "n", "from 1 to 64"),
    ({"response_format": {"type": "xml"}}, "response_format", "text, json_object or json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        "response_format.json_schema.schema",
        "must be object",
    ),
    ({"grammar": "root ::= x", "json_schema": {}}, "json_schema", "exclude each other"),
    ({"grammar": 7}, "grammar", "string"),
    ({"json_schema": "x"}, "json_schema", "must be object"),
    ({"json_schema": {"minimum": 10**30}}, "json_schema", "64 bits"),
    ({"top_logprobs": 3}, "top_logprobs", "needs `logprobs`"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
    ({"tool_choice": "always"}, "tool_choice", "'required'"),
    ({"tool_choice": {"type": "custom"}}, "tool_choice", "'required'"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "boolean"),
    ({"tools": [7]}, "tools[0]", "object, not integer"),
    ({"tools": [{"type": "function", "name": "f", "parameters": {}}]}, "tools[0].function", "must be object"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name", "missing"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type", "'custom'"),
    ({"functions": [{"name": "f"}]}, "functions", "send `tools`"),
    ({"tools": [{"x": 10**30}]}, "tools", "64 bits"),
    ({"chat_template_kwargs": {"x": json.loads("[" * 100 + "]" * 100)}}, "chat_template_kwargs", "nested"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs", "object"),
    ({"cache_salt": "x" * 2000}, "cache_salt", "1024"),
    ({"ignore_eos": 1}, "ignore_eos", "boolean"),
    ({"min_tokens": -1}, "min_tokens", "at least 0"),
    ({"stream": "yes"}, "stream", "boolean"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", "boolean"),
    ({"model": 7}, "model", "string"),
]


@pytest.mark.parametrize(("sent", "param", "word"), BAD_CHAT, ids=lambda value: str(value)[:40])
async def test_rule_8_bad_fields_are_named(
    client: TestClient, backend: ScriptedBackend, sent: dict[str, Any], param: str, word: str
) -> None:
    reply = await client.post(CHAT, json={**HELLO, "stream": True, **sent})
    assert reply.status == 400
    assert reply.content_type == "application/json"
    error = await error_of(reply)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert word in error["message"]
    assert not backend.generations


@pytest.mark.parametrize(
    ("sent", "param", "word"),
    [
        ({}, "prompt", "missing"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [[]]}, "prompt", "empty"),
        ({"prompt": ["a"] * 65}, "prompt", "at most 64"),
        ({"prompt": ["a"] * 33, "n": 2}, "n", "at most 64, not 66"),
        ({"prompt": ["a", ""]}, "prompt", "empty"),
        ({"prompt": [1, "a"]}, "prompt", "mixture"),
        ({"prompt": ["a", 1]}, "prompt", "mixture"),
        ({"prompt": [1000]}, "prompt", "0 to 999"),
        ({"prompt": [-1]}, "prompt", "0 to 999"),
        ({"prompt": [1.5]}, "prompt[0]", "integer"),
        ({"prompt": "x", "echo": True, "logprobs": 0, "suffix": "y"}, "suffix", "excludes"),
        ({"prompt": [1], "suffix": "y"}, "suffix", "to be text"),
        ({"prompt": "x", "best_of": 2, "n": 3}, "best_of", "at least `n`, which is 3"),
        ({"prompt": "x", "best_of": 2, "stream": True}, "best_of", "cannot be streamed"),
        ({"prompt": ["x"] * 33, "best_of": 2}, "best_of", "`best_of` times the number of prompts must be at most 64"),
        ({"prompt": "x", "best_of": 65}, "best_of", "from 0 to 64"),
        ({"prompt": "x", "logprobs": 21}, "logprobs", "from 0 to 20"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens", "at least 1"),
    ],
)
async def test_bad_completions(client: TestClient, sent: dict[str, Any], param: str, word: str) -> None:
    reply = await client.post(COMPLETIONS, json=sent)
    assert reply.status == 400
    error = await error_of(reply)
    assert error["param"] == param
    assert word in error["message"]


async def test_neutral_completion_values(client: TestClient) -> None:
    neutral = {"echo": False, "suffix": "", "best_of": 1, "logprobs": None, "n": 1}
    assert (await client.post(COMPLETIONS, json={"prompt": "x", **neutral})).status == 200


async def test_unknown_fields_are_only_a_debug_line(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "homeprefixd.api")
    assert (await client.post(CHAT, json={**HELLO, "zebra": 1, "user": "x"})).status == 200
    assert [r.getMessage() for r in caplog.records if "ignored" in r.getMessage()] == ["ignored fields: zebra"]
