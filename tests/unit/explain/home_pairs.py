# ruff: noqa: E501
"""Pairs of prompts as apps at home send them, with the place and the cause that a person holds right.

Written from README.md, the issue and what is known of clients, before the code that explains them was looked at, and
left as they were but for their form. At the first try 56 of 67 were right (84 %): `FORM` of the others say the right
thing in other words than were expected. What was wrong was mended by general rules; `SHORT` is not said by intent.
"""

from __future__ import annotations

import copy
import json
from typing import Any, NamedTuple

from homeprefixd.bench.pairs import Sent
from homeprefixd.frames.worker import Message

FORM = {"tool-dropped", "analysis-channel-dropped", "git-status"}
"""The tool that went is named rather than the one that stands there now; a text has no messages; what was put in."""

SHORT = "retokenised-reply"
"""Fewer tokens are lost than are worth a word."""


class Expected(NamedTuple):
    """Section: `system`, `tool:NAME`, `message:N` (from 0, of all messages of the second chat), `tools`, `template`, `none`."""

    name: str
    first: Sent
    second: Sent
    section: str
    now: str  # what stands there
    before: str  # what stood there
    cause: str  # in a person's words, see CAUSES


CAUSES = {
    "clock": {"clock"},
    "place": {"changing_value"},
    "weather": {"changing_value"},
    "changed": {"changed_text", "changing_value", "history_edited", "inserted_text"},
    "id": {"random_id"},
    "id|clock": {"random_id", "clock"},
    "counter": {"counter"},
    "billing": {"billing_line"},
    "tools_order": {"tools_reordered"},
    "tools_changed": {"tools_changed"},
    "json_keys": {"keys_reordered"},
    "white_space": {"white_space"},
    "thoughts": {"thoughts_stripped"},
    "truncated": {"history_truncated"},
    "none": {"goes_on"},
    "new_question": {"goes_on"},
    "never_seen": {"never_seen"},
    "retokenised": {"retokenised"},
}


QWEN = (
    "{%- if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}# Tools\n\nYou may call one or more functions.\n\n<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools><|im_end|>\n"
    "{%- elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
    "{%- set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n{% elif m.role != 'system' %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and m.reasoning_content and loop.index0 > ns.last %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    '{{ m.content or \'\' }}{% for c in m.tool_calls or [] %}\n<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}<|im_start|>assistant\n'
)
LLAMA31 = (
    "{{ bos_token }}<|start_header_id|>system<|end_header_id|>\n\n{% if tools %}Environment: ipython\n{% endif %}Cutting Knowledge Date: December 2023\nToday Date: {{ DATE }}\n\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}<|eot_id|>"
    "{% for m in rest %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{% if loop.first and tools %}Given the following functions, please respond with a JSON for a function call.\n\n{% for t in tools %}{{ t | tojson(indent=4) }}\n\n{% endfor %}{% endif %}{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ first if loop.first else '' }}{{ m.content | trim }}<end_of_turn>\n{% endfor %}<start_of_turn>model\n"
)
MISTRAL3 = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set sys = messages[0].content %}{% set rest = messages[1:] %}{% else %}{% set sys = '' %}{% set rest = messages %}{% endif %}"
    "{% if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{% for m in rest %}{% if m.role == 'user' %}[INST] {{ sys + '\n\n' if loop.first and sys else '' }}{{ m.content }}[/INST]"
    '{% elif m.role == \'tool\' %}[TOOL_RESULTS] {"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    '{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}, "id": "{{ c.id }}"}{{ \', \' if not loop.last }}{% endfor %}]</s>{% else %} {{ m.content }}</s>{% endif %}{% endfor %}'
)
TEMPLATES = {
    "chatml": QWEN.replace(" and loop.index0 > ns.last", ""),
    "qwen3": QWEN,
    "llama3": LLAMA31.replace("{{ DATE }}", "26 Jul 2024"),
    "llama3-date": LLAMA31.replace("DATE", "strftime_now('%d %b %Y')"),
    "gemma": GEMMA,
    "mistral": MISTRAL3,
}


def system(text: str) -> Message:
    return Message("system", text)


def user(text: str) -> Message:
    return Message("user", text)


def assistant(text: str, **more: Any) -> Message:
    return Message("assistant", text, **more)


def tool(text: str, ident: str) -> Message:
    return Message("tool", text, tool_call_id=ident)


def call(ident: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": ident, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


ENTITIES = [
    ("Kitchen Ceiling", "light", "on", "Kitchen"),
    ("Kitchen Strip", "light", "off", "Kitchen"),
    ("Front Door", "lock", "locked", "Hallway"),
    ("Hallway Motion", "binary_sensor", "off", "Hallway"),
    ("Living Room Thermostat", "climate", "heat", "Living Room"),
    ("Living Room TV", "media_player", "playing", "Living Room"),
    ("Bedroom Blinds", "cover", "closed", "Bedroom"),
    ("Bedroom Temperature", "sensor", "19.4", "Bedroom"),
    ("Washing Machine", "switch", "on", "Bathroom"),
    ("Garage Door", "cover", "closed", "Garage"),
    ("Vacuum", "vacuum", "docked", "Hallway"),
    ("Office Lamp", "light", "off", "Office"),
]
HA_HEAD = """You are a voice assistant for Home Assistant.
Answer questions about the world truthfully.
Answer in plain text. Keep it simple and to the point.
When controlling Home Assistant always call the intent tools. Use HassTurnOn to lock and HassTurnOff to unlock a lock. When controlling a device, prefer passing just name and domain. When controlling an area, prefer passing just area name and domain.
When a user asks to turn on all devices of a specific type, ask user to specify an area, unless there is only one device of that type.
"""


def overview(**states: str) -> str:
    out = ["Static Context: An overview of the areas and the devices in this smart home:"]
    for name, domain, state, area in ENTITIES:
        out += [f"- names: {name}", f"  domain: {domain}", f"  state: '{states.get(name, state)}'", f"  areas: {area}"]
    return "\n".join(out) + "\n"


def schema(name: str, description: str, /, **properties: Any) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": properties, "required": []},
        },
    }


