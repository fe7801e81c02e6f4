"""What a conversation is to every dialect: from a dialect's own words to the messages that the template sees.

The same conversation gives the same messages whatever dialect it comes in, so that it is the same prompt and shares
its blocks. Knows no dialect.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import msgspec

from ..errors import RequestError
from ..frames.worker import Constraint, Generate
from . import fields

_MOST_LOOKS = 100  # at parts of one function's parameters, for whether they are an object


def joined(texts: Sequence[str]) -> str | None:
    """Texts of one message's parts, as the OpenAI dialect joins them; None for none."""
    return "\n".join(texts) if texts else None


def function_tool(
    name: str, description: str | None, parameters: dict[str, Any] | None, strict: bool | None = None
) -> dict[str, Any]:
    """A tool in OpenAI's form, its keys in the order in which OpenAI's clients write them."""
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    if parameters is not None:
        function["parameters"] = parameters
    if strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def without_strict(tools: Sequence[dict[str, Any]] | None) -> tuple[list[dict[str, Any]] | None, list[str]]:
    """Tools in OpenAI's form as templates see them, and the names of the `strict` ones: how closely calls are kept to
    their schemas is no part of a prompt."""
    found, strict = [], []
    for tool in tools or []:
        function = tool["function"]
        if function.get("strict"):
            strict.append(str(function["name"]))
        if "strict" in function:
            tool = {**tool, "function": {key: value for key, value in function.items() if key != "strict"}}
        found.append(tool)
    return found or None, strict


def check_parameters(where: str, schema: Any) -> None:
    """What a function takes, at `where`, is an object with a member for each parameter. Raises RequestError."""
    if schema is None:
        return
    if not isinstance(schema, dict):
        raise RequestError(f"`{where}` must be object.", param=where, code="wrong_type")
    if not _may_be_object(schema, schema, itertools.count()):
        raise unsupported(where, f"`{where}` must be a JSON schema of an object: the parameters by name.")


def _may_be_object(schema: Any, root: dict[str, Any], looks: Iterator[int]) -> bool:
    """Whether it allows one as far as its types tell, where references and choices are not too many."""
    if not isinstance(schema, dict) or next(looks) > _MOST_LOOKS:
        return True
    kinds = schema.get("type", "object")
    values = [schema["const"]] if "const" in schema else schema.get("enum", [{}])
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        return False
    if isinstance(values, list) and not any(isinstance(value, dict) for value in values):
        return False
    must = schema.get("allOf", [])
    may = [choice for key in ("anyOf", "oneOf") if isinstance(choice := schema.get(key), list) and choice]
    parts = [*(must if isinstance(must, list) else []), _referred(schema.get("$ref"), root)]
    return all(_may_be_object(part, root, looks) for part in parts) and all(
        any(_may_be_object(part, root, looks) for part in choice) for choice in may
    )


def _referred(reference: Any, root: dict[str, Any]) -> Any:
    """What `#/$defs/name` and the like name; None if that is not known here."""
    at: Any = root
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    for name in reference[2:].split("/"):
        at = at.get(name) if isinstance(at, dict) else None
    return at


def tool_call(ident: str | None, name: str, arguments: Any) -> dict[str, Any]:
    """A call in an assistant's message, as templates know it. `arguments`: an object, or the text of one."""
    function = {"name": name, "arguments": arguments}
    return {**({} if ident is None else {"id": ident}), "type": "function", "function": function}


def tool_names(tools: Sequence[dict[str, Any]] | None) -> list[str]:
    """Of tools in OpenAI's form."""
    return [str(tool.get("function", {}).get("name", "")) for tool in tools or []]


def checked_choice(choice: str, tools: Sequence[dict[str, Any]] | None, param: str = "tool_choice") -> str:
    """`Generate.tool_choice`, if it can be kept. Raises RequestError."""
    if choice in ("auto", "none"):
        return choice
    names = tool_names(tools)
    if not names:
        raise RequestError(f"`{param}` asks for a call, but `tools` has none.", param=param, code="out_of_range")
    if choice.startswith("=") and choice[1:] not in names:
        raise RequestError(
            f"`{param}` names {choice[1:][:60]!r}, which is not among `tools`: {', '.join(names)[:300]}.",
            param=param,
            code="out_of_range",
        )
    return choice


