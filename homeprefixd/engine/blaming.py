"""Schemas that cannot be compiled: which keyword is to blame, and what is left of a tool's parameters without it.

Found by compiling parts. Belongs to the thread that compiles.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from typing import Any

from ..chat.culprit import Wrong, culprit, loosened, shown
from ..chat.forcing import json_rule
from ..errors import RequestError
from .constraint import Constraints

_PATIENCE = 4.0
"""Seconds for one request's search; the try that is going on then is finished."""

_KEPT = 64  # schemas that were loosened: apps send the same few again and again

REFUSED = "unsupported_schema"
"""The code of a refusal whose reason is in the schema."""


class Blame:
    """For one model's constraints."""

    def __init__(self, constraints: Constraints, patience: float = _PATIENCE) -> None:
        self._constraints, self._patience = constraints, patience
        self._kept: OrderedDict[str, dict[str, Any]] = OrderedDict()

    def named(self, error: RequestError, schema: Any) -> RequestError:
        """The refusal of `schema` with the keyword to blame, if one is."""
        return self._named(error, schema, "", self._wrong(lenient=False))

    def _named(self, error: RequestError, schema: Any, whose: str, wrong: Wrong) -> RequestError:
        """`whose`: the tool whose schema it is."""
        if error.code != REFUSED or not isinstance(schema, dict):
            return error
        try:
            path = culprit(schema, wrong)
        except TimeoutError:
            return error
        if not path:
            return error
        where = shown(path) + (f" of the parameters of {whose[:60]!r}" if whose else "")
        return RequestError(f"{error.message.rstrip('.')} ({where}).", param=error.param, code=error.code)

    def named_in(self, error: RequestError, functions: dict[str, dict[str, Any]]) -> RequestError:
        """As `named`, of the first function that is strict and has such a schema."""
        wrong = self._wrong(lenient=False)
        for name, function in functions.items():
            if function.get("strict"):
                told = self._named(error, function.get("parameters"), name, wrong)
                if told is not error:
                    return told
        return error

    def loosened(self, functions: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Those that are not strict without the keywords because of which they cannot be compiled."""
        found = {}
        wrong = self._wrong(lenient=True)
        for name, function in functions.items():
            schema = function.get("parameters")
            if isinstance(schema, dict) and not function.get("strict"):
                function = {**function, "parameters": self._loosened(schema, wrong)}
            found[name] = function
        return found

    def _loosened(self, schema: dict[str, Any], wrong: Wrong) -> dict[str, Any]:
        text = json.dumps(schema)
        if text not in self._kept:
            try:
                self._kept[text] = loosened(schema, wrong)
            except TimeoutError:
                return {"type": "object"}
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(text)
        return self._kept[text]

    def _wrong(self, *, lenient: bool) -> Wrong:
        deadline = time.monotonic() + self._patience

        def wrong(schema: Any) -> str:
            if time.monotonic() > deadline:
                raise TimeoutError
            try:
                self._constraints.check(f"start: {json_rule(schema, lenient=lenient)}")
            except RequestError as error:
                return error.message
            return ""

        return wrong