TEXT = {"type": "string"}
DEVICES = {"name": TEXT, "area": TEXT, "floor": TEXT, "domain": {"type": "array", "items": TEXT}}
HASS = [
    schema(
        "HassTurnOn",
        "Turns on/opens/presses a device or entity. For locks, this performs a 'lock' action.",
        **DEVICES,
    ),
    schema(
        "HassTurnOff",
        "Turns off/closes a device or entity. For locks, this performs an 'unlock' action.",
        **DEVICES,
    ),
    schema(
        "HassLightSet",
        "Sets the brightness percentage or color of a light",
        name=TEXT,
        area=TEXT,
        brightness={"type": "integer", "minimum": 0, "maximum": 100},
        color=TEXT,
    ),
    schema(
        "HassClimateSetTemperature",
        "Sets the target temperature of a climate device or entity",
        temperature={"type": "number"},
        area=TEXT,
        name=TEXT,
    ),
    schema(
        "GetLiveContext",
        "Provides real-time information about the CURRENT state, value, or mode of devices, sensors, entities, or areas.",
    ),
]
CODE_TOOLS = [
    schema(
        "read_file",
        "Reads a file from the local filesystem. Lines longer than 2000 characters are cut.",
        path=TEXT,
        offset={"type": "integer"},
        limit={"type": "integer"},
    ),
    schema(
        "edit_file",
        "Performs exact string replacements in files. Fails if old_string is not unique.",
        path=TEXT,
        old_string=TEXT,
        new_string=TEXT,
        replace_all={"type": "boolean", "default": False},
    ),
    schema(
        "bash",
        "Executes a bash command in a persistent shell session with optional timeout.",
        command=TEXT,
        timeout={"type": "number"},
        description=TEXT,
    ),
    schema(
        "grep",
        "A search tool built on ripgrep. Supports full regular expression syntax.",
        pattern=TEXT,
        path=TEXT,
        glob=TEXT,
    ),
]
CODE_HEAD = """You are an interactive CLI tool that helps users with software engineering tasks. Use the instructions below and the tools available to you to assist the user.

# Tone and style
Be concise, direct, and to the point. Minimize output tokens while keeping helpfulness, quality and accuracy. Do not add comments to code unless asked.

# Following conventions
When making changes to files, first understand the file's code conventions. Mimic code style, use existing libraries and utilities, and follow existing patterns.
NEVER assume that a given library is available, even if it is well known. Check package.json or pyproject.toml first.
"""
ESSAY = """The household's policy: lights are off where nobody is, heating stays between 18 and 21 degrees, and doors are locked at night. Answer briefly. Ask before you open the garage. Never read messages aloud while guests are there. The dishwasher runs at night, the washing machine never while somebody sleeps. """

P: list[Expected] = []


def pair(
    name: str,
    template: str,
    first: list[Message] | str,
    second: list[Message] | str,
    section: str,
    now: str,
    before: str,
    cause: str,
    tools: list[dict[str, Any]] | None = None,
    tools2: list[dict[str, Any]] | None = None,
    clocks: tuple[str, str] = ("", ""),
) -> None:
    sent = [
        _sent(asked, given or [], template, clock)
        for asked, given, clock in zip(
            (first, second), (tools, tools if tools2 is None else tools2), clocks, strict=True
        )
    ]
    P.append(Expected(name, sent[0], sent[1], section, now, before, cause))


