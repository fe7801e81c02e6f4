"""Lines of system messages that say what is so just now: what time it is, where somebody is, the weather, an id.

Pure functions on a text. A line is one only as a whole: a label that is known whole, and behind it a value of that
kind and nothing else (`Date: 2026-11-30`; neither `Date of birth: 1984-03-12` nor `Time: 30 minutes a day`), or a
sentence that states it (`It is 21:15.`). In doubt it is none, and stays where it is.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import NamedTuple

from .instructions import INSTRUCTION

MOST_LINES = 8
"""In a text: more are no stray lines, but a list with times in it."""


class VolatileLine(NamedTuple):
    """[start, end) of the text. `label`: the line without its value, by which it is known again; `value`: what stands
    there. `says_now`: it says that this is the time or date of now, so that it changes though it has not yet.
    `generated`: a program writes such a line; nobody edits it.
    """

    start: int
    end: int
    label: str
    value: str
    says_now: bool = False
    generated: bool = False


# ------------------------------------------------------------------------------------------------- clocks

_MONTH = r"(?:jan|feb|m[aä]r|mrz|apr|ma[iy]|jun|jul|aug|sep|o[ck]t|nov|de[cz])[a-zä]*"
_TIME = r"(?:[01]?\d|2[0-4]):[0-5]\d(?::[0-6]\d(?:[.,]\d+)?)?(?![\d:])"
_ISO = r"\d{4}-\d{2}-\d{2}"
_DATE = (
    rf"{_ISO}(?![\d-])|\d{{4}}/\d{{1,2}}/\d{{1,2}}(?!\d)|\d{{1,2}}[./]\d{{1,2}}[./]\d{{2,4}}(?!\d)"
    rf"|{_MONTH}\.?\s+\d{{1,2}}(?:st|nd|rd|th)?\b(?!:)|\d{{1,2}}(?:st|nd|rd|th)?\.?\s+(?:of\s+)?{_MONTH}\b"
)
ZONE = (  # without regard to case
    r"(?:(?:utc|gmt)\s?[+-]|\+|(?<=:\d\d:\d\d)-)(?:0?\d|1[0-4])(?::?[0-5]\d)?(?!\d)|z(?![a-z])"
    r"|\b(?:utc|gmt|bst|ce?s?t|[aecmp][sd]t|[aecmp]t)\b|(?-i:\b[A-Z][a-z]+/[A-Z][A-Za-z_]+\b)"
)
_WEEKDAY = (
    r"\b(?:(?:mon|tues?|wed(?:nes)?|thu(?:rs)?|fri|sat(?:ur)?|sun)(?:day)?"
    r"|montag|dienstag|mittwoch|donnerstag|freitag|samstag|sonnabend|sonntag)\b"
)
_TOKEN = re.compile(
    rf"(?P<both>{_ISO}[T_]{_TIME})|(?P<date>{_DATE})|(?P<time>{_TIME})|(?P<zone>{ZONE})|(?P<day>{_WEEKDAY})"
    r"|(?P<year>\b(?:19|20)\d{2}\b)|(?P<word>\b(?:at|on|the|and|um|den|der|[ap]\.?m\b\.?|uhr|o'clock)\b|\b[ap]m\b)"
    r"|(?P<blank>[\s,.;()\[\]]+|-(?=\s))",
    re.IGNORECASE,
)
"""What a clock is made of."""

_ONCE = ("date", "time", "day", "year")  # of each: two times are from when to when

_OF_NOW = r"(?:current(?:ly)?|present|today'?s|now|aktuell\w*|heutig\w*|jetzig\w*)"
_ITS = r"(?:the|my|our|your|user'?s?|local|system|server|home|actual|die|das|der)"
_WHAT = r"(?:date|time|day|datetime|timestamp|clock|uhrzeit|zeit|datum|tag)"
_SEPARATED = r"(?:\s*(?:\([\w/+\-: ]{1,24}\))?\s*[:=]\s*|\s+(?:is|ist)(?:\s+(?:now|currently|jetzt))?:?\s+)"
_ANNOUNCED = re.compile(
    rf"(?P<now>(?:it(?:'s|\s+is)|es\s+ist|jetzt\s+ist\s+es|now\s+it(?:'s|\s+is)|(?:right\s+)?now\s*(?:[:=]|is\b))"
    rf"(?:\s+(?:now|currently|jetzt|gerade))?\s*)"
    rf"|(?P<label>(?:(?:{_OF_NOW}|{_ITS})[\s_]+){{0,4}}{_WHAT}(?:\s*(?:and|und|&|/|,)\s*(?:the\s+)?{_WHAT})?"
    rf"(?:\s+(?:now|today|jetzt|heute))?{_SEPARATED})"
    rf"|(?P<today>(?:today(?:'s|\s+is|\s+it\s+is|\s*[:=])|heute(?:\s+ist(?:\s+es)?|\s*[:=]))\s*)",
    re.IGNORECASE,
)
_SAYS_NOW = re.compile(rf"\b{_OF_NOW}(?![a-z])|\btoday\b|\bheute\b|\bjetzt\b", re.IGNORECASE)
_LEAD = re.compile(r"[*\-\s]*(?:\[[\w ]{1,20}\]\s*|[\[(<]\s*)?(?:(?:please\s+)?note(?:\s+that)?:?\s+)?", re.IGNORECASE)
_OBJECT = re.compile(r"(?:[\w ]{1,20}:\s*)?(\{[^{}\n]*\})\s*$")
_NOW_KEYS = frozenset(
    {"now", "today", "current_time", "current_date", "current_datetime", "currenttime", "currentdate"}
)
_BESIDE_NOW = frozenset(
    re.findall(
        r"\S+",
        "time date datetime timestamp day weekday tz timezone time_zone utc_offset locale units home area room location"
        " place city country weather temperature",
    )
)
"""Keys of an object that says what is so just now, and nothing else."""

_FEW_WORDS = 4  # of such a value, at most
_ISO_CLOCK = re.compile(rf"{_ISO}(?:[T ]{_TIME})?(?:{ZONE})?", re.IGNORECASE)
_NUMBERS = re.compile(r"\d:\d")
_MAY_BE_CLOCK = re.compile(rf"\d[:./-]\d|{_MONTH}", re.IGNORECASE)


def _clock_end(text: str, at: int) -> tuple[int, Counter[str]]:
    """Where a clock ends that begins at `at`, and what it has."""
    has: Counter[str] = Counter()
    while (token := _TOKEN.match(text, at)) is not None:
        kind = token.lastgroup or ""
        kinds = ("date", "time") if kind == "both" else (kind,)
        if any(has[one] and one in _ONCE for one in kinds):
            break
        has.update(kinds)
        at = token.end()
    return at, has


def _clock(line: str) -> tuple[str, str, bool] | None:
    """Label, value, whether it says that it is now; of a line that is made of statements of the time only."""
    if _MAY_BE_CLOCK.search(line) is None:
        return None
    if line.endswith("}"):
        return _object(line)
    start = _LEAD.match(line)
    at = start.end() if start is not None else 0
    labels, values, now = [], [], False
    while at < len(line):
        head = _ANNOUNCED.match(line, at)
        if head is None:
            return None
        end, has = _clock_end(line, head.end())
        dated = has["date"] or has["day"]
        if not (dated or has["time"]) or (head.lastgroup == "today" and not dated):
            return None
        now = now or head.lastgroup != "label" or _SAYS_NOW.search(head[0]) is not None
        labels.append(head[0].strip().lower())
        values.append(line[head.end() : end].strip())
        at = end
    value = " ".join(values)
    return (" ".join(labels), value, now) if _TOKEN_OF_NUMBERS.search(value) else None


def _object(line: str) -> tuple[str, str, bool] | None:
    """As `_clock`, of a JSON object that says what time it is, perhaps with where."""
    found = _OBJECT.match(line)
    try:
        content = json.loads(found[1]) if found is not None else None
    except ValueError:
        return None
    if not isinstance(content, dict) or not content.keys() <= _NOW_KEYS | _BESIDE_NOW:
        return None
    if any(not isinstance(value, str | int | float | None) or _is_text(str(value)) for value in content.values()):
        return None
    for key, value in content.items():
        if key in _NOW_KEYS and isinstance(value, str) and _ISO_CLOCK.fullmatch(value) is not None:
            return line.replace(value, "", 1), value, True
    return None


def _is_text(value: str) -> bool:
    return len(value.split()) > _FEW_WORDS or INSTRUCTION.search(value) is not None


_TOKEN_OF_NUMBERS = re.compile(rf"{_TIME}|{_DATE}", re.IGNORECASE)


def _stamp(line: str) -> bool:
    """Whether a line is a date with the time of day, and nothing else."""
    if len(line) > _HINTED or _NUMBERS.search(line) is None:
        return False
    end, has = _clock_end(line, 0)
    return end == len(line) and bool(has["date"]) and bool(has["time"])


# ------------------------------------------------------------------------------------------------- other values

_NAME = (
    r"(?!(?:the|a|an|my|our|on|off|open|closed|secret|private|hidden|unknown|confidential|restricted|strict|none)\b)"
    r"[^\W_][\w'’/-]*(?:\s(?!(?:and|or|with|to|for|from|as|is|are|has|und|oder|mit|et|ou|y|o|e|och|og|en|her|him|it|them)\b)"
    r"[^\W_][\w'’/-]*){0,3}(?:\s\([^()\n]{1,40}\))?"
)
_UNIT = (
    r"(?:°\s?[cfk]?|degrees?(?:\s(?:celsius|fahrenheit))?|celsius|fahrenheit|%|percent|km/h|m/s|mph|mm|hpa|mbar|lux|lx)"
)
_MEASURED = rf"[-+−]?\d+(?:[.,]\d+)?\s?{_UNIT}"
_SKY = (
    r"(?:(?:light|heavy|mostly|partly|very|slightly|some|freezing)\s)?(?:sun(?:ny|shine)?|cloud(?:y|s)?|partlycloudy|clear"
    r"|clear-night|overcast|rain(?:y|ing)?|drizzle|showers?|pouring|snow(?:y|ing)?|sleet|hail|fog(?:gy)?|mist|haze|wind(?:y)?"
    r"|storm(?:y)?|thunderstorms?|lightning|dry|hot|warm|mild|cool|cold|frost|exceptional)"
)
_REPORT = rf"(?:{_SKY}|(?:(?:wind|humidity|rain|pressure|uv|feels like)\s)?{_MEASURED})"
_ID = r"#?(?=[\w-]*\d)[A-Za-z0-9_-]{1,80}={0,2}"
_COUNT = r"#?\d{1,9}(?:\s?(?:/|of)\s?\d{1,9})?"
_SAID_OF = r"(?:(?:the|this|my|your|current|present|user'?s?|device'?s?|satellite'?s?)\s+){0,3}"
_JUST_NOW = r"(?:\s+(?:outside|inside|outdoors|indoors|now|today|right now))?"
_IS = r"(?:\s*[:=]\s*|\s+is(?:\s+now|\s+currently)?\s+)"
_KINDS = re.compile(
    "|".join(
        rf"(?P<{kind}>{_SAID_OF}{label}{separator})(?P<{kind}_value>{value})\.?\s*$"
        for kind, label, separator, value in (
            ("place", r"(?:area|room|location)(?:\s+now)?", r"\s*[:=]\s*", _NAME),
            ("weather", rf"weather{_JUST_NOW}", _IS, rf"{_REPORT}(?:(?:,\s?|\s+and\s+|\s+at\s+|\s){_REPORT}){{0,5}}"),
            ("measure", rf"(?:(?:room|outside|inside|outdoor|indoor)\s)?temperature{_JUST_NOW}", _IS, _MEASURED),
            ("id", r"(?:(?:session|request)(?:[\s_-]?id)?|nonce)", r"\s*(?:[:=]\s*|#\s?|\s(?=\d))", _ID),
            ("counter", r"(?:turn|counter)", r"\s*(?:[:=]\s*|#\s?|\s(?=\d))", _COUNT),
            (
                "stands",
                r"(?:user|speaker|device|satellite|tablet|panel|microphone)"
                r"\s(?:(?:is|stands|is placed|is located)(?:\snow)?\s(?:in|from)|speaks\sfrom)",
                r"\s",
                r"(?:the\s(?:[\w'’-]+\s)?(?:room|hall(?:way)?|corridor|kitchen|bedroom|bathroom|garden|office|garage"
                r"|attic|cellar|basement|nursery|study|lounge|pantry|laundry|workshop|library|balcony|terrace|porch)"
                r"|(?-i:[A-ZÀ-Þ])[\w'’-]*(?:\s(?-i:[A-ZÀ-Þ])[\w'’-]*){0,2})",
            ),
        )
    ),
    re.IGNORECASE,
)
_AREA = re.compile(
    rf"(?P<head>you are in (?:the )?area )(?P<value>(?!of\b){_NAME})"
    r"(?:,?\s+and all generic commands(?:\slike\s'[^'\n]{1,60}')?"
    r"\s(?:should target this area|are meant for (?:it|this area)))?\.?\s*$",
    re.IGNORECASE,
)
"""As Home Assistant says it; that what is asked for is meant there stands behind it in the same line."""


def _other(line: str) -> tuple[str, str] | None:
    """Label and value of a line that says where somebody is, how the weather is, or which session this is."""
    plain = line.lstrip("#*- \t")
    found = _AREA.match(plain)
    if found is not None:
        return found["head"].lower(), found["value"]
    found = _KINDS.match(plain)
    if found is None or INSTRUCTION.search(line) is not None:
        return None
    kind = next(name for name, text in found.groupdict().items() if text is not None and not name.endswith("_value"))
    return found[kind].strip().lower(), found[f"{kind}_value"]


# ------------------------------------------------------------------------------------------------- lines

_LINE = re.compile(r"^[^\n]+$", re.MULTILINE)
_LONGEST = 240
_OF_STRUCTURE = " \t\"'|}]"
"""Beginnings of lines that say nothing without those around them: indented, or of JSON or a table."""

_ENDS = (".", "!", "?", "。", "---", ">")
_WORDS = re.compile(r"[a-z']+")
_HINTS = frozenset(
    re.findall(
        r"\S+",
        "time date datetime timestamp clock uhrzeit zeit datum day tag now today today's it it's es heute jetzt area"
        " room location weather temperature session sessionid request requestid nonce turn counter user speaker device"
        " satellite tablet panel microphone",
    )
)
"""Most lines begin with none of these: a cheap look first."""

_HINTED = 60  # characters of a line in which it stands


def volatile_lines(text: str) -> list[VolatileLine]:
    """In order; none where there are more than MOST_LINES. What is said twice is said of two things, which the lines
    around it name, and what follows a line with a colon at its end is of that line: both stay. Only the time of now is
    the same everywhere.
    """
    found: list[VolatileLine] = []
    stamps: list[VolatileLine] = []
    fenced = announced = False
    end, before = 0, ""
    for match in _LINE.finditer(text):
        line, start = match[0], match.start()
        announced = (announced or before.endswith((":", "："))) and text.count("\n", end, start) < 2
        above, before, end = before, line.rstrip(), match.end()
        fenced ^= line.startswith("```")
        if fenced or len(line) > _LONGEST or line[0] in _OF_STRUCTURE:
            continue
        hinted = not _HINTS.isdisjoint(_WORDS.findall(line[:_HINTED].lower()))
        if hinted and (said := _said(line, announced)) is not None:
            found.append(VolatileLine(start, end, *said, generated=_AREA.match(line) is not None))
        elif not announced and line[0].isalnum() and (not above or above.endswith(_ENDS)) and _stamp(line):
            stamps.append(VolatileLine(start, end, "", line))
    if len(stamps) == 1:  # more are of what happened then
        found = sorted([*found, *stamps])
    times = Counter(one.label for one in found)
    found = [one for one in found if times[one.label] == 1 or one.says_now]
    return found if len(found) <= MOST_LINES else []


def _said(line: str, announced: bool) -> tuple[str, str, bool] | None:
    """Label, value, whether it says that it is now."""
    line = line.replace("**", "")
    clock = _clock(line)
    if clock is not None:
        return clock if clock[2] or not announced else None
    other = None if announced else _other(line)
    return (*other, False) if other is not None else None
