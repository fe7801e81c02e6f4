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
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from ..clients import app_name
from ..expressions import Expression, UnfitError, joined
from ..frames.worker import TOO_SLOW, Generate, Message, StableRules
from .volatile_lines import MOST_LINES, volatile_lines

BILLING_HEADER = re.compile(
    r"\bx-(?:[\w-]+-)?billing-header:(?:[^\S\n]*[\w.-]+=[^\s;]*[^\S\n]*(?:;|(?=\n|\Z)))+", re.IGNORECASE
)
"""A coding agent's header: items such as its version, and a number that is new with each request. What else is said of
billing is somebody's text.
"""

_BILLING_LINE = re.compile(rf"\s*{BILLING_HEADER.pattern}[^\S\n]*(?:\n(?:\r?\n)*|\Z)", re.IGNORECASE)

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
        first = leading(messages)
        head = _each_system(messages[:first], drop_billing_line, counts, "drop_billing_line", emptied=False)
        messages = head + messages[first:]
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


def leading(messages: Sequence[Message]) -> int:
    """How many system messages come before all others: what an app says of itself. Later ones are of their place."""
    return next((i for i, message in enumerate(messages) if message.role != "system"), len(messages))


def drop_billing_line(text: str) -> tuple[str, int]:
    """The text without the lines of a vendor's billing that it begins with, and how many there were."""
    at = count = 0
    while (found := _BILLING_LINE.match(text, at)) is not None:
        at, count = found.end(), count + 1
    return text[at:], count


def move_lines(
    messages: list[Message], rules: StableRules, counts: Counter[str], limit: float = TIME_LIMIT
) -> list[Message]:
    """What changes from request to request goes from the leading system messages to the beginning of the last user
    message; where an app says anew what changes later in the chat, to that of the last one before it.

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
    first = leading(messages)
    moved: list[str] = []
    changed: list[Message] = []
    rules: Counter[str] = Counter()
    for message in messages[:first]:
        text, found = _taken_out(message.content or "", expression, volatile, rules)
        moved += found
        changed.append(msgspec.structs.replace(message, content=text) if found else message)
    until = first
    while moved and until < len(messages) and not _says_anew(messages[until], expression, volatile):
        until += 1
    last = max((i for i in range(first, until) if messages[i].role == "user"), default=-1)
    if last < 0 or not moved:
        return messages
    counts.update(rules)
    asked = messages[last]
    text = "\n".join([_HEAD, *moved, "", asked.content or ""])
    asked = msgspec.structs.replace(asked, content=text)
    # One is left, though empty: without any, templates write a system message of their own.
    changed = [message for message in changed if message.content] or changed[:1]
    return [*changed, *messages[first:last], asked, *messages[last + 1 :]]


def _says_anew(message: Message, expression: Expression | None, volatile: bool) -> bool:
    """Whether a message has lines of its own that the rules know: behind it, what was moved from the front is past."""
    if message.role != "system" or not message.content:
        return False
    return bool(_taken_out(message.content, expression, volatile, Counter())[1])


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
            content = _without(content, found)
    return content, moved


def _without(text: str, spans: Sequence[tuple[int, int]]) -> str:
    """The text without these, of which there is one at least. Where one was, two line ends are left at most, and none
    at the beginning or the end of the text; all else is as it was.
    """
    left = text[: spans[0][0]]
    for (_, end), (start, _) in zip(spans, [*spans[1:], (len(text), 0)], strict=True):
        piece = text[end:start]
        behind = piece.lstrip("\n")
        if not behind:
            left += piece
            continue
        before = left.rstrip("\n")
        ends = len(left) - len(before) + len(piece) - len(behind)
        left = before + "\n" * min(ends, 2) * bool(before) + behind
    return left if text[spans[-1][1] :].strip("\n") else left.rstrip("\n")


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
