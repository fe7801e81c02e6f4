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

from ..clients import app_name
from ..expressions import Expression, UnfitError, joined
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
    r"(?:current |user'?s? )?"
    r"(?:area|room|location|weather|temperature|session(?: id)?|request(?: id)?|nonce|turn|counter)"
)
_IS = (
    r"(?:[^\n:=.,;!?]{0,30}[:=]|(?:\s+(?:outside|inside|now|today|in(?: the)? \w+))?\s+is\b"
    r"|\s*[#№]?\s*\d[\w-]*\s*(?:[.;,/]|of\b|$))"
)
"""What stands between such a word and its value; else the word begins a sentence (`Turn off the light.`)."""

_SAID_PLACE = re.compile(r"[#*\-\s]*you are in (?:the )?area\b", re.IGNORECASE)
"""As Home Assistant says it; that what is asked for is meant there stands behind it in the same line."""

INSTRUCTION = re.compile(
    r"\b(?:you(?:'re|r (?:task|job|role|name|goal)| \w+)"
    r"|never|always|must|should|shall|do not|don't|cannot|can't|only|answer|reply|respond|speak|write|use|keep"
    r"|ignore|refuse|reveal|tell|say|act|pretend|behave|follow|obey|avoid|ensure|make sure|remember|treat|ask"
    r"|assistant|persona|please|if|when|unless|allowed|forbidden|to be|du bist|sie sind|nie|niemals|immer|nicht"
    r"|keine?n?|muss|musst|darf|darfst|soll(?:st|en)?|antworte\w*|sprich|verrate|verwende|benutze|bleibe?|bitte"
    r"|wenn|assistent\w*|tu es|vous êtes|jamais|toujours|dois|devez|réponds|répondez|eres|usted es|nunca"
    r"|siempre|debes?|responde\w*|asistente|devi|rispondi|sempre|você é|deve|responda|je bent|u bent|nooit"
    r"|altijd|moet|niet|antwoord|du är|aldrig|alltid|måste|svara|inte|jesteś|nigdy|zawsze|musisz|odpowiadaj"
    r"|olet|aina|koskaan|älä|vastaa|ты|вы|никогда|всегда|должен|отвечай\w*)\b"
    r"|あなた|ください|必ず|禁止|您|你|请|不要|必须",
    re.IGNORECASE,
)
"""What tells a model what it is, or what to do: that stays where it stands."""

_LINE = re.compile(r"^[^\n]{1,240}$", re.MULTILINE)
_NUMBERS = re.compile(r"\d[:./-]\d")
_CLOCK_AT_ALL = re.compile(_CLOCK, re.IGNORECASE)
_BEFORE_CLOCK_WORD = (
    r"(?:the|my|our|user'?s|your|current(?:ly)?|local|present|today'?s|system|server|it'?s|is|date|day|right|as of"
    r"|please note|note|aktuell\w*|heutig\w*|die|das|es ist|la|el|il|le|de)"
)
_TIMED_LINE = re.compile(
    rf"[#*\-\s\[(<]*(?:[^\n:\]]{{0,20}}[:\]]\s*)?(?:{_BEFORE_CLOCK_WORD}[\s,]+){{0,5}}{_CLOCK_WORD}\b[^\n]*{_CLOCK}"
    rf"|[^\n]*[\"']{_CLOCK_WORD}[\"']\s*:\s*[\"']?{_CLOCK}",
    re.IGNORECASE,
)
"""It says what time it is. A time alone says that of anything: `Tea at 16:00`."""

_OF_A_CLOCK = re.compile(
    rf"{_CLOCK}(?:[a-z]+)?|\d+|(?<=\d)[tz](?![a-z])"
    r"|\b(?:it|is|it's|the|of|in|at|on|and|a\.?m\.?|p\.?m\.?|utc|gmt|ce?s?t|[ecmp][sd]t|uhr|es|ist|um|den|der|week|day"
    rf"|{_MONTH}[a-z]*|(?:mon|tues?|wed(?:nes)?|thu(?:rs)?|fri|sat(?:ur)?|sun)(?:day)?"
    r"|montag|dienstag|mittwoch|donnerstag|freitag|samstag|sonntag|januar|februar|märz|mai|juni|juli|oktober|dezember)\b"
    r"|[^\w\n]",
    re.IGNORECASE,
)
"""What may stand in a line that is a clock and nothing else."""

_STRUCTURE = re.compile(r"\s+\S|[\"'|}\]]")
"""The beginning of a line that says nothing without those around it: indented, or of JSON or a table."""

_LISTED = re.compile(r"\s*[-*+•]\s|\s*\d+[.)]\s")

_STANDS = (
    r"(?:the |this )?(?:user|speaker|device|satellite|tablet|panel|microphone)"
    r" (?:is|stands|is placed|is located|speaks)(?: now)? (?:in|from)\b"
)
_PLACE_LINE = re.compile(rf"[#*\-\s]*(?:{_PLACE_WORD}\b{_IS}|{_STANDS})", re.IGNORECASE)
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
    fenced, above = False, ""
    for found in _LINE.finditer(text):
        line = found[0]
        fenced ^= line.startswith("```")
        before, above = above, line
        if fenced or _STRUCTURE.match(line) is not None:
            continue
        timed = _may_tell_time(line) and (_TIMED_LINE.match(line) is not None or _is_clock(line, before))
        placed = timed or _PLACE_LINE.match(line) is not None
        if (placed and INSTRUCTION.search(line) is None) or _SAID_PLACE.match(line) is not None:
            yield found.span()


def _is_clock(line: str, above: str) -> bool:
    """Whether a line is a clock and nothing else, and neither goes on with the line above nor is one of a list."""
    stands_alone = not above or above.rstrip().endswith((".", "!", "?", "。", "---")) or above.startswith(("#", "<"))
    return stands_alone and not _OF_A_CLOCK.sub("", line) and _LISTED.match(line) is None


def says_what_changes(line: str) -> bool:
    """Whether it says what it is, the time or where somebody is: then it may be moved though it has not changed yet."""
    return _TIMED_LINE.match(line) is not None or _SAID_PLACE.match(line) is not None


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
