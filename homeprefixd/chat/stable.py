"""Rules that keep prompts stable: what changes with each request is taken out of the way of what does not.

Pure functions on messages and tools, before the template renders them. A rule changes nothing but what it is for, and
what it moves is still in the prompt.
"""

from __future__ import annotations

import datetime
import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec

from ..clients import app_name
from ..expressions import Expression, UnfitError, joined
from ..frames.worker import TOO_SLOW, Generate, Message, StableRules
from .volatile_lines import MOST_LINES, volatile_lines

_BILLING = re.compile(r"^[^\S\n]*x-[\w-]*billing[\w-]*:[^\n]*(?:\n|\Z)", re.IGNORECASE | re.MULTILINE)
"""A coding agent's header line in the system message: its version, and a number that is new with each request."""

_HEAD = "Current values:"

TIME_LIMIT = 0.25
"""Seconds of processor time that all expressions of the rules may take on one chat. Other streams go on meanwhile."""

_SLOW_IN_A_ROW = 3  # then an expression is used no more
_SAID_EVERY = 60.0  # s

logger = logging.getLogger(__name__)


class Stabilizer:
    """The rules in force, and what they do to each chat. May be used from any thread.

    A rule whose expression was too slow several times in a row is left out until rules are set again.
    """

    def __init__(self, rules: StableRules, timer: Callable[[], float] = time.monotonic) -> None:
        """`timer`: s."""
        self._timer = timer
        self._lock = threading.Lock()
        self.rules = rules
        self.clock_in_template = False  # does the model's template ask for the time?

    @property
    def rules(self) -> StableRules:
        return self._rules

    @rules.setter
    def rules(self, rules: StableRules) -> None:
        with self._lock:
            self._rules = rules
            self._slow: Counter[str] = Counter()  # expression -> how often it was too slow since it last was not
            self._off: frozenset[str] = frozenset()
            self._said: dict[str, float] = {}  # expression -> when

    def __call__(self, generate: Generate) -> tuple[Generate, dict[str, int]]:
        """As `apply`."""
        with self._lock:
            rules, off = self._rules, self._off
        own = for_client(rules, generate.client)
        changed, counts = apply(own, generate, clock_in_template=self.clock_in_template, off=off)
        if (own.custom or own.move) and generate.messages is not None:
            self._note(rules, own, counts)
        return changed, counts

    def _note(self, rules: StableRules, own: StableRules, counts: Mapping[str, int]) -> None:
        with self._lock:
            if rules is not self._rules:
                return
            for name, expression in (("custom", own.custom), ("move", own.move)):
                if not expression or expression in self._off:
                    continue
                if not counts.get(name + TOO_SLOW):
                    self._slow[expression] = 0
                    continue
                self._slow[expression] += 1
                now = self._timer()
                if self._slow[expression] >= _SLOW_IN_A_ROW:
                    self._off |= {expression}
                    logger.warning(
                        "stable.%s was too slow %d times in a row: it is off until the configuration is read again."
                        " Write an expression without nested repeats, such as (a+)+",
                        name,
                        self._slow[expression],
                    )
                elif now - self._said.get(expression, -_SAID_EVERY) >= _SAID_EVERY:
                    self._said[expression] = now
                    logger.warning("stable.%s was too slow for a prompt: that was left as it came", name)

    def now(self) -> datetime.datetime:
        """What templates shall take for now."""
        return clock(self.rules)()


def apply(
    rules: StableRules, generate: Generate, *, clock_in_template: bool = False, off: Collection[str] = ()
) -> tuple[Generate, dict[str, int]]:
    """A chat with the rules applied, and how often each was; the same object where none has changed it.

    `clock_in_template`: the model's template asks for the time. A rule whose expression is too slow is not applied,
    and counted with TOO_SLOW behind its name. `off`: expressions that are left out.
    """
    if generate.messages is None:
        return generate, {}
    counts: Counter[str] = Counter()
    if rules.freeze_clock and clock_in_template:
        counts["freeze_clock"] += 1
    rules = for_client(rules, generate.client)
    messages, tools = list(generate.messages), generate.tools
    if rules.drop_billing_line:
        messages = _each_system(messages, drop_billing_line, counts, "drop_billing_line", emptied=False)
    left_out = {name: "" for name in ("custom", "move") if getattr(rules, name) in off}
    rules = msgspec.structs.replace(rules, **left_out)
    share = TIME_LIMIT / max(1, bool(rules.custom) + bool(rules.move))
    if rules.custom:
        try:
            messages = _each_system(messages, Expression(rules.custom, share).removed, counts, "custom")
        except UnfitError:
            del counts["custom"]
            counts["custom" + TOO_SLOW] = 1
    if rules.move_volatile_line or rules.move:
        messages = move_lines(messages, rules, counts, share)
    if tools and rules.sort_tools:
        tools = _counted(tools, sort_tools(tools), counts, "sort_tools")
    if tools and rules.sort_keys:
        tools = _counted(tools, [sort_keys(tool) for tool in tools], counts, "sort_keys")
    if all(name == "freeze_clock" or name.endswith(TOO_SLOW) for name in counts):
        return generate, dict(counts)
    return msgspec.structs.replace(generate, messages=messages, tools=tools), dict(counts)


