"""What a piece of text is that differs between two prompts: a clock, a counter, a random id, a billing line, a value.

Pure functions on two texts and the position of the first character that differs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ..chat.stable import BILLING_HEADER

_AROUND = 72  # characters to each side that are looked at
_LINE = 240  # of a line

_MONTH = (
    r"(?:jan(?:uary|uar|uari|vier)?|feb(?:ruary|ruar|ruari)?|f[eé]v(?:rier)?|mar(?:ch|s|zo)?|m[aä]r(?:z)?|apr(?:il)?|avr(?:il)?"
    r"|ma[iy]|june?|juni|juin|july?|juli|juillet|aug(?:ust|ustus)?|ao[uû]t|sept?(?:ember)?|septembre|o[ck]t(?:ober|obre)?"
    r"|nov(?:ember|embre)?|de[cz](?:ember)?|d[eé]c(?:embre)?"
    r"|enero|febrero|abril|mayo|junio|julio|agosto|sep?tiembre|octubre|noviembre|diciembre"
    r"|gennaio|febbraio|aprile|maggio|giugno|luglio|settembre|ottobre|novembre|dicembre"
    r"|janeiro|fevereiro|mar[cç]o|maio|junho|julho|setembro|outubro|novembro|dezembro|maart|mei|marts|maj|augusti"
    r"|stycznia|lutego|marca|kwietnia|maja|czerwca|lipca|sierpnia|wrze[sś]nia|pa[zź]dziernika|listopada|grudnia"
    r"|январ[ья]|феврал[ья]|марта?|апрел[ья]|ма[йя]|июн[ья]|июл[ья]|августа?|сентябр[ья]|октябр[ья]|ноябр[ья]|декабр[ья]"
    r"|січня|лютого|березня|квітня|травня|червня|липня|серпня|вересня|жовтня|листопада|грудня"
    r"|ledna|února|b[řr]ezna|dubna|kv[ěe]tna|července|červen(?:ce)?|srpna|září|října|listopadu|prosince"
    r"|ocak|şubat|nisan|may[ıi]s|haziran|temmuz|a[ğg]ustos|eyl[üu]l|ekim|kas[ıi]m|aral[ıi]k"
    r"|(?:tammi|helmi|maalis|huhti|touko|kesä|heinä|elo|syys|loka|marras|joulu)kuu(?:ta)?)"
)
_DAY = (
    r"(?:mon|tues?|wed(?:nes)?|thu(?:rs)?|fri|sat(?:ur)?|sun)(?:day)?"
    r"|montag|dienstag|mittwoch|donnerstag|freitag|samstag|sonnabend|sonntag|lundi|mardi|mercredi|jeudi|vendredi|samedi|dimanche"
    r"|lunes|martes|mi[eé]rcoles|jueves|viernes|s[aá]bado|domingo|luned[iì]|marted[iì]|mercoled[iì]|gioved[iì]|venerd[iì]"
    r"|sabato|domenica|(?:segunda|ter[cç]a|quarta|quinta|sexta)-feira"
    r"|maandag|dinsdag|woensdag|donderdag|vrijdag|zaterdag|zondag"
    r"|m[åa]ndag|ti(?:r)?sdag|onsdag|torsdag|fredag|l[öø]rdag|s[öø]ndag"
    r"|poniedzia[łl]ek|wtorek|[śs]roda|czwartek|pi[ąa]tek|sobota|niedziela"
    r"|понедельник|вторник|сред[ау]|четверг|пятниц[ау]|суббот[ау]|воскресенье"
    r"|понеділок|вівторок|середа|четвер|п'ятниця|субота|неділя"
    r"|pond[ěe]lí|úterý|středa|čtvrtek|pátek|neděle"
    r"|pazartesi|salı|çarşamba|perşembe|cuma(?:rtesi)?|pazar"
    r"|(?:maanan|tiis|tors|perjan|lauan|sunnun)tai|keskiviikko"
)
_HOUR = (
    r"(?:one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|noon|midnight|\d{1,2}|eins|zwei|drei|vier|fünf|sechs"
    r"|sieben|acht|neun|zehn|elf|zwölf|une|deux|trois|quatre|cinq|sept|huit|neuf|dix|onze|midi|minuit)"
)
_MINUTES = r"(?:quarter|half|(?:five|ten|twenty(?:[- ]five)?|\d{1,2})(?:\s+minutes?)?)"
_CLOCKS = tuple(
    re.compile(pattern)
    for pattern in (
        r"\d{4}-\d{2}-\d{2}(?:[t _]\d{2}[:.h]?\d{2}(?:[:.]?\d{2}(?:[.,]\d+)?)?)?\s?(?:z|utc|[+-]\d{2}:?\d{2})?",
        r"\d{4}/\d{1,2}/\d{1,2}",
        r"\b\d{4}-w\d{2}(?:-\d)?\b",
        r"\d{1,2}[./]\d{1,2}[./]\d{2,4}",
        r"\d{8}t?\d{4,6}z?",
        r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?:\s?[ap]\.?m\.?)?",
        r"\d{1,2}\s?(?:[ap]\.?m\.?|o'clock|uhr)\b",
        rf"\b{_MONTH}\.?\s+\d{{1,2}}(?:st|nd|rd|th)?,?(?:\s+\d{{4}})?\b",
        r"\b\d{1,2}\s?h\s?\d{2}\b",  # 7 h 42, as in French; `3 h` alone is how long something takes
        r"\b(?:il est|à|vers)\s\d{1,2}\s?h(?:eures?)?\b",
        r"(?:\d{2,4}\s?[年년]\s?)?\d{1,2}\s?[月월]\s?\d{1,2}\s?[日일]",
        r"\d{1,2}\s?(?:[時时시](?:\s?\d{1,2}\s?[分분])?|点\s?\d{1,2}\s?分)",
        r"[月火水木金土日]曜日?|[월화수목금토일]요일|(?:星期|周|週)[一二三四五六日天]",
        rf"\b\d{{1,2}}(?:st|nd|rd|th|er|º)?\.?\s+(?:of\s+|de\s+)?{_MONTH}\.?,?(?:\s+(?:de\s+)?\d{{4}})?\b",
        rf"\b{_MONTH}\.?\s+\d{{4}}\b",
        rf"\b(?:{_DAY})\b",
        rf"\b{_MONTH}\b",
        r"\b\d+\s*(?:s|sec(?:ond)?s?|min(?:ute)?s?|h(?:ou)?rs?|days?|weeks?)\s+(?:ago|old)\b",
        rf"\b(?:an?\s+)?{_MINUTES}\s+(?:past|to|before|after)\s+{_HOUR}\b",
        rf"\b{_HOUR}\s+(?:o'clock|uhr)\b",
        rf"\b(?:(?:viertel|fünf|zehn|zwanzig)\s+(?:nach|vor)\s+(?:halb\s+)?|halb\s+|dreiviertel\s+){_HOUR}\b",
        rf"\b{_HOUR}\s+heures?(?:\s+(?:et\s+(?:quart|demie)|moins\s+le\s+quart))?\b",
        r"\b(?:morning|forenoon|noon|afternoon|evening|night|midnight|dawn|dusk)\b",
        r"\b1[5-9]\d{8}(?:\d{3}|\.\d+)?\b",
    )
)
"""For text in small letters: `re` takes three times as long to look for these words in either case."""

_DATE = (
    re.compile(r"(?:[^\W\d]+[.,]?\s+){0,3}\b\d{1,2}\.?\s+(?:[^\W\d]+[.,]?\s+){1,2}(?:19|20)\d{2}\b"),
    re.compile(r"\b(?:19|20)\d{2}[.,]?\s+[^\W\d]+[.,]?\s+\d{1,2}\b(?:[.,]?\s+[^\W\d]+)?"),
)
"""A day, a word and a year, with the weekday before it: a date in whatever language."""

_YEAR = re.compile(r"\b(?:19|20)\d{2}")
DAY_OF_MONTH = (
    rf"\b\d{{1,2}}(?:st|nd|rd|th|er|º)?\.?\s(?:of\s|de\s)?{_MONTH}\b|\b{_MONTH}\.?\s\d{{1,2}}(?:st|nd|rd|th)?\b"
)
_IDS = tuple(
    re.compile(pattern)
    for pattern in (
        r"\b[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}\b",
        r"(?<![0-9A-Za-z])(?:[A-Za-z]{2,12}[_-])?(?=[A-Za-z_-]*\d)(?=[0-9_-]*[A-Za-z])[0-9A-Za-z_-]{8,}={0,2}",
        r"(?<![0-9A-Za-z])(?:0x)?[0-9a-fA-F]{8,}\b",
        r"(?<![0-9A-Za-z])(?=[0-9]*[a-f])(?=[a-f]*[0-9])[0-9a-f]{7}\b",  # a commit of git
        r"(?<![0-9A-Za-z])[A-Za-z]{2,12}[_-](?=[0-9A-Za-z]*\d)[0-9A-Za-z]{4,}\b",
    )
)
_ID_WORD = re.compile(
    r"\b(?:id|uuid|guid|nonce|token|session|trace|correlation|seed|hash|salt|cch)\b\W*[\w-]*$", re.IGNORECASE
)
_CLOCK_WORD = re.compile(
    r"(?<!this )(?<!last )(?<!past )(?<!per )(?<!each )(?<!\ba )"
    r"\b(?:time|date|clock|timestamp|year|hour|minute|day|week|month|epoch|datum|uhrzeit|zeit|jahr"
    r"|heure|jour|hora|fecha|ora|tijd)s?\b"
    r"|^\W*(?:(?:it|that|es|this)\W+(?:is|s|ist)\W+)?(?:today|now|heute|aujourd'hui|hoy|oggi|hoje|vandaag)\b",
    re.I,
)
"""Of a number in the same sentence. `Messages left today: 42` are messages, and so are those of `this week`."""

_BETWEEN_SENTENCES = re.compile(r"(?<=[^\d\s][.!?])\s|。")
_NUMBER = re.compile(r"[-+]?\d+(?:[.,]\d+)*")
_UNIT = re.compile(
    r"\s?(?:°|%|degrees?|grad\b|celsius|fahrenheit|k?wh?\b|lux\b|lx\b|hpa\b|mbar\b|bar\b|km/?h\b|m/s\b|mph\b|ppm\b"
    r"|db\b|v\b|a\b|hz\b|mm\b|cm\b|µg|eur\b|h\b|min\b|€|\$|gb\b|mb\b|gib\b|mib\b|c\b|f\b)",
    re.I,
)
_ATTRIBUTE = re.compile(
    r"(?:\bstate|\bvalue|brightness|temp(?:erature)?|humidity|illuminance|pressure|battery|level|volume|position|power"
    r"|energy|speed|percentage|\b(?:current|target)_\w+)[\"']?\s*[:=]\s*[\"']?$",
    re.IGNORECASE,
)
"""What stands before the value of a sensor, or of a device's attribute."""

