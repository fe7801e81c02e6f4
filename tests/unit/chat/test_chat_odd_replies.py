"""Replies that only look like calls, or that no client could read: what is sent is JSON, nothing is lost, and no form
of a reply takes long."""

from __future__ import annotations

import json
import math
import time
from typing import Any, get_args

import msgspec
import pytest

from homeprefixd.chat.layout import DEEPSEEK, Calls, Layout
from homeprefixd.chat.reply import ReplyParser, Split
from homeprefixd.frames.worker import Delta

TOOLS = {
    "get": {"parameters": {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "number"}}}},
    "set.x": {},
}
ALL, ONE, SEP, END, _ = DEEPSEEK
LIST, LIST_END = "<|tool_call_start|>[", "]<|tool_call_end|>"
MARK = "]<]minimax[>["
M3 = f"{MARK}<tool_call>"


def read(kind: Calls, reply: str, size: int = 0, **changes: Any) -> Split:
    """All that the parser says of a reply; `size`: characters of a piece."""
    ids = iter(range(10**6))
    options: dict[str, Any] = {"opened": False, "calls": True, "parallel": True, **changes}
    parser = ReplyParser(Layout(kind), tools=TOOLS, new_id=lambda: f"id{next(ids)}", **options)
    size = size or len(reply)
    parts = [parser.feed(reply[at : at + size]) for at in range(0, len(reply), size)] + [parser.finish()]
    whole = Split("".join(part.text for part in parts), "".join(part.reasoning for part in parts))
    texts: dict[int, list[str]] = {}
    for piece in (piece for part in parts for piece in part.calls):
        if piece.index not in texts:
            whole.calls.append(msgspec.structs.replace(piece))
        texts.setdefault(piece.index, []).append(piece.arguments)
    for call in whole.calls:
        call.arguments = "".join(texts[call.index])
    return whole


def calls_of(split: Split) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in split.calls]


def same_in_pieces(kind: Calls, reply: str) -> Split:
    whole = read(kind, reply)
    for size in (1, 2, 3, 5):
        assert read(kind, reply, size) == whole
    return whole


# ---------------------------------------------------------------------------------------------- halves of characters


