"""Thoughts, tool calls, log-probabilities, forms, several choices: what OpenAI's and llama-server's clients see."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest
from aiohttp.test_utils import TestClient
from scripted_backend import TIMINGS, ScriptedBackend, ScriptedGeneration

from homeprefixd.errors import BusyError
from homeprefixd.frames.worker import (
    Accepted,
    CallPiece,
    Constraint,
    Converted,
    Delta,
    Detokenize,
    Finished,
    Generate,
    Tokenize,
    TokenLogprob,
)

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
LOGPROBS = [
    TokenLogprob(5, b"He", -0.5, [TokenLogprob(5, b"He", -0.5), TokenLogprob(6, b"\xc3", float("-inf"))]),
    TokenLogprob(7, b"llo", -0.25),
]


async def whole(client: TestClient, path: str, body: dict[str, Any]) -> Any:
    reply = await client.post(path, json=body)
    assert reply.status == 200, await reply.text()
    return await reply.json()


async def streamed(client: TestClient, path: str, body: dict[str, Any]) -> list[Any]:
    """The events; the mark of the end is checked where there is one."""
    reply = await client.post(path, json={**body, "stream": True})
    assert reply.status == 200, await reply.text()
    assert reply.content_type == "text/event-stream"
    lines = [line for line in (await reply.text()).split("\n\n") if line and not line.startswith(":")]
    assert all(line.startswith("data: ") for line in lines)
    if path.startswith("/v1/c"):
        assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def end(**more: Any) -> Finished:
    return Finished("", more.pop("reason", "stop"), more.pop("text", ""), more.pop("stop", None), TIMINGS, **more)


# ---------------------------------------------------------------------------------------------------- calls, thoughts


async def test_rules_1_to_3_and_12_thoughts_and_calls_in_a_stream(client: TestClient, backend: ScriptedBackend) -> None:
    backend.script = [
        Accepted("", 100),
        Delta("", "", 1, reasoning="Hm."),
        Delta("", "I look.", 2, calls=[CallPiece(0, "", "c0", "f"), CallPiece(1, '{"a', "c1", "g")]),
        Delta("", "", 3, calls=[CallPiece(1, '": 1}')]),
        end(reason="tool_calls"),
    ]
    chunks = await streamed(client, CHAT, {**HELLO, "tools": TOOLS, "stream_options": {"include_usage": True}})
    usage = chunks.pop()
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 3)
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": None},
        {"reasoning_content": "Hm."},
        {"content": "I look."},
        {"tool_calls": [{"index": 0, "id": "c0", "type": "function", "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 1, "id": "c1", "type": "function", "function": {"name": "g", "arguments": '{"a'}}]},
        {"tool_calls": [{"index": 1, "function": {"arguments": '": 1}'}}]},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 6 + ["tool_calls"]
    assert len({(chunk["id"], chunk["model"], chunk["created"]) for chunk in chunks}) == 1


async def test_a_stream_with_a_call_that_broke_off_ends_without_asking_for_calls(
    client: TestClient, backend: ScriptedBackend
) -> None:
    pieces = [CallPiece(0, "{}", "c1", "f"), CallPiece(1, '{"x":', "c2", "f")]
    backend.script = [Accepted("", 100), Delta("", "", 1, calls=pieces), end(reason="tool_calls", broken=1)]
    chunks = await streamed(client, CHAT, {**HELLO, "tools": TOOLS})
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    choice = (await whole(client, CHAT, {**HELLO, "tools": TOOLS}))["choices"][0]
    assert choice["finish_reason"] == "tool_calls"  # which has nothing but what is complete
    assert [call["id"] for call in choice["message"]["tool_calls"]] == ["c1"]
    assert choice["message"]["content"] == 'f{"x":'


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/api/chat"])
async def test_a_call_that_was_cut_is_the_text_that_was_written(
    client: TestClient, backend: ScriptedBackend, path: str
) -> None:
    backend.whole = True
    written = '<tool_call>\n{"name": "f", "arguments": {"x'
    calls = [CallPiece(0, '{"x', "c1", "f", written)]
    backend.script = [Accepted("", 100), end(reason="length", calls=calls, broken=1)]
    reply = await whole(client, path, {**HELLO, "stream": False})
    message = reply["choices"][0]["message"] if path == CHAT else reply.get("message", reply)
    content = message["content"]
    assert (content if isinstance(content, str) else content[0]["text"]) == written


async def test_thoughts_and_calls_in_a_whole_reply(client: TestClient, backend: ScriptedBackend) -> None:
    backend.script = [
        Accepted("", 100),
        end(reason="tool_calls", reasoning="Hm.", calls=[CallPiece(0, '{"a": 1}', "c0", "f")]),
    ]
    backend.whole = True
    (choice,) = (await whole(client, CHAT, {**HELLO, "tools": TOOLS}))["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "Hm.",
        "tool_calls": [{"id": "c0", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
    }


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, "auto"),
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "function": {"name": "f"}}, "=f"),
        ({"type": "function", "name": "f"}, "=f"),
    ],
)
async def test_tool_choice(client: TestClient, backend: ScriptedBackend, choice: Any, expected: str) -> None:
    await whole(client, CHAT, {**HELLO, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False})
    assert (backend.asked.tool_choice, backend.asked.parallel_tool_calls) == (expected, False)


MANY = [{"type": "function", "function": {"name": name}} for name in ("f", "g", "h")]
G = {"type": "function", "function": {"name": "g"}}


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_allowed_tools_stay_among_all_in_the_prompt(
    client: TestClient, backend: ScriptedBackend, mode: str
) -> None:
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [G, MANY[2], G]}}
    await whole(client, CHAT, {**HELLO, "tools": MANY, "tool_choice": choice})
    assert (backend.asked.tool_choice, backend.asked.allowed_tools) == (mode, ["g", "h"])
    assert backend.asked.tools == MANY


@pytest.mark.parametrize(
    ("allowed", "param", "word"),
    [
        ({"mode": "any", "tools": [G]}, "tool_choice.allowed_tools.mode", "auto or required"),
        ({"mode": "auto", "tools": []}, "tool_choice.allowed_tools.tools", "of one at least"),
        ({"mode": "auto"}, "tool_choice.allowed_tools.tools", "list of tools"),
        ({"mode": "auto", "tools": [G, {}]}, "tool_choice.allowed_tools.tools[1]", "must name a function"),
        ({"mode": "auto", "tools": ["g"]}, "tool_choice.allowed_tools.tools[0]", "must name a function"),
        (
            {"tools": [{"type": "function", "function": {"name": "x"}}]},
            "tool_choice.allowed_tools.tools[0]",
            "not among `tools`: f, g, h",
        ),
        ({"tools": [{"type": "mcp"}]}, "tool_choice.allowed_tools.tools[0].type", "is of type 'mcp', and no such tool"),
        (7, "tool_choice.allowed_tools.mode", "auto or required"),
    ],
)
async def test_bad_allowed_tools(client: TestClient, allowed: Any, param: str, word: str) -> None:
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    reply = await client.post(CHAT, json={**HELLO, "tools": MANY, "tool_choice": choice})
    error = (await reply.json())["error"]
    assert (reply.status, error["param"]) == (400, param)
    assert word in error["message"]


# ---------------------------------------------------------------------------------------------------- forms


SCHEMA = {"type": "object", "properties": {"z": {"const": 1}, "a": {}}}


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object"),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, "json_schema"),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, "json_schema"),
        ({"json_schema": SCHEMA}, "json_schema"),
        ({"grammar": "root ::= [a-z]"}, "grammar"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/completion"])
async def test_forms(client: TestClient, backend: ScriptedBackend, path: str, sent: Any, kind: str) -> None:
    await whole(client, path, {**(HELLO if path == CHAT else {"prompt": "x"}), **sent})
    constraint = backend.asked.constraint
    assert isinstance(constraint, Constraint)
    assert constraint.kind == kind
    if kind == "json_schema":
        assert constraint.text == '{"type":"object","properties":{"z":{"const":1},"a":{}}}'  # in its own order


@pytest.mark.parametrize(
    ("sent", "param"),
    [
        ({"json_schema": SCHEMA}, "json_schema"),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, "response_format"),
    ],
)
async def test_a_form_knows_its_field(client: TestClient, backend: ScriptedBackend, sent: Any, param: str) -> None:
    await whole(client, CHAT, {**HELLO, **sent})
    assert backend.asked.constraint is not None
    assert backend.asked.constraint.param == param


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
async def test_a_grammar_and_a_call_that_must_be_made_exclude_each_other(client: TestClient, choice: Any) -> None:
    body = {**HELLO, "tools": TOOLS, "grammar": 'root ::= "a"'}
    reply = await client.post(CHAT, json={**body, "tool_choice": choice})
    assert (reply.status, (await reply.json())["error"]["param"]) == (400, "grammar")
    await whole(client, CHAT, {**body, "tool_choice": "auto"})


async def test_that_a_tool_is_strict_is_no_part_of_the_prompt(client: TestClient, backend: ScriptedBackend) -> None:
    schema = {"type": "object"}
    function = {"name": "f", "description": "d", "parameters": schema}
    hello = HELLO["messages"]
    for strict in (True, False):
        tool = {**function, "strict": strict}
        anthropic = {"name": "f", "description": "d", "input_schema": schema, "strict": strict}
        for path, body in (
            (CHAT, {"messages": hello, "tools": [{"type": "function", "function": tool}]}),
            ("/v1/responses", {"input": "Hello", "tools": [{"type": "function", **tool}]}),
            ("/v1/messages", {"messages": hello, "max_tokens": 5, "tools": [anthropic]}),
            ("/api/chat", {"messages": hello, "stream": False, "tools": [{"type": "function", "function": tool}]}),
        ):
            await whole(client, path, body)
            assert backend.asked.tools == [{"type": "function", "function": function}]
            assert backend.asked.strict_tools == (["f"] if strict else [])


# ---------------------------------------------------------------------------------------------------- logprobs


async def test_logprobs_of_a_chat(client: TestClient, backend: ScriptedBackend) -> None:
    backend.script = [Accepted("", 100), Delta("", "Hello", 2, logprobs=LOGPROBS), end(logprobs=LOGPROBS)]
    body = {**HELLO, "logprobs": True, "top_logprobs": 2}
    shown = {
        "content": [
            {
                "token": "He",
                "logprob": -0.5,
                "bytes": [72, 101],
                "top_logprobs": [
                    {"token": "He", "logprob": -0.5, "bytes": [72, 101]},
                    {"token": "\ufffd", "logprob": -9999.0, "bytes": [195]},
                ],
            },
            {"token": "llo", "logprob": -0.25, "bytes": [108, 108, 111], "top_logprobs": []},
        ],
        "refusal": None,
    }
    chunks = await streamed(client, CHAT, body)
    assert backend.asked.logprobs == 2
    assert [chunk["choices"][0]["logprobs"] for chunk in chunks] == [None, shown, None]
    backend.whole = True
    assert (await whole(client, CHAT, body))["choices"][0]["logprobs"] == shown
    await whole(client, CHAT, {**HELLO, "logprobs": True})
    assert backend.asked.logprobs == 0
    await whole(client, CHAT, {**HELLO, "logprobs": False, "top_logprobs": 0})
    assert backend.asked.logprobs == -1


async def test_logprobs_of_a_completion(client: TestClient, backend: ScriptedBackend) -> None:
    backend.script = [Accepted("", 100), Delta("", "Hello", 2, logprobs=LOGPROBS), end(text="Hello", logprobs=LOGPROBS)]
    backend.whole = True
    reply = await whole(client, COMPLETIONS, {"prompt": "x", "logprobs": 2})
    assert reply["choices"][0]["logprobs"] == {
        "tokens": ["He", "llo"],
        "token_logprobs": [-0.5, -0.25],
        "top_logprobs": [{"He": -0.5, "\ufffd": -9999.0}, {}],
        "text_offset": [0, 2],
    }


# ---------------------------------------------------------------------------------------------------- several choices


async def test_several_choices_in_a_stream(client: TestClient, backend: ScriptedBackend) -> None:
    chunks = await streamed(client, CHAT, {**HELLO, "n": 3, "seed": 7, "stream_options": {"include_usage": True}})
    asked = [generation.request for generation in backend.generations]
    assert [request.rid for request in asked] == ["chatcmpl-id0", "chatcmpl-id0-1", "chatcmpl-id0-2"]
    assert [request.sampling.seed for request in asked] == [7, 8, 9]
    usage = chunks.pop()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (100, 9, 109)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 64}
    for index in range(3):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": None}
        assert "".join(choice["delta"].get("content") or "" for choice in own) == 'Hello "wörld"\n!'
        assert (own[-1]["delta"], own[-1]["finish_reason"]) == ({}, "stop")
    assert {chunk["id"] for chunk in chunks} == {"chatcmpl-id0"}
    assert all(generation.left.is_set() for generation in backend.generations)


async def test_several_prompts_and_choices(client: TestClient, backend: ScriptedBackend) -> None:
    reply = await whole(client, COMPLETIONS, {"prompt": ["a", "b"], "n": 2, "echo": True})
    assert [generation.request.prompt for generation in backend.generations] == ["a", "a", "b", "b"]
    assert [(choice["index"], choice["text"][:4]) for choice in reply["choices"]] == [
        (0, "aHel"), (1, "aHel"), (2, "bHel"), (3, "bHel"),
    ]  # fmt: skip
    assert reply["usage"]["prompt_tokens"] == 200
    assert reply["usage"]["completion_tokens"] == 12


async def test_one_of_several_that_is_refused_ends_all(client: TestClient, backend: ScriptedBackend) -> None:
    made: list[Generate] = []
    original = backend.generate

    def generate(alias: str, request: Generate) -> ScriptedGeneration:
        made.append(request)
        generation = original(alias, request)
        if len(made) == 2:
            generation.script = [BusyError("The queue is full.")]
        return generation

    backend.generate = generate  # type: ignore[method-assign]
    for stream in (False, True):
        made.clear()
        reply = await client.post(CHAT, json={**HELLO, "n": 3, "stream": stream})
        assert (reply.status, reply.content_type) == (429, "application/json")
    assert all(generation.left.is_set() for generation in backend.generations if generation.entered)


async def test_one_of_several_that_fails_later_ends_the_stream(client: TestClient, backend: ScriptedBackend) -> None:
    gate = asyncio.Event()
    backend.script = [Accepted("", 1), Delta("", "a", 1), gate.wait, BusyError("It broke.")]
    gate.set()
    reply = await client.post(CHAT, json={**HELLO, "n": 2, "stream": True})
    assert reply.status == 200
    last = (await reply.text()).strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "It broke."
    assert all(generation.left.is_set() for generation in backend.generations)


async def test_echo_of_tokens(client: TestClient, backend: ScriptedBackend) -> None:
    backend.converted = Converted("", text="Once ")
    chunks = await streamed(client, COMPLETIONS, {"prompt": [1, 2], "echo": True, "max_tokens": 0})
    assert backend.conversions == [Detokenize("cmpl-id0-echo", [1, 2])]
    assert chunks[0]["choices"][0]["text"] == "Once "
    assert backend.asked.max_tokens == 0


# ---------------------------------------------------------------------------------------------------- of the prompt


def logprob(piece: str | bytes, value: float, **top: float) -> TokenLogprob:
    data = piece if isinstance(piece, bytes) else piece.encode()
    return TokenLogprob(len(data), data, value, [TokenLogprob(1, name.encode(), one) for name, one in top.items()])


PROMPT = [
    logprob("<s>", math.nan),
    logprob("On", -1.5, On=-1.5, A=-2.0),
    logprob(b"ce \xc3", -0.25),
    logprob(b"\xa4", -9.0),
]
"""Of the text `Once ä`, whose last letter is two tokens."""

TOLD = {
    "tokens": ["<s>", "On", "ce \ufffd", "\ufffd"],
    "token_logprobs": [None, -1.5, -0.25, -9.0],
    "top_logprobs": [None, {"On": -1.5, "A": -2.0}, {}, {}],
    "text_offset": [0, 0, 2, 6],
}


async def test_echo_with_logprobs(client: TestClient, backend: ScriptedBackend) -> None:
    backend.whole = True
    reply_logprobs = [logprob(" b", -3.0, c=-1.0)]
    backend.script = [
        Accepted("", 4),
        Finished("", "length", " b", None, TIMINGS, logprobs=reply_logprobs, prompt_logprobs=PROMPT),
    ]
    asked = {"prompt": "Once ä", "echo": True, "logprobs": 2, "max_tokens": 1}
    choice = (await whole(client, COMPLETIONS, asked))["choices"][0]
    assert choice["text"] == "Once ä b"
    assert choice["logprobs"] == {
        "tokens": [*TOLD["tokens"], " b"],
        "token_logprobs": [*TOLD["token_logprobs"], -3.0],
        "top_logprobs": [*TOLD["top_logprobs"], {"c": -1.0}],
        "text_offset": [*TOLD["text_offset"], 6],
    }
    assert (backend.asked.prompt_logprobs, backend.asked.logprobs) == (2, 2)
    assert backend.asked.most_prompt_logprobs == 200_000


@pytest.mark.parametrize(
    ("prompt", "generated"),
    [
        ([b"<s>", b"\xf0\x9f", b"\x98\x80", b" a"], [b"b"]),
        ([b"\x98\x80", b" a", b"\xff", b"b\xc3", b"\xa4"], [b"\x98", b"c", b"\xc3", b"\xa4", b"d"]),
        ([b"a", b"\xf0\x9f"], [b"\x98\x80", b"x", b"\xe2\x82", b"y", b"\xc0", b"\x80", b"z"]),
    ],
)
async def test_offsets_where_bytes_are_no_characters(
    client: TestClient, backend: ScriptedBackend, prompt: list[bytes], generated: list[bytes]
) -> None:
    backend.whole = True
    text = b"".join(prompt).decode(errors="replace")
    said = b"".join(generated).decode(errors="replace")
    backend.converted = Converted("", text=text)
    told = [logprob(piece, math.nan if not at else -1.0) for at, piece in enumerate(prompt)]
    written = [logprob(piece, -1.0) for piece in generated]
    backend.script = [
        Accepted("", len(prompt)),
        Finished("", "length", said, None, TIMINGS, logprobs=written, prompt_logprobs=told),
    ]
    asked = {"prompt": list(range(len(prompt))), "echo": True, "logprobs": 0, "max_tokens": 9}
    choice = (await whole(client, COMPLETIONS, asked))["choices"][0]
    assert choice["text"] == text + said
    shown = choice["logprobs"]
    for token, offset in zip(shown["tokens"], shown["text_offset"], strict=True):
        assert offset <= len(choice["text"])
        if "\ufffd" not in token:
            assert choice["text"].startswith(token, offset), (token, offset)


async def test_one_choice_computes_what_all_of_them_tell(client: TestClient, backend: ScriptedBackend) -> None:
    backend.whole = True
    original = backend.generate

    def generate(alias: str, request: Generate) -> ScriptedGeneration:
        generation = original(alias, request)
        told = PROMPT if request.prompt_logprobs >= 0 else []
        generation.script = [Accepted("", 4), Finished("", "length", "", None, TIMINGS, prompt_logprobs=told)]
        return generation

    backend.generate = generate  # type: ignore[method-assign]
    asked = {"prompt": ["Once ä", "Once ä"], "n": 2, "echo": True, "logprobs": 0, "max_tokens": 0}
    choices = (await whole(client, COMPLETIONS, asked))["choices"]
    assert [choice["logprobs"] for choice in choices] == [TOLD] * 4
    assert [one.request.prompt_logprobs for one in backend.generations] == [0, -1, 0, -1]
    assert {one.request.most_prompt_logprobs for one in backend.generations} == {50_000}


async def test_in_a_stream_the_prompt_comes_first_in_each_choice(client: TestClient, backend: ScriptedBackend) -> None:
    """Also of one that is faster than the one which computes the prompt's log-probabilities."""
    gate = asyncio.Event()
    original = backend.generate

    def generate(alias: str, request: Generate) -> ScriptedGeneration:
        generation = original(alias, request)

        async def opened() -> None:
            gate.set()

        if request.prompt_logprobs >= 0:
            first: list[Any] = [gate.wait, Delta("", "", 0, prompt_logprobs=PROMPT)]
        else:
            first = [Delta("", "x", 1, logprobs=[logprob("x", -0.5)]), opened]
        end = Finished("", "length", "", None, TIMINGS)
        generation.script = [Accepted("", 4), *first, Delta("", "y", 2, logprobs=[logprob("y", -0.5)]), end]
        return generation

    backend.generate = generate  # type: ignore[method-assign]
    asked = {"prompt": "Once ä", "n": 2, "echo": True, "logprobs": 0, "max_tokens": 2}
    chunks = await streamed(client, COMPLETIONS, asked)
    for index, text in ((0, "y"), (1, "xy")):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert (own[0]["text"], own[0]["logprobs"]) == ("Once ä", TOLD)
        assert "".join(choice["text"] for choice in own[1:]) == text
        assert [choice["logprobs"]["text_offset"] for choice in own[1:-1]] == [[6 + at] for at in range(len(text))]
        assert own[-1]["finish_reason"] == "length"


