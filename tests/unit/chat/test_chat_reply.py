"""Replies of every family of models: thoughts, text and calls, wherever the reply is cut."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homeprefixd.chat.layout import DEEPSEEK, Layout, detect_layout
from homeprefixd.chat.reply import ReplyParser, Split
from homeprefixd.frames.worker import CallPiece

THINK = ("<think>", "</think>")
WEATHER = ("get_weather", {"city": "Paris", "unit": "°C"})
ARGUMENTS = '{"city": "Paris", "unit": "°C"}'
D_ALL, D_ONE, D_SEP, D_END, D_END_ALL = DEEPSEEK


def parser(layout: Layout, **changes: Any) -> ReplyParser:
    ids = iter(range(100))
    options: dict[str, Any] = {
        "tools": {"get_weather": {}, "turn_on": {}}, "opened": False, "calls": True, "parallel": True,
        "new_id": lambda: f"id{next(ids)}",
    }  # fmt: skip
    return ReplyParser(layout, **{**options, **changes})


def read(layout: Layout, *pieces: str, **changes: Any) -> Split:
    """The whole of what the parser says, calls joined."""
    reader = parser(layout, **changes)
    parts = [reader.feed(piece) for piece in pieces] + [reader.finish()]
    calls: list[CallPiece] = []
    for piece in [call for part in parts for call in part.calls]:
        if piece.index == len(calls):
            assert piece.id, "a call's first piece has its id"
            assert piece.name
            calls.append(CallPiece(piece.index, piece.arguments, piece.id, piece.name))
        else:
            assert not piece.id
            assert not piece.name
            calls[piece.index].arguments += piece.arguments
    return Split("".join(part.text for part in parts), "".join(part.reasoning for part in parts), calls)


def called(split: Split) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in split.calls]


RECORDED: list[tuple[str, Layout, str, dict[str, Any], tuple[str, str, list[tuple[str, Any]]]]] = [
    (
        "hermes: thoughts, text, two calls",
        Layout("hermes", THINK),
        "<think>\nThe user wants\n\nthe weather.\n</think>\n\nLet me look.\n\n<tool_call>\n"
        '{"name": "get_weather", "arguments": ' + ARGUMENTS + "}\n</tool_call>\n<tool_call>\n"
        '{"arguments": {"id": "lamp {\\"1\\"}"}, "name": "turn_on"}\n</tool_call>',
        {},
        ("Let me look.", "The user wants\n\nthe weather.", [WEATHER, ("turn_on", {"id": 'lamp {"1"}'})]),
    ),
    (
        "hermes: the prompt opens the thoughts",
        Layout("hermes", THINK),
        "Hm.\n</think>\n\nForty two.\n",
        {"opened": True},
        ("Forty two.\n", "Hm.", []),
    ),
    (
        "hermes: arguments as a text, none, and an unknown tool",
        Layout("hermes"),
        '<tool_call>{"name": "turn_on", "arguments": "{\\"id\\": 1}"}</tool_call>'
        '<tool_call>{"name": "turn_on"}</tool_call><tool_call>{"name": "other", "arguments": null}</tool_call>',
        {},
        ("", "", [("turn_on", {"id": 1}), ("turn_on", {}), ("other", {})]),
    ),
    (
        "hermes: what is no call stays text",
        Layout("hermes"),
        "Write <tool_call> like this: <tool_call>nothing</tool_call> or <tool_call>{1}</tool_call>!",
        {},
        ("Write <tool_call> like this: <tool_call>nothing</tool_call> or <tool_call>{1}</tool_call>!", "", []),
    ),
    (
        "hermes: tags with parameters, as Qwen's coders write",
        Layout("hermes"),
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>"
        "\n</function>\n</tool_call>",
        {},
        ("", "", [("get_weather", {"city": "Paris", "days": 3})]),
    ),
    (
        "hermes: keys and values in tags, as GLM writes",
        Layout("hermes", THINK),
        "<think></think>\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days"
        "</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>turn_on\n<arg_key>id</arg_key>\n<arg_value>"
        '{"a": [1]}</arg_value>\n</tool_call>',
        {},
        ("", "", [("get_weather", {"city": "Paris", "days": 3}), ("turn_on", {"id": {"a": [1]}})]),
    ),
    (
        "hermes: a small model leaves the tags out",
        Layout("hermes", THINK),
        '<think>\n\n</think>\n\n{"name": "turn_on", "arguments": {"id": 1}}',
        {},
        ("", "", [("turn_on", {"id": 1})]),
    ),
    (
        "hermes: tools may not be called",
        Layout("hermes"),
        '<tool_call>{"name": "f"}</tool_call>',
        {"calls": False},
        ('<tool_call>{"name": "f"}</tool_call>', "", []),
    ),
    (
        "hermes: one call only",
        Layout("hermes"),
        '<tool_call>{"name": "turn_on", "arguments": {}}</tool_call><tool_call>{"name": "turn_on"}</tool_call>',
        {"parallel": False},
        ("", "", [("turn_on", {})]),
    ),
    (
        "llama3: two calls",
        Layout("llama3"),
        '{"name": "get_weather", "parameters": ' + ARGUMENTS + '}; {"name": "turn_on", "parameters": {"id": 2}}',
        {},
        ("", "", [WEATHER, ("turn_on", {"id": 2})]),
    ),
    (
        "llama3: a call of a tool that it was made with",
        Layout("llama3"),
        '<|python_tag|>brave_search.call(query="rain in \\"Paris\\"")',
        {},
        ("", "", [("brave_search", {"query": 'rain in "Paris"'})]),
    ),
    (
        "llama3: a tag and JSON",
        Layout("llama3"),
        '<|python_tag|>{"type": "function", "name": "turn_on", "parameters": {"id": [1, {"a": "}"}]}}',
        {},
        ("", "", [("turn_on", {"id": [1, {"a": "}"}]})]),
    ),
    (
        "llama3: an answer in JSON is no call",
        Layout("llama3"),
        ' {"name": "Anna", "age": 3}',
        {},
        (' {"name": "Anna", "age": 3}', "", []),
    ),
    (
        "mistral: a list",
        Layout("mistral"),
        'I look.[TOOL_CALLS] [{"name": "get_weather", "arguments": ' + ARGUMENTS + '}, {"name": "turn_on", '
        '"arguments": {"id": -1.5e3}, "id": "abcdefghi"}]',
        {},
        ("I look.", "", [WEATHER, ("turn_on", {"id": -1500.0})]),
    ),
    (
        "mistral: names and arguments",
        Layout("mistral_args", ("[THINK]", "[/THINK]")),
        "[THINK]Rain?[/THINK][TOOL_CALLS]get_weather[ARGS]" + ARGUMENTS + "[TOOL_CALLS]turn_on[CALL_ID]x[ARGS]"
        '{"id": 1}[TOOL_CALLS]turn_on{}',
        {},
        ("", "Rain?", [WEATHER, ("turn_on", {"id": 1}), ("turn_on", {})]),
    ),
    (
        # the reply on the model card of Mistral-7B-Instruct-v0.3, and of those since tokenizer version 3
        "mistral: as its first description shows",
        Layout("mistral"),
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris, France", "format": "celsius"}, '
        '"id": "VvvODy9mT"}]',
        {},
        ("", "", [("get_weather", {"city": "Paris, France", "format": "celsius"})]),
    ),
    (
        "mistral: since tokenizer version 11, with text before",
        Layout("mistral_args"),
        'I look.[TOOL_CALLS]get_weather{"city": "Paris"}[TOOL_CALLS]turn_on{"id": 3}',
        {},
        ("I look.", "", [("get_weather", {"city": "Paris"}), ("turn_on", {"id": 3})]),
    ),
    (
        # Google's description of FunctionGemma; the last token is one on which the model waits
        "gemma: functions, as described",
        Layout("gemma_call"),
        "<start_function_call>call:get_weather{city:<escape>Tokyo, Japan<escape>,unit:<escape>celsius<escape>}"
        "<end_function_call><start_function_response>and more",
        {},
        ("", "", [("get_weather", {"city": "Tokyo, Japan", "unit": "celsius"})]),
    ),
    (
        "gemma: Python in a fence",
        Layout("gemma"),
        "Of course:\n```tool_code\nprint(get_weather(city='Paris', unit='°C'))\n```",
        {},
        ("Of course:", "", [WEATHER]),
    ),
    (
        "gemma: JSON in a fence",
        Layout("gemma"),
        '```json\n[{"name": "get_weather", "arguments": ' + ARGUMENTS + "}]\n```",
        {},
        ("", "", [WEATHER]),
    ),
    (
        "gemma: other code is text",
        Layout("gemma"),
        "```tool_code\nimport os\n```\nDone.",
        {},
        ("```tool_code\nimport os\n```\nDone.", "", []),
    ),
    (
        "gemma: functions",
        Layout("gemma_call"),
        "<start_function_call>call:get_weather{city:<escape>Paris<escape>,unit:<escape>°C<escape>}<end_function_call>"
        "<start_function_call>call:turn_on{id:3,deep:{on:true,all:[1,<escape>a,b<escape>]}}<end_function_call>",
        {},
        ("", "", [WEATHER, ("turn_on", {"id": 3, "deep": {"on": True, "all": [1, "a,b"]}})]),
    ),
    (
        "gemma: pipes and thoughts",
        Layout("gemma_pipe", ("<|channel>thought\n", "<channel|>")),
        '<|channel>thought\nRain.\n<channel|>So:<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,unit:<|"|>°C<|"|>}'
        "<tool_call|>",
        {},
        ("So:", "Rain.", [WEATHER]),
    ),
    (
        "harmony: thoughts, preamble, call",
        Layout("harmony"),
        "<|channel|>analysis<|message|>Need the weather.<|end|><|start|>assistant<|channel|>commentary<|message|>One"
        " moment.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        + ARGUMENTS
        + "<|call|>",
        {},
        ("One moment.", "Need the weather.", [WEATHER]),
    ),
    (
        "harmony: thoughts and an answer",
        Layout("harmony"),
        "<|channel|>analysis<|message|>A.<|end|><|start|>assistant<|channel|>analysis<|message|>B.<|end|><|start|>"
        "assistant<|channel|>final<|message|>Forty < two.\n",
        {},
        ("Forty < two.", "A.\n\nB.", []),
    ),
    (
        "harmony: the recipient comes first",
        Layout("harmony"),
        '<|start|>assistant to=functions.turn_on<|channel|>commentary json<|message|>{"id": 1}<|call|>',
        {},
        ("", "", [("turn_on", {"id": 1})]),
    ),
    (
        # OpenAI's description of the format: "handling tool calls"
        "harmony: as its description shows",
        Layout("harmony"),
        "<|channel|>analysis<|message|>Need to use function get_weather.<|end|><|start|>assistant<|channel|>commentary"
        ' to=functions.get_weather <|constrain|>json<|message|>{"city":"San Francisco"}<|call|>',
        {},
        ("", "Need to use function get_weather.", [("get_weather", {"city": "San Francisco"})]),
    ),
    (
        # the same: "the actual answer", after a preamble for the user
        "harmony: a preamble and an answer",
        Layout("harmony"),
        "<|channel|>commentary<|message|>**Action plan**: look.<|end|><|start|>assistant<|channel|>final<|message|>2 +"
        " 2 = 4.<|return|>",
        {},
        ("**Action plan**: look.\n\n2 + 2 = 4.", "", []),
    ),
    ("harmony: plain text", Layout("harmony"), "Forty two.", {}, ("Forty two.", "", [])),
    (
        "deepseek: fences",
        Layout("deepseek", THINK),
        f"Hm.</think>I look.{D_ALL}{D_ONE}function{D_SEP}get_weather\n```json\n{ARGUMENTS}\n```{D_END}\n{D_ONE}function"
        f'{D_SEP}turn_on\n```json\n{{"id": 1}}\n```{D_END}{D_END_ALL}',
        {"opened": True},
        ("I look.", "Hm.", [WEATHER, ("turn_on", {"id": 1})]),
    ),
    (
        "deepseek: plain",
        Layout("deepseek_plain"),
        f"{D_ALL}{D_ONE}get_weather{D_SEP}{ARGUMENTS}{D_END}{D_END_ALL}",
        {},
        ("", "", [WEATHER]),
    ),
    (
        # the template of DeepSeek-V3.1: calls follow each other "directly without separators or spaces"
        "deepseek: plain, two calls after text",
        Layout("deepseek_plain", THINK),
        f"I'll look.{D_ALL}{D_ONE}get_weather{D_SEP}{ARGUMENTS}{D_END}{D_ONE}turn_on{D_SEP}{{}}{D_END}{D_END_ALL}",
        {},
        ("I'll look.", "", [WEATHER, ("turn_on", {})]),
    ),
    (
        "deepseek: thoughts that the template has opened, then a plain call",
        Layout("deepseek_plain", THINK),
        f"Hm.</think>{D_ALL}{D_ONE}get_weather{D_SEP}{ARGUMENTS}{D_END}{D_END_ALL}",
        {"opened": True},
        ("", "Hm.", [WEATHER]),
    ),
    (
        # the description that the template of DeepSeek-V3.2 gives its model
        "deepseek: tags with parameters, texts as they are",
        Layout("dsml_functions", THINK),
        "Hm.</think>I look.\n\n<｜DSML｜function_calls>\n"
        '<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">12</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">[3, {"a": null}]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="turn_on">\n<｜DSML｜parameter name="id" string="true">a "b" <c>\n\n d'
        "</｜DSML｜parameter>\n"
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        {"opened": True},
        (
            "I look.",
            "Hm.",
            [("get_weather", {"city": "12", "days": [3, {"a": None}]}), ("turn_on", {"id": 'a "b" <c>\n\n d'})],
        ),
    ),
    (
        # that of DeepSeek-V4, whose calls without arguments have an empty line
        "deepseek: tags of version 4, without arguments and without an attribute",
        Layout("dsml_tools", THINK),
        '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="turn_on">\n\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="zip">075</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
        {"tools": {"get_weather": {"parameters": {"properties": {"zip": {"type": "string"}}}}}},
        ("", "", [("turn_on", {}), ("get_weather", {"zip": "075"})]),
    ),
    (
        "hermes: the schema says which of the parameters in tags are texts",
        Layout("hermes"),
        "<tool_call>\n<function=turn_on>\n<parameter=a>\n75001\n</parameter>\n<parameter=b>\n75001\n</parameter>\n"
        "<parameter=c>\nnull\n</parameter>\n<parameter=d>\ntrue\n</parameter>\n<parameter=e>\n2\n</parameter>\n"
        '<parameter=f>\n"quoted"\n</parameter>\n</function>\n</tool_call>',
        {
            "tools": {
                "turn_on": {
                    "parameters": {
                        "properties": {
                            "a": {"type": "string"},
                            "b": {"type": "integer"},
                            "c": {"type": ["string", "null"]},
                            "d": {"enum": ["true", "false"]},
                            "e": {"anyOf": [{"type": "string"}, {"type": "number"}]},
                            "f": {"type": "string"},
                        }
                    }
                }
            }
        },
        ("", "", [("turn_on", {"a": "75001", "b": 75001, "c": None, "d": "true", "e": 2, "f": '"quoted"'})]),
    ),
    (
        "hermes: so it does where GLM writes",
        Layout("hermes"),
        "<tool_call>turn_on\n<arg_key>a</arg_key>\n<arg_value>7</arg_value>\n<arg_key>b</arg_key>\n<arg_value>7"
        "</arg_value>\n</tool_call>",
        {"tools": {"turn_on": {"parameters": {"properties": {"a": {"type": "string"}}}}}},
        ("", "", [("turn_on", {"a": "7", "b": 7})]),
    ),
    (
        # the description on the card of Granite 3.3
        "granite: a list behind a mark",
        Layout("granite", THINK),
        'So:<|tool_call|>[{"name": "get_weather", "arguments": '
        + ARGUMENTS
        + '}, {"name": "turn_on", "arguments": {}}]',
        {},
        ("So:", "", [WEATHER, ("turn_on", {})]),
    ),
    (
        "granite: no list, and no call",
        Layout("granite"),
        '<|tool_call|> {"name": "turn_on", "arguments": {"id": 1}}<|tool_call|> [1] <|tool_call|>x',
        {},
        ("<|tool_call|> [1] <|tool_call|>x", "", [("turn_on", {"id": 1})]),
    ),
    (
        # the template of Nemotron Nano 2
        "nemotron: a list between marks",
        Layout("nemotron", THINK),
        'Hm.</think>\n<TOOLCALL>[{"name": "get_weather", "arguments": ' + ARGUMENTS + "}]</TOOLCALL>",
        {"opened": True},
        ("", "Hm.", [WEATHER]),
    ),
    (
        # the template of Command R7B
        "command: actions",
        Layout("command", ("<|START_THINKING|>", "<|END_THINKING|>")),
        "<|START_THINKING|>I look.<|END_THINKING|><|START_ACTION|>[\n    "
        '{"tool_call_id": "0", "tool_name": "get_weather", "parameters": ' + ARGUMENTS + "}\n]<|END_ACTION|>",
        {},
        ("", "I look.", [WEATHER]),
    ),
    (
        # Liquid's description of LFM2
        "lfm: Python between marks",
        Layout("lfm"),
        '<|tool_call_start|>[get_weather(city="Paris", unit="°C"), turn_on(id=3)]<|tool_call_end|>Looking it up.',
        {},
        ("Looking it up.", "", [WEATHER, ("turn_on", {"id": 3})]),
    ),
    (
        # Moonshot's description of Kimi K2's tool calls; its templates show the id again, so it must stay
        "kimi: a section of calls",
        Layout("kimi", THINK),
        "<think>Both.</think>I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        "<|tool_call_argument_begin|>" + ARGUMENTS + "<|tool_call_end|><|tool_call_begin|>functions.turn_on:1"
        '<|tool_call_argument_begin|>{"id": 3}<|tool_call_end|><|tool_calls_section_end|>',
        {},
        ("I look.", "Both.", [WEATHER, ("turn_on", {"id": 3})]),
    ),
    (
        "kimi: no call",
        Layout("kimi"),
        "A <|tool_call_begin|>b c<|tool_call_end|> d",
        {},
        ("A <|tool_call_begin|>b c<|tool_call_end|> d", "", []),
    ),
    (
        # the template of Functionary v3.2, whose prompts end with >>>
        "functionary: text and calls",
        Layout("functionary"),
        "all\nI look >>> there.>>>get_weather\n" + ARGUMENTS + '>>>turn_on\n{"id": 3}',
        {},
        ("I look >>> there.", "", [WEATHER, ("turn_on", {"id": 3})]),
    ),
    ("functionary: text", Layout("functionary"), "all\nForty\ntwo.", {"calls": False}, ("Forty\ntwo.", "", [])),
    ("functionary: no form", Layout("functionary"), "Forty\ntwo.", {}, ("Forty\ntwo.", "", [])),
    (
        # the card of Functionary small v3.1
        "function_tag: a name in a tag",
        Layout("function_tag"),
        "I look.<function=get_weather>" + ARGUMENTS + '</function>\n<function=turn_on>{"id": 3}</function>',
        {},
        ("I look.", "", [WEATHER, ("turn_on", {"id": 3})]),
    ),
    ("function_tag: no call", Layout("function_tag"), "a <function=b c>d", {}, ("a <function=b c>d", "", [])),
    (
        # the card of Firefunction v2
        "functools: a list",
        Layout("functools"),
        ' functools[{"name": "get_weather", "arguments": ' + ARGUMENTS + '}, {"name": "turn_on", "arguments": {}}]',
        {},
        ("", "", [WEATHER, ("turn_on", {})]),
    ),
    ("functools: text", Layout("functools"), "Use functools, or x.", {}, ("Use functools, or x.", "", [])),
    (
        # the template of Jamba 1.5
        "jamba: a list in tags",
        Layout("jamba"),
        'So: <tool_calls>[\n{"name": "get_weather", "arguments": ' + ARGUMENTS + "}\n]</tool_calls>",
        {},
        ("So:", "", [WEATHER]),
    ),
    (
        # the tool_use template of Command R and R+
        "command_r: actions in a fence",
        Layout("command_r"),
        'Plan: I look.\nAction: ```json\n[\n    {\n        "tool_name": "get_weather",\n        "parameters": '
        + ARGUMENTS
        + '\n    },\n    {"tool_name": "turn_on", "parameters": {"id": 3}}\n]```',
        {},
        ("Plan: I look.", "", [WEATHER, ("turn_on", {"id": 3})]),
    ),
    ("command_r: an action in words", Layout("command_r"), "Action: none", {}, ("Action: none", "", [])),
    (
        # the template of Seed-OSS
        "seed: tags with parameters",
        Layout("seed", ("<seed:think>", "</seed:think>")),
        "<seed:think>Hm.</seed:think>I look.<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>"
        "\n<parameter=unit>°C</parameter>\n</function>\n</seed:tool_call>",
        {},
        ("I look.", "Hm.", [WEATHER]),
    ),
    (
        # MiniMax's description of M2's tool calls
        "minimax: invocations",
        Layout("minimax", THINK),
        'Hm.</think>\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="unit">°C</parameter>\n</invoke>\n<invoke name="turn_on">\n<parameter name="id">3</parameter>'
        "\n</invoke>\n</minimax:tool_call>",
        {"opened": True},
        ("", "Hm.", [WEATHER, ("turn_on", {"id": 3})]),
    ),
    (
        "minimax: none",
        Layout("minimax"),
        "<minimax:tool_call>x</minimax:tool_call>",
        {},
        ("<minimax:tool_call>x</minimax:tool_call>", "", []),
    ),
    (
        # the template of MiniCPM5
        "minicpm: tags with names",
        Layout("minicpm", THINK),
        'I look.<function name="get_weather"><param name="city"><![CDATA[Paris]]></param><param name="unit">°C</param>'
        '</function><function name="turn_on"></function>',
        {},
        ("I look.", "", [WEATHER, ("turn_on", {})]),
    ),
    (
        # the template of GigaChat 3
        "gigachat: behind a separator",
        Layout("gigachat"),
        'I look.<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "get_weather", "arguments": ' + ARGUMENTS + "}",
        {},
        ("I look.", "", [WEATHER]),
    ),
    (
        # the template of MiniMax-M1
        "jamba: objects in tags, without a list",
        Layout("jamba"),
        'So:\n<tool_calls>\n{"name": "get_weather", "arguments": '
        + ARGUMENTS
        + '}\n{"name": "turn_on", "arguments": {}}'
        "\n</tool_calls>",
        {},
        ("So:", "", [WEATHER, ("turn_on", {})]),
    ),
    (
        # the template of MiniMax-M3
        "minimax_m3: tags in tags",
        Layout("minimax_m3", ("<mm:think>", "</mm:think>")),
        "<mm:think>Hm.</mm:think>]<]minimax[>[<tool_call>\n"
        ']<]minimax[>[<invoke name="get_weather">]<]minimax[>[<city>Paris]<]minimax[>[</city>]<]minimax[>[<unit>°C'
        ']<]minimax[>[</unit>]<]minimax[>[</invoke>\n]<]minimax[>[<invoke name="turn_on">]<]minimax[>[<ids>'
        "]<]minimax[>[<item>1]<]minimax[>[</item>]<]minimax[>[<item>]<]minimax[>[<a>x]<]minimax[>[</a>"
        "]<]minimax[>[</item>]<]minimax[>[</ids>]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
        {},
        ("", "Hm.", [WEATHER, ("turn_on", {"ids": [1, {"a": "x"}]})]),
    ),
    (
        # the template of Solar Open
        "solar: ids and names",
        Layout("solar"),
        "I look.<|tool_calls|><|tool_call:begin|>c1<|tool_call:name|>get_weather<|tool_call:args|>"
        + ARGUMENTS
        + "<|tool_call:end|><|tool_call:begin|>c2<|tool_call:name|>turn_on<|tool_call:args|>{}<|tool_call:end|>",
        {},
        ("I look.", "", [WEATHER, ("turn_on", {})]),
    ),
    (
        # the template of Apertus
        "apertus: names as keys",
        Layout("apertus"),
        'I look.<|tools_prefix|>[{"get_weather": ' + ARGUMENTS + '}, {"turn_on": {}}]<|tools_suffix|>',
        {},
        ("I look.", "", [WEATHER, ("turn_on", {})]),
    ),
    (
        "apertus: none",
        Layout("apertus"),
        "<|tools_prefix|>[1]<|tools_suffix|>",
        {},
        ("<|tools_prefix|>[1]<|tools_suffix|>", "", []),
    ),
    (
        # the template of Olmo 3
        "olmo: Python in tags",
        Layout("olmo"),
        'I look.<function_calls>\nget_weather(city="Paris", unit="°C")\nturn_on(id=3)\n</function_calls>',
        {},
        ("I look.", "", [WEATHER, ("turn_on", {"id": 3})]),
    ),
    (
        "hermes: what may not be called stays text",
        Layout("hermes"),
        '<tool_call>{"name": "turn_off", "arguments": {}}</tool_call>',
        {"only": True},
        ('<tool_call>{"name": "turn_off", "arguments": {}}</tool_call>', "", []),
    ),
    (
        "mistral: what may not be called stays text",
        Layout("mistral_args"),
        '[TOOL_CALLS]turn_off[ARGS]{"id": 1}[TOOL_CALLS]turn_on[ARGS]{}',
        {"only": True},
        ('turn_off{"id": 1}', "", [("turn_on", {})]),
    ),
    (
        "harmony: what may not be called stays text",
        Layout("harmony"),
        "<|channel|>commentary to=functions.turn_off <|constrain|>json<|message|>{}<|call|>",
        {"only": True},
        ("turn_off{}", "", []),
    ),
    (
        "generic: a call of OpenAI's form",
        Layout("generic"),
        '\n{"type": "function", "function": {"name": "get_weather", "arguments": ' + ARGUMENTS + "}}",
        {},
        ("", "", [WEATHER]),
    ),
    ("generic: text", Layout("generic"), "  Well, {x}.\n", {}, ("  Well, {x}.\n", "", [])),
    (
        "thoughts that never end",
        Layout("generic", THINK),
        "<think>I wonder ",
        {"calls": False},
        ("", "I wonder", []),
    ),
    ("no thoughts", Layout("generic", THINK), "\n <thin ice>", {"calls": False}, ("\n <thin ice>", "", [])),
]


@pytest.mark.parametrize(
    ("layout", "reply", "changes", "expected"), [case[1:] for case in RECORDED], ids=[case[0] for case in RECORDED]
)
def test_recorded_replies_wherever_they_are_cut(
    layout: Layout, reply: str, changes: dict[str, Any], expected: tuple[str, str, list[tuple[str, Any]]]
) -> None:
    whole = read(layout, reply, **changes)
    assert (whole.text, whole.reasoning, called(whole)) == expected
    for at in range(1, len(reply)):
        assert read(layout, reply[:at], reply[at:], **changes) == whole, f"cut at {at}: {reply[:at]!r}"
    assert read(layout, *reply, **changes) == whole
    for size in (2, 3, 7):
        pieces = [reply[at : at + size] for at in range(0, len(reply), size)]
        assert read(layout, *pieces, **changes) == whole


@pytest.mark.parametrize(("layout", "reply", "changes"), [case[1:4] for case in RECORDED if case[4][2]])
def test_replies_that_are_cut_short_give_what_was_certain(layout: Layout, reply: str, changes: dict[str, Any]) -> None:
    whole = read(layout, reply, **changes)
    for at in range(len(reply)):
        if layout.calls == "harmony" and re.search(r"<(\||\|\w+\|?)?$", reply[:at]):
            continue  # its markers are tokens: none is ever cut
        part = read(layout, reply[:at], **changes)
        for call, full in zip(part.calls, whole.calls, strict=False):
            assert call.name == full.name
            assert full.arguments.startswith(call.arguments) or call.arguments == "{}"


def test_arguments_are_streamed() -> None:
    reader = parser(Layout("hermes"))
    reader.feed('<tool_call>{"name": "turn_on", "arguments": {"id')
    assert reader.count == 1
    assert reader.feed('": "la').calls == [CallPiece(0, '": "la')]
    assert reader.feed("mp").calls == [CallPiece(0, "mp")]


def test_a_call_keeps_the_id_that_its_template_shows_again() -> None:
    reader = parser(Layout("kimi"))
    split = reader.feed("<|tool_call_begin|>functions.turn_on:7<|tool_call_argument_begin|>{}<|tool_call_end|>")
    assert split.calls == [CallPiece(0, "{}", "functions.turn_on:7", "turn_on")]


def test_text_and_thoughts_are_streamed() -> None:
    reader = parser(Layout("hermes", THINK))
    assert reader.feed("<think>So").reasoning == "So"
    assert reader.feed(" it").reasoning == " it"
    assert reader.feed("</think>Yes").text == "Yes"
    assert reader.feed(", no").text == ", no"


def test_after_the_only_call_the_reply_is_over() -> None:
    reader = parser(Layout("hermes"), parallel=False)
    reader.feed('<tool_call>{"name": "turn_on", "arguments": {}')
    assert not reader.ended
    reader.feed("}")
    assert reader.ended


LAYOUTS = sorted({(case[1].calls, case[1].thoughts) for case in RECORDED}, key=str)
BITS = st.sampled_from(
    [
        *(marker for calls, thoughts in LAYOUTS for marker in Layout(calls, thoughts).markers),
        '{"name": "turn_on", "arguments": ', '"parameters": {"a": [1]}', "turn_on", "{", "}", '"', "[", "]", "\\",
        "```",
        "```json", "```tool_code\n", "turn_on(a=1)", " ", "\n", "é", "call:turn_on{a:1}", "functions.turn_on", " to=",
        "function", ",", ";", "1",
    ]
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(LAYOUTS), st.lists(BITS, max_size=12), st.booleans(), st.integers(1, 5))
def test_no_reply_depends_on_its_cuts(layout: Any, bits: list[str], parallel: bool, size: int) -> None:
    reply = "".join(bits)
    whole = read(Layout(*layout), reply, parallel=parallel)
    pieces = [reply[at : at + size] for at in range(0, len(reply), size)]
    assert read(Layout(*layout), *pieces, parallel=parallel) == whole


@pytest.mark.parametrize(
    ("template", "layout"),
    [
        ("{% if tools %}<tool_call>{% endif %}<think></think>", Layout("hermes", THINK)),
        ("<|start_header_id|>ipython<|end_header_id|>", Layout("llama3")),
        ("[AVAILABLE_TOOLS][TOOL_CALLS]", Layout("mistral")),
        ("[TOOL_CALLS]x[ARGS][THINK][/THINK]", Layout("mistral_args", ("[THINK]", "[/THINK]"))),
        ("<start_of_turn>model", Layout("gemma")),
        ("only with <|tool_call|>", Layout("granite")),
        ("<TOOLCALL>[</think>", Layout("nemotron", THINK)),
        ("<|START_ACTION|>", Layout("command")),
        ("<|tool_call_start|>", Layout("lfm")),
        ("'List of tools: ['", Layout("lfm")),
        ("<start_of_turn><start_function_call>", Layout("gemma_call")),
        ("<|tool_call><|channel>thought\n<channel|>", Layout("gemma_pipe", ("<|channel>thought\n", "<channel|>"))),
        ("<|start|>assistant<|channel|>final<|message|>", Layout("harmony")),
        (f"{D_ALL}```json</think>", Layout("deepseek", THINK)),
        (D_ALL, Layout("deepseek_plain")),
        ("{% set d = '｜DSML｜' %}<' + d + 'function_calls></think>", Layout("dsml_functions", THINK)),
        ("{% set d = '｜DSML｜' %}<' + d + 'tool_calls></think>", Layout("dsml_tools", THINK)),
        ("<|tool_calls_section_begin|><|tool_call_begin|><think>", Layout("kimi", THINK)),
        ("<|start_header_id|>assistant>>>all", Layout("functionary")),
        ("<|start_header_id|>ipython <function={name}>", Layout("function_tag")),
        ("<tool_call><function=x><parameter=y>", Layout("hermes")),
        ("<|start_header_id|> functools[", Layout("functools")),
        ("<tool_calls>[", Layout("jamba")),
        ("'Action:' followed by a json-formatted list of actions", Layout("command_r")),
        ("<seed:tool_call><seed:think>", Layout("seed", ("<seed:think>", "</seed:think>"))),
        ("<minimax:tool_call><think>", Layout("minimax", THINK)),
        ('<function name="a"><param name="b">', Layout("minicpm")),
        ("'<|role_sep|>' 'function call'", Layout("gigachat")),
        ("<|tool_call:begin|>", Layout("solar")),
        ("]<]minimax[>[ <tool_call> <mm:think>", Layout("minimax_m3", ("<mm:think>", "</mm:think>"))),
        ("<|tools_prefix|>", Layout("apertus")),
        ("<function_calls>", Layout("olmo")),
        ("<|im_start|>", Layout("generic")),
        ("", Layout("generic")),
    ],
)
def test_layouts_are_told_from_templates(template: str, layout: Layout) -> None:
    assert detect_layout(template) == layout


_READ_WHOLE = (
    "tags with parameters", "the schema says", "fences", "a list between marks", "actions", "a list in tags",
    "invocations", "objects in tags", "tags in tags",
)  # fmt: skip
"""Forms of which a call is understood at its end only: what is left of the mark behind it stays text."""


@pytest.mark.parametrize(
    ("layout", "reply", "changes"),
    [c[1:4] for c in RECORDED if c[4][2] and not any(form in c[0] for form in _READ_WHOLE)],
)
def test_of_an_end_that_is_cut_nothing_is_text(layout: Layout, reply: str, changes: dict[str, Any]) -> None:
    """As where `max_tokens` ends a reply within the mark behind its last call."""
    whole = read(layout, reply, **changes)
    last = max(reply.rfind(char) for char in '}])"')
    for at in range(last + 1, len(reply)):
        part = read(layout, reply[:at], **changes)
        if part.calls == whole.calls:  # else it cannot be known yet what was called
            assert whole.text.strip().startswith(part.text.strip()), reply[:at]
