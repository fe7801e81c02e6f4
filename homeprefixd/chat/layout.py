"""How families of models write their thoughts and their tool calls, told from the chat template's text.

Pure text; what is done with a layout is in `reply.py` (reading) and `forcing.py` (making a model write one).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Calls = Literal[
    "hermes",  # <tool_call>{"name": ..., "arguments": {...}}</tool_call>, of Qwen, Hermes, GLM and many others
    "llama3",  # {"name": ..., "parameters": {...}}, perhaps after <|python_tag|>
    "mistral",  # [TOOL_CALLS][{"name": ..., "arguments": {...}}]
    "mistral_args",  # [TOOL_CALLS]name[ARGS]{...}
    "gemma_call",  # <start_function_call>call:name{key:<escape>text<escape>}<end_function_call>
    "gemma_pipe",  # <|tool_call>call:name{key:<|"|>text<|"|>}<tool_call|>
    "gemma",  # ```tool_code name(key="text")```
    "harmony",  # <|channel|>commentary to=functions.name<|message|>{...}<|call|>
    "deepseek",  # <｜tool▁call▁begin｜>function<｜tool▁sep｜>name ```json {...}```<｜tool▁call▁end｜>
    "deepseek_plain",  # <｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>
    "dsml_functions",  # <｜DSML｜function_calls><｜DSML｜invoke name="name"><｜DSML｜parameter name="key" ...
    "dsml_tools",  # the same in <｜DSML｜tool_calls>
    "granite",  # <|tool_call|>[{"name": ..., "arguments": {...}}]
    "nemotron",  # <TOOLCALL>[{"name": ..., "arguments": {...}}]</TOOLCALL>
    "command",  # <|START_ACTION|>[{"tool_name": ..., "parameters": {...}}]<|END_ACTION|>
    "lfm",  # <|tool_call_start|>[name(key="text")]<|tool_call_end|>
    "kimi",  # <|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>
    "solar",  # <|tool_call:begin|>id<|tool_call:name|>name<|tool_call:args|>{...}<|tool_call:end|>
    "functionary",  # >>>name, a line end, {...}; text is >>>all
    "function_tag",  # <function=name>{...}</function>, of Functionary 3.1 and what learned it from Llama 3.1
    "functools",  # functools[{"name": ..., "arguments": {...}}], of Firefunction
    "jamba",  # <tool_calls>[{"name": ..., "arguments": {...}}]</tool_calls>, or such objects without a list
    "command_r",  # Action: ```json [{"tool_name": ..., "parameters": {...}}]```
    "seed",  # <seed:tool_call><function=name><parameter=key>text</parameter></function></seed:tool_call>
    "minimax",  # <minimax:tool_call><invoke name="name"><parameter name="key">text</parameter></invoke> ...
    "minimax_m3",  # a mark before each tag, <tool_call><invoke name="name"><key>text</key></invoke></tool_call>
    "minicpm",  # <function name="name"><param name="key">text</param></function>
    "gigachat",  # <|message_sep|>function call<|role_sep|>{"name": ..., "arguments": {...}}
    "apertus",  # <|tools_prefix|>[{"name": {...}}]<|tools_suffix|>
    "olmo",  # <function_calls>name(key="text")</function_calls>
    "generic",  # {"name": ..., "arguments": {...}}
]

_THOUGHTS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("<|channel>thought\n", "<channel|>"),
)

_MARKERS: dict[Calls, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]",),
    "mistral_args": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    "gemma_call": ("<start_function_call>", "<end_function_call>", "<escape>", "<start_function_response>"),
    "gemma_pipe": ("<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>"),
    "gemma": (),
    "harmony": ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>"),
    "deepseek": (),
    "deepseek_plain": (),
    "dsml_functions": ("｜DSML｜",),
    "dsml_tools": ("｜DSML｜",),
    "granite": ("<|tool_call|>",),
    "nemotron": ("<TOOLCALL>", "</TOOLCALL>"),
    "command": ("<|START_ACTION|>", "<|END_ACTION|>"),
    "lfm": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "kimi": (
        "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    ),
    "solar": (
        "<|tool_calls|>", "<|tool_call:begin|>", "<|tool_call:name|>", "<|tool_call:args|>", "<|tool_call:end|>",
    ),
    "functionary": (),
    "function_tag": (),
    "functools": ("functools",),
    "jamba": ("<tool_calls>", "</tool_calls>"),
    "command_r": (),
    "seed": ("<seed:tool_call>", "</seed:tool_call>"),
    "minimax": ("<minimax:tool_call>", "</minimax:tool_call>"),
    "minimax_m3": ("]<]minimax[>[", "<tool_call>", "</tool_call>"),
    "minicpm": ("<function", "</function>", "<param", "</param>"),
    "gigachat": ("<|message_sep|>", "<|role_sep|>"),
    "apertus": ("<|tools_prefix|>", "<|tools_suffix|>"),
    "olmo": ("<function_calls>", "</function_calls>"),
    "generic": (),
}  # fmt: skip

GEMMA_QUOTES: dict[Calls, str] = {kind: _MARKERS[kind][2] for kind in ("gemma_call", "gemma_pipe")}
"""Layouts whose calls are in braces -> what stands around texts there."""

DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
"""Begin of all, begin of one, between the kind or the name and what follows, end of one, end of all."""

SOLAR = _MARKERS["solar"]
"""Begin of all, begin of one, between its id and its name, before its arguments, end of one."""

MINIMAX_MARK = _MARKERS["minimax_m3"][0]

KIMI = _MARKERS["kimi"]
"""Begin and end of all, begin of one, between its id and its arguments, end of one."""

LISTS: dict[Calls, tuple[str, ...]] = {
    kind: _MARKERS[kind] for kind in ("granite", "nemotron", "command", "functools", "jamba")
}
"""Layouts whose calls are one list of JSON objects -> the mark before it, and the one after it if there is one."""

DSML: dict[Calls, str] = {"dsml_functions": "function_calls", "dsml_tools": "tool_calls"}
"""Layouts of DeepSeek since V3.2 -> the tag around all calls."""


@dataclass(frozen=True)
class Layout:
    """What a model's replies look like. `thoughts`: the tags around them, None for a model that writes none."""

    calls: Calls
    thoughts: tuple[str, str] | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be control tokens of the vocabulary and must be seen by who parses the reply."""
        calls = DEEPSEEK if self.calls.startswith("deepseek") else _MARKERS[self.calls]
        channel = ("<|channel>", "<channel|>") if self.thoughts and self.thoughts[1] == "<channel|>" else ()
        return (*calls, *(self.thoughts or ()), *channel)


def detect_layout(template: str) -> Layout:
    """The layout that a model's chat template speaks of."""
    calls = _detect_calls(template)
    if calls == "harmony":
        return Layout(calls)  # thoughts are one of its channels
    thoughts = next((tags for tags in _THOUGHTS if tags[0] in template or tags[1] in template), None)
    return Layout(calls, thoughts)