def swap(
    name: str,
    template: str,
    text: str,
    before_now: tuple[str, str],
    section: str,
    cause: str,
    ask: str = "Is the front door locked?",
    tools: list[dict[str, Any]] | None = None,
) -> None:
    """A system message that holds `@`, which is one thing before and another now."""
    before, now = before_now
    first, second = ([system(text.replace("@", value)), user(ask)] for value in before_now)
    pair(name, template, first, second, section, now, before, cause, tools)


def _sent(asked: list[Message] | str, tools: list[dict[str, Any]], template: str, clock: str) -> Sent:
    """A chat's last message, where it is the assistant's, is what was replied, as a model writes it."""
    if isinstance(asked, str):
        return Sent(text=asked)
    reply = ""
    if asked[-1].role == "assistant":
        *asked, last = asked
        thoughts = f"<think>\n{last.reasoning_content}\n</think>\n\n" if last.reasoning_content else ""
        reply = thoughts + (last.content or "")
    return Sent(messages=asked, tools=tools, reply=reply, template=TEMPLATES[template], now=clock)


# --- clocks, many languages and forms -------------------------------------------------------------------------------
swap(
    "ha-time-first",
    "chatml",
    "Current time is @. Today's date is 2026-11-30.\n" + HA_HEAD + overview(),
    ("14:03:12", "14:05:47"),
    "system",
    "clock",
    tools=HASS,
)
swap(
    "home-llm-us-date",
    "chatml",
    "You are 'Al', a helpful AI Assistant that controls the devices in a house. Complete the following task as instructed with the information provided only.\nThe current time and date is @\nServices: light.turn_off(), light.turn_on(brightness,rgb_color), cover.open_cover()\nDevices:\n"
    + "\n".join(f"{d}.{n.lower().replace(' ', '_')} '{n}' = {s}" for n, d, s, _ in ENTITIES),
    ("08:12 AM on Thursday March 14, 2024", "08:15 AM on Thursday March 14, 2024"),
    "system",
    "clock",
)
swap(
    "german-datum",
    "llama3",
    "Du bist ein Sprachassistent für ein Haus in Graz. " + ESSAY + "\n@\n" + overview(),
    ("Heute ist Montag, der 30. November 2026, 14:03 Uhr.", "Heute ist Dienstag, der 1. Dezember 2026, 7:15 Uhr."),
    "system",
    "clock",
    "Ist die Haustür zu?",
)
swap(
    "french-heure",
    "mistral",
    "Tu es l'assistant vocal de la maison. Réponds brièvement, en français. " + ESSAY + "\n@\n" + overview(),
    (
        "Nous sommes le lundi 30 novembre 2026 et il est 14 h 03.",
        "Nous sommes le mardi 1er décembre 2026 et il est 8 h 20.",
    ),
    "system",
    "clock",
    "Quelle heure est-il ?",
)
swap(
    "japanese-time",
    "chatml",
    "あなたはスマートホームの音声アシスタントです。簡潔に答えてください。\n"
    + ESSAY
    + "\n現在の時刻は@です。\n"
    + overview(),
    ("2026年11月30日(月)14時03分", "2026年11月30日(月)14時21分"),
    "system",
    "clock",
    "玄関は閉まっていますか?",
)
swap(
    "chinese-date",
    "chatml",
    "你是一个智能家居语音助手,请简短回答。" + ESSAY + "\n今天是@。\n" + overview(),
    ("2026年11月30日 星期一", "2026年12月1日 星期二"),
    "system",
    "clock",
    "门锁了吗?",
)
swap(
    "russian-date",
    "gemma",
    "Ты голосовой помощник умного дома. Отвечай кратко. " + ESSAY + "\nСейчас @.\n" + overview(),
    ("понедельник, 30 ноября 2026 г., 14:03", "вторник, 1 декабря 2026 г., 09:11"),
    "system",
    "clock",
    "Дверь закрыта?",
)
swap(
    "spanish-hora",
    "chatml",
    "Eres el asistente de voz de la casa. " + ESSAY + "\nSon las @ del lunes 30 de noviembre de 2026.\n" + overview(),
    ("14:03", "19:47"),
    "system",
    "clock",
    "¿Está cerrada la puerta?",
)
swap(
    "korean-time",
    "chatml",
    "당신은 스마트홈 음성 비서입니다. 간단히 대답하세요. " + ESSAY + "\n지금은 @입니다.\n" + overview(),
    ("오후 2시 3분", "오후 5시 40분"),
    "system",
    "clock",
    "문이 잠겼나요?",
)
swap(
    "open-webui-datetime",
    "llama3",
    "You are a helpful assistant. "
    + ESSAY
    + "The user is in Europe/Vienna. Current date and time: @.\nUse markdown. "
    + ESSAY,
    ("2026-11-30 14:03:12", "2026-12-01 07:30:05"),
    "system",
    "clock",
)
swap(
    "iso-ms-z",
    "chatml",
    ESSAY + '\nContext: {"tz":"Europe/Vienna","now":"@","units":"metric","home":"Haus am Hang"}\n' + overview(),
    ("2026-11-30T14:03:12.551Z", "2026-11-30T14:03:58.007Z"),
    "system",
    "clock",
)
swap(
    "unix-epoch",
    "chatml",
    ESSAY + "\n<ctx ts=@ tz=+01:00 />\n" + overview(),
    ("1795953792", "1795957461"),
    "system",
    "clock",
)
swap(
    "weekday-only",
    "gemma",
    ESSAY + "Today is @. The bins are put out on Wednesdays. " + overview(),
    ("Monday", "Tuesday"),
    "system",
    "clock",
    "Are the bins out?",
)
swap("twelve-hours", "llama3", ESSAY + "It is @ in Vienna. " + overview(), ("2:03 PM", "9:41 PM"), "system", "clock")
swap("day-month-year", "mistral", ESSAY + "Date: @\n" + overview(), ("30/11/2026", "01/12/2026"), "system", "clock")
swap(
    "claude-code-env-date",
    "chatml",
    CODE_HEAD
    + "\nHere is useful information about the environment you are running in:\n<env>\nWorking directory: /home/anna/src/solar\nIs directory a git repo: Yes\nPlatform: linux\nOS Version: Linux 6.1.0-18-amd64\nToday's date: @\n</env>\nYou are powered by the model qwen3.\n"
    + ESSAY,
    ("2026-11-29", "2026-11-30"),
    "system",
    "clock",
    "fix the failing test",
    tools=CODE_TOOLS,
)
swap(
    "relative-time",
    "chatml",
    HA_HEAD + "Hallway Motion: last triggered @ ago\n" + overview(),
    ("3 minutes", "18 minutes"),
    "system",
    "clock",
    tools=HASS,
)
pair(
    "camera-time-in-user",
    "gemma",
    [
        user(
            ESSAY
            + "Describe what the camera sees in one sentence. Do not guess names.\nCamera: front_door\nTime: 14:03:12\nObjects: person (0.87)"
        )
    ],
    [
        user(
            ESSAY
            + "Describe what the camera sees in one sentence. Do not guess names.\nCamera: front_door\nTime: 14:19:40\nObjects: car (0.91)"
        )
    ],
    "message:0",
    "14:19:40",
    "14:03:12",
    "clock",
)
pair(
    "llama-template-date",
    "llama3-date",
    [system(HA_HEAD + overview()), user("Is the door locked?")],
    [system(HA_HEAD + overview()), user("Is the door locked?")],
    "template",
    "30 Nov 2026",
    "29 Nov 2026",
    "clock",
    clocks=("2026-11-29T21:15", "2026-11-30T08:15"),
)