@pytest.mark.parametrize(
    ("kind", "reply", "arguments"),
    [
        ("hermes", r'<tool_call>{"name":"get","arguments":{"a":"X"}}</tool_call>', {"a": "X"}),
        ("hermes", r'<tool_call>{"arguments":{"X":["X"]},"name":"get"}</tool_call>', {"X": ["X"]}),
        ("hermes", r'<tool_call>{"name":"get","arguments":"{\"a\":\"X\"}"}</tool_call>', {"a": "X"}),
        ("hermes", r'<tool_call><function=get><parameter=z>"X"</parameter></function></tool_call>', {"z": "X"}),
        ("hermes", r'<tool_call>get<arg_key>z</arg_key><arg_value>["X"]</arg_value></tool_call>', {"z": ["X"]}),
        ("gemma_call", r'<start_function_call>call:get{a:"X"}<end_function_call>', {"a": "X"}),
        ("apertus", r'<|tools_prefix|>[{"get":{"a":"X"}}]<|tools_suffix|>', {"a": "X"}),
        ("minimax", r'<minimax:tool_call><invoke name="get"><parameter name="z">"X"</parameter></invoke>'
         r"</minimax:tool_call>", {"z": "X"}),
        ("minimax_m3", rf'{MARK}<tool_call>{MARK}<invoke name="get">{MARK}<z>{MARK}<item>"X"{MARK}</item>{MARK}</z>'
         rf"{MARK}</invoke>{MARK}</tool_call>", {"z": ["X"]}),
        ("lfm", rf'{LIST}get(a="X"){LIST_END}', {"a": "X"}),
        ("olmo", r"<function_calls>get(a='X')</function_calls>", {"a": "X"}),
        ("llama3", r'<|python_tag|>get.call(a="X")', {"a": "X"}),
        ("kimi", r'<|tool_call_begin|>get:0<|tool_call_argument_begin|>{"a":"X"}<|tool_call_end|>', {"a": "X"}),
        ("harmony", r'<|channel|>commentary to=functions.get<|message|>{"a":"X"}<|call|>', {"a": "X"}),
        ("generic", r'{"name":"get","arguments":{"a":"X"}}', {"a": "X"}),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    ("escape", "character"),
    [
        (r"\ud83d\ude00", "😀"),
        (r"\ud83d", "�"),
        (r"\ude00-", "�-"),
        (r"\ud83d\ud83d\ude00", "�😀"),
        (r"\ud83d\n", "�\n"),
        (r"\u00e9\uD83D\uDE00", "é😀"),
    ],
)
def test_no_client_gets_half_a_character(kind: Calls, reply: str, arguments: Any, escape: str, character: str) -> None:
    text = reply.replace("X", escape.replace("\\", "\\\\") if '"{' in reply else escape)
    split = same_in_pieces(kind, text)
    (call,) = split.calls
    assert json.loads(call.arguments) == json.loads(json.dumps(arguments).replace("X", json.dumps(character)[1:-1]))
    msgspec.msgpack.encode(Delta(rid="r", text=split.text, tokens=1, calls=split.calls))
    json.dumps(calls_of(split), ensure_ascii=False).encode()


def test_a_name_has_no_half_of_a_character() -> None:
    (call,) = same_in_pieces("hermes", r'<tool_call>{"name":"ge\ud83d","arguments":{}}</tool_call>').calls
    assert call.name == "ge�"
    text = read("hermes", r'<tool_call>{"name":"ge\ud83d"}</tool_call>', only=True).text
    assert text == r'<tool_call>{"name":"ge\ud83d"}</tool_call>'


# ---------------------------------------------------------------------------------------------- what JSON does not have


@pytest.mark.parametrize(
    "value",
    ["{1,2}", "b'x'", "{[]:1}", "{{}}", "1j", "...", "-'x'", "{(1,2):3}", "1e999", "-1e999", "1<2", "[{1e999: 2}]"],
)
@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("lfm", LIST, LIST_END),
        ("olmo", "<function_calls>", "</function_calls>"),
        ("gemma", "```tool_code\n", "\n```"),
        ("llama3", "<|python_tag|>", ""),
    ],
)
def test_python_that_is_no_json_stays_text(kind: Calls, before: str, after: str, value: str) -> None:
    reply = f"{before}get(a={value}){after}"
    split = same_in_pieces(kind, reply)
    assert (split.text, split.calls) == (reply.removeprefix("<|python_tag|>"), [])


@pytest.mark.parametrize(
    ("kind", "reply", "arguments"),
    [
        (
            "hermes",
            "<tool_call><function=get><parameter=a>NaN</parameter><parameter=z>1e999</parameter></function></tool_call>",
            {"a": "NaN", "z": "1e999"},
        ),
        (
            "gemma_call",
            "<start_function_call>call:get{a:NaN,b:-Infinity,c:1e999}<end_function_call>",
            {"a": "NaN", "b": "-Infinity", "c": "1e999"},
        ),
        (
            "hermes",
            '<tool_call>{"name":"get","arguments":{"a":NaN,"b":[-Infinity, 1e999,1e5],"c":"NaN","d":true}}</tool_call>',
            {"a": None, "b": [None, None, 1e5], "c": "NaN", "d": True},
        ),
        ("mistral_args", '[TOOL_CALLS]get[ARGS]{"a": Infinity}', {"a": None}),
        ("harmony", '<|channel|>commentary to=functions.get<|message|>{"a": NaN}<|call|>', {"a": None}),
    ],
)
def test_numbers_that_json_does_not_have_reach_no_client(kind: Calls, reply: str, arguments: Any) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    (call,) = same_in_pieces(kind, reply).calls
    assert json.loads(call.arguments, parse_constant=refuse) == arguments


# ---------------------------------------------------------------------------------------------- nothing is lost