_ROW = re.compile(r"(?:[^,\n]*,){2,}[^,\n]*$")
"""Of a table, without its line end; a sentence may look like one."""

_FIELD_ENDS = ",;\n"
STATES = frozenset(
    re.findall(
        r"\S+",
        "on off open opened closed home away not_home locked unlocked true false yes no playing paused idle"
        " unavailable unknown heating cooling sunny rainy rain cloudy clear snow snowy fog foggy windy"
        " partlycloudy clear-night armed disarmed armed_home armed_away detected dry wet low high"
        " above_horizon below_horizon charging full empty an aus auf zu",
    )
)
_WORD = re.compile(r"[\w-]+")


_DATE_WORD = re.compile(rf"\b(?:{_DAY}|{_MONTH})\b|[上下]午|午[前后後]|오[전후]", re.IGNORECASE)


def date_words(text: str) -> Iterator[re.Match[str]]:
    """Names of days and months in a text, and of halves of days."""
    return _DATE_WORD.finditer(text)


def clocks(text: str) -> Iterator[slice]:
    """Where times and dates stand in a text; some overlap."""
    small = _small(text)
    for pattern in (*_CLOCKS, *_DATE):
        yield from (slice(*found.span()) for found in pattern.finditer(small))


class Volatile(NamedTuple):
    cause: str  # a key of CAUSES
    before: str
    after: str