def allowed_tools(
    choice: dict[str, Any],
    tools: Sequence[dict[str, Any]] | None,
    hosted: Container[str] = (),
    stand_for: Callable[[dict[str, Any]], list[str] | str | None] = lambda tool: None,
) -> tuple[str, list[str]]:
    """`Generate.tool_choice` and `allowed_tools` of a `tool_choice` of that type, in either of OpenAI's forms.

    All of `tools` stay in the prompt, so that its beginning stays the same whichever are allowed. `hosted`: types
    of tools that were offered but left out of `tools`, and so here. `stand_for`: the names in `tools` of what a
    dialect names in another way, one that should be there and is not, None for what it does not know. Raises
    RequestError.
    """
    given = choice.get("allowed_tools", choice)
    where = "tool_choice.allowed_tools" if "allowed_tools" in choice else "tool_choice"
    mode, listed = (given.get("mode", "auto"), given.get("tools")) if isinstance(given, dict) else (None, None)
    if mode not in ("auto", "required"):
        raise RequestError(f"`{where}.mode` must be auto or required.", param=f"{where}.mode", code="unsupported_value")
    if not isinstance(listed, list) or not listed:
        raise RequestError(
            f"`{where}.tools` must be a list of tools, of one at least.", param=f"{where}.tools", code="wrong_type"
        )
    if len(listed) > fields.MAX_TOOLS:  # as many as there may be in all
        raise RequestError(
            f"`{where}.tools` must have at most {fields.MAX_TOOLS} items.", param=f"{where}.tools", code="out_of_range"
        )
    names: list[str] = []
    for index, tool in enumerate(listed):
        if isinstance(tool, dict) and (known := stand_for(tool)) is not None:
            if isinstance(known, str):
                known = [checked_choice(f"={known}", tools, f"{where}.tools[{index}]")[1:]]
            names.extend(known)
            continue
        kind = tool.get("type", "function") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind in hosted:
            continue
        if kind == "custom" and tool.get("name") in tool_names(tools):
            kind = "function"  # as which it is offered
        if isinstance(kind, str) and kind != "function":
            raise RequestError(
                f"`{where}.tools[{index}]` is of type {kind[:40]!r}, and no such tool is among `tools`.",
                param=f"{where}.tools[{index}].type",
                code="unsupported_value",
            )
        function = tool.get("function", tool) if kind == "function" else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not name:
            form = '"name": ...' if where == "tool_choice" else '"function": {"name": ...}'
            raise RequestError(
                f'`{where}.tools[{index}]` must name a function: {{"type": "function", {form}}}.',
                param=f"{where}.tools[{index}]",
                code="unsupported_value",
            )
        names.append(checked_choice(f"={name}", tools, f"{where}.tools[{index}]")[1:])
    if not names and mode == "required":
        raise RequestError(
            f"`{where}` asks for a call, but what it allows has no function.", param=where, code="out_of_range"
        )
    if not names:
        return "none", []
    return mode, list(dict.fromkeys(names))


def schema_constraint(schema: Any, where: str, param: str = "") -> Constraint:
    """A reply that must fit a JSON schema, which stands at `where`. `param`: the field to blame for what cannot be
    enforced, "" for the same. Raises RequestError."""
    if not isinstance(schema, dict):
        raise RequestError(f"`{where}` must be object.", param=where, code="wrong_type")
    fields.check_plain(where, schema)
    return Constraint("json_schema", msgspec.json.encode(schema).decode(), param or where)


def unsupported(param: str, message: str) -> RequestError:
    """What would change the reply and is not done."""
    return RequestError(message, param=param, code="unsupported_value")


def missing(param: str) -> RequestError:
    return RequestError(f"`{param}` is missing.", param=param, code="missing_field")


def check_call(generate: Generate) -> None:
    """Refuse what could not reach the worker or be done there. Raises RequestError."""
    check_form(generate)
    fields.check_plain("tools", generate.tools)
    for index, message in enumerate(generate.messages or []):
        if message.tool_calls:
            fields.check_plain(f"messages[{index}]", message.tool_calls)
    fields.check_plain("chat_template_kwargs", generate.template_kwargs)


def check_form(generate: Generate) -> None:
    """Refuse what no reply can be at once. Raises RequestError."""
    form = generate.constraint
    if form is not None and form.kind == "grammar" and generate.tool_choice not in ("auto", "none"):
        raise RequestError(
            "`grammar` and a `tool_choice` that asks for a call exclude each other: send one of them.",
            param="grammar",
            code="conflict",
        )