# --- places, weather, values -------------------------------------------------------------------------------------------
swap(
    "ha-area",
    "chatml",
    HA_HEAD
    + "You are in area @ and all generic commands like 'turn on the lights' should target this area.\n"
    + overview(),
    ("Kitchen (floor Ground floor)", "Bedroom (floor Upstairs)"),
    "system",
    "place",
    "Turn on the lights",
    tools=HASS,
)
swap(
    "weather-line",
    "chatml",
    ESSAY + "\nWeather: @\n" + overview(),
    ("light rain, 4 °C, wind 12 km/h", "cloudy, 6 °C, wind 20 km/h"),
    "system",
    "weather",
)
pair(
    "ha-sensor-value",
    "chatml",
    [system(HA_HEAD + overview()), user("How warm is the bedroom?")],
    [system(HA_HEAD + overview(**{"Bedroom Temperature": "19.7"})), user("How warm is the bedroom?")],
    "system",
    "19.7",
    "19.4",
    "changed",
    HASS,
)
pair(
    "ha-switch-state",
    "llama3",
    [system(HA_HEAD + overview()), user("Is the garage open?")],
    [system(HA_HEAD + overview(**{"Garage Door": "open"})), user("Is the garage open?")],
    "system",
    "open",
    "closed",
    "changed",
    HASS,
)

