# ruff: noqa: E501
"""Pairs of prompts as home apps send them, one after the other, with the cause of what was not reused and its place."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from homeprefixd.bench.pairs import CHATML, LLAMA, MISTRAL
from homeprefixd.chat.prompt import PromptBuilder
from homeprefixd.explain.prompt import Prompt
from homeprefixd.frames.worker import Message


@dataclass
class Chat:
    """What an app sends, and what it got. `text` instead of messages: a finished prompt."""

    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    reply: str = ""
    template: str = CHATML
    now: datetime = datetime(2026, 11, 29, 21, 15)
    text: str = ""

    def prompt(self) -> Prompt:
        if self.text:
            return Prompt(self.text, reply=self.reply)
        builder = PromptBuilder(self.template, "<s>", "</s>", 5.0, now=lambda: self.now)
        return Prompt(builder.render(self.messages, self.tools, {}), self.messages, self.tools or (), self.reply)


@dataclass
class Pair:
    """`place`: part of the place's name."""

    name: str
    before: Chat
    after: Chat
    cause: str
    place: str = "system"


def system(text: str) -> Message:
    return Message("system", text)


def user(text: str) -> Message:
    return Message("user", text)


def said(text: str, **more: Any) -> Message:
    return Message("assistant", text, **more)


def tool(name: str, about: str = "", /, **properties: str) -> dict[str, Any]:
    described = {
        key: {"type": kind, "description": f"The {key}."} for key, kind in (properties or {"x": "string"}).items()
    }
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": about or f"Does what {name} says.",
            "parameters": {"type": "object", "properties": described, "required": list(described)},
        },
    }


def turned(value: Any) -> Any:
    """The same JSON with its keys the other way round."""
    if isinstance(value, dict):
        return {key: turned(value[key]) for key in reversed(value)}
    return [turned(item) for item in value] if isinstance(value, list) else value


POLICY = "\n".join(
    f"{number}. {rule}"
    for number, rule in enumerate(
        [
            "Answer in one or two sentences, without lists.",
            "Never unlock a door unless the person has said which one.",
            "Heating is not set above 23 degrees without asking twice.",
            "At night the lights in the corridor stay dim.",
            "If a window is open, say so before you turn on the heating.",
            "Children may not order anything.",
            "The alarm is armed only when nobody is at home.",
            "Ask when two devices could be meant.",
            "Say when a device did not answer.",
            "Do not tell guests who is at home.",
        ],
        start=1,
    )
)
ENTITIES = [
    f"{kind}.{room}, {room} {kind}, {state}"
    for room in ("kitchen", "bedroom", "bathroom", "office", "hall", "cellar")
    for kind, state in (("light", "off"), ("climate", "heating"), ("cover", "closed"))
]
HOME = "You are the voice assistant of this house.\n"
ASK = [user("Turn on the kitchen light."), user("Is the bedroom window open?")]
TOOLS = [
    tool("HassTurnOn", "Turns on a device.", name="string", area="string"),
    tool("HassTurnOff", "Turns off a device.", name="string", area="string"),
    tool("HassClimateSetTemperature", "Sets the target temperature.", temperature="number", area="string"),
    tool("GetLiveContext", "Gives the state of all devices.", domain="string"),
]
AGENT = (
    "You are a coding agent. Work in the repository that is open, and change nothing outside it.\n\n# Tone\nBe brief. No"
    " preamble.\n\n# Tasks\nPlan with the todo tool. Run the tests before you say that you are done. Never commit unless"
    " the user asks for it.\n\n# Environment\n"
)
AGENT_TOOLS = [
    tool("Bash", "Runs a command in a shell.", command="string", timeout="number"),
    tool("Edit", "Replaces text in a file.", file_path="string", old_string="string", new_string="string"),
    tool("Read", "Reads a file.", file_path="string"),
    tool("Grep", "Searches file contents.", pattern="string", path="string"),
]
BILLING = "x-anthropic-billing-header: cc_version=2.1.37.{}; cc_entrypoint=cli; cch={};\n"


def house(first: str, *, entities: list[str] | None = None) -> str:
    lines = "\n".join(ENTITIES if entities is None else entities)
    return f"{HOME}{first}\n{POLICY}\n\nDevices:\n{lines}\n"


