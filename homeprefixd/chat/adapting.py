"""What to change in messages that a chat template does not take, so that apps need not know which model they talk to.

A template may know no system messages or one at the beginning only, want roles that alternate, one call at a time, or
arguments that are an object.
Each change touches only what is in its way, so that a conversation that grows keeps its beginning. Pure data; knows
nothing of templates.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from ..errors import RequestError

Messages = list[dict[str, Any]]
"""As templates see them."""

_REFUSALS = frozenset({"template_refused", "template_failed"})


def adapted(messages: Messages, render: Callable[[Messages], str], seconds: float = math.inf) -> str:
    """`render` of the messages, or of the least changed ones that it takes. Raises what it raised at first.

    One complaint may have several causes, so that a change alone need not show: all sets of them are tried, until
    `seconds` have passed.
    """
    began = time.monotonic()
    try:
        return render(messages)
    except RequestError as error:
        if error.code not in _REFUSALS:
            raise
        first = error
    tried = [messages]
    for count in range(1, len(_CHANGES) + 1):
        for changes in itertools.combinations(_CHANGES, count):
            changed = functools.reduce(lambda messages, change: change(messages), changes, messages)
            if changed in tried:
                continue
            if time.monotonic() - began > seconds:
                raise first
            tried.append(changed)
            try:
                return render(changed)
            except RequestError as error:
                if error.code not in _REFUSALS:
                    raise
    raise first


def objects_for_arguments(messages: Messages) -> Messages:
    """A call whose arguments are no JSON object, as one that was cut short: an object with the text as it was."""

    def whole(call: dict[str, Any]) -> dict[str, Any]:
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(text := function.get("arguments"), str):
            return call
        return {**call, "function": {**function, "arguments": {"arguments": text}}}

    return [
        {**message, "tool_calls": [whole(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def one_call_at_a_time(messages: Messages) -> Messages:
    """Several calls in one message: one after the other, each with its result."""
    changed: Messages = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            changed.append(message)
            continue
        begin = at
        while at < len(messages) and messages[at]["role"] == "tool":
            at += 1
        results = _Results(messages[begin:at], {call.get("id") for call in calls})
        for index, call in enumerate(calls):
            head = message if index == 0 else {"role": message["role"], "content": ""}
            changed.append({**head, "tool_calls": [call]})
            if (own := results.take(call.get("id"))) is not None:
                changed.append(own)
        changed += results.rest()
    return changed


class _Results:
    """Results of several calls, in their order; each is taken once. `idents`: of the calls."""

    def __init__(self, results: Messages, idents: set[Any]) -> None:
        self._left = dict(enumerate(results))
        self._of_call: defaultdict[Any, deque[int]] = defaultdict(deque)
        self._of_none: deque[int] = deque()
        for number, result in self._left.items():
            ident = result.get("tool_call_id")
            (self._of_call[ident] if ident in idents else self._of_none).append(number)

    def take(self, ident: Any) -> dict[str, Any] | None:
        """That of the call `ident`, else the first one that is of none of the calls by its id; None if there is none.

        Never one of another call: the model would take it for this one's.
        """
        waiting = self._of_call.get(ident) or self._of_none
        return self._left.pop(waiting.popleft()) if waiting else None

    def rest(self) -> Messages:
        """Those that no call was there for."""
        return list(self._left.values())


def system_first(messages: Messages) -> Messages:
    """One system message at the beginning, and none later: those are the user's, where they stand.

    Moved to the beginning, they would change what all that came before is computed from.
    """
    count = next((at for at, message in enumerate(messages) if message["role"] != "system"), len(messages))
    first, later = messages[:count], messages[count:]
    if count > 1:
        first = [{**first[0], "content": "\n\n".join(filter(None, (message["content"] for message in first)))}]
    return [*first, *({**message, "role": "user"} if message["role"] == "system" else message for message in later)]


def system_within_user(messages: Messages) -> Messages:
    """What the system says at the beginning becomes the beginning of what the user says, all later the user's."""
    messages = system_first(messages)
    if not messages or messages[0]["role"] != "system":
        return messages
    system, rest = messages[0], messages[1:]
    if rest and rest[0]["role"] == "user":
        return [{**rest[0], "content": f"{system['content']}\n\n{rest[0]['content']}"}, *rest[1:]]
    return [{**system, "role": "user"}, *rest]


def alternating(messages: Messages) -> Messages:
    """Messages of the user's, or of the assistant's without calls, that follow each other become one."""
    changed: Messages = []
    parts: list[Messages] = []  # of each of `changed`
    for message in messages:
        before = changed[-1] if changed else None
        if (
            before is not None
            and message["role"] == before["role"]
            and message["role"] in ("user", "assistant")
            and "tool_calls" not in before
        ):
            changed[-1] = {**before, **message}
            parts[-1].append(message)
        else:
            changed.append(message)
            parts.append([message])
    for number, own in enumerate(parts):
        if len(own) > 1:
            texts = ("content", "reasoning_content")
            said = {name: "\n\n".join(filter(None, (one.get(name) for one in own))) for name in texts}
            changed[number] |= {name: text for name, text in said.items() if name in changed[number]}
    return changed


_CHANGES = (objects_for_arguments, one_call_at_a_time, system_first, system_within_user, alternating)
"""In the order in which they are made."""