async def test_the_best_of_several(client: TestClient, backend: ScriptedBackend) -> None:
    backend.whole = True
    means = iter([-2.0, -0.5, -3.0, -1.0])
    original = backend.generate

    def generate(alias: str, request: Generate) -> ScriptedGeneration:
        generation = original(alias, request)
        mean = next(means)
        tokens = [logprob("x", mean - 1), logprob("y", mean + 1)]
        told = PROMPT if request.prompt_logprobs >= 0 else []
        end = Finished("", "stop", f"{mean}", None, TIMINGS, logprobs=tokens, prompt_logprobs=told)
        generation.script = [Accepted("", 4), end]
        return generation

    backend.generate = generate  # type: ignore[method-assign]
    reply = await whole(client, COMPLETIONS, {"prompt": "a", "n": 2, "best_of": 4, "seed": 5})
    assert [(choice["index"], choice["text"], choice["logprobs"]) for choice in reply["choices"]] == [
        (0, "-0.5", None),
        (1, "-1.0", None),
    ]
    assert reply["usage"]["completion_tokens"] == 4 * TIMINGS.predicted_n
    assert reply["usage"]["prompt_tokens"] == TIMINGS.total_prompt_n
    assert [one.request.sampling.seed for one in backend.generations] == [5, 6, 7, 8]
    assert {one.request.logprobs for one in backend.generations} == {0}
    means = iter([-2.0, -0.5])
    asked = {"prompt": "Once ä", "best_of": 2, "echo": True, "logprobs": 0}
    choice = (await whole(client, COMPLETIONS, asked))["choices"][0]
    assert choice["text"] == "Once ä-0.5"
    assert choice["logprobs"]["tokens"] == [*TOLD["tokens"], "x", "y"]


