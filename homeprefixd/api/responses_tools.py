"""Tools of `/v1/responses`: what a model is told of them, and how its calls are given back.

To a model all are functions. A `custom` tool has one parameter, its text. One in a namespace, as Codex has for each MCP
server, is called by both names; a client wants them back apart. A namespace's own description is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..errors import RequestError
from . import conversation, fields
from .conversation import missing, unsupported
from .fields import MAX_TOOLS, Tools

HOSTED = (
    "web_search", "file_search", "code_interpreter", "image_generation", "computer", "mcp", "local_shell", "shell",
    "apply_patch", "tool_search",
)  # fmt: skip
"""Beginnings of types of tools that OpenAI runs or has its own words for, and of the items that came of them. A model
that is told of neither answers without."""

_FREE = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
"""Parameters of a `custom` tool, which takes a text."""

_BETWEEN = "__"


class Tool(msgspec.Struct):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: Any = None  # of the text that a `custom` one takes: for the reader, it is not enforced
    tools: Tools[Tool] | None = None  # of a `namespace`


class NamedTool(msgspec.Struct):
    """What `tool_choice` asks for: a function or custom tool, or with `mode` those of `tools` that are allowed."""

    type: str
    name: str | None = None
    namespace: str | None = None
    mode: str | None = None
    tools: list[Any] | None = None
    allowed_tools: Any = None  # `mode` and `tools` as the chat's dialect has them


def one_name(namespace: str | None, name: str) -> str:
    """What a model calls a function by: `mcp__files` and `read` are `mcp__files__read`."""
    if not namespace:
        return name
    return namespace + name if namespace.endswith(_BETWEEN) else f"{namespace}{_BETWEEN}{name}"


@dataclass
class Offered:
    """The tools of a request. All names are those that the model has."""

    functions: list[dict[str, Any]] = field(default_factory=list)
    """In OpenAI's form."""
    custom: set[str] = field(default_factory=set)
    """Those that take a text."""
    spaces: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Those in namespaces -> namespace and name there."""
    hosted: set[str] = field(default_factory=set)
    """Types of those that were left out."""
    names: set[str] = field(default_factory=set)
    by_space: dict[str, list[str]] = field(default_factory=dict)
    """Namespace -> its functions."""
    by_own: dict[str, list[str]] = field(default_factory=dict)
    """Name within a namespace -> the functions that have it."""

    def meant(self, name: str, namespace: str | None) -> str:
        """The function that a client names, with its namespace or without where it is the only one of that name."""
        if namespace:
            return one_name(namespace, name)
        inner = self.by_own.get(name, [])
        return name if name in self.names or len(inner) != 1 else inner[0]

    def stand_for(self, tool: dict[str, Any]) -> list[str] | str | None:
        """The functions that an entry of `allowed_tools` means, in either of OpenAI's forms: all of a namespace, or
        one. Of one that a namespace should have and has not, its name; else None if it is none that is known here."""
        kind = tool.get("type", "function")
        if kind not in ("namespace", "function", "custom"):
            return None
        function = tool.get("function", tool)
        name, space = (function.get("name"), function.get("namespace")) if isinstance(function, dict) else (None, None)
        if not isinstance(name, str):
            return None
        if kind == "namespace":
            return self.by_space.get(name)
        if space:
            known = one_name(str(space), name)
            return [known] if known in self.names else known
        known = self.meant(name, None)
        return [known] if known in self.names else None


def offered(tools: Sequence[Tool] | None) -> Offered:
    """Raises RequestError."""
    found = Offered()
    for where, namespace, tool in _each(tools or (), found):
        if tool.name is None:
            raise missing(f"{where}.name")
        name = one_name(namespace, tool.name)
        if name in found.names and (namespace or name in found.spaces):
            raise RequestError(
                f"`{where}`: there is another tool that a model would call {name[:80]!r}; rename one of them.",
                param=f"{where}.name",
                code="conflict",
            )
        found.names.add(name)
        if len(found.names) > MAX_TOOLS:
            raise RequestError(f"`tools` has more than {MAX_TOOLS} tools.", param="tools", code="out_of_range")
        if namespace:
            found.spaces[name] = namespace, tool.name
            found.by_space[namespace].append(name)
            found.by_own.setdefault(tool.name, []).append(name)
        if tool.type == "custom":
            fields.check_plain(f"{where}.format", tool.format)
            found.custom.add(name)
            found.functions.append(conversation.function_tool(name, tool.description, _FREE, True))
            continue
        conversation.check_parameters(f"{where}.parameters", tool.parameters)
        found.functions.append(conversation.function_tool(name, tool.description, tool.parameters, tool.strict))
    return found


def _each(tools: Sequence[Tool], found: Offered) -> Iterator[tuple[str, str | None, Tool]]:
    """Where each function and custom tool stands, and in which namespace; what else there is goes into `found`."""
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if tool.type in ("function", "custom"):
            yield where, None, tool
        elif tool.type == "namespace":
            if not tool.name:
                raise missing(f"{where}.name")
            found.by_space.setdefault(tool.name, [])
            for number, inner in enumerate(tool.tools or ()):
                at = f"{where}.tools[{number}]"
                if inner.type not in ("function", "custom"):
                    raise _unknown(at, inner.type)
                yield at, tool.name, inner
        elif tool.type.startswith(HOSTED):
            found.hosted.add(tool.type)
        else:
            raise _unknown(where, tool.type)


def _unknown(where: str, kind: str) -> RequestError:
    return unsupported(f"{where}.type", f"`{where}`: tools of type {kind[:40]!r} are not supported here.")


def choice_of(choice: str | NamedTool | None, tools: Offered) -> tuple[str, list[str] | None]:
    """`Generate.tool_choice` and `allowed_tools`. Raises RequestError."""
    functions = tools.functions or None
    if choice is None:
        return "auto", None
    if isinstance(choice, str):
        if choice not in ("auto", "none", "required"):
            raise RequestError(
                "`tool_choice` must be auto, none, required or an object that names a function"
                f' ({{"type": "function", "name": ...}}), not {choice[:40]!r}.',
                param="tool_choice",
            )
        return conversation.checked_choice(choice, functions), None
    if choice.type == "allowed_tools":
        given = {key: item for key, item in msgspec.to_builtins(choice).items() if item is not None}
        return conversation.allowed_tools(given, functions, tools.hosted, tools.stand_for)
    if choice.type not in ("function", "custom"):
        raise unsupported("tool_choice.type", f"`tool_choice` of type {choice.type[:40]!r} is not supported here.")
    if choice.name is None:
        raise missing("tool_choice.name")
    return conversation.checked_choice(f"={tools.meant(choice.name, choice.namespace)}", functions), None