@pytest.mark.parametrize(
    ("kind", "reply", "text", "calls"),
    [
        ("deepseek", f"{ALL}text", ..., []),
        ("deepseek", f"{ALL}{ONE}bad name{SEP}x", ..., []),
        ("deepseek_plain", f"{ONE}get", ..., []),
        ("deepseek_plain", f"{ALL}{ONE}get{SEP}words{END}", f"{ONE}get{SEP}words{END}", []),
        ("deepseek_plain", f'{ALL}{ONE}get{SEP}{{"a":"x"}} words{END}', "words", [("get", {"a": "x"})]),
        ("dsml_tools", "<｜DSML｜tool_calls> text", ..., []),
        ("dsml_tools", '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get">\n<｜DSML｜parameter name="a">cut', ..., []),
        ("dsml_tools", '<｜DSML｜tool_calls><｜DSML｜invoke name="get">words</｜DSML｜invoke>', ..., []),
        ("harmony", "<|start|>assistant text", ..., []),
        ("harmony", "<|channel|>analysis text", ..., []),
        ("harmony", "<|channel|>final<|message|>A.<|end|><|start|>assistant", "A.", []),
        ("harmony", "<|channel|>commentary to=functions.get<|message|>words<|call|>", "words", []),
        ("harmony", "<|channel|>commentary to=functions.get<|message|><|call|>", "", [("get", {})]),
        ("function_tag", "See <function=html> for details", ..., []),
        ("function_tag", "See <function=get> for details", ..., []),
        ("function_tag", "<function=get>words</function>", ..., []),
        ("function_tag", '<function=html>{"a":1}</function>', ..., []),
        ("function_tag", "<function=get></function>", "", [("get", {})]),
        ("function_tag", '<function=get>{"a":"x"} words</function> after', "words after", [("get", {"a": "x"})]),
        ("kimi", "<|tool_call_begin|>get:0<|tool_call_argument_begin|>words<|tool_call_end|>", ..., []),
        ("kimi", "<|tool_call_begin|>get:0<|tool_call_argument_begin|><|tool_call_end|>", "", [("get", {})]),
        ("solar", "<|tool_call:begin|>i<|tool_call:name|>get<|tool_call:args|>words<|tool_call:end|>", ..., []),
        ("mistral_args", "[TOOL_CALLS]get[ARGS]words", ..., []),
        ("mistral_args", "[TOOL_CALLS]get[CALL_ID]i[ARGS][1]", ..., []),
        ("mistral", '[TOOL_CALLS][{"city": "Rome"}]', ..., []),
        ("mistral", '[TOOL_CALLS] [{"name":"get"}, {"x"}] y', ', {"x"}] y', [("get", {})]),
        ("granite", "<|tool_call|> [1]", ..., []),
        ("functionary", ">>>get\nwords", ..., []),
        ("minicpm", '<function name="get">words</function>', ..., []),
        ("minicpm", 'A <function name="html"> in prose', ..., []),
        ("minimax", '<minimax:tool_call><invoke name="get">words</invoke></minimax:tool_call>', ..., []),
        ("minimax", '<minimax:tool_call><invoke name="get"></invoke> w</minimax:tool_call>', "w", [("get", {})]),
        ("minimax_m3", f'{M3}{MARK}<invoke name="get">w{MARK}<a>x{MARK}</a>{MARK}</invoke>{MARK}</tool_call>',
         "w", [("get", {"a": "x"})]),
        ("minimax_m3", f'{MARK}<tool_call>{MARK}<invoke name="get">w{MARK}</invoke>{MARK}</tool_call>', ..., []),
        ("seed", "<seed:tool_call>w<function=get><parameter=a>x</parameter></function></seed:tool_call>", "w",
         [("get", {"a": "x"})]),
        ("hermes", '<tool_call>{"name":"get","arguments":{"a":"x"}} words</tool_call>', "words", [("get", {"a": "x"})]),
        ("hermes", '<tool_call>{"name":"get"}\n{"name":"set.x"}</tool_call>', "", [("get", {}), ("set.x", {})]),
        ("hermes", '<tool_call>{"name":"get"} never closed', "never closed", [("get", {})]),
        ("hermes", '<tool_call>{"name":"get"}<tool_call>{"name":"set.x"}', "", [("get", {}), ("set.x", {})]),
        ("hermes", '<tool_call>{"name":"get"}}}</tool_call> w', "w", [("get", {})]),
        ("hermes", '<tool_call>{"name":"get","arguments":[1]}</tool_call>', ..., []),
        ("hermes", '<tool_call>{"name":"get","arguments":"words"}</tool_call>', ..., []),
        ("hermes", '<tool_call>{"name":"get","arguments":{"a":1},"arguments":{"a":2}}</tool_call>', '{"a":2}}',
         [("get", {"a": 1})]),
        ("hermes", '<tool_call>{"arguments":{"a":1},"arguments":{"a":2},"name":"get"}</tool_call>', ..., []),
        ("hermes", '<tool_call>{"name":"get","name":"set.x","arguments":{"a":1}}</tool_call>', ..., []),
        ("hermes", '<tool_call>{"name":"","arguments":{}}</tool_call>', ..., []),
        ("hermes", '<tool_call>{"name":"a\\nb","arguments":{}}</tool_call>', ..., []),
    ],
)  # fmt: skip
def test_what_is_no_call_stays_text(kind: Calls, reply: str, text: Any, calls: list[tuple[str, Any]]) -> None:
    split = same_in_pieces(kind, reply)
    assert (split.text.strip(), calls_of(split)) == (reply if text is ... else text, calls)


