"""Tool calls as a model of a layout writes them, for templates that do not do it: the reverse of `reply.py`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from .layout import LISTS, Layout


def written_calls(functions: Sequence[dict[str, Any]], layout: Layout) -> str:
    """Calls with `name` and `arguments`. Layouts whose templates show calls are not asked: JSON, a line each."""
    objects = [json.dumps(function, ensure_ascii=False) for function in functions]
    if layout.calls in LISTS:
        opening, *closing = LISTS[layout.calls]
        return f"{opening}[{', '.join(objects)}]{''.join(closing)}"
    if layout.calls == "lfm":
        opening, closing_mark, *_ = layout.markers
        return f"{opening}[{', '.join(map(_python_call, functions))}]{closing_mark}"
    return "\n".join(objects)


def _python_call(function: dict[str, Any]) -> str:
    arguments = function.get("arguments")
    pairs = arguments.items() if isinstance(arguments, dict) else ()
    return f"{function.get('name', '')}({', '.join(f'{key}={_python_value(value)}' for key, value in pairs)})"


def _python_value(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