# --- counters, ids, billing lines ---------------------------------------------------------------------------------------
swap(
    "turn-of-fifty",
    "chatml",
    CODE_HEAD + "This is step @ of 50. Stop when you are done.\n" + ESSAY,
    ("12", "13"),
    "system",
    "counter",
    "go on",
    tools=CODE_TOOLS,
)
swap(
    "request-number",
    "llama3",
    "Request #@ from the kitchen display.\n" + ESSAY + overview(),
    ("1041", "1042"),
    "system",
    "counter",
)
swap(
    "token-budget",
    "chatml",
    CODE_HEAD + "Token usage: @/200000; keep within it.\n" + ESSAY,
    ("35120", "36844"),
    "system",
    "counter",
    "go on",
    tools=CODE_TOOLS,
)
swap(
    "session-uuid",
    "chatml",
    ESSAY + "\nSession: @\n" + overview(),
    ("6f1c2b1e-51c4-4a0e-9a52-0d2f6f3f7a11", "b83d0a77-9c1d-4f3e-8a0b-77c6e9d1c0de"),
    "system",
    "id",
)
swap(
    "ulid-conversation",
    "mistral",
    "conversation_id: @\n" + ESSAY + overview(),
    ("01JD5K8V3QZ7N0W9T2E6XBRM4C", "01JD5KDS1H2M8Y6P4A9GQ7CZVW"),
    "system",
    "id",
)
swap("hex-nonce", "gemma", ESSAY + "[nonce=@]\n" + overview(), ("9f3ab27c", "04e7d1f8"), "system", "id")
swap(
    "trace-header",
    "chatml",
    ESSAY + "\ntraceparent: 00-@-01\n" + overview(),
    ("4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7", "a1c7f0de12e94c3bb0aa5d6e7f809112-c3d4e5f60718293a"),
    "system",
    "id",
)
swap(
    "claude-code-billing",
    "chatml",
    "x-anthropic-billing-header: cc_version=2.1.37.3f1; cc_entrypoint=cli; cch=@;\n" + CODE_HEAD + ESSAY,
    ("a81f3", "7c02e"),
    "system",
    "billing",
    "fix the failing test",
    tools=CODE_TOOLS,
)
A_CALL = call("aB3dE5fG7", "bash", {"command": "ls src"})
B_CALL = call("Zx9Yw8Vu7", "bash", {"command": "ls src"})
pair(
    "mistral-call-ids",
    "mistral",
    [
        user(CODE_HEAD + "list the sources"),
        assistant("", tool_calls=[A_CALL]),
        tool("main.py\nsolar.py", "aB3dE5fG7"),
        assistant("There are two files."),
        user("open the first"),
    ],
    [
        user(CODE_HEAD + "list the sources"),
        assistant("", tool_calls=[B_CALL]),
        tool("main.py\nsolar.py", "Zx9Yw8Vu7"),
        assistant("There are two files."),
        user("open the first"),
    ],
    "message:1",
    "Zx9Yw8Vu7",
    "aB3dE5fG7",
    "id",
)
pair(
    "counter-in-tool-result",
    "chatml",
    [
        system(HA_HEAD),
        user("is it done?"),
        assistant("", tool_calls=[call("c1", "GetLiveContext", {})]),
        tool('{"washer": {"state": "running", "poll_count": 18}}', "c1"),
    ],
    [
        system(HA_HEAD),
        user("is it done?"),
        assistant("", tool_calls=[call("c1", "GetLiveContext", {})]),
        tool('{"washer": {"state": "running", "poll_count": 19}}', "c1"),
    ],
    "message:3",
    "19",
    "18",
    "counter",
    HASS,
)
pair(
    "camera-clip-name",
    "chatml",
    [
        system(ESSAY + "You name recordings."),
        user("Clip /media/frigate/clips/front_door-1795953792.551-k3x9ab.jpg: what is it?"),
    ],
    [
        system(ESSAY + "You name recordings."),
        user("Clip /media/frigate/clips/front_door-1795954003.118-p0q7zz.jpg: what is it?"),
    ],
    "message:1",
    "1795954003.118-p0q7zz",
    "1795953792.551-k3x9ab",
    "id|clock",
)