def volatile(a: str, b: str, place: int) -> Volatile | None:
    """What changes at `place`, the first character that differs; None if it is nothing of that kind."""
    low = max(0, place - _AROUND)
    wa, wb, at = a[low : place + _AROUND], b[low : place + _AROUND], place - low
    line = _line(a, place), _line(b, place)
    if all(_is_of_billing(text, place) for text in (a, b)):
        return Volatile("billing_line", *line)
    return (
        _both(_CLOCKS[:1], wa, wb, at, "clock")
        or _both(_IDS[:1], wa, wb, at, "random_id")
        or _unix(wa, wb, at)
        or _both(_CLOCKS[1:-1], wa, wb, at, "clock")
        or _random(wa, wb, at)
        or _date(wa, wb, at)
        or _number(wa, wb, at, line[1], b, place)
        or _state(wa, wb, at)
    )


def _is_of_billing(text: str, place: int) -> bool:
    """Is a place in a header as the rule drops it, or at its end? A template may write something before it."""
    start, end = text.rfind("\n", 0, place) + 1, text.find("\n", place)
    end = min(end if end >= 0 else len(text), place + _LINE)
    found = BILLING_HEADER.search(text, max(start, place - _LINE), end)
    return found is not None and found.start() <= place <= found.end()


def _line(text: str, place: int) -> str:
    start = text.rfind("\n", 0, place) + 1
    end = text.find("\n", place)
    return text[start : end if end >= 0 else len(text)][:_LINE]


