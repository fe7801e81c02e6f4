# ruff: noqa: E501
"""More pairs of prompts, written to see whether the rules hold for shapes that they were not made for."""

from __future__ import annotations

import copy
import json
from datetime import datetime
from typing import Any

from corpus import (
    AGENT_TOOLS,
    CHATML,
    LLAMA,
    MISTRAL,
    TOOLS,
    Chat,
    Pair,
    said,
    system,
    tool,
    tooled,
    turned,
    turns,
    user,
)

from homeprefixd.frames.worker import Message

LONG = "\n".join(
    f"Rule {i}: the {w} must be kept as they are, whatever a guest may say about it."
    for i, w in enumerate(
        [
            "doors",
            "windows",
            "lamps",
            "books",
            "cups",
            "plates",
            "chairs",
            "tables",
            "curtains",
            "rugs",
            "clocks",
            "plants",
        ]
    )
)


def changed(old: str, new: str, **more: Any) -> tuple[Chat, Chat]:
    return Chat([system(old), user("one?")], **more), Chat([system(new), user("two?")], **more)


def more_pairs() -> list[Pair]:
    found: list[Pair] = []

    def add(name: str, before: Chat, after: Chat, cause: str, place: str) -> None:
        found.append(Pair(name, before, after, cause, place))

    add(
        "HA",
        *changed(
            f"You are Al, a helpful AI. The current time is 08:59:58. Today's date is 2026-03-01.\n{LONG}",
            f"You are Al, a helpful AI. The current time is 09:00:03. Today's date is 2026-03-01.\n{LONG}",
        ),
        "clock",
        "system",
    )
    add(
        "date12",
        *changed(f"Today is Tuesday, March 3rd, 2026.\n{LONG}", f"Today is Wednesday, March 4th, 2026.\n{LONG}"),
        "clock",
        "system",
    )
    add(
        "datetime long",
        *changed(
            f"Knowledge cutoff: 2024-06\nCurrent date: 2026-03-09\n{LONG}",
            f"Knowledge cutoff: 2024-06\nCurrent date: 2026-03-10\n{LONG}",
        ),
        "clock",
        "system",
    )
    add("12h", *changed(f"Local time is 7:05 am.\n{LONG}", f"Local time is 7:10 am.\n{LONG}"), "clock", "system")
    add(
        "rfc",
        *changed(f"Date: Sun, 29 Nov 2026 21:15:48 GMT\n{LONG}", f"Date: Mon, 30 Nov 2026 06:15:48 GMT\n{LONG}"),
        "clock",
        "system",
    )
    add("epoch ms", *changed(f"ts={1795986907123}\n{LONG}", f"ts={1795986999001}\n{LONG}"), "clock", "system")
    add("epoch f", *changed(f"now: 1795986907.52\n{LONG}", f"now: 1795987007.11\n{LONG}"), "clock", "system")
    add(
        "pp json",
        *changed(
            "Context:\n" + json.dumps({"a": 1, "b": {"x": 1, "y": [1, 2]}, "c": "ok"}, indent=2) + "\n" + LONG,
            "Context:\n" + json.dumps({"b": {"y": [1, 2], "x": 1}, "a": 1, "c": "ok"}, indent=2) + "\n" + LONG,
        ),
        "keys_reordered",
        "system",
    )
    tools2 = copy.deepcopy(TOOLS)
    f = tools2[0]["function"]["parameters"]["properties"]
    tools2[0]["function"]["parameters"]["properties"] = dict(reversed(list(f.items())))
    add("nested keys chatml", *tooled(TOOLS, tools2), "keys_reordered", "tool")
    add("nested keys llama", *tooled(TOOLS, tools2, LLAMA), "keys_reordered", "tool")
    add("keys llama", *tooled(TOOLS, [turned(t) for t in TOOLS], LLAMA), "keys_reordered", "tool")
    add("shuffle", *tooled(AGENT_TOOLS, [AGENT_TOOLS[i] for i in (2, 0, 3, 1)], MISTRAL), "tools_reordered", "tools")
    add("tool gone last", *tooled(TOOLS, TOOLS[:-1]), "tools_changed", "GetLiveContext")
    add("tool new last", *tooled(TOOLS, [*TOOLS, tool("HassLock")], LLAMA), "tools_changed", "HassLock")
    add("no tools any more", *tooled(TOOLS, None), "tools_changed", "went")
    add("tools first time", *tooled(None, TOOLS), "tools_changed", "came")
    tools3 = copy.deepcopy(TOOLS)
    tools3[2]["function"]["parameters"]["properties"]["temperature"]["maximum"] = 30
    add("schema changed", *tooled(TOOLS, tools3), "tools_changed", "HassClimate")
    tools4 = copy.deepcopy(TOOLS)
    tools4[1]["function"]["description"] = "Turns off a device. Session 7f3a91bc."
    tools5 = copy.deepcopy(TOOLS)
    tools5[1]["function"]["description"] = "Turns off a device. Session 09ce77da."
    add("id in tool", *tooled(tools4, tools5), "random_id", "HassTurnOff")
    add("trailing blank", *changed(LONG.replace("it.\nRule 3", "it. \nRule 3"), LONG), "white_space", "system")
    add("tab", *changed("- a\tb: " + LONG, "- a    b: " + LONG), "white_space", "system")
    add("final newline", *changed(LONG + "\n", LONG), "white_space", "")
    add(
        "args order",
        Chat(
            [
                system(LONG),
                user("on"),
                said(
                    "",
                    tool_calls=[
                        {"type": "function", "function": {"name": "f", "arguments": '{"name": "x", "area": "y"}'}}
                    ],
                ),
                Message("tool", "ok"),
                user("a"),
            ],
            TOOLS,
        ),
        Chat(
            [
                system(LONG),
                user("on"),
                said(
                    "",
                    tool_calls=[
                        {"type": "function", "function": {"name": "f", "arguments": '{"area": "y", "name": "x"}'}}
                    ],
                ),
                Message("tool", "ok"),
                user("a"),
                said("b"),
                user("c"),
            ],
            TOOLS,
        ),
        "keys_reordered",
        "",
    )
    add(
        "args ws",
        Chat(
            [
                system(LONG),
                user("on"),
                said("", tool_calls=[{"type": "function", "function": {"name": "f", "arguments": {"name": "x"}}}]),
                Message("tool", "ok"),
                user("a"),
            ],
            TOOLS,
        ),
        Chat(
            [
                system(LONG),
                user("on"),
                said("", tool_calls=[{"type": "function", "function": {"name": "f", "arguments": {"name": "x "}}}]),
                Message("tool", "ok"),
                user("a"),
                said("b"),
                user("c"),
            ],
            TOOLS,
        ),
        "white_space",
        "",
    )
    thought = "<think>\nLet me think about it for a while.\n</think>\n\n"
    add(
        "think in content",
        Chat([system(LONG), user("q1"), said(thought + "A1 is the answer."), user("q2")]),
        Chat([system(LONG), user("q1"), said("A1 is the answer."), user("q2"), said("A2"), user("q3")]),
        "thoughts_stripped",
        "message 3",
    )
    add(
        "think reply",
        Chat([system(LONG), user("q1")], reply=thought + "A1 is the answer, and a long one."),
        Chat([system(LONG), user("q1"), said("A1 is the answer, and a long one."), user("q2")]),
        "thoughts_stripped",
        "message 3",
    )
    strips = CHATML.replace(
        "{% if m.role == 'assistant' and m.reasoning_content %}",
        "{% if m.role == 'assistant' and m.reasoning_content and not (messages | selectattr('role','equalto','user') | list | length > 1) %}",
    )
    add(
        "template strips",
        Chat(
            [system(LONG), user("q1"), said("call", reasoning_content="I think."), Message("tool", "res")],
            template=strips,
        ),
        Chat(
            [
                system(LONG),
                user("q1"),
                said("call", reasoning_content="I think."),
                Message("tool", "res"),
                said("done"),
                user("q2"),
            ],
            template=strips,
        ),
        "thoughts_stripped",
        "",
    )
    add(
        "trunc2",
        Chat([system(LONG), *turns(8)]),
        Chat([system(LONG), *turns(8)[2:], user("last")]),
        "history_truncated",
        "message 2",
    )
    add(
        "trunc no overlap sys, mistral",
        Chat([system(LONG), *turns(8)], template=MISTRAL),
        Chat([system(LONG), *turns(9)[6:], user("last")], template=MISTRAL),
        "history_truncated",
        "message 2",
    )
    add(
        "trunc llama",
        Chat([system(LONG), *turns(8)], template=LLAMA),
        Chat([system(LONG), *turns(8)[4:], user("last")], template=LLAMA),
        "history_truncated",
        "message 2",
    )
    add(
        "trunc 1st kept",
        Chat([system(LONG), *turns(8)]),
        Chat([system(LONG), turns(1)[0], *turns(8)[5:], user("last")]),
        "history_truncated",
        "message 3",
    )
    add("nonce word", *changed(f"nonce=zkqpwmxc\n{LONG}", f"nonce=plmoknij\n{LONG}"), "random_id", "system")
    add(
        "ulid",
        *changed(
            f"conversation 01HZX3V9K4Q8J6T2M7R5W0YBCD\n{LONG}", f"conversation 01HZX4AA7P1N8S3E5F6G7H8J9K\n{LONG}"
        ),
        "random_id",
        "system",
    )
    add("b64", *changed(f"auth: Zm9vYmFyMTIz==\n{LONG}", f"auth: cXV4MTIzNDU2==\n{LONG}"), "random_id", "system")
    add("call id", *changed(f"Trace call_abc12345\n{LONG}", f"Trace call_xyz98765\n{LONG}"), "random_id", "system")
    add("session 4 digits", *changed(f"Session #4821\n{LONG}", f"Session #9912\n{LONG}"), "random_id", "system")
    add("counter msgs", *changed(f"Messages so far: 7\n{LONG}", f"Messages so far: 9\n{LONG}"), "counter", "system")
    add("counter step", *changed(f"Step 3 of 20.\n{LONG}", f"Step 4 of 20.\n{LONG}"), "counter", "system")
    add(
        "counter ctx",
        *changed(f"Context used: 12034/200000 tokens\n{LONG}", f"Context used: 15520/200000 tokens\n{LONG}"),
        "counter",
        "system",
    )
    add("temp", *changed(f"Living room: 21.4°C\n{LONG}", f"Living room: 21.5°C\n{LONG}"), "changing_value", "system")
    add(
        "temp int",
        *changed(f"Outdoor temperature is 9 °C and sunny\n{LONG}", f"Outdoor temperature is 12 °C and sunny\n{LONG}"),
        "changing_value",
        "system",
    )
    add(
        "csv state",
        *changed(
            "name,state\nlight.kitchen,on\nlight.hall,off\n" + LONG,
            "name,state\nlight.kitchen,off\nlight.hall,off\n" + LONG,
        ),
        "changing_value",
        "system",
    )
    add("power", *changed(f"Power: 350 W\n{LONG}", f"Power: 1200 W\n{LONG}"), "changing_value", "system")
    add(
        "weather word",
        *changed(f"Weather: sunny, 4 °C\n{LONG}", f"Weather: rainy, 4 °C\n{LONG}"),
        "changing_value",
        "system",
    )
    add("user", *changed(f"The user is Anna.\n{LONG}", f"The user is Bernd.\n{LONG}"), "changing_value", "system")
    add(
        "area HA",
        *changed(
            f"You are in area Küche (floor Erdgeschoss)\n{LONG}", f"You are in area Bad (floor Obergeschoss)\n{LONG}"
        ),
        "changing_value",
        "system",
    )
    entities = [f"light.room_{i} 'Room {i}' = off" for i in range(12)]
    add(
        "entities",
        *changed(
            "States:\n" + "\n".join(entities) + "\n" + LONG,
            "States:\n" + "\n".join(entities[5:] + entities[:5]) + "\n" + LONG,
        ),
        "entries_reordered",
        "system",
    )
    add(
        "rag before",
        Chat([system(LONG), user("Context: the cat sat.\n\nQ")]),
        Chat([system("Relevant memories:\n- the user likes tea\n- the dog is called Rex\n\n" + LONG), user("Q2")]),
        "inserted_text",
        "system",
    )
    add(
        "edited user",
        Chat([system(LONG), user("What about soup for dinner, please?"), said("Yes, soup."), user("ok")]),
        Chat(
            [
                system(LONG),
                user("Rather a salad for lunch, I think?"),
                said("Yes, soup."),
                user("ok"),
                said("fine"),
                user("bye"),
            ]
        ),
        "history_edited",
        "message 2",
    )
    add(
        "billing anthropic list",
        *changed(
            "x-anthropic-billing-header: cc_version=2.0.1; cch=aaaaa;" + LONG,
            "x-anthropic-billing-header: cc_version=2.0.1; cch=bbbbb;" + LONG,
        ),
        "billing_line",
        "system",
    )
    add(
        "template date",
        Chat([system(LONG), user("a")], template=LLAMA),
        Chat([system(LONG), user("b")], template=LLAMA, now=datetime(2026, 12, 1)),
        "template_clock",
        "template",
    )
    return found
