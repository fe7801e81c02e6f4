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
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import msgspec

from ..expressions import Expression, UnfitError
from ..frames.worker import TOO_SLOW, Generate, Message, StableRules

_BILLING = re.compile(r"^[^\S\n]*x-[\w-]*billing[\w-]*:[^\n]*(?:\n|\Z)", re.IGNORECASE | re.MULTILINE)
"""A coding agent's header line in the system message: its version, and a number that is new with each request."""

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_MONTH = f"(?:{'|'.join(_MONTHS)})"
_CLOCK = (
    r"(?:\d{1,2}:\d{2}|\d{4}-\d{2}-\d{2}|\d{1,2}[./]\d{1,2}[./]\d{2,4}"
    rf"|\b{_MONTH}[a-z]*\.?\s+\d{{1,2}}\b|\b\d{{1,2}}(?:st|nd|rd|th)?\s+{_MONTH})"
)
_CLOCK_WORD = r"(?:time|date|today|now|clock|datetime|timestamp|uhrzeit|datum|heute)"
_PLACE_WORD = (
    r"(?:you are in (?:the )?area|the user is in"
    r"|(?:current |user'?s? )?(?:area|room|location|weather|temperature"
    r"|session(?: id)?|request(?: id)?|nonce|turn|counter))"
)
_LINE = re.compile(r"^[^\n]{1,240}$", re.MULTILINE)
_NUMBERS = re.compile(r"\d[:./-]\d")
_CLOCK_AT_ALL = re.compile(_CLOCK, re.IGNORECASE)
_TIMED_LINE = re.compile(rf"[^\n]*\b{_CLOCK_WORD}\b[^\n]*{_CLOCK}|[^\n]{{0,40}}{_CLOCK}[^\n]{{0,40}}$", re.IGNORECASE)
_PLACE_LINE = re.compile(rf"[#*\-\s]*{_PLACE_WORD}\b", re.IGNORECASE)
"""A short line that says what time it is, where somebody is, or what the weather is like."""

_MOST_LINES = 8  # that are moved: more are no stray lines, but a list with times in it
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
            self._slow: Counter[str] = Counter()  # rule -> how often it was too slow since it last was not
            self._off: frozenset[str] = frozenset()
            self._said: dict[str, float] = {}  # rule -> when

    def __call__(self, generate: Generate) -> tuple[Generate, dict[str, int]]:
        """As `apply`."""
        with self._lock:
            rules, off = self._rules, self._off
        changed, counts = apply(rules, generate, clock_in_template=self.clock_in_template, off=off)
        if (rules.custom or rules.move) and generate.messages is not None and _is_for(rules, generate.client):
            self._note(rules, counts)
        return changed, counts

    def _note(self, rules: StableRules, counts: Mapping[str, int]) -> None:
        with self._lock:
            if rules is not self._rules:
                return
            for name in {"custom", "move"} - self._off:
                if not counts.get(name + TOO_SLOW):
                    self._slow[name] = 0
                    continue
                self._slow[name] += 1
                now = self._timer()
                if self._slow[name] >= _SLOW_IN_A_ROW:
                    self._off |= {name}
                    logger.warning(
                        "stable.%s was too slow %d times in a row: it is off until the configuration is read again."
                        " Write an expression without nested repeats, such as (a+)+",
                        name,
                        self._slow[name],
                    )
                elif now - self._said.get(name, -_SAID_EVERY) >= _SAID_EVERY:
                    self._said[name] = now
                    logger.warning("stable.%s was too slow for a prompt: that was left as it came", name)

    def now(self) -> datetime.datetime:
        """What templates shall take for now."""
        return clock(self.rules)()


def apply(
    rules: StableRules, generate: Generate, *, clock_in_template: bool = False, off: Collection[str] = ()
) -> tuple[Generate, dict[str, int]]:
    """A chat with the rules applied, and how often each was; the same object where none has changed it.

    `clock_in_template`: the model's template asks for the time. A rule whose expression is too slow is not applied,
    and counted with TOO_SLOW behind its name. `off`: rules with expressions that are left out.
    """
    if generate.messages is None:
        return generate, {}
    counts: Counter[str] = Counter()
    if rules.freeze_clock and clock_in_template:
        counts["freeze_clock"] += 1
    if not _is_for(rules, generate.client):
        return generate, dict(counts)
    messages, tools = list(generate.messages), generate.tools
    if rules.drop_billing_line:
        messages = _each_system(messages, drop_billing_line, counts, "drop_billing_line")
    rules = msgspec.structs.replace(rules, **dict.fromkeys(off, ""))
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


def _is_for(rules: StableRules, client: str) -> bool:
    return not rules.apps or any(name.lower() in client.lower() for name in rules.apps)


def _each_system(
    messages: list[Message], change: Callable[[str], tuple[str, int]], counts: Counter[str], rule: str
) -> list[Message]:
    changed: list[Message] = []
    for message in messages:
        if message.role == "system" and message.content:
            text, times = change(message.content)
            if times:
                counts[rule] += times
                message = msgspec.structs.replace(message, content=text)
        changed.append(message)
    return changed


def drop_billing_line(text: str) -> tuple[str, int]:
    """The text without lines of a vendor's billing, and how many there were."""
    return _BILLING.subn("", text)


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


def taken_out(content: str, rules: StableRules, counts: Counter[str]) -> tuple[str, list[str]]:
    """A system message without what the rules move, and that. Raises UnfitError."""
    expression = Expression(rules.move, TIME_LIMIT, multiline=True) if rules.move else None
    return _taken_out(content, expression, rules.move_volatile_line, counts)


def _taken_out(
    content: str, expression: Expression | None, volatile: bool, counts: Counter[str]
) -> tuple[str, list[str]]:
    finders: list[tuple[str, Callable[[str], list[tuple[int, int]]]]] = []
    if expression is not None:
        finders.append(("move", lambda text: expression.spans(text, _MOST_LINES + 1)))
    if volatile:
        finders.append(("move_volatile_line", lambda text: list(_volatile_lines(text))))
    moved: list[str] = []
    for name, find in finders:
        found = [(start, end) for start, end in find(content) if content[start:end].strip()]
        if 0 < len(found) <= _MOST_LINES:
            counts[name] += len(found)
            moved += [content[start:end].strip() for start, end in found]
            ends = [0, *(end for _, end in found)]
            kept = [content[at:start] for at, (start, _) in zip(ends, found, strict=False)]
            content = re.sub(r"\n{3,}", "\n\n", "".join([*kept, content[ends[-1] :]]).strip("\n"))
    return content, moved


def _volatile_lines(text: str) -> Iterator[tuple[int, int]]:
    for found in _LINE.finditer(text):
        line = found[0]
        timed = _may_tell_time(line) and _TIMED_LINE.match(line) is not None
        if timed or _PLACE_LINE.match(line) is not None:
            yield found.span()


def _may_tell_time(line: str) -> bool:
    """The cheap looks first: most lines have neither."""
    if _NUMBERS.search(line) is not None:
        return _CLOCK_AT_ALL.search(line) is not None
    small = line.lower()
    return any(month in small for month in _MONTHS) and _CLOCK_AT_ALL.search(line) is not None


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