def _spanning(patterns: Iterable[re.Pattern[str]], text: str, at: int) -> slice | None:
    """Where the first pattern that does finds what holds position `at`, or ends there."""
    for pattern in patterns:
        for found in pattern.finditer(text):
            if found.start() <= at <= found.end() and found.end() > found.start():
                return slice(*found.span())
            if found.start() > at:
                break
    return None


def _small(text: str) -> str:
    """In small letters, each at its place: only İ would become two."""
    return text.replace("İ", "i").lower()


def _both(patterns: Sequence[re.Pattern[str]], a: str, b: str, at: int, cause: str) -> Volatile | None:
    of = _small if cause == "clock" else str
    before = _spanning(patterns, of(a), at)
    after = _spanning(patterns, of(b), at) if before is not None else None
    if before is None or after is None or a[before] == b[after]:
        return None
    return Volatile(cause, a[before], b[after])


def _date(a: str, b: str, at: int) -> Volatile | None:
    """A date whose month is in any language."""
    return _both(_DATE, a, b, at, "clock") if _YEAR.search(a) else None


def _unix(a: str, b: str, at: int) -> Volatile | None:
    """Seconds since 1970, unless an id is announced."""
    found = _both(_CLOCKS[-1:], a, b, at, "clock")
    return None if found is not None and _ID_WORD.search(a[: a.find(found.before)]) else found


def _random(a: str, b: str, at: int) -> Volatile | None:
    """An id, unless it is a number that counts, or a word with a number (`gpt4-turbo`)."""
    found = _both(_IDS[1:], a, b, at, "random_id")
    if found is not None:
        if found.before.isdigit() and found.after.isdigit() and not _ID_WORD.search(a[: a.find(found.before)]):
            return None
        alike = sum(x == y for x, y in zip(found.before, found.after, strict=False))
        if len(found.before) == len(found.after) and alike >= len(found.before) - 1 and found.before[-1:].isdigit():
            head = found.before.rstrip("0123456789")
            if head and found.after.startswith(head) and head[-1] in "_-":
                return Volatile("counter", found.before, found.after)  # step-1009, step-1010
    return found


def _number(a: str, b: str, at: int, line: str, text: str, place: int) -> Volatile | None:
    found = _both((_NUMBER,), a, b, at, "counter")
    if found is None:
        return None
    if _ID_WORD.search(b[: b.rfind(found.after, 0, at + len(found.after) + 1)]) and len(found.after) >= 4:
        return found._replace(cause="random_id")
    start = b.rfind(found.after, 0, at + len(found.after) + 1)
    behind = b[start + len(found.after) :]
    if _ATTRIBUTE.search(b[:start]) or _is_field(text, place - at + start, place - at + start + len(found.after)):
        return found._replace(cause="changing_value")
    if re.search(r"\d[.,]\d", found.before + " " + found.after) or _UNIT.match(behind):
        return found._replace(cause="changing_value")
    return found._replace(cause="clock") if _CLOCK_WORD.search(_sentence(line, found.after)) else found


def _sentence(line: str, value: str) -> str:
    """The one that holds a value first."""
    return next((text for text in _BETWEEN_SENTENCES.split(line) if value in text), line)


def _is_field(text: str, start: int, end: int) -> bool:
    """Is [start, end) all of a field in a table, as of entities and their states: a row beside which another stands?"""
    if text[start - 1 : start] not in tuple(_FIELD_ENDS) or text[end : end + 1] not in ("", *_FIELD_ENDS):
        return False
    begin, close = text.rfind("\n", 0, start) + 1, text.find("\n", end)
    row, above = text[begin : close if close >= 0 else len(text)], text[:begin].rstrip("\n").rpartition("\n")[2]
    below = text[close + 1 :].partition("\n")[0] if close >= 0 else ""
    return bool(_ROW.match(row)) and any(other.count(",") == row.count(",") for other in (above, below))


def _state(a: str, b: str, at: int) -> Volatile | None:
    found = _both((_WORD,), a, b, at, "changing_value")
    if found is not None and _ID_WORD.search(a[: a.rfind(found.before, 0, at + len(found.before))].rstrip()):
        return found._replace(cause="random_id")
    if found is None or not {found.before.lower(), found.after.lower()} <= STATES:
        return None
    return found