async def test_suffix(client: TestClient, backend: ScriptedBackend) -> None:
    await whole(client, COMPLETIONS, {"prompt": "def f():\n", "suffix": "\n    return x"})
    assert (backend.asked.prompt, backend.asked.suffix) == ("def f():\n", "\n    return x")


# ---------------------------------------------------------------------------------------------------- llama.cpp


@pytest.mark.parametrize("path", ["/completion", "/completions", "/v1/completion"])
async def test_a_native_completion(client: TestClient, backend: ScriptedBackend, path: str) -> None:
    reply = await whole(client, path, {"prompt": "Once", "n_predict": 3, "stop": ["x"], "top_k": 7})
    assert (reply["content"], reply["stop"], reply["stop_type"]) == ('Hello "wörld"\n!', True, "eos")
    assert (reply["tokens_predicted"], reply["tokens_evaluated"], reply["prompt"]) == (3, 100, "Once")
    assert (reply["has_new_line"], reply["timings"]["cache_n"], reply["model"]) == (True, 64, "demo")
    assert reply["generation_settings"]["top_k"] == 7
    assert backend.asked.max_tokens == 3


async def test_a_native_stream(client: TestClient, backend: ScriptedBackend) -> None:
    events = await streamed(client, "/completion", {"prompt": "Once", "return_progress": True})
    assert events[0]["prompt_progress"] == {"total": 100, "cache": 64, "processed": 100}
    assert "".join(event["content"] for event in events) == 'Hello "wörld"\n!'
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1]["stop_type"] == "eos"


