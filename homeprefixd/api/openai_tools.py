"""OpenAI's dialect, tools of a chat: what may be sent, and which of them must be called."""

from __future__ import annotations

from typing import Any

from ..errors import RequestError
from . import fields
from .conversation import allowed_tools, check_parameters, unsupported


def check_tools(tools: list[dict[str, Any]] | None, functions: list[Any] | None) -> None:
    """Raises RequestError for what could never be called. `functions`: what `tools` was before."""
    if functions:
        raise unsupported("functions", "`functions` is what `tools` was before, and not supported: send `tools`.")
    fields.check_plain("tools", tools)
    for index, tool in enumerate(tools or []):
        where = f"tools[{index}]"
        kind = tool.get("type", "function")
        if kind != "function":
            raise unsupported(
                f"{where}.type", f"`{where}`: only tools of type 'function' are supported, not {str(kind)[:40]!r}."
            )
        function = tool.get("function")
        if not isinstance(function, dict):
            raise RequestError(f"`{where}.function` must be object.", param=f"{where}.function")
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise RequestError(
                f"`{where}.function.name` is missing.", param=f"{where}.function.name", code="missing_field"
            )
        check_parameters(f"{where}.function.parameters", function.get("parameters"))


def tool_choice(
    choice: str | dict[str, Any] | None, tools: list[dict[str, Any]] | None
) -> tuple[str, list[str] | None]:
    """`tool_choice` and `allowed_tools` as the frame has them. Whatever may not be called stays in the prompt all the
    same, so that its prefix stays the same.

    Raises RequestError.
    """
    if choice is None:
        return "auto", None
    if isinstance(choice, str):
        if choice in ("auto", "none", "required"):
            return choice, None
        if choice == "any":  # Mistral's word
            return "required", None
    elif choice.get("type") == "allowed_tools":
        return allowed_tools(choice, tools)
    else:
        function = choice.get("function", choice)
        name = function.get("name") if isinstance(function, dict) else None
        if choice.get("type", "function") == "function" and isinstance(name, str) and name:
            return f"={name}", None
    raise unsupported(
        "tool_choice",
        '`tool_choice` must be \'auto\', \'none\', \'required\', {"type": "function", "function": {"name": ...}} or'
        ' {"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}.',
    )