_SIGNS: dict[Calls, tuple[str, ...]] = {
    "kimi": ("<|tool_call_begin|>",),
    "solar": ("<|tool_call:begin|>",),
    "functionary": (">>>all",),
    "seed": ("<seed:tool_call>",),
    "minimax": ("<minimax:tool_call>",),
    "minimax_m3": ("]<]minimax[>[",),
    "gigachat": ("<|role_sep|>", "function call"),
    "apertus": ("<|tools_prefix|>",),
    "functools": ("functools[",),
    "minicpm": ('<function name="', '<param name="'),
    "command_r": ("followed by a json-formatted list of actions",),
}
"""What only one family's templates have, though they may have marks of others too."""


def _detect_calls(template: str) -> Calls:
    calls: Calls
    if "<|channel|>" in template and "<|message|>" in template:
        return "harmony"
    if "｜DSML｜" in template:
        return "dsml_functions" if "function_calls>" in template else "dsml_tools"
    if DEEPSEEK[0] in template:
        return "deepseek" if "```json" in template else "deepseek_plain"
    if "[TOOL_CALLS]" in template:
        return "mistral_args" if "[ARGS]" in template else "mistral"
    if "<|tool_call>" in template:
        return "gemma_pipe"
    if "<start_function_call>" in template:
        return "gemma_call"
    for calls, signs in _SIGNS.items():
        if all(sign in template for sign in signs):
            return calls
    if "<tool_call>" in template:
        return "hermes"
    if "<function=" in template and "<parameter=" not in template:
        return "function_tag"
    if "<|python_tag|>" in template or ("<|start_header_id|>" in template and "ipython" in template):
        return "llama3"
    for calls in ("nemotron", "command", "granite", "jamba", "olmo"):
        if _MARKERS[calls][0] in template:
            return calls
    if "<|tool_call_start|>" in template or "List of tools: " in template:
        return "lfm"
    if "<start_of_turn>" in template:
        return "gemma"
    return "generic"


def takes_tools(template: str) -> bool:
    """Does the template itself write the tools into the prompt?"""
    return "tools" in template