async def test_native_probabilities_and_tokens(client: TestClient, backend: ScriptedBackend) -> None:
    backend.script = [Accepted("", 100), Delta("", "Hello", 2, logprobs=LOGPROBS), end(text="Hello", logprobs=LOGPROBS)]
    backend.whole = True
    body = {"prompt": "x", "n_probs": 2, "return_tokens": True}
    reply = await whole(client, "/completion", body)
    assert reply["tokens"] == [5, 7]
    first = reply["completion_probabilities"][0]
    assert (first["id"], first["token"], first["logprob"], first["bytes"]) == (5, "He", -0.5, [72, 101])
    assert [other["id"] for other in first["top_logprobs"]] == [5, 6]
    (delta, _) = await streamed(client, "/completion", body)
    assert (delta["tokens"], len(delta["completion_probabilities"])) == ([5, 7], 2)
    assert (delta["tokens_predicted"], delta["tokens_evaluated"]) == (2, 100)
    without = await whole(client, "/completion", {"prompt": "x", "return_tokens": True})
    assert without["tokens"] == [5, 7]
    assert "completion_probabilities" not in without


async def test_several_native_prompts(client: TestClient, backend: ScriptedBackend) -> None:
    reply = await whole(client, "/completion", {"prompt": ["a", [1, 2]], "n_predict": 0})
    assert [(part["index"], part["prompt"]) for part in reply] == [(0, "a"), (1, "")]
    assert backend.asked.max_tokens == 0


