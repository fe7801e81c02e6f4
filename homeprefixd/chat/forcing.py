"""Grammars that make a model answer in a form: a call of a tool in the model's own layout, or an answer of a kind.

In llguidance's variant of Lark. Thoughts before the answer are free. Knows layouts; how a control token is written in
a grammar, only the vocabulary knows: `mark` says it. Compiling is not done here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ..errors import RequestError
from ..frames.worker import Constraint
from .braces import BraceRules, shared_rules
from .dsml import ParameterRules
from .layout import DEEPSEEK, DSML, GEMMA_QUOTES, LISTS, Layout
from .schema import prepared

Mark = Callable[[str], str]
"""A marker -> the grammar's expression for it."""

MAX_CALLS = 8
"""Calls in one reply that was made to have some: a small model might never stop."""

JSON_OPTIONS: dict[str, Any] = {
    # Without a bound it is what small models fill a context with.
    "whitespace_pattern": "\\n[ \\t]{0,16}|[ ]{1,2}",
    # None by number: a name that is written in two ways would be another one to the grammar, but not to a reader.
    "json_allowed_escapes": 'nrbtf\\"',
}
"""Of grammars of JSON."""

_ANYTHING = "/(?s:.*)/"
_NAMES_NOTHING = frozenset({"type", "properties", "required", "title", "description", "$schema"})
"""Keys of a schema that say of no member, where they name none, what it is."""


def text(value: str) -> str:
    """A literal in a grammar."""
    return json.dumps(value, ensure_ascii=False)