def systems(old: str, new: str, **more: Any) -> tuple[Chat, Chat]:
    return Chat([system(old), ASK[0]], **more), Chat([system(new), ASK[1]], **more)


def heads(old: str, new: str, **more: Any) -> tuple[Chat, Chat]:
    """The household's prompt with another first line."""
    return systems(house(old), house(new), **more)


def tooled(old: list[dict[str, Any]], new: list[dict[str, Any]], template: str = CHATML) -> tuple[Chat, Chat]:
    text = house("Be kind.")
    return (
        Chat([system(text), ASK[0]], old, template=template),
        Chat([system(text), ASK[1]], new, template=template),
    )


def turns(count: int, start: int = 0) -> list[Message]:
    found: list[Message] = []
    for number in range(start, start + count):
        found += [
            user(f"Question {number}: what do I need for a dinner of {number + 2} people with one who eats no meat?"),
            said(
                f"For {number + 2} people take {number + 4} potatoes, {number + 1} onions and a good cheese; that is all."
            ),
        ]
    return found


THINKING = [said("It is off now.", reasoning_content="The user wants the light off. HassTurnOff is the tool for that.")]
DOCUMENT = "The boiler was built in 1998 and is serviced each autumn. " * 12


def pairs() -> list[Pair]:
    clock: list[tuple[str, str, str]] = [
        ("iso time", "Current time: 2026-11-29T21:15:07+01:00", "Current time: 2026-11-29T21:16:12+01:00"),
        ("iso date", "Today is 2026-11-29.", "Today is 2026-11-30."),
        ("hh:mm", "The current time is 21:15.", "The current time is 21:16."),
        ("hh:mm pm", "It is 9:59 PM now.", "It is 10:00 PM now."),
        ("month and day", "Today's date is November 29, 2026.", "Today's date is November 30, 2026."),
        ("weekday", "Today is Sunday.", "Today is Monday."),
        ("german date", "Heute ist der 29.11.2026.", "Heute ist der 30.11.2026."),
        ("unix time", "timestamp: 1795986907", "timestamp: 1795986961"),
        ("ago", "Last motion in the hall: 5 minutes ago", "Last motion in the hall: 12 minutes ago"),
        ("daytime", "It is evening.", "It is night."),
    ]
    ids = [
        ("uuid", "Session 3f2b8c1e-90aa-4d4b-8f6e-27d9a1b0c5d4", "Session 8d1fa2b3-11c4-47aa-9e02-5b6c7d8e9f00"),
        ("prefixed", "Request: req_8fA3k2Lm9Q", "Request: req_zz81PqW04x"),
        ("hex", "trace=9f86d081884c7d65", "trace=60303ae22b998861"),
        ("number", "Session id: 48213377", "Session id: 59120046"),
    ]
    found = [Pair(f"clock: {name}", *heads(old, new), "clock") for name, old, new in clock]
    found += [Pair(f"id: {name}", *heads(old, new), "random_id") for name, old, new in ids]
    found += [
        Pair(
            "counter: turn",
            *heads("This is turn 9 of the conversation.", "This is turn 10 of the conversation."),
            "counter",
        ),
        Pair("counter: request", *heads("Request #1041", "Request #1042"), "counter"),
        Pair("counter: tokens left", *heads("Budget: 18423 tokens left", "Budget: 17650 tokens left"), "counter"),
        Pair("value: weather", *heads("Outside: 4.5 °C, cloudy", "Outside: 5.1 °C, cloudy"), "changing_value"),
        Pair("value: humidity", *heads("Humidity in the bath: 48 %", "Humidity in the bath: 61 %"), "changing_value"),
        Pair("value: area", *heads("You are in area Kitchen.", "You are in area Living Room."), "changing_value"),
        Pair(
            "value: state of an entity",
            *systems(
                house("Be kind."), house("Be kind.", entities=["light.kitchen, kitchen light, on", *ENTITIES[1:]])
            ),
            "changing_value",
        ),
        Pair(
            "billing line",
            *systems(BILLING.format("3a3", "91b0c") + AGENT, BILLING.format("3a3", "04f2e") + AGENT, tools=AGENT_TOOLS),
            "billing_line",
        ),
        Pair(
            "billing line, other version",
            *systems(BILLING.format("3a3", "00000") + AGENT, BILLING.format("77c", "00000") + AGENT, tools=AGENT_TOOLS),
            "billing_line",
        ),
        Pair(
            "date in the environment of an agent",
            *systems(
                f"{AGENT}Platform: linux\nDate: 11/29/2026\n{POLICY}",
                f"{AGENT}Platform: linux\nDate: 11/30/2026\n{POLICY}",
            ),
            "clock",
        ),
        Pair("tools in another order", *tooled(TOOLS, TOOLS[::-1]), "tools_reordered", "tools"),
        Pair(
            "tools in another order, Mistral",
            *tooled(TOOLS, [TOOLS[1], TOOLS[0], *TOOLS[2:]], MISTRAL),
            "tools_reordered",
            "tools",
        ),
        Pair("tools in another order, Llama", *tooled(TOOLS, TOOLS[::-1], LLAMA), "tools_reordered", "tools"),
        Pair(
            "a tool came",
            *tooled(AGENT_TOOLS, [AGENT_TOOLS[0], tool("WebFetch", url="string"), *AGENT_TOOLS[1:]]),
            "tools_changed",
            "WebFetch came",
        ),
        Pair("a tool went", *tooled(AGENT_TOOLS, AGENT_TOOLS[1:]), "tools_changed", "Bash went"),
        Pair(
            "a tool's description",
            *tooled(
                TOOLS, [tool("HassTurnOn", "Turns on a device or an area.", name="string", area="string"), *TOOLS[1:]]
            ),
            "tools_changed",
            "HassTurnOn",
        ),
        Pair(
            "a date in a tool's description",
            *tooled(
                [tool("Calendar", "Events from 2026-11-29 on.", day="string"), *TOOLS],
                [tool("Calendar", "Events from 2026-11-30 on.", day="string"), *TOOLS],
            ),
            "clock",
            "Calendar",
        ),
        Pair("keys of tools", *tooled(TOOLS, [turned(one) for one in TOOLS], MISTRAL), "keys_reordered", "tool"),
        Pair(
            "keys of one tool",
            *tooled(AGENT_TOOLS, [AGENT_TOOLS[0], turned(AGENT_TOOLS[1]), *AGENT_TOOLS[2:]], MISTRAL),
            "keys_reordered",
            "tool",
        ),
        Pair(
            "keys of JSON in the system message",
            *systems(
                f"{HOME}State: {json.dumps({'sun': 'up', 'mode': 'day', 'guests': 0})}\n{POLICY}",
                f"{HOME}State: {json.dumps({'guests': 0, 'mode': 'day', 'sun': 'up'})}\n{POLICY}",
            ),
            "keys_reordered",
        ),
        Pair(
            "entities in another order",
            *systems(house("Be kind."), house("Be kind.", entities=[ENTITIES[3], *ENTITIES[:3], *ENTITIES[4:]])),
            "entries_reordered",
        ),
        Pair(
            "white space: blank line",
            *systems(house("Be kind."), house("Be kind.").replace("\n\nDevices", "\n\n\nDevices")),
            "white_space",
        ),
        Pair(
            "white space: two blanks",
            *systems(house("Be kind. Be brief."), house("Be kind.  Be brief.")),
            "white_space",
        ),
        Pair(
            "white space: line ends",
            *systems(house("Be kind."), house("Be kind.").replace("\n", "\r\n")),
            "white_space",
        ),
        Pair(
            "thoughts left out of the history",
            Chat([system(POLICY), user("Light off."), *THINKING, user("And the heating?")], TOOLS),
            Chat(
                [
                    system(POLICY),
                    user("Light off."),
                    said("It is off now."),
                    user("And the heating?"),
                    said("Done."),
                    user("Thanks, and the covers?"),
                ],
                TOOLS,
            ),
            "thoughts_stripped",
            "message 3",
        ),
        Pair(
            "thoughts of the last reply left out",
            Chat(
                [system(POLICY), user("Light off.")],
                TOOLS,
                reply="<think>\nThe user wants it off.\n</think>\n\nIt is off now.\nAnything else that I can do for you?",
            ),
            Chat(
                [
                    system(POLICY),
                    user("Light off."),
                    said("It is off now.\nAnything else that I can do for you?"),
                    user("Thanks."),
                ],
                TOOLS,
            ),
            "thoughts_stripped",
            "message 3",
        ),
        Pair(
            "history cut at the front",
            Chat([system(POLICY), *turns(6), user("And now?")]),
            Chat([system(POLICY), *turns(6)[4:], user("And now?"), said("Now you cook."), user("For how long?")]),
            "history_truncated",
            "message 2",
        ),
        Pair(
            "history cut behind the first question",
            Chat([system(POLICY), *turns(6), user("And now?")]),
            Chat(
                [system(POLICY), *turns(1), *turns(6)[6:], user("And now?"), said("Now you cook."), user("How long?")]
            ),
            "history_truncated",
            "message 4",
        ),
        Pair(
            "history cut, no system message",
            Chat([*turns(6), user("And now?")], template=MISTRAL),
            Chat([*turns(6)[2:], user("And now?"), said("Now you cook."), user("How long?")], template=MISTRAL),
            "history_truncated",
            "message 1",
        ),
        Pair(
            "an earlier message was changed",
            Chat([system(POLICY), *turns(4), user("And now?")]),
            Chat(
                [
                    system(POLICY),
                    user("Question 0, better said: what do I need to make a soup?"),
                    *turns(4)[1:],
                    user("And now?"),
                ]
            ),
            "history_edited",
            "message 2",
        ),
        Pair(
            "documents before the question",
            Chat(text=f"Manual of the boiler.\n{DOCUMENT}\nQuestion: how old is it?\nAnswer:"),
            Chat(
                text=f"Found for you: the boiler stands in the cellar, behind the door.\nManual of the boiler.\n{DOCUMENT}\nQuestion: is it safe?\nAnswer:"
            ),
            "inserted_text",
            "prompt",
        ),
        Pair(
            "a window over a transcript",
            Chat(text="".join(f"[{n}] Somebody said sentence number {n} of the long talk.\n" for n in range(40))),
            Chat(text="".join(f"[{n}] Somebody said sentence number {n} of the long talk.\n" for n in range(4, 44))),
            "history_truncated",
            "prompt",
        ),
        Pair(
            "a template's date",
            Chat([system(house("Be kind.")), ASK[0]], template=LLAMA),
            Chat([system(house("Be kind.")), ASK[1]], template=LLAMA, now=datetime(2026, 11, 29, 21, 16)),
            "template_clock",
            "template",
        ),
        Pair(
            "a clock in a finished prompt",
            Chat(text=f"Now: 21:15:01\n{POLICY}\n{DOCUMENT}\nQ: warm?\nA:"),
            Chat(text=f"Now: 21:17:44\n{POLICY}\n{DOCUMENT}\nQ: cold?\nA:"),
            "clock",
            "prompt",
        ),
        Pair(
            "other words in the system message",
            *systems(
                house("You like to answer with irony and a wink, as an old butler would, and you know everyone here."),
                f"Always rhyme. {house('Your words are those of a sea captain in the age of sail.')}",
            ),
            "changed_text",
        ),
    ]
    return found


def stable() -> list[tuple[str, Chat, Chat]]:
    """Pairs that lose nothing."""
    text = house("Be kind.")
    first = [system(text), ASK[0]]
    return [
        ("another question", Chat(first, TOOLS), Chat([system(text), ASK[1]], TOOLS)),
        ("the same again", Chat(first), Chat(first)),
        ("the next turn", Chat(first, reply="It is on."), Chat([*first, said("It is on."), ASK[1]])),
        (
            "the next turn, with thoughts kept",
            Chat(first, reply="<think>\nOn it goes.\n</think>\n\nIt is on."),
            Chat([*first, said("It is on.", reasoning_content="On it goes."), ASK[1]]),
        ),
        (
            "another question of a finished prompt",
            Chat(text=f"{POLICY}\nQ: warm?\nA:"),
            Chat(text=f"{POLICY}\nQ: is it safe?\nA:"),
        ),
        (
            "another last turn",
            Chat([*first, said("On."), user("Why?")]),
            Chat([*first, said("On."), user("And the hall?")]),
        ),
    ]