@pytest.mark.parametrize(
    ("prompt", "asked", "taken"),
    [
        ({"prompt_string": "a"}, [], ["a"]),
        ([1, "b", 2], [[1, "b", 2]], [[5, 6]]),
        (["a", [1, 2], {"prompt_string": "c"}], [], ["a", [1, 2], "c"]),
        ([[1, "b"], "c"], [[1, "b"]], [[5, 6], "c"]),
    ],
)
async def test_native_prompts(
    client: TestClient, backend: ScriptedBackend, prompt: Any, asked: list[Any], taken: list[Any]
) -> None:
    backend.converted = Converted("", tokens=[5, 6])
    await whole(client, "/completion", {"prompt": prompt, "n_predict": 1})
    assert [wanted.content for wanted in backend.conversions if isinstance(wanted, Tokenize)] == asked
    assert [generation.request.prompt for generation in backend.generations] == taken


async def test_native_replies_of_chosen_fields(client: TestClient, backend: ScriptedBackend) -> None:
    fields = ["content", "generation_settings/top_k", "no/such", "nothing"]
    body = {"prompt": "Once", "top_k": 7, "response_fields": fields}
    assert await whole(client, "/completion", body) == {
        "content": 'Hello "wörld"\n!',
        "generation_settings/top_k": 7,
    }
    assert (await streamed(client, "/completion", body))[-1] == {"content": "", "generation_settings/top_k": 7}