# --- tools and JSON -------------------------------------------------------------------------------------------------------
ask = [system(HA_HEAD + overview()), user("Turn off the office lamp")]
pair(
    "ha-tools-reordered",
    "chatml",
    ask,
    ask,
    "tool:GetLiveContext",
    "GetLiveContext",
    "HassTurnOn",
    "tools_order",
    HASS,
    [HASS[4], HASS[0], HASS[2], HASS[1], HASS[3]],
)
pair(
    "two-tools-swapped",
    "llama3",
    ask,
    ask,
    "tool:HassClimateSetTemperature",
    "HassClimateSetTemperature",
    "HassLightSet",
    "tools_order",
    HASS,
    [HASS[0], HASS[1], HASS[3], HASS[2], HASS[4]],
)
code = [system(CODE_HEAD), user("rename the module")]
pair(
    "mcp-tool-added",
    "chatml",
    code,
    code,
    "tool:mcp__calendar__list",
    "mcp__calendar__list",
    "grep",
    "tools_changed",
    CODE_TOOLS,
    [*CODE_TOOLS[:3], schema("mcp__calendar__list", "Lists the calendar's entries of a day", day=TEXT), CODE_TOOLS[3]],
)
pair(
    "tool-dropped",
    "chatml",
    code,
    code,
    "tool:bash",
    "bash",
    "edit_file",
    "tools_changed",
    CODE_TOOLS,
    [CODE_TOOLS[0], *CODE_TOOLS[2:]],
)
enum = copy.deepcopy(HASS)
enum[2]["function"]["parameters"]["properties"]["name"] = {
    "type": "string",
    "enum": ["Kitchen Ceiling", "Kitchen Strip"],
}
enum2 = copy.deepcopy(HASS)
enum2[2]["function"]["parameters"]["properties"]["name"] = {
    "type": "string",
    "enum": ["Kitchen Ceiling", "Office Lamp"],
}
pair(
    "entity-enum-changed",
    "chatml",
    ask,
    ask,
    "tool:HassLightSet",
    "Office Lamp",
    "Kitchen Strip",
    "tools_changed",
    enum,
    enum2,
)
worded = copy.deepcopy(CODE_TOOLS)
worded[2]["function"]["description"] = "Runs a shell command, with a time limit of 120 seconds."
pair(
    "tool-description",
    "mistral",
    code,
    code,
    "tool:bash",
    "Runs a shell",
    "Executes a bash",
    "tools_changed",
    CODE_TOOLS,
    worded,
)
keys = [
    {
        "type": "function",
        "function": {
            "description": t["function"]["description"],
            "name": t["function"]["name"],
            "parameters": t["function"]["parameters"],
        },
    }
    for t in HASS
]
pair("schema-keys-top", "chatml", ask, ask, "tool:HassTurnOn", "description", "name", "json_keys", HASS, keys)
deep = copy.deepcopy(HASS)
props = deep[3]["function"]["parameters"]["properties"]
deep[3]["function"]["parameters"]["properties"] = {k: props[k] for k in ("name", "area", "temperature")}
pair(
    "schema-properties-order",
    "llama3",
    ask,
    ask,
    "tool:HassClimateSetTemperature",
    "name",
    "temperature",
    "json_keys",
    HASS,
    deep,
)
state = {
    "light.kitchen": {"state": "on", "brightness": 80, "color": "warm"},
    "lock.front": {"state": "locked", "battery": 91},
}
other = {
    "lock.front": {"battery": 91, "state": "locked"},
    "light.kitchen": {"color": "warm", "state": "on", "brightness": 80},
}
pair(
    "json-context-keys",
    "gemma",
    [system(ESSAY + "State of the home: " + json.dumps(state) + " Answer from it."), user("Is it bright?")],
    [system(ESSAY + "State of the home: " + json.dumps(other) + " Answer from it."), user("Is it bright?")],
    "system",
    "lock.front",
    "light.kitchen",
    "json_keys",
)
pair(
    "call-arguments-keys",
    "chatml",
    [
        system(HA_HEAD),
        user("dim the kitchen"),
        assistant("", tool_calls=[call("c1", "HassLightSet", {"area": "Kitchen", "brightness": 30, "color": "warm"})]),
        tool('{"ok": true}', "c1"),
        assistant("Done."),
        user("thanks"),
    ],
    [
        system(HA_HEAD),
        user("dim the kitchen"),
        assistant("", tool_calls=[call("c1", "HassLightSet", {"brightness": 30, "color": "warm", "area": "Kitchen"})]),
        tool('{"ok": true}', "c1"),
        assistant("Done."),
        user("thanks"),
    ],
    "message:2",
    "brightness",
    "area",
    "json_keys",
    HASS,
)
pair(
    "tools-gone-last-step",
    "chatml",
    [system(CODE_HEAD), user("rename the module"), assistant("It is renamed."), user("sum it up")],
    [system(CODE_HEAD), user("rename the module"), assistant("It is renamed."), user("sum it up")],
    "tools",
    "",
    "# Tools",
    "tools_changed",
    CODE_TOOLS,
    [],
)