def test_an_object_in_objects_ends_nothing() -> None:
    reply = '<tool_call>{"function":' * 3000
    assert read("hermes", reply).text == reply


# ---------------------------------------------------------------------------------------------- time

TOOL = "<tool_call>"
DSML_ONE, DSML_PARAMETER = '<｜DSML｜invoke name="get">', '<｜DSML｜parameter name="a">'
HOSTILE: list[tuple[Calls, str, str, str]] = [
    ("hermes", TOOL, "<function=", ""),
    ("hermes", TOOL, "<function=", ">"),
    ("hermes", TOOL, "<function=a>", ""),
    ("hermes", TOOL + "x", "<arg_key>", "</tool_call>"),
    ("hermes", TOOL + "x", "<arg_key></arg_key>", "</tool_call>"),
    ("hermes", TOOL + "x", "<arg_key></arg_key><arg_value>", "</tool_call>"),
    ("hermes", TOOL + "<function=get>", "<parameter=", "</tool_call>"),
    ("hermes", TOOL + "<function=get>", "<parameter=a>", "</tool_call>"),
    ("hermes", TOOL + '{"name":"get","arguments":', "[", ""),
    ("hermes", TOOL + '{"name":"get","arguments":', '{"a":', ""),
    ("hermes", TOOL + '{"arguments":', '{"a":', ""),
    ("hermes", TOOL + '{"name":"get","arguments":[', "1", ""),
    ("hermes", TOOL + '{"name":"get","arguments":{"a":"', "\\\\", ""),
    ("hermes", TOOL + '{"name":"get","arguments":{"a":"', "\\ud83d", ""),
    ("hermes", "", TOOL + "{}", ""),
    ("hermes", TOOL + "{", ",,", ""),
    ("hermes", "", TOOL + '{"name":"get","arguments":{}}</tool_call>', ""),
    ("dsml_tools", f"<｜DSML｜tool_calls>{DSML_ONE}", DSML_PARAMETER, "</｜DSML｜invoke>"),
    ("dsml_tools", f"<｜DSML｜tool_calls>{DSML_ONE}", f"{DSML_PARAMETER}x</｜DSML｜parameter>", "</｜DSML｜invoke>"),
    ("dsml_tools", "<｜DSML｜tool_calls>", f"{DSML_ONE}</｜DSML｜invoke>", ""),
    ("minimax", "<minimax:tool_call>", '<invoke name="a">', "</minimax:tool_call>"),
    ("minimax", "<minimax:tool_call>", '<invoke name="', "</minimax:tool_call>"),
    ("minimax", '<minimax:tool_call><invoke name="get">', '<parameter name="a">', "</invoke></minimax:tool_call>"),
    (
        "minimax",
        '<minimax:tool_call><invoke name="get">',
        '<parameter name="a"><![CDATA[',
        "</invoke></minimax:tool_call>",
    ),
    ("minimax_m3", M3, f'{MARK}<invoke name="get">', f"{MARK}</tool_call>"),
    ("minimax_m3", f'{M3}{MARK}<invoke name="get">', f"{MARK}<a>", f"{MARK}</invoke>{MARK}</tool_call>"),
    ("minimax_m3", f'{M3}{MARK}<invoke name="get">', f"{MARK}<a>{MARK}</b>", f"{MARK}</invoke>{MARK}</tool_call>"),
    ("minimax_m3", f'{M3}{MARK}<invoke name="get">', f"{MARK}<a>{MARK}</a>", f"{MARK}</invoke>{MARK}</tool_call>"),
    ("minicpm", '<function name="get">', '<param name="a">', "</function>"),
    ("minicpm", '<function name="get">', '<param name="a"><![CDATA[', "</function>"),
    ("gemma_call", "<start_function_call>call:get{a:", "[", "<end_function_call>"),
    ("gemma_call", "<start_function_call>call:get{a:[", "1,", "]}<end_function_call>"),
    ("gemma_call", "<start_function_call>call:get{a:[", "{},", "]}<end_function_call>"),
    ("gemma_call", "<start_function_call>call:get{", "}}", "x<end_function_call>"),
    ("gemma_call", "<start_function_call>call:get{", "a:1,", "}<end_function_call>"),
    ("gemma_call", "<start_function_call>call:get{", "a:<escape>", "}<end_function_call>"),
    ("gemma", "```tool_code\n", "get(a=1)\n", "```"),
    ("gemma", "```tool_code\nget(a=", "-", "1)```"),
    ("gemma", "", "```tool_code\n```", ""),
    ("lfm", LIST, "get(a=1),", LIST_END),
    ("lfm", "<|tool_call_start|>", "[", "<|tool_call_end|>"),
    ("lfm", "<|tool_call_start|>", "(", "<|tool_call_end|>"),
    ("lfm", "<|tool_call_start|>", '"', "<|tool_call_end|>"),
    ("llama3", "<|python_tag|>", "get.call(a=1)\n", ""),
    ("kimi", "", "<|tool_call_begin|>x<|tool_call_end|>", ""),
    ("kimi", "", "<|tool_call_begin|>get:0<|tool_call_argument_begin|>{}", ""),
    ("functionary", "", ">>>get\n{}", ""),
    ("functionary", ">>>get\n", "[", ""),
    ("function_tag", "", "<function=get>{}", ""),
    ("granite", "<|tool_call|>[", ",", ""),
    ("apertus", "<|tools_prefix|>[", '{"get":{}},', '{"get":{}}]<|tools_suffix|>'),
    ("mistral", "[TOOL_CALLS][", '{"name":"get","arguments":{}}', ""),
    ("mistral_args", "", "[TOOL_CALLS]get[ARGS]{}", ""),
    ("harmony", "<|channel|>", "<|message|>", ""),
    ("harmony", "<|channel|>final", "to=", ""),
    ("harmony", "<|channel|>", "<|channel|>", "<|message|>x"),
    ("harmony", "<|channel|>", "<|end|>", ""),
    ("harmony", "<|channel|>", "          <|start|>", "x"),
    ("harmony", "<|channel|>", f"{' ' * 60}x<|end|>", ""),
    ("deepseek", ALL, ONE, ""),
    ("deepseek", ALL, f"{ONE}function{SEP}get\n```json\n{{}}\n```{END}", ""),
    ("command_r", "Action:", ",", ""),
    ("generic", "", '{"name":"get","arguments":{}},', ""),
]


