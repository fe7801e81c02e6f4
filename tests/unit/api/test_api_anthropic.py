"""Anthropic's dialect: what Claude Code and the SDK send, and what they read."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

import pytest
from aiohttp.test_utils import TestClient
from scripted_backend import TIMINGS, ScriptedBackend

from homeprefixd.errors import BusyError, ContextOverflowError, HomeprefixdError, UnavailableError
from homeprefixd.frames.worker import (
    Accepted,
    CallPiece,
    Converted,
    Delta,
    Finished,
    Message,
    Progress,
    TokenizeRequest,
)

PATH = "/v1/messages"
TOOL = {"name": "light", "description": "Switch a lamp", "input_schema": {"type": "object", "properties": {}}}
AS_OPENAI = {"name": "light", "description": "Switch a lamp", "parameters": TOOL["input_schema"]}


def body(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"model": "demo", "max_tokens": 50, "messages": messages or [{"role": "user", "content": "Hello"}], **more}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


async def events(client: TestClient, request: dict[str, Any]) -> list[dict[str, Any]]:
    reply = await client.post(PATH, json={**request, "stream": True})
    assert reply.status == 200
    assert reply.content_type == "text/event-stream"
    found = []
    for event in (await reply.text()).split("\n\n")[:-1]:
        if event.startswith(":"):
            continue
        kind, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {found[-1]['type']}"
    return found


async def test_a_message(client: TestClient, backend: ScriptedBackend) -> None:
    reply = await client.post(f"{PATH}?beta=true", json=body(), headers={"anthropic-beta": "claude-code-20250219,x"})
    assert reply.status == 200
    assert await reply.json() == {
        "id": "msg_id0",
        "type": "message",
        "role": "assistant",
        "model": "demo",
        "content": [{"type": "text", "text": 'Hello "wörld"\n!'}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 36,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 64,
            "output_tokens": 3,
        },
    }
    asked = backend.asked
    assert asked.messages == [Message("user", "Hello")]
    assert (asked.max_tokens, asked.stream, asked.tool_choice, asked.constraint) == (50, False, "auto", None)


async def test_events_in_their_order(client: TestClient) -> None:
    found = await events(client, body())
    assert [event["type"] for event in found] == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start, end = found[0]["message"], found[-2]
    assert (start["content"], start["stop_reason"], start["id"]) == ([], None, "msg_id0")
    assert start["usage"] == {
        "input_tokens": 36,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 64,
        "output_tokens": 0,
    }
    assert found[2]["content_block"] == {"type": "text", "text": ""}
    assert "".join(event["delta"]["text"] for event in found[3:6]) == 'Hello "wörld"\n!'
    assert end["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert end["usage"]["output_tokens"] == 3


CALLS = [
    Accepted("", 100),
    Progress("", 64, 100, 100),
    Delta("", "", 1, reasoning="Which "),
    Delta("", "", 2, reasoning="lamp?"),
    Delta("", "Wait.", 3),
    Delta("", "", 4, calls=[CallPiece(0, "", "toolu_1", "light")]),
    Delta("", "", 5, calls=[CallPiece(0, '{"on":')]),
    Delta("", "", 6, calls=[CallPiece(0, "true}")]),
    Delta("", "", 7, calls=[CallPiece(1, "{}", "toolu_2", "light")]),
    Finished("", "tool_calls", "", None, TIMINGS),
]


async def test_rule_12_thinking_and_calls_are_blocks_of_their_own(client: TestClient, backend: ScriptedBackend) -> None:
    backend.script = list(CALLS)
    found = await events(client, body(tools=[TOOL]))
    assert [(event["type"], event.get("index")) for event in found[2:-2]] == [
        ("content_block_start", 0),
        ("content_block_delta", 0),
        ("content_block_delta", 0),
        ("content_block_delta", 0),
        ("content_block_stop", 0),
        ("content_block_start", 1),
        ("content_block_delta", 1),
        ("content_block_stop", 1),
        ("content_block_start", 2),
        ("content_block_delta", 2),
        ("content_block_delta", 2),
        ("content_block_stop", 2),
        ("content_block_start", 3),
        ("content_block_delta", 3),
        ("content_block_stop", 3),
    ]
    begun = [event["content_block"] for event in found if event["type"] == "content_block_start"]
    assert begun == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": ""},
        {"type": "tool_use", "id": "toolu_1", "name": "light", "input": {}},
        {"type": "tool_use", "id": "toolu_2", "name": "light", "input": {}},
    ]
    (signature,) = [event["delta"]["signature"] for event in found if "signature" in event.get("delta", {})]
    assert signature == base64.b64encode(hashlib.sha256(b"homeprefixd thinking\nWhich lamp?").digest()).decode()
    pieces = [event["delta"]["partial_json"] for event in found if event.get("delta", {}).get("partial_json")]
    assert pieces == ['{"on":', "true}", "{}"]
    assert found[-2]["delta"]["stop_reason"] == "tool_use"
    assert (await (await client.post(PATH, json=body(tools=[TOOL]))).json())["content"] == [
        {"type": "thinking", "thinking": "Which lamp?", "signature": signature},
        {"type": "text", "text": "Wait."},
        {"type": "tool_use", "id": "toolu_1", "name": "light", "input": {"on": True}},
        {"type": "tool_use", "id": "toolu_2", "name": "light", "input": {}},
    ]


@pytest.mark.parametrize(
    ("reason", "stop", "told", "sequence"),
    [
        ("stop", None, "end_turn", None),
        ("stop", "END", "stop_sequence", "END"),
        ("length", None, "max_tokens", None),
        ("tool_calls", None, "tool_use", None),
        ("cancelled", None, "max_tokens", None),
    ],
)
async def test_reasons(
    client: TestClient, backend: ScriptedBackend, reason: Any, stop: str | None, told: str, sequence: str | None
) -> None:
    backend.script = [Accepted("", 9), Finished("", reason, "", stop, TIMINGS)]
    reply = await (await client.post(PATH, json=body(stop_sequences=["END"]))).json()
    assert (reply["stop_reason"], reply["stop_sequence"]) == (told, sequence)
    assert reply["content"] == [{"type": "text", "text": ""}]  # readers look at the first block
    assert backend.asked.stop == ["END"]
    found = await events(client, body())
    assert [event["type"] for event in found] == ["message_start", "ping", "message_delta", "message_stop"]
    assert found[2]["delta"] == {"stop_reason": told, "stop_sequence": sequence}


# ---------------------------------------------------------------------------------------------------- messages

BILLING = "x-anthropic-billing-header: cc_version=2.1; cch=00f3a;"


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        ("Be brief.", "Be brief."),
        ([text("Be brief.", cache_control={"type": "ephemeral"}), text("Be kind.")], "Be brief.\nBe kind."),
        ([text(BILLING), text("You are Claude Code.")], f"{BILLING}\nYou are Claude Code."),  # the rule drops it
        ([], None),
        ("", None),
    ],
)
async def test_system(client: TestClient, backend: ScriptedBackend, system: Any, expected: str | None) -> None:
    assert (await client.post(PATH, json=body(system=system))).status == 200
    first = [] if expected is None else [Message("system", expected)]
    assert backend.asked.messages == [*first, Message("user", "Hello")]


async def test_a_conversation_is_what_the_openai_dialect_makes_of_it(
    client: TestClient, backend: ScriptedBackend
) -> None:
    conversation = body(
        user(text("Light on", cache_control={"type": "ephemeral"}), text("please")),
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "A lamp.", "signature": "x"},
                {"type": "redacted_thinking", "data": "zzz"},
                text("Done?"),
                {"type": "tool_use", "id": "t1", "name": "light", "input": {"on": True}},
            ],
        },
        user({"type": "tool_result", "tool_use_id": "t1", "content": [text("ok")]}, text("Thanks")),
        system="Be brief.",
        tools=[TOOL],
    )
    assert (await client.post(PATH, json=conversation)).status == 200
    mine = backend.asked
    openai = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [text("Light on"), text("please")]},
            {
                "role": "assistant",
                "content": "Done?",
                "reasoning_content": "A lamp.",
                "tool_calls": [
                    {"id": "t1", "type": "function", "function": {"name": "light", "arguments": {"on": True}}}
                ],
            },
            {"role": "tool", "tool_call_id": "t1", "content": "ok"},
            {"role": "user", "content": "Thanks"},
        ],
        "tools": [{"type": "function", "function": AS_OPENAI}],
    }
    assert (await client.post("/v1/chat/completions", json=openai)).status == 200
    assert backend.asked.messages == mine.messages
    assert json.dumps(backend.asked.tools) == json.dumps(mine.tools)


@pytest.mark.parametrize(
    ("choice", "expected", "parallel"),
    [
        ({"type": "auto"}, "auto", True),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", False),
        ({"type": "any"}, "required", True),
        ({"type": "tool", "name": "light"}, "=light", True),
        ({"type": "none"}, "none", True),
    ],
)
async def test_tool_choice(
    client: TestClient, backend: ScriptedBackend, choice: Any, expected: str, parallel: bool
) -> None:
    assert (await client.post(PATH, json=body(tools=[TOOL], tool_choice=choice))).status == 200
    assert (backend.asked.tool_choice, backend.asked.parallel_tool_calls) == (expected, parallel)
    assert backend.asked.tools == [{"type": "function", "function": AS_OPENAI}]


@pytest.mark.parametrize(
    ("more", "kwargs"),
    [
        ({}, {"enable_thinking": False}),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, {"enable_thinking": True}),
        ({"thinking": {"type": "adaptive"}}, {"enable_thinking": True}),
        ({"thinking": {"type": "between_tools"}}, {"enable_thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"output_config": {"effort": "low"}}, {"enable_thinking": False, "reasoning_effort": "low"}),
        ({"chat_template_kwargs": {"enable_thinking": True}}, {"enable_thinking": True}),
    ],
)
async def test_thinking(client: TestClient, backend: ScriptedBackend, more: Any, kwargs: Any) -> None:
    assert (await client.post(PATH, json=body(**more))).status == 200
    assert backend.asked.template_kwargs == kwargs


@pytest.mark.parametrize("name", ["output_format", "output_config"])
async def test_a_schema_for_the_reply(client: TestClient, backend: ScriptedBackend, name: str) -> None:
    wanted = {"type": "json_schema", "schema": {"type": "object"}}
    more = {name: wanted if name == "output_format" else {"format": wanted}}
    assert (await client.post(PATH, json=body(**more))).status == 200
    assert backend.asked.constraint is not None
    assert (backend.asked.constraint.kind, backend.asked.constraint.text) == ("json_schema", '{"type":"object"}')


# ---------------------------------------------------------------------------------------------------- counting


async def test_a_call_that_was_cut_short_is_text(client: TestClient, backend: ScriptedBackend) -> None:
    cut = Delta("", "", 1, calls=[CallPiece(0, '{"on":', "toolu_1", "light")])
    backend.script = [Accepted("", 100), cut, Finished("", "stop", "", '"room"', TIMINGS, broken=1)]
    whole = await (await client.post("/v1/messages", json=body())).json()
    assert whole["content"] == [text('light{"on":')]
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", '"room"')
    found = await events(client, body())
    assert [event["content_block"]["type"] for event in found if event["type"] == "content_block_start"] == ["text"]
    assert [event["delta"]["text"] for event in found if event["type"] == "content_block_delta"] == ['light{"on":']
    assert found[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": '"room"'}
    backend.script[2:] = [
        Delta("", " Or", 2, calls=[CallPiece(0, " tru"), CallPiece(1, "{}", "toolu_2", "light")]),
        Finished("", "tool_calls", "", None, TIMINGS, broken=1),
    ]
    found = await events(client, body())
    begun = [event["content_block"] for event in found if event["type"] == "content_block_start"]
    assert [block["type"] for block in begun] == ["text", "text", "tool_use"]
    assert begun[2]["id"] == "toolu_2"
    assert [event["index"] for event in found if event["type"] == "content_block_stop"] == [0, 1, 2]
    said = [event["delta"].get("text") for event in found if event["type"] == "content_block_delta"]
    assert said == ['light{"on": tru', " Or", None]
    assert found[-2]["delta"]["stop_reason"] == "tool_use"


async def test_count_tokens_counts_the_rendered_prompt(client: TestClient, backend: ScriptedBackend) -> None:
    async def convert(alias: str, conversion: Any) -> Converted:
        backend.conversions.append(conversion)
        return Converted("", tokens=[1, 2, 3])

    backend.convert = convert  # type: ignore[method-assign]
    wanted = body(system=[text(BILLING), text("Be brief.")], tools=[TOOL])
    del wanted["max_tokens"]
    reply = await client.post(f"{PATH}/count_tokens?beta=true", json=wanted)
    assert (reply.status, await reply.json()) == (200, {"input_tokens": 3})
    (counted,) = backend.conversions
    assert isinstance(counted, TokenizeRequest)  # with the rules of [stable], as for a message
    template = counted.request
    assert template.messages == [Message("system", f"{BILLING}\nBe brief."), Message("user", "Hello")]
    assert template.tools == [{"type": "function", "function": AS_OPENAI}]
    assert template.client
    await client.post(PATH, json={**wanted, "max_tokens": 1})
    assert (backend.asked.messages, backend.asked.tools) == (template.messages, template.tools)
    assert backend.asked.template_kwargs == template.template_kwargs


@pytest.mark.parametrize("given", ['{"a": 18446744073709551616}', '{"a": ' + "[" * 965 + "]" * 965 + "}"])
async def test_what_cannot_be_counted_is_refused_as_a_message_is(client: TestClient, given: str) -> None:
    use = f'{{"type": "tool_use", "id": "a", "name": "light", "input": {given}}}'
    data = f'{{"model": "demo", "max_tokens": 5, "messages": [{{"role": "assistant", "content": [{use}]}}]}}'
    for path in (PATH, f"{PATH}/count_tokens"):
        assert (await client.post(path, data=data, headers={"Content-Type": "application/json"})).status == 400


# ---------------------------------------------------------------------------------------------------- errors


async def refusal(client: TestClient, request: Any, path: str = PATH) -> tuple[int, str, str]:
    reply = await client.post(path, json=request)
    said = await reply.json()
    assert set(said) == {"type", "error"}
    assert said["type"] == "error"
    assert set(said["error"]) == {"type", "message"}
    return reply.status, said["error"]["type"], said["error"]["message"]


@pytest.mark.parametrize(
    ("request_", "word"),
    [
        ({"max_tokens": 5}, "messages"),
        (body() | {"messages": []}, "messages"),
        (body({"role": "judge", "content": "x"}), "judge"),
        (body(user({"type": "image", "source": {}})), "messages[0].content[0]"),
        (body(user({"type": "text"})), "text"),
        (body(user({"type": "tool_result", "content": "x"})), "tool_use_id"),
        (body({"role": "assistant", "content": [{"type": "tool_use", "input": {}}]}), "name"),
        (body(tools=[{"type": "web_search_20250305", "name": "web_search"}]), "web_search_20250305"),
        (body(tool_choice={"type": "any"}), "tools"),
        (body(tools=[TOOL], tool_choice={"type": "tool", "name": "oven"}), "oven"),
        (body(tools=[TOOL], tool_choice={"type": "must"}), "tool_choice"),
        (body(max_tokens=0), "max_tokens"),
        (body(temperature="hot"), "temperature"),
        (body(thinking={}), "thinking.type"),
        (body(output_format={"type": "xml"}), "output_format"),
        (body(output_format={"type": "json_schema"}), "schema"),
        (body(system=[{"type": "image"}]), "system[0]"),
        ([], "object"),
    ],
)
async def test_refusals_name_the_field(client: TestClient, request_: Any, word: str) -> None:
    status, kind, message = await refusal(client, request_)
    assert (status, kind) == (400, "invalid_request_error")
    assert word in message


async def test_rule_8_errors_look_like_anthropics(client: TestClient, backend: ScriptedBackend) -> None:
    assert (await refusal(client, body() | {"model": "claude"}))[:2] == (404, "not_found_error")
    assert (await refusal(client, body(), f"{PATH}/batches"))[:2] == (404, "not_found_error")
    assert (await refusal(client, {}, f"{PATH}/count_tokens"))[:2] == (400, "invalid_request_error")
    backend.refusal = BusyError("full", retry_after=7)
    reply = await client.post(PATH, json=body())
    assert (reply.status, reply.headers["Retry-After"]) == (429, "7")
    assert (await reply.json())["error"]["type"] == "rate_limit_error"
    backend.refusal = UnavailableError("Loading model", retry_after=1)
    assert (await refusal(client, body()))[:2] == (503, "overloaded_error")
    backend.refusal = None
    backend.script = [ContextOverflowError("Too long.", n_prompt_tokens=9000, n_ctx=2048)]
    status, kind, message = await refusal(client, body(stream=True))
    assert (status, kind) == (400, "invalid_request_error")
    assert message == "prompt is too long: 9000 tokens > 2048 maximum. Too long."


async def test_rule_6_a_failure_in_a_stream_is_its_last_event(client: TestClient, backend: ScriptedBackend) -> None:
    backend.script[3:] = [HomeprefixdError("the worker died")]
    found = await events(client, body())
    assert found[-1] == {"type": "error", "error": {"type": "api_error", "message": "the worker died"}}
    backend.script[3:] = [ValueError("secret")]
    assert "secret" not in str((await events(client, body()))[-1])