# --- white space ------------------------------------------------------------------------------------------------------------
pair(
    "trailing-newline",
    "chatml",
    [system(HA_HEAD + overview()), user("hello there")],
    [system(HA_HEAD + overview() + "\n\n"), user("hello there")],
    "system",
    "\n\n",
    "",
    "white_space",
)
pair(
    "crlf",
    "llama3",
    [system(CODE_HEAD + ESSAY), user("hi")],
    [system((CODE_HEAD + ESSAY).replace("\n", "\r\n")), user("hi")],
    "system",
    "\r\n",
    "\n",
    "white_space",
)
big = {"files": [{"path": f"src/{n}.py", "lines": n * 37} for n in range(1, 9)]}
pair(
    "tool-result-indented",
    "chatml",
    [
        system(CODE_HEAD),
        user("list"),
        assistant("", tool_calls=[call("c1", "bash", {"command": "ls"})]),
        tool(json.dumps(big), "c1"),
    ],
    [
        system(CODE_HEAD),
        user("list"),
        assistant("", tool_calls=[call("c1", "bash", {"command": "ls"})]),
        tool(json.dumps(big, indent=2), "c1"),
    ],
    "message:3",
    "\n",
    "",
    "white_space",
    CODE_TOOLS,
)
pair(
    "nbsp",
    "gemma",
    [system(ESSAY + "Temperatures are given as 21 °C. " + overview()), user("ok?")],
    [system(ESSAY + "Temperatures are given as 21\u00a0°C. " + overview()), user("ok?")],
    "system",
    "\u00a0",
    " ",
    "white_space",
)
pair(
    "tabs-for-spaces",
    "chatml",
    [system(CODE_HEAD), user("Review:\n" + "\n".join(f"    line_{n} = {n}" for n in range(12)))],
    [system(CODE_HEAD), user("Review:\n" + "\n".join(f"\tline_{n} = {n}" for n in range(12)))],
    "message:1",
    "\t",
    "    ",
    "white_space",
    CODE_TOOLS,
)

# --- histories ------------------------------------------------------------------------------------------------------------------
THOUGHT = "The user wants to know whether the front door is locked. The overview says it is locked, so I say that."
pair(
    "think-tags-stripped",
    "chatml",
    [
        system(HA_HEAD + overview()),
        user("Is the door locked?"),
        assistant(f"<think>\n{THOUGHT}\n</think>\n\nYes, it is locked."),
    ],
    [
        system(HA_HEAD + overview()),
        user("Is the door locked?"),
        assistant("Yes, it is locked."),
        user("And the garage?"),
    ],
    "message:2",
    "Yes",
    "<think>",
    "thoughts",
    HASS,
)
pair(
    "qwen-template-strips",
    "qwen3",
    [
        system(HA_HEAD + overview()),
        user("Is the door locked?"),
        assistant("Yes, it is locked.", reasoning_content=THOUGHT),
    ],
    [
        system(HA_HEAD + overview()),
        user("Is the door locked?"),
        assistant("Yes, it is locked.", reasoning_content=THOUGHT),
        user("And the garage?"),
    ],
    "message:2",
    "Yes",
    "<think>",
    "thoughts",
    HASS,
)
pair(
    "analysis-channel-dropped",
    "raw",
    "<|start|>system<|message|>"
    + HA_HEAD
    + overview()
    + "<|end|><|start|>user<|message|>Is the door locked?<|end|><|start|>assistant<|channel|>analysis<|message|>"
    + THOUGHT
    + "<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
    "<|start|>system<|message|>"
    + HA_HEAD
    + overview()
    + "<|end|><|start|>user<|message|>Is the door locked?<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|end|><|start|>user<|message|>And the garage?<|end|><|start|>assistant",
    "template|message:2",
    "final",
    "analysis",
    "thoughts",
)
TURNS = [
    (
        f"Question {w} about the house: what did the {w} do at night?",
        f"The {w} was quiet, as the log of the night says.",
    )
    for w in ("boiler", "vacuum", "freezer", "door", "garage", "pump", "lamp", "washer", "mower")
]


def chat(turns: list[tuple[str, str]], last: str) -> list[Message]:
    out: list[Message] = []
    for q, a in turns:
        out += [user(q), assistant(a)]
    return [*out, user(last)]