def seconds(kind: Calls, reply: str, size: int) -> float:
    """Of computing on this thread; others on the machine make that longer, too, but hardly each time."""
    best = math.inf
    for _ in range(3):
        began = time.thread_time()
        read(kind, reply, size)
        best = min(best, time.thread_time() - began)
        if best < _QUICK:
            break
    return best


_QUICK = 0.5  # seconds; what takes less is not measured again


def check(kind: Calls, before: str, repeated: str, after: str, size: int, length: int) -> None:
    def reply(characters: int) -> str:
        return before + repeated * (characters // len(repeated)) + after

    whole = seconds(kind, reply(length), size)
    assert whole < length / 60_000, f"{whole:.2f} s"
    if whole > _QUICK:  # else noise would decide
        quarter = seconds(kind, reply(length // 4), size)
        assert whole < 9 * quarter, f"{quarter:.2f} s, and {whole:.2f} s for four times as much"


@pytest.mark.parametrize("size", [0, 4], ids=["at once", "in pieces"])
@pytest.mark.parametrize(("kind", "before", "repeated", "after"), HOSTILE)
def test_no_reply_takes_long(kind: Calls, before: str, repeated: str, after: str, size: int) -> None:
    check(kind, before, repeated, after, size, 60_000)


@pytest.mark.parametrize("kind", get_args(Calls))
def test_whatever_is_repeated_takes_no_long(kind: Calls) -> None:
    markers = Layout(kind).markers
    for repeated in (*markers, "{", "}", "[", "]", '"', "\\", " ", "\n", "<", "```", "get(", '{"name":'):
        for before in {"", *markers[:1]}:
            check(kind, before, repeated, "", 32, 30_000)
