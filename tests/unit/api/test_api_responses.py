"""`/v1/responses`: items in, items out, events in OpenAI's order."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from aiohttp.test_utils import TestClient
from msgspec import structs
from scripted_backend import TIMINGS, ScriptedBackend

from homeprefixd.api import fields
from homeprefixd.api.responses_reply import ResponseWriter
from homeprefixd.errors import ContextOverflowError, HomeprefixdError
from homeprefixd.frames.worker import Accepted, CallPiece, Delta, Finished, Message, Progress

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "light", "description": "Switch", "parameters": {"type": "object"}, "strict": True}
AS_TEMPLATE = {
    "type": "function",
    "function": {"name": "light", "description": "Switch", "parameters": {"type": "object"}},
}


def body(items: Any = "Hello", **more: Any) -> dict[str, Any]:
    return {"model": "demo", "input": items, **more}


async def events(client: TestClient, request: dict[str, Any]) -> list[dict[str, Any]]:
    reply = await client.post(PATH, json={**request, "stream": True})
    assert reply.status == 200
    assert reply.content_type == "text/event-stream"
    found = []
    for event in (await reply.text()).split("\n\n")[:-1]:
        kind, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


async def test_a_response(client: TestClient, backend: ScriptedBackend) -> None:
    reply = await client.post(PATH, json=body(instructions="Be brief.", max_output_tokens=9, metadata={"a": "b"}))
    assert reply.status == 200
    said = await reply.json()
    assert (said["id"], said["object"], said["status"], said["model"]) == ("resp_id0", "response", "completed", "demo")
    assert said["output"] == [
        {
            "id": "msg_id0_0",
            "type": "message",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": 'Hello "wörld"\n!', "annotations": [], "logprobs": []}],
        }
    ]
    assert said["usage"] == {
        "input_tokens": 100,
        "input_tokens_details": {"cached_tokens": 64},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 103,
    }
    assert (said["instructions"], said["max_output_tokens"], said["metadata"]) == ("Be brief.", 9, {"a": "b"})
    assert (said["store"], said["error"], said["incomplete_details"]) == (False, None, None)
    assert backend.asked.messages == [Message("system", "Be brief."), Message("user", "Hello")]
    assert backend.asked.max_tokens == 9


async def test_events_in_openais_order(client: TestClient) -> None:
    found = await events(client, body())
    assert [event["type"].removeprefix("response.") for event in found] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert found[0]["response"]["status"] == "in_progress"
    assert found[2]["item"]["content"] == []
    assert all(event["item_id"] == "msg_id0_0" and event["content_index"] == 0 for event in found[3:9])
    text = "".join(event["delta"] for event in found[4:7])
    assert text == found[7]["text"] == found[8]["part"]["text"] == found[9]["item"]["content"][0]["text"]
    assert found[-1]["response"]["output"] == [found[9]["item"]]
    assert found[-1]["response"]["usage"]["input_tokens_details"] == {"cached_tokens": 64}


async def test_thoughts_and_calls_are_items_of_their_own(client: TestClient, backend: ScriptedBackend) -> None:
    backend.script = [
        Accepted("", 100),
        Progress("", 64, 100, 100),
        Delta("", "", 1, reasoning="A "),
        Delta("", "", 2, reasoning="lamp."),
        Delta("", "", 3, calls=[CallPiece(0, "", "call_1", "light")]),
        Delta("", "", 4, calls=[CallPiece(0, '{"on":')]),
        Delta("", "", 5, calls=[CallPiece(0, "true}"), CallPiece(1, "{}", "call_2", "light")]),
        Finished("", "tool_calls", "", None, TIMINGS),
    ]
    found = await events(client, body(tools=[TOOL]))
    assert [(event["type"].removeprefix("response."), event.get("output_index")) for event in found[2:-1]] == [
        ("output_item.added", 0),
        ("content_part.added", 0),
        ("reasoning_text.delta", 0),
        ("reasoning_text.delta", 0),
        ("reasoning_text.done", 0),
        ("content_part.done", 0),
        ("output_item.done", 0),
        ("output_item.added", 1),
        ("function_call_arguments.delta", 1),
        ("function_call_arguments.delta", 1),
        ("function_call_arguments.done", 1),
        ("output_item.done", 1),
        ("output_item.added", 2),
        ("function_call_arguments.delta", 2),
        ("function_call_arguments.done", 2),
        ("output_item.done", 2),
    ]
    output = found[-1]["response"]["output"]
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "A lamp."}]
    assert [(item["call_id"], item["name"], item["arguments"]) for item in output[1:]] == [
        ("call_1", "light", '{"on":true}'),
        ("call_2", "light", "{}"),
    ]
    whole = await (await client.post(PATH, json=body(tools=[TOOL]))).json()
    assert [item["type"] for item in whole["output"]] == ["reasoning", "function_call", "function_call"]
    assert whole["output"][1]["arguments"] == '{"on":true}'
    assert whole["tools"] == [TOOL]
    assert backend.asked.tools == [AS_TEMPLATE]


async def test_a_reply_that_was_cut_short_is_incomplete(client: TestClient, backend: ScriptedBackend) -> None:
    backend.script[-1] = Finished("", "length", "", None, TIMINGS)
    last = (await events(client, body()))[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["output"][0]["status"] == "incomplete"
    again = await events(client, body())
    (done,) = [event["item"] for event in again if event["type"] == "response.output_item.done"]
    assert [done] == again[-1]["response"]["output"]
    whole = await (await client.post(PATH, json=body())).json()
    assert (done["status"], whole["output"][0]["status"]) == ("incomplete", "incomplete")


@pytest.mark.parametrize(("thought", "kind"), [("A lamp", "reasoning"), ("", "message")])
async def test_a_reply_without_text_has_the_same_items_streamed_and_not(
    client: TestClient, backend: ScriptedBackend, thought: str, kind: str
) -> None:
    thoughts = [Delta("", "", 1, reasoning=thought)] if thought else []
    for reason, status in (("length", "incomplete"), ("stop", "completed")):
        backend.script = [Accepted("", 100), *thoughts, Finished("", reason, "", None, TIMINGS)]
        found = await events(client, body())
        assert found[-1]["type"] == f"response.{status}"
        streamed = found[-1]["response"]
        whole = await (await client.post(PATH, json=body())).json()
        for response in (streamed, whole):
            assert [(item["type"], item["status"]) for item in response["output"]] == [(kind, status)]
            assert response["incomplete_details"] == ({"reason": "max_output_tokens"} if reason == "length" else None)
        done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
        assert done == streamed["output"]
        assert whole["output"] == [{**done[0], "id": whole["output"][0]["id"]}]


@pytest.mark.parametrize(("reason", "told"), [("stop", "incomplete_tool_call"), ("length", "max_output_tokens")])
async def test_a_call_that_broke_off_is_never_done(
    client: TestClient, backend: ScriptedBackend, reason: Any, told: str
) -> None:
    backend.script = [
        Accepted("", 100),
        Delta("", "", 1, calls=[CallPiece(0, '{"on": true}', "call_1", "light"), CallPiece(1, "{", "call_2", "light")]),
        Delta("", "", 2, calls=[CallPiece(1, '"on":')]),
        Finished("", reason, "", None, TIMINGS, broken=1),
    ]
    found = await events(client, body(tools=[TOOL]))
    kind = "response.function_call_arguments.done"
    assert [event["arguments"] for event in found if event["type"] == kind] == ['{"on": true}']
    items = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert [item["status"] for item in items] == ["completed", "incomplete"]
    assert found[-1]["type"] == "response.incomplete"
    assert found[-1]["response"]["output"] == items
    assert found[-1]["response"]["incomplete_details"] == {"reason": told}
    whole = await (await client.post(PATH, json=body(tools=[TOOL]))).json()
    assert [item["type"] for item in whole["output"]] == ["message", "function_call"]
    assert whole["output"][0]["content"][0]["text"] == 'light{"on":'
    assert whole["status"] == ("incomplete" if reason == "length" else "completed")


async def test_text_behind_a_call_in_one_delta(client: TestClient, backend: ScriptedBackend) -> None:
    backend.script = [
        Accepted("", 100),
        Delta("", "", 1, calls=[CallPiece(0, "{", "call_1", "light")]),
        Delta("", "Done.", 2, calls=[CallPiece(0, "}")]),
        Finished("", "tool_calls", "", None, TIMINGS),
    ]
    output = (await events(client, body(tools=[TOOL])))[-1]["response"]["output"]
    assert [(item["type"], item["status"]) for item in output] == [
        ("function_call", "completed"),
        ("message", "completed"),
    ]


async def test_thoughts_are_counted(client: TestClient, backend: ScriptedBackend) -> None:
    backend.script[-1] = Finished("", "stop", "", None, structs.replace(TIMINGS, thought_n=2))
    assert (await (await client.post(PATH, json=body())).json())["usage"]["output_tokens_details"] == {
        "reasoning_tokens": 2
    }


async def test_earlier_items_make_the_messages_of_the_openai_dialect(
    client: TestClient, backend: ScriptedBackend
) -> None:
    items = [
        {"role": "developer", "content": "Be kind."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Light on"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "A lamp."}]},
        {"type": "reasoning", "id": "rs_2", "summary": [{"type": "summary_text", "text": "It is off."}]},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Wait.", "annotations": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "light", "arguments": '{"on": true}'},
        {"type": "function_call", "id": "fc_2", "call_id": "c2", "name": "light", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "on"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "off"}]},
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "Thanks"},
    ]
    assert (await client.post(PATH, json=body(items, instructions="Be brief."))).status == 200
    mine = backend.asked.messages

    def call(ident: str, arguments: str) -> dict[str, Any]:
        return {"id": ident, "type": "function", "function": {"name": "light", "arguments": arguments}}

    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Light on"},
        {
            "role": "assistant",
            "content": "Wait.",
            "reasoning_content": "A lamp.\nIt is off.",
            "tool_calls": [call("c1", '{"on": true}'), call("c2", "{}")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "on"},
        {"role": "tool", "tool_call_id": "c2", "content": "off"},
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "Thanks"},
    ]
    assert (await client.post("/v1/chat/completions", json={"messages": chat})).status == 200
    assert backend.asked.messages == mine


async def test_items_of_tools_that_are_left_out_are_left_out(client: TestClient, backend: ScriptedBackend) -> None:
    items = [
        {"role": "user", "content": "Weather?"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "local_shell_call", "call_id": "c1", "action": {"command": ["ls"]}, "status": "completed"},
        {"type": "local_shell_call_output", "call_id": "c1", "output": "a.txt"},
        {"type": "computer_call_output", "call_id": "c2", "output": {"type": "computer_screenshot", "image_url": "x"}},
        {"type": "shell_call_output", "call_id": "c3", "output": [{"stdout": "x", "stderr": ""}]},
        {"role": "assistant", "content": "Sunny."},
        {"role": "user", "content": "Thanks"},
    ]
    assert (await client.post(PATH, json=body(items))).status == 200
    said = [(message.role, message.content) for message in backend.asked.messages or []]
    assert said == [("user", "Weather?"), ("assistant", "Sunny."), ("user", "Thanks")]
    wrong = {"type": "function_call_output", "call_id": "c1", "output": [{"stdout": "x"}]}
    reply = await client.post(PATH, json=body([*items, wrong]))
    assert (reply.status, (await reply.json())["error"]["param"]) == (400, "input[8].output")


async def test_custom_tools_take_a_text(client: TestClient, backend: ScriptedBackend) -> None:
    patch = {"type": "custom", "name": "patch", "description": "Edit", "format": {"type": "text"}}
    backend.script = [
        Accepted("", 100),
        Delta("", "", 1, calls=[CallPiece(0, '{"input": "a', "c1", "patch")]),
        Delta("", "", 2, calls=[CallPiece(0, 'b"}')]),
        Finished("", "tool_calls", "", None, TIMINGS),
    ]
    items = [
        {"role": "user", "content": "Go"},
        {"type": "custom_tool_call", "id": "ctc_1", "call_id": "c0", "name": "patch", "input": 'x "y"'},
        {"type": "custom_tool_call_output", "call_id": "c0", "output": "done"},
    ]
    choice = {"type": "custom", "name": "patch"}
    request = body(items, tools=[patch, {"type": "web_search"}], tool_choice=choice)
    found = await events(client, request)
    assert [event["type"].removeprefix("response.") for event in found[2:-1]] == [
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
    ]
    assert found[4]["input"] == "ab"
    (item,) = found[-1]["response"]["output"]
    assert (item["type"], item["call_id"], item["name"], item["input"]) == ("custom_tool_call", "c1", "patch", "ab")
    (whole,) = (await (await client.post(PATH, json=request)).json())["output"]
    assert whole == {**item, "id": whole["id"]}
    assert backend.asked.tool_choice == "=patch"
    assert [tool["function"]["name"] for tool in backend.asked.tools or []] == ["patch"]
    (call,) = (backend.asked.messages or [])[1].tool_calls or []
    assert json.loads(call["function"]["arguments"]) == {"input": 'x "y"'}
    assert (backend.asked.messages or [])[2].content == "done"
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [choice]}
    assert (await client.post(PATH, json={**request, "tool_choice": allowed})).status == 200
    assert backend.asked.allowed_tools == ["patch"]
    backend.script[2:3] = []
    found = await events(client, request)
    assert not [event for event in found if "custom_tool_call_input" in event["type"]]
    assert found[-1]["response"]["output"][0]["status"] == "incomplete"


SPACE = {
    "type": "namespace",
    "name": "mcp__burp__",
    "description": "Of a server",
    "tools": [
        {"type": "function", "name": "status", "parameters": {"type": "object"}},
        {"type": "custom", "name": "say"},
    ],
}
OTHER = {"type": "namespace", "name": "files", "description": "", "tools": [{"type": "function", "name": "read"}, TOOL]}


async def test_functions_in_namespaces_are_called_and_given_back_apart(
    client: TestClient, backend: ScriptedBackend
) -> None:
    backend.script = [
        Accepted("", 100),
        Delta("", "", 1, calls=[CallPiece(0, "{", "c1", "mcp__burp__status")]),
        Delta("", "", 2, calls=[CallPiece(0, "}"), CallPiece(1, '{"input": "a"}', "c2", "mcp__burp__say")]),
        Delta("", "", 3, calls=[CallPiece(2, "{}", "c3", "light")]),
        Finished("", "tool_calls", "", None, TIMINGS),
    ]
    items = [
        {"role": "user", "content": "Go"},
        {"type": "function_call", "call_id": "c0", "namespace": "files", "name": "read", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c0", "output": "done"},
    ]
    request = body(items, tools=[TOOL, SPACE, OTHER])
    found = await events(client, request)
    output = found[-1]["response"]["output"]
    assert [(item["type"], item.get("namespace"), item["name"]) for item in output] == [
        ("function_call", "mcp__burp__", "status"),
        ("custom_tool_call", "mcp__burp__", "say"),
        ("function_call", None, "light"),
    ]
    added = [event["item"] for event in found if event["type"] == "response.output_item.added"]
    assert [(item.get("namespace"), item["name"]) for item in added] == [
        ("mcp__burp__", "status"), ("mcp__burp__", "say"), (None, "light"),
    ]  # fmt: skip
    done = [event["name"] for event in found if event["type"] == "response.function_call_arguments.done"]
    assert done == ["status", "light"]
    assert found[-1]["response"]["tools"][1]["tools"][0]["name"] == "status"
    whole = await (await client.post(PATH, json=request)).json()
    assert [{**item, "id": 0} for item in whole["output"]] == [{**item, "id": 0} for item in output]
    names = [tool["function"]["name"] for tool in backend.asked.tools or []]
    assert names == ["light", "mcp__burp__status", "mcp__burp__say", "files__read", "files__light"]
    (call,) = (backend.asked.messages or [])[1].tool_calls or []
    assert call["function"]["name"] == "files__read"


@pytest.mark.parametrize(
    ("choice", "expected", "allowed"),
    [
        ({"type": "function", "name": "status", "namespace": "mcp__burp__"}, "=mcp__burp__status", None),
        ({"type": "function", "name": "status"}, "=mcp__burp__status", None),
        ({"type": "custom", "name": "say"}, "=mcp__burp__say", None),
        ({"type": "function", "name": "light"}, "=light", None),
        ({"type": "function", "name": "light", "namespace": "files"}, "=files__light", None),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "namespace", "name": "files"}, TOOL]},
            "auto",
            ["files__read", "files__light", "light"],
        ),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "read"}]},
            "auto",
            ["files__read"],
        ),
    ],
)
async def test_they_are_chosen_by_both_names_or_by_one_that_is_clear(
    client: TestClient, backend: ScriptedBackend, choice: Any, expected: str, allowed: Any
) -> None:
    assert (await client.post(PATH, json=body(tools=[TOOL, SPACE, OTHER], tool_choice=choice))).status == 200
    assert (backend.asked.tool_choice, backend.asked.allowed_tools) == (expected, allowed)


@pytest.mark.parametrize(
    ("listed", "allowed"),
    [
        ([{"type": "namespace", "name": "files"}], ["files__read", "files__light"]),
        ([{"type": "function", "function": {"name": "read"}}], ["files__read"]),
        ([{"type": "function", "function": {"name": "light", "namespace": "files"}}], ["files__light"]),
        ([{"type": "function", "name": "light", "namespace": "files"}, TOOL], ["files__light", "light"]),
        ([{"type": "custom", "name": "say"}], ["mcp__burp__say"]),
        ([{"type": "namespace", "name": "empty"}, TOOL], ["light"]),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
async def test_they_are_allowed_in_both_forms(
    client: TestClient, backend: ScriptedBackend, listed: Any, allowed: Any, nested: bool
) -> None:
    given = {"mode": "auto", "tools": listed}
    choice = {"type": "allowed_tools", **({"allowed_tools": given} if nested else given)}
    empty = {"type": "namespace", "name": "empty", "tools": []}
    reply = await client.post(PATH, json=body(tools=[TOOL, SPACE, OTHER, empty], tool_choice=choice))
    assert (reply.status, backend.asked.allowed_tools) == (200, allowed)


@pytest.mark.parametrize(
    "wrong",
    [
        {"type": "function", "name": "read", "namespace": "mcp__burp__"},
        {"type": "function", "name": "shell", "namespace": "files"},
        {"type": "function", "name": "shell", "namespace": "oven"},
        {"type": "function", "name": "shell", "namespace": ["files"]},
        {"type": "function", "name": "oven"},
        {"type": "namespace", "name": "oven"},
    ],
)
async def test_a_refusal_behind_a_namespace_names_its_place(client: TestClient, wrong: Any) -> None:
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "namespace", "name": "files"}, wrong]}
    shell = {"type": "function", "name": "shell"}
    reply = await client.post(PATH, json=body(tools=[TOOL, SPACE, OTHER, shell], tool_choice=choice))
    assert reply.status == 400
    assert (await reply.json())["error"]["param"].startswith("tool_choice.tools[1]")


async def test_a_list_of_allowed_tools_costs_no_more_than_its_length(client: TestClient) -> None:
    """Of namespaces, each of which is many functions, and of tools; nobody else is served meanwhile."""
    functions = [{"type": "function", "name": f"f{number}"} for number in range(1000)]
    tools = [{"type": "namespace", "name": "many", "tools": functions}]
    for one in ({"type": "namespace", "name": "many"}, {"type": "function", "name": "f999"}):
        choice = {"type": "allowed_tools", "mode": "auto", "tools": [one] * 1000}
        start = time.perf_counter()
        assert (await client.post(PATH, json=body(tools=tools, tool_choice=choice))).status == 200
        assert time.perf_counter() - start < 5
        choice["tools"] = [one] * 1001
        reply = await client.post(PATH, json=body(tools=tools, tool_choice=choice))
        assert (reply.status, (await reply.json())["error"]["param"]) == (400, "tool_choice.tools")


async def test_a_call_that_nothing_allowed_can_be(client: TestClient) -> None:
    empty = {"type": "namespace", "name": "empty"}
    choice = {"type": "allowed_tools", "mode": "required", "tools": [empty]}
    reply = await client.post(PATH, json=body(tools=[TOOL, {**empty, "tools": []}], tool_choice=choice))
    assert reply.status == 400
    assert "what it allows has no function" in (await reply.json())["error"]["message"]


@pytest.mark.parametrize("levels", [fields.MAX_NESTING + 1, 500, 900, *range(950, 1000)])
async def test_what_is_told_again_is_not_nested_deeper_than_can_be(client: TestClient, levels: int) -> None:
    deep = "[" * levels + "]" * levels
    for field in (
        f'"tools": [{{"type": "custom", "name": "say", "format": {deep}}}]',
        f'"metadata": {{"a": {deep}}}',
        f'"tool_choice": {{"type": "allowed_tools", "mode": "auto", "tools": [{deep}]}}',
        f'"tool_choice": {{"type": "allowed_tools", "allowed_tools": {deep}}}',
    ):
        data = f'{{"model": "demo", "input": "Hello", {field}}}'
        reply = await client.post(PATH, data=data, headers={"Content-Type": "application/json"})
        assert reply.status == 400, field[:20]


async def test_tools_within_a_function_are_not_looked_through(client: TestClient) -> None:
    """Nor told again: each level of many would be written out anew."""
    tool = TOOL
    for _ in range(100):
        tool = {**TOOL, "tools": [tool]}
    reply = await client.post(PATH, json=body(tools=[tool]))
    assert (reply.status, (await reply.json())["tools"]) == (200, [TOOL])


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "name": "light"}, "=light"),
    ],
)
async def test_tool_choice(client: TestClient, backend: ScriptedBackend, choice: Any, expected: str) -> None:
    request = body(tools=[TOOL, {"type": "web_search"}], tool_choice=choice, parallel_tool_calls=False)
    reply = await client.post(PATH, json=request)
    assert (backend.asked.tool_choice, backend.asked.parallel_tool_calls) == (expected, False)
    assert backend.asked.tools == [AS_TEMPLATE]
    assert (await reply.json())["tool_choice"] == choice


async def test_allowed_tools(client: TestClient, backend: ScriptedBackend) -> None:
    function, search = {"type": "function", "name": "light"}, {"type": "web_search"}
    choice = {"type": "allowed_tools", "mode": "required", "tools": [function, search]}
    reply = await client.post(PATH, json=body(tools=[TOOL, search], tool_choice=choice))
    assert (backend.asked.tool_choice, backend.asked.allowed_tools) == ("required", ["light"])
    assert backend.asked.tools == [AS_TEMPLATE]
    assert (await reply.json())["tool_choice"] == choice
    only = {"type": "allowed_tools", "mode": "auto", "tools": [search]}
    assert (await client.post(PATH, json=body(tools=[TOOL, search], tool_choice=only))).status == 200
    assert backend.asked.tool_choice == "none"
    reply = await client.post(
        PATH, json=body(tools=[TOOL], tool_choice={**choice, "tools": [{**function, "name": "x"}]})
    )
    assert reply.status == 400
    assert "not among `tools`: light" in (await reply.json())["error"]["message"]


async def test_allowed_tools_as_the_chat_has_them(client: TestClient, backend: ScriptedBackend) -> None:
    search = {"type": "web_search"}
    listed = [{"type": "function", "function": {"name": "light"}}, {"type": "function", "name": "light"}, search]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": listed}}
    reply = await client.post(PATH, json=body(tools=[TOOL, search], tool_choice=choice))
    assert (backend.asked.tool_choice, backend.asked.allowed_tools) == ("required", ["light"])
    assert (await reply.json())["tool_choice"] == choice


@pytest.mark.parametrize("kind", ["mcp", "web_search_preview", "custom", "shell"])
@pytest.mark.parametrize("nested", [False, True])
async def test_allowed_tools_that_were_not_offered(client: TestClient, kind: str, nested: bool) -> None:
    given = {"mode": "auto", "tools": [{"type": "function", "name": "light"}, {"type": kind, "server_label": "x"}]}
    choice = {"type": "allowed_tools", **({"allowed_tools": given} if nested else given)}
    reply = await client.post(PATH, json=body(tools=[TOOL, {"type": "web_search"}], tool_choice=choice))
    error = (await reply.json())["error"]
    where = "tool_choice.allowed_tools" if nested else "tool_choice"
    assert (reply.status, error["param"]) == (400, f"{where}.tools[1].type")
    assert f"is of type '{kind}', and no such tool is among `tools`" in error["message"]


async def test_no_effort_is_no_thinking(client: TestClient, backend: ScriptedBackend) -> None:
    assert (await client.post(PATH, json=body(reasoning={"effort": "none"}))).status == 200
    assert backend.asked.template_kwargs == {"reasoning_effort": "none", "enable_thinking": False}


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, "json_object"),
        ({"type": "json_schema", "name": "x", "strict": True, "schema": {"type": "object"}}, "json_schema"),
    ],
)
async def test_format(client: TestClient, backend: ScriptedBackend, given: Any, kind: str | None) -> None:
    reply = await client.post(PATH, json=body(text={"format": given}, reasoning={"effort": "low"}))
    assert (backend.asked.constraint and backend.asked.constraint.kind) == kind
    assert backend.asked.template_kwargs == {"reasoning_effort": "low"}
    said = await reply.json()
    assert said["text"] == {"format": given}
    assert said["reasoning"] == {"effort": "low", "summary": None}


async def test_neutral_fields_change_nothing(client: TestClient) -> None:
    neutral = {"store": True, "include": ["reasoning.encrypted_content"], "truncation": "auto", "user": "x"}
    assert (await client.post(PATH, json=body(**neutral, prompt_cache_key="k", stream_options={}))).status == 200


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        ({}, "input"),
        (body([]), "input"),
        (body(previous_response_id="resp_1"), "previous_response_id"),
        (body(conversation="conv_1"), "conversation"),
        (body(background=True), "background"),
        (body(top_logprobs=3), "top_logprobs"),
        (body(max_output_tokens=0), "max_output_tokens"),
        (body([{"type": "item_reference", "id": "x"}]), "input[0].type"),
        (body([{"type": "compaction"}]), "input[0].type"),
        (body([{"type": "computer_call"}]), "input"),
        (body([{"role": "judge", "content": "x"}]), "input[0].role"),
        (body([{"role": "user"}]), "input[0].content"),
        (body([{"role": "user", "content": [{"type": "input_image"}]}]), "input[0].content[0].type"),
        (body([{"type": "function_call", "call_id": "x"}]), "input[0].name"),
        (body([{"type": "function_call_output", "output": "x"}]), "input[0].call_id"),
        (body(tools=[{"type": "namespace", "tools": [TOOL]}]), "tools[0].name"),
        (body(tools=[{"type": "namespace", "name": "x", "tools": [{"type": "function"}]}]), "tools[0].tools[0].name"),
        (body(tools=[{"type": "namespace", "name": "x", "tools": [{"type": "mcp"}]}]), "tools[0].tools[0].type"),
        (
            body(tools=[{**TOOL, "name": "x__light"}, {"type": "namespace", "name": "x", "tools": [TOOL]}]),
            "tools[1].tools[0].name",
        ),
        (body(tools=[{"type": "oven", "name": "x"}]), "tools[0].type"),
        (body(tools=[{"type": "custom"}]), "tools[0].name"),
        (body(tools=[{"type": "function"}]), "tools[0].name"),
        (body(tool_choice="required"), "tool_choice"),
        (body(tool_choice="oven"), "tool_choice"),
        (body(tools=[TOOL], tool_choice="light"), "tool_choice"),
        (body(tools=[TOOL], tool_choice={"type": "web_search"}), "tool_choice.type"),
        (body(text={"format": {"type": "grammar"}}), "text.format.type"),
        (body(text={"format": {"type": "json_schema"}}), "text.format.schema"),
    ],
)
async def test_refusals_name_the_field(client: TestClient, request_: Any, param: str) -> None:
    reply = await client.post(PATH, json=request_)
    error = (await reply.json())["error"]
    assert (reply.status, error["type"], error["param"]) == (400, "invalid_request_error", param)


async def test_nothing_is_stored(client: TestClient) -> None:
    for reply in (await client.get(f"{PATH}/resp_1"), await client.delete(f"{PATH}/resp_1")):
        assert reply.status == 404
        assert "stored" in (await reply.json())["error"]["message"]


async def test_failures(client: TestClient, backend: ScriptedBackend) -> None:
    backend.script[3:] = [HomeprefixdError("the worker died", code="worker_died")]
    last = (await events(client, body()))[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": "worker_died", "message": "the worker died"}
    backend.script = [ContextOverflowError("Too long.", n_prompt_tokens=9000, n_ctx=2048)]
    writer = ResponseWriter("id", "demo", 0, {})  # a stream that had to begin before it was known
    lines = writer.failure(ContextOverflowError("Too long.", n_prompt_tokens=9000, n_ctx=2048)).decode().split("\n")
    assert [line for line in lines if line.startswith("event: ")] == [
        "event: response.created", "event: response.in_progress", "event: response.failed",
    ]  # fmt: skip
    reply = await client.post(PATH, json=body(stream=True))
    error = (await reply.json())["error"]
    assert (reply.status, error["type"], error["n_ctx"]) == (400, "exceed_context_size_error", 2048)