def for_client(rules: StableRules, client: str) -> StableRules:
    """What counts for one client: the rules, if they are for its app, and those that are for it alone."""
    if not rules.apps and not rules.per_app:
        return rules
    if rules.apps and not any(name.lower() in client.lower() for name in rules.apps):
        rules = StableRules(drop_billing_line=False, freeze_clock=rules.freeze_clock, per_app=rules.per_app)
    own: dict[str, Any] = {"apps": (), "per_app": ()}
    name = app_name(client).lower()
    for one in rules.per_app:
        if one.app.lower() == name:
            switches = {"drop_billing_line", "move_volatile_line", "sort_tools", "sort_keys"}
            own |= {field: value for field in switches if (value := getattr(one, field)) is not None}
            own |= {"custom": joined(rules.custom, one.custom), "move": joined(rules.move, one.move)}
    return msgspec.structs.replace(rules, **own)


def _each_system(
    messages: list[Message],
    change: Callable[[str], tuple[str, int]],
    counts: Counter[str],
    rule: str,
    *,
    emptied: bool = True,
) -> list[Message]:
    """`emptied` False: a message of which nothing is left goes."""
    changed: list[Message] = []
    for message in messages:
        if message.role == "system" and message.content:
            text, times = change(message.content)
            if times:
                counts[rule] += times
                if not text and not emptied:
                    continue
                message = msgspec.structs.replace(message, content=text)
        changed.append(message)
    return changed


def drop_billing_line(text: str) -> tuple[str, int]:
    """The text without lines of a vendor's billing, and how many there were."""
    left, count = _BILLING.subn("", text)
    return left.lstrip("\n") if count and _BILLING.match(text) else left, count


def move_lines(
    messages: list[Message], rules: StableRules, counts: Counter[str], limit: float = TIME_LIMIT
) -> list[Message]:
    """What changes from request to request goes from system messages to the beginning of the last user message.

    `limit`: seconds that the expression may take; if it takes more, what it finds stays where it is.
    """
    found: Counter[str] = Counter()
    try:
        expression = Expression(rules.move, limit, multiline=True) if rules.move else None
        moved = _move_lines(messages, expression, rules.move_volatile_line, found)
    except UnfitError:
        found = Counter({"move" + TOO_SLOW: 1})
        moved = _move_lines(messages, None, rules.move_volatile_line, found)
    counts.update(found)
    return moved


def _move_lines(
    messages: list[Message], expression: Expression | None, volatile: bool, counts: Counter[str]
) -> list[Message]:
    """Raises UnfitError."""
    last = max((i for i, message in enumerate(messages) if message.role == "user"), default=-1)
    if last < 0:
        return messages
    moved: list[str] = []
    changed: list[Message] = []
    for message in messages:
        if message.role == "system" and message.content:
            text, found = _taken_out(message.content, expression, volatile, counts)
            if found:
                moved += found
                message = msgspec.structs.replace(message, content=text)
        changed.append(message)
    if not moved:
        return messages
    asked = changed[last]
    text = "\n".join([_HEAD, *moved, "", asked.content or ""])
    changed[last] = msgspec.structs.replace(asked, content=text)
    return changed


def moved_lines(content: str) -> str:
    """What the rules have put before a message's own text, with the empty line behind it; "" if there is none."""
    head, end, _rest = content.partition("\n\n")
    return head + end if content.startswith(f"{_HEAD}\n") and end else ""


def taken_out(content: str, rules: StableRules, counts: Counter[str]) -> tuple[str, list[str]]:
    """A system message without what the rules move, and that. Raises UnfitError."""
    expression = Expression(rules.move, TIME_LIMIT, multiline=True) if rules.move else None
    return _taken_out(content, expression, rules.move_volatile_line, counts)


def _taken_out(
    content: str, expression: Expression | None, volatile: bool, counts: Counter[str]
) -> tuple[str, list[str]]:
    finders: list[tuple[str, Callable[[str], list[tuple[int, int]]]]] = []
    if expression is not None:
        finders.append(("move", lambda text: expression.spans(text, MOST_LINES + 1)))
    if volatile:
        finders.append(("move_volatile_line", lambda text: [(line.start, line.end) for line in volatile_lines(text)]))
    moved: list[str] = []
    for name, find in finders:
        found = [(start, end) for start, end in find(content) if content[start:end].strip()]
        if 0 < len(found) <= MOST_LINES:
            counts[name] += len(found)
            moved += [content[start:end].strip() for start, end in found]
            ends = [0, *(end for _, end in found)]
            kept = [content[at:start] for at, (start, _) in zip(ends, found, strict=False)]
            content = re.sub(r"\n{3,}", "\n\n", "".join([*kept, content[ends[-1] :]]).strip("\n"))
    return content, moved


def sort_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By name."""

    def name(tool: dict[str, Any]) -> str:
        function = tool.get("function")
        return str(function.get("name", "") if isinstance(function, dict) else tool.get("name", ""))

    return sorted(tools, key=name)


def sort_keys(value: Any) -> Any:
    """JSON with the keys of each object in order. Lists stay as they are."""
    if isinstance(value, dict):
        return {key: sort_keys(value[key]) for key in sorted(value, key=str)}
    return [sort_keys(item) for item in value] if isinstance(value, list) else value


def _counted(
    old: list[dict[str, Any]], new: list[dict[str, Any]], counts: Counter[str], rule: str
) -> list[dict[str, Any]]:
    if msgspec.json.encode(old, enc_hook=str) == msgspec.json.encode(new, enc_hook=str):  # order counts
        return old
    counts[rule] += 1
    return new


Clock = Callable[[], datetime.datetime]


def clock(rules: StableRules, now: Clock = datetime.datetime.now) -> Clock:
    """What `strftime_now` of templates shall take for now: frozen to the day, unless the rule is off."""
    if not rules.freeze_clock:
        return now
    return lambda: now().replace(hour=0, minute=0, second=0, microsecond=0)