def tool_functions(tools: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Name -> function, of those that have a name."""
    functions: dict[str, dict[str, Any]] = {}
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, dict) and isinstance(name := function.get("name"), str) and name:
            functions[name] = function
    return functions


def json_rule(schema: dict[str, Any] | bool, *, lenient: bool = False) -> str:
    """The grammar's expression for JSON by a schema. `lenient`: what cannot be expressed is ignored, not an error.

    Raises RequestError.
    """
    schema = prepared(schema, lenient=lenient)
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    options: dict[str, Any] = {**JSON_OPTIONS, "lenient": True} if lenient else JSON_OPTIONS
    return f"%json {json.dumps({**schema, 'x-guidance': options}, ensure_ascii=False)}"


def forced_functions(tools: list[dict[str, Any]] | None, choice: str) -> dict[str, dict[str, Any]]:
    """The functions one of which must be called. Raises RequestError."""
    functions = tool_functions(tools or [])
    if choice == "required":
        if not functions:
            raise RequestError(
                "`tool_choice` is 'required', but `tools` has no function with a name.",
                param="tool_choice",
                code="no_tools",
            )
        return functions
    name = choice.removeprefix("=")
    if name not in functions:
        known = ", ".join(sorted(functions)) or "none"
        raise RequestError(
            f"`tool_choice` names the function {name[:100]!r}, which is not among `tools` ({known[:500]}).",
            param="tool_choice",
            code="unknown_tool",
        )
    return {name: functions[name]}


def calls_grammar(layout: Layout, functions: dict[str, dict[str, Any]], single: bool, opened: bool, mark: Mark) -> str:
    """A grammar of a call of one of `functions`, or unless `single` of several.

    `opened`: the prompt ends within the thoughts.
    """
    rules = _calls_rules(layout, functions, single, mark)
    return "\n".join([*start_rules(layout, opened, mark, calls=True), *rules, "answer: calls"])


def _calls_rules(layout: Layout, functions: dict[str, dict[str, Any]], single: bool, mark: Mark) -> list[str]:
    """Rules of which `calls` stands for calls of `functions`."""
    rules = _CallRules(layout, mark)
    quote = GEMMA_QUOTES.get(layout.calls)
    lines = [] if quote is None else shared_rules(mark(quote))
    for index, (name, function) in enumerate(functions.items()):
        schema = function.get("parameters")
        if not isinstance(schema, dict | bool) or _has_no_parameters(schema):
            schema = {"properties": {}, "additionalProperties": False}
        schema = {**(schema if isinstance(schema, dict) else {}), "type": "object"}
        lines.append(f"call{index}: {rules.call(name, f'arguments{index}')}")
        if quote is not None:
            braces = BraceRules(f"arguments{index}", mark(quote), schema, bool(function.get("strict")), json_rule)
            lines += [f"arguments{index}: {braces.start}", *braces.lines]
            continue
        if layout.calls in DSML:
            tags = ParameterRules(
                f"arguments{index}", mark(layout.markers[0]), schema, bool(function.get("strict")), json_rule
            )
            lines += [f"arguments{index}: {tags.start}", *tags.lines]
            continue
        lines.append(f"arguments{index}: {json_rule(schema, lenient=not function.get('strict'))}")
    lines.append("call: " + " | ".join(f"call{index}" for index in range(len(functions))))
    most = 1 if single or layout.calls == "harmony" else MAX_CALLS
    more = f"({rules.between} call){{0,{most - 1}}}" if most > 1 else ""
    lines.append(f"calls: {rules.before} call {more} {rules.after}")
    return lines


def _has_no_parameters(schema: dict[str, Any] | bool) -> bool:
    """Does it name none? Then none are meant, though JSON Schema would allow any."""
    if not isinstance(schema, dict):
        return not schema
    names = schema.get("properties") or schema.get("required")
    return not names and schema.keys() <= _NAMES_NOTHING and schema.get("type", "object") == "object"


class _CallRules:
    """How one layout writes calls, as expressions of the grammar."""

    def __init__(self, layout: Layout, mark: Mark) -> None:
        self._kind, self._mark = layout.calls, mark
        self.before = self.after = ""
        self.between = text("\n")
        if self._kind == "llama3":
            self.between = text("; ")
        elif self._kind == "mistral":
            self.before, self.between, self.after = f'{mark("[TOOL_CALLS]")} "["', '", "', '"]"'
        elif self._kind in LISTS:
            opening, *closing = map(mark, LISTS[self._kind])
            self.before, self.between, self.after = f'{opening} "["', '", "', " ".join(['"]"', *closing])
        elif self._kind == "mistral_args" or self._kind in GEMMA_QUOTES:
            self.between = ""
        elif self._kind in DSML:
            tag = mark(Layout(self._kind).markers[0]), text(f"{DSML[self._kind]}>")
            self.before, self.between = f'"<" {tag[0]} {tag[1]} "\\n"', ""
            self.after = f'"</" {tag[0]} {tag[1]}'
        elif self._kind.startswith("deepseek"):
            self.before, self.after = mark(DEEPSEEK[0]), mark(DEEPSEEK[4])
            self.between = '"\\n"' if self._kind == "deepseek" else ""

    def call(self, name: str, arguments: str) -> str:
        """A call of `name`; `arguments` is the rule of its arguments."""
        mark = self._mark
        if self._kind == "hermes":
            begin = text('\n{"name": ' + text(name) + ', "arguments": ')
            return f'{mark("<tool_call>")} {begin} {arguments} "}}\\n" {mark("</tool_call>")}'
        if self._kind in GEMMA_QUOTES:
            opening, closing, *_ = Layout(self._kind).markers
            return f"{mark(opening)} {text(f'call:{name}')} {arguments} {mark(closing)}"
        if self._kind in DSML:
            tag = mark(Layout(self._kind).markers[0])
            return f'"<" {tag} {text(f"""invoke name="{name}">""")} "\\n" {arguments} "</" {tag} "invoke>\\n"'
        if self._kind == "mistral_args":
            return f"{mark('[TOOL_CALLS]')} {text(name)} {mark('[ARGS]')} {arguments}"
        if self._kind == "deepseek":
            fence = text(f"{name}\n```json\n")
            return (
                f'{mark(DEEPSEEK[1])} "function" {mark(DEEPSEEK[2])} {fence} {arguments} "\\n```" {mark(DEEPSEEK[3])}'
            )
        if self._kind == "deepseek_plain":
            return f"{mark(DEEPSEEK[1])} {text(name)} {mark(DEEPSEEK[2])} {arguments} {mark(DEEPSEEK[3])}"
        if self._kind == "harmony":
            channel, message = mark("<|channel|>"), mark("<|message|>")
            head = text(f"commentary to=functions.{name} ")
            return f'{channel} {head} {mark("<|constrain|>")} "json" {message} {arguments}'
        key = "parameters" if self._kind in ("llama3", "command") else "arguments"
        naming = "tool_name" if self._kind == "command" else "name"
        return f'{text("{" + text(naming) + ": " + text(name) + ", " + text(key) + ": ")} {arguments} "}}"'


def start_rules(layout: Layout | None, opened: bool, mark: Mark, *, calls: bool = False) -> list[str]:
    """Rules for `start`, which is `answer` after what the layout may have before it. `layout` None: nothing."""
    if layout is None:
        return ["start: answer"]
    if layout.calls == "harmony":
        channel, message, end = mark("<|channel|>"), mark("<|message|>"), mark("<|end|>")
        thoughts = f'{channel} "analysis" {message} {_ANYTHING} {end} {mark("<|start|>")} "assistant"'
        final = "answer" if calls else f'{channel} "final" {message} answer'
        return [f"start: ({thoughts})? {final}"]
    if layout.thoughts is None:
        return ["start: answer"]
    opening, closing = layout.thoughts
    end = mark(closing)
    gap = "/[ \\n]{0,4}/"
    if end.startswith("<["):
        inner = [f"thoughts: {_ANYTHING} {end}"]
    else:
        inner = [f"thoughts[suffix={text(closing)}]: {_ANYTHING}"]
    rest = f"thoughts {gap} answer"
    return [f"start: {rest}" if opened else f"start: answer | {_opening(opening, mark)} {rest}", *inner]


def _opening(tag: str, mark: Mark) -> str:
    """The tag before thoughts; of some only the beginning is a token."""
    token, space, rest = tag.partition(">")
    return f"{mark(token + space)} {text(rest)}" if rest else mark(tag)


def answer_grammar(
    constraint: Constraint,
    layout: Layout | None,
    opened: bool,
    mark: Mark,
    rules: Callable[[str], str],
    functions: dict[str, dict[str, Any]],
) -> str:
    """A grammar of an answer as `constraint` has it, or of calls of `functions` instead, if there are any.

    `rules`: llama.cpp's grammar -> rules of ours, from `form` on. Raises RequestError.
    """
    lines = start_rules(layout, opened, mark)
    lines.append("answer: form")
    if functions and layout is not None and layout.calls != "harmony":
        lines[-1] = "answer: form | calls"
        lines += _calls_rules(layout, functions, False, mark)
    if constraint.kind == "grammar":
        return "\n".join([*lines, rules(constraint.text)])
    schema: Any = {"type": "object"}
    if constraint.kind == "json_schema":
        try:
            schema = json.loads(constraint.text)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"The JSON schema is no JSON: {error}.", code="bad_schema") from error
        if not isinstance(schema, dict | bool):
            raise RequestError("The JSON schema must be an object.", code="bad_schema")
    return "\n".join([*lines, f"form: {json_rule(schema)}"])