pair(
    "cut-front-system-kept",
    "chatml",
    [system(HA_HEAD), *chat(TURNS, "And now?")],
    [system(HA_HEAD), *chat(TURNS[2:], "And now?"), assistant("All quiet."), user("Good.")],
    "message:1",
    "freezer",
    "boiler",
    "truncated",
    HASS,
)
pair(
    "cut-front-no-system",
    "llama3",
    chat(TURNS, "And now?"),
    chat(TURNS[3:], "And then?"),
    "message:0",
    "door",
    "boiler",
    "truncated",
)
pair(
    "compacted",
    "chatml",
    [system(CODE_HEAD), *chat(TURNS, "go on")],
    [
        system(CODE_HEAD),
        user(
            "This session is being continued from a previous conversation. Summary: the user asked about boiler, vacuum and freezer; all were quiet."
        ),
        *chat(TURNS[4:], "go on"),
    ],
    "message:1",
    "This session",
    "Question",
    "truncated",
    CODE_TOOLS,
)
pair(
    "retokenised-reply",
    "chatml",
    [system(HA_HEAD + overview()), user("Is the door locked?"), assistant("The front door is unlocked.")],
    [
        system(HA_HEAD + overview()),
        user("Is the door locked?"),
        assistant("The front door is unlocked."),
        user("Lock it"),
    ],
    "message:2",
    "unlocked",
    "unlocked",
    "retokenised",
    HASS,
)
pair(
    "title-request",
    "chatml",
    [system(HA_HEAD + overview()), *chat(TURNS[:3], "And now?")],
    [
        user(
            '### Task:\nGenerate a concise, 3-5 word title with an emoji summarizing the chat history.\n### Output:\nJSON format: { "title": "your concise title here" }\n### Chat History:\n<chat_history>\nUSER: what did the boiler do?\n</chat_history>'
        )
    ],
    "template|message:0",
    "### Task",
    "You are a voice",
    "never_seen",
)

# --- texts that somebody or something changed ----------------------------------------------------------------------------------
DOCS = [
    f'<source id="{n}" name="manual-{n}.pdf">Chapter {n}. To reset the {w}, hold the button for {n + 4} seconds until the lamp is green. Then wait.</source>'
    for n, w in enumerate(("boiler", "vacuum", "freezer", "pump"), 1)
]
RAG = "### Task:\nRespond to the user query using the provided context, incorporating inline citations in the format [id].\n\n<context>\n@\n</context>\n"
pair(
    "rag-other-sources",
    "chatml",
    [system(ESSAY), user(RAG.replace("@", "\n".join(DOCS[:3])) + "How do I reset the boiler?")],
    [system(ESSAY), user(RAG.replace("@", "\n".join([DOCS[0], DOCS[3], DOCS[1]])) + "How do I reset the pump?")],
    "message:1",
    "4",
    "2",
    "changed",
)
swap(
    "other-user",
    "llama3",
    "You are the assistant of the household. The person who speaks is @. " + ESSAY + overview(),
    ("Anna", "Ben"),
    "system",
    "changed",
)
swap(
    "working-directory",
    "chatml",
    CODE_HEAD + "Working directory: @\nPlatform: linux\n" + ESSAY,
    ("/home/anna/src/solar", "/home/anna/src/heatpump"),
    "system",
    "changed",
    "go on",
    tools=CODE_TOOLS,
)
swap(
    "git-status",
    "chatml",
    CODE_HEAD + "gitStatus: Current branch: main\nStatus:\n@\n\n" + ESSAY,
    (" M src/solar.py", " M src/solar.py\n?? notes.md"),
    "system",
    "changed",
    "go on",
    tools=CODE_TOOLS,
)
swap(
    "typo-mended",
    "mistral",
    ESSAY + "Answer in the @ of the question. " + overview(),
    ("langauge", "language"),
    "system",
    "changed",
)
pair(
    "aider-file-edited",
    "llama3",
    [
        system(CODE_HEAD),
        user(
            "*Trust this message as the true contents of these files!*\n\nsolar.py\n```\n"
            + "\n".join(f"def panel_{n}():\n    return {n}" for n in range(8))
            + "\n```"
        ),
        assistant("Ok."),
        user("add a test"),
    ],
    [
        system(CODE_HEAD),
        user(
            "*Trust this message as the true contents of these files!*\n\nsolar.py\n```\n"
            + "\n".join(f"def panel_{n}():\n    return {n if n != 4 else 'None'}" for n in range(8))
            + "\n```"
        ),
        assistant("Ok."),
        user("add a test"),
    ],
    "message:1",
    "None",
    "4",
    "changed",
)

# --- nothing is wrong ------------------------------------------------------------------------------------------------------------
pair(
    "next-turn",
    "chatml",
    [system(HA_HEAD + overview()), user("Is the door locked?")],
    [system(HA_HEAD + overview()), user("Is the door locked?"), assistant("Yes."), user("And the garage?")],
    "none",
    "",
    "",
    "none",
    HASS,
)
pair(
    "other-question",
    "llama3",
    [system(HA_HEAD + overview()), user("Is the door locked?")],
    [system(HA_HEAD + overview()), user("Turn off the office lamp")],
    "message:1",
    "Turn off",
    "Is the",
    "new_question",
    HASS,
)
pair(
    "never-seen",
    "chatml",
    [system(HA_HEAD + overview()), user("Is the door locked?")],
    [system("Tu traduis des recettes. " * 30), user("Une recette de pain")],
    "template|system",
    "Tu traduis",
    "You are a voice",
    "never_seen",
)