@pytest.mark.parametrize(
    ("script", "expected"),
    [(end(stop="x"), ("word", "x")), (end(reason="length"), ("limit", ""))],
)
async def test_native_reasons(
    client: TestClient, backend: ScriptedBackend, script: Finished, expected: tuple[str, str]
) -> None:
    backend.script = [Accepted("", 1), script]
    reply = await whole(client, "/completion", {"prompt": "x"})
    assert (reply["stop_type"], reply["stopping_word"]) == expected


@pytest.mark.parametrize("path", ["/infill", "/v1/infill"])
async def test_infill(client: TestClient, backend: ScriptedBackend, path: str) -> None:
    body = {
        "input_prefix": "a", "input_suffix": "c", "prompt": "b", "input_extra": [{"filename": "x.py", "text": "y"}],
        "n_predict": 5,
    }  # fmt: skip
    await whole(client, path, body)
    asked = backend.asked
    assert (asked.prompt, asked.suffix, asked.files, asked.max_tokens) == ("ab", "c", [("x.py", "y")], 5)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/completion", {}, "prompt"),
        ("/completion", {"prompt": {"prompt_string": "x", "multimodal_data": ["aGk="]}}, "prompt"),
        ("/completion", {"prompt": {"text": "x"}}, "prompt"),
        ("/completion", {"prompt": ["a", ["b", 10**9]]}, "prompt"),
        ("/completion", {"prompt": []}, "prompt"),
        ("/completion", {"prompt": "x", "n_probs": 101}, "n_probs"),
        ("/completion", {"prompt": "x", "post_sampling_probs": True}, "post_sampling_probs"),
        ("/completion", {"prompt": "x", "n_predict": -2}, "n_predict"),
        ("/infill", {"input_prefix": "x"}, "input_suffix"),
        ("/infill", {"input_prefix": "x", "input_suffix": "y", "input_extra": [{"text": 1}]}, "input_extra[0].text"),
    ],
)
async def test_bad_native_requests(client: TestClient, path: str, body: Any, param: str) -> None:
    reply = await client.post(path, json=body)
    assert reply.status == 400
    assert (await reply.json())["error"]["param"] == param
