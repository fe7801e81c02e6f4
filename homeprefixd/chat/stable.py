"""Rules that keep prompts stable: what changes with each request is taken out of the way of what does not.

Pure functions on messages and tools, before the template renders them. A rule changes nothing but what it is for, and
what it moves is still in the prompt.
"""

from __future__ import annotations

import datetime
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from ..frames.worker import Generate, Message, StableRules

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


class Stabilizer:
    """The rules in force, and what they do to each chat. `rules` may be set from any thread."""

    def __init__(self, rules: StableRules) -> None:
        self.rules = rules
        self.clock_in_template = False  # does the model's template ask for the time?

    def __call__(self, generate: Generate) -> tuple[Generate, dict[str, int]]:
        """As `apply`."""
        return apply(self.rules, generate, clock_in_template=self.clock_in_template)

    def now(self) -> datetime.datetime:
        """What templates shall take for now."""
        return clock(self.rules)()


def apply(
    rules: StableRules, generate: Generate, *, clock_in_template: bool = False
) -> tuple[Generate, dict[str, int]]:
    """A chat with the rules applied, and how often each was; the same object where none has changed it.

    `clock_in_template`: the model's template asks for the time.
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
    if rules.custom:
        custom = re.compile(rules.custom)
        messages = _each_system(messages, lambda text: custom.subn("", text), counts, "custom")
    if rules.move_volatile_line or rules.move:
        messages = move_lines(messages, rules, counts)
    if tools and rules.sort_tools:
        tools = _counted(tools, sort_tools(tools), counts, "sort_tools")
    if tools and rules.sort_keys:
        tools = _counted(tools, [sort_keys(tool) for tool in tools], counts, "sort_keys")
    if not counts - Counter(freeze_clock=1):
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


def move_lines(messages: list[Message], rules: StableRules, counts: Counter[str]) -> list[Message]:
    """What changes from request to request goes from system messages to the beginning of the last user message."""
    last = max((i for i, message in enumerate(messages) if message.role == "user"), default=-1)
    if last < 0:
        return messages
    moved: list[str] = []
    changed: list[Message] = []
    for message in messages:
        if message.role == "system" and message.content:
            text, found = taken_out(message.content, rules, counts)
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
    """A system message without what the rules move, and that."""
    finders: list[tuple[str, Callable[[str], Iterator[tuple[int, int]]]]] = []
    if rules.move:
        expression = re.compile(rules.move, re.MULTILINE)
        finders.append(("move", lambda text: (found.span() for found in expression.finditer(text))))
    if rules.move_volatile_line:
        finders.append(("move_volatile_line", _volatile_lines))
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
