"""Which rule of `[stable]` would keep a prompt stable, tried on the two texts that differ before it is proposed.

Pure. A rule that would change nothing is worse than none: somebody turns it on, restarts, and waits for nothing. One
that finds too much is worse still: what it moves has less weight with the model. So an expression is the very line
that changes, with a place only for each value (a number, a date, an id), or a known label with a short value behind it;
and never a line that tells the model what to do.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from ..chat import stable
from ..chat.instructions import INSTRUCTION
from ..chat.volatile_lines import ZONE
from ..expressions import UnfitError
from ..frames.worker import StableRules
from .prompt import common_length
from .volatile import STATES, clocks, date_words, volatile

_LONGEST = 160  # characters of a line or sentence that is moved
_MOST_WORDS = {"clock": 16}
"""Of a line or sentence, by cause: what is longer says more than a value, in whatever language."""

_FEW_WORDS = 10
_SHORTEST_HEAD = 3  # letters before the first value, by which a line is known again
_GAIN = 16  # characters that must be the same behind what is moved
_ENDS = 4  # of sentences that are tried: a date has dots too
_NO_ORDINAL = r"(?:(?<=of \d)|(?<=of \d\d)|(?<![\s(]\d)(?<![\s(]\d\d))"
_SENTENCE_END = re.compile(rf"{_NO_ORDINAL}[.!?](?=\s|$)|。")
_SENTENCE = re.compile(r"w[.!?。]")
"""As `_shape` has it."""

_GOES_ON = re.compile(rf"{_NO_ORDINAL}[.!?]\s+\S|[。;]\s*\S")
"""A line of several sentences: of these, only the one that changes is moved."""

_ORDINAL = re.compile(r"(?:^|[\s(])(?<!of )\d{1,2}\.\s+\S")
"""Or a number at a sentence's end: where the next begins is not known then."""

_STRUCTURE = re.compile(r"[{}\"]|^\s+\S")
"""A line that says nothing without those around it: JSON, or indented."""

_TRIED = 2048  # characters of a system message, from the line that changes on, on which a rule is tried

_SUFFIX = r"(?:st|nd|rd|th|er|am|pm|AM|PM|h)"
_TOKEN = re.compile(
    rf"(?P<number>(?:(?<![^\s:=(])[-+−])?\d(?:[\d.,:/]*\d)?{_SUFFIX}?(?:(?![A-Za-z0-9_])|(?=[AaPp]\.))"
    r"|\d{4}-\d{2}-\d{2}(?:[T_]\d{2}[:.h]?\d{2}(?:[:.]?\d{2}(?:[.,]\d+)?)?)?(?:Z|[+-]\d{2}:?\d{2})?(?![\w-]))"
    r"|(?P<half>(?<=\d)\s?[AaPp](?:[Mm](?![^\W_])|\.\s?[Mm]\.))"
    r"|(?P<id>(?=[A-Za-z_-]*\d)(?=[\d_-]*[A-Za-z])[A-Za-z0-9_-]{3,}={0,2}|[0-9a-fA-F]{4,}(?:-[0-9a-fA-F]{4,})+)"
    r"|(?P<word>[^\W\d_]+(?:['’][^\W\d_]+)*)|(?P<other>\s+|.)"
)
_HALF = r"\s?[AaPp](?:[Mm]|\.\s?[Mm]\.)"
"""Of the day: a rule that was learnt in the morning is for the afternoon, too."""

_ID = r"[\w=-]{2,80}"
_LABEL = re.compile(
    r"[#*\-\s]{0,4}(?:(?:the|this|my|our|current(?:ly)?|now|nearest|last|user'?s?|your|device'?s?|active|outside|inside"
    r"|outdoor|indoor|living|person|die|der|das|aktuell\w*|derzeit\w*)\s+){0,3}"
    r"(?:area|room|location|place|position|zone|floor|weather|forecast|temperature|humidity|wind|rain|mood|battery"
    r"|power|light|volume|season|moon|sun|state|status|presence|home|playing|track|song|channel|branch|git branch"
    r"|speaker|user|user name|username|wetter|raum|ort|standort|temperatur|stimmung|météo|lieu|pièce|tiempo|lugar|luogo"
    r"|stanza|meteo)(?:\s+(?:outside|inside|now|today|home|id|name))?"
    r"(?:\s*[:=]\s*|\s+(?:is|ist|est|es|è)(?:\s+now)?\s+(?:in\s+)?(?:the\s+)?)",
    re.IGNORECASE,
)
"""What a text that changes is announced by, if it may be moved: what it is, not what to do."""

_LABELLED = re.compile(r"[^\W\d_][\"'*)\]]{0,3}\s?[:=]?\s{0,2}$")
"""What stands before a number that is a value: a word."""

_GOES_ON_BEHIND = re.compile(r"[,;:–—]\s*[^\W\d_]|\([^()]*\)\s*[^\s.!。]")
"""More is said behind the last value: `from 06:32 on, whisper`."""

_LETTER = re.compile(r"[^\W\d_]")
_OF_CLOCK = re.compile(
    rf"^[^\W\da-z_]{{1,4}}|\b(?:o['’]clock|uhr|hours?|h|(?:local\s)?time|now|jetzt|tz|time\s?zone|(?-i:in\s[A-Z][\w-]+))\b|{ZONE}",
    re.IGNORECASE,
)
"""What may stand behind one: a suffix where words are not parted, a unit, a zone, or a place for it."""

_TIME_OF_DAY = re.compile(r"\d\s?(?:[:h時时点시]|[ap]\.?m)", re.IGNORECASE)
_OFFSET = re.compile(r"(?:(?:(?:utc|gmt)\s?|(?<=\d\s))[-−]|\+)(?:0?\d|1[0-4])(?::?[0-5]\d)?$", re.IGNORECASE)
"""Of a zone."""

_MOST_VALUE_WORDS = 5  # more are a sentence, of which nobody knows what it will say
_IN_SENTENCES = re.compile(
    r"\b(?:her|him|them|it|es|sie|ihn|as|what|who|that|this|which|how|whom|was|wie|que|qui|is|are|ist|sind|est|sont)\b"
)
"""Words of which a value has none: `Name: call her Nora`."""

_VALUE = rf"[^\s.!?;]{{1,30}}(?: [^\s.!?;]{{1,30}}){{0,{_MOST_VALUE_WORDS - 1}}}"


class Proposal(NamedTuple):
    rule: str = ""  # of StableRules; "": none helps
    setting: str = "on"  # "on", or a regular expression


DROP_BILLING_LINE = "drop_billing_line"


def dropping(before: str, after: str, place: int) -> tuple[Proposal, ...]:
    """How to drop a billing line that differs at `place` (in both), if it stands where the rule drops it."""
    left, count = stable.drop_billing_line(after)
    drops = count and stable.drop_billing_line(before)[1] and place <= len(after) - len(left)
    return (Proposal(DROP_BILLING_LINE),) if drops else ()


def moving(before: str, after: str, place: int) -> Iterator[Proposal]:
    """How to move what changes at `place` (in both) out of a system message, of which both texts are the whole: the
    best first; the others are narrower. What `move_volatile_line` takes along is judged by `evidence.py`.
    """
    start = after.rfind("\n", 0, place) + 1
    start = after.rfind("\n", 0, max(0, start - 1)) + 1  # the line above; what stands before it changes in both alike
    if place - start > _TRIED // 2:
        return
    whole = after
    before, after, place = before[start : start + _TRIED], after[start : start + _TRIED], place - start
    if _helps(StableRules(move_volatile_line=True), before, after, place):
        yield Proposal("move_volatile_line")
    for pattern in _patterns(before, after, place):
        if _helps(StableRules(move=pattern), before, after, place) and _finds_one(pattern, whole):
            yield Proposal("move", pattern)
            return


def _finds_one(pattern: str, text: str) -> bool:
    return len(list(itertools.islice(re.finditer(pattern, text, re.MULTILINE), 2))) == 1


def _helps(rules: StableRules, before: str, after: str, place: int) -> bool:
    counts: Counter[str] = Counter()
    try:
        (old, out), (new, moved) = (stable.taken_out(text, rules, counts) for text in (before, after))
    except UnfitError:
        return False
    if not moved or len(out) != len(moved) or (rules.move and len(moved) != 1):
        return False
    if old == new:
        return True
    gone = len(after) - len(new)
    same = common_length(old, new)
    return same >= max(0, place - gone) + _GAIN and len(new) - same < len(after) - place - gone


def _patterns(before: str, after: str, place: int) -> Iterator[str]:
    """Of the line that changes, then of the sentence."""
    start = after.rfind("\n", 0, place) + 1
    lines = [_to_end(text, start, place) for text in (before, after)]
    if any(_STRUCTURE.search(line) for line in lines) or _stands_in_a_list(after, start, lines[1]):
        return
    what = volatile(before, after, place)
    cause = what.cause if what is not None else "changing_value"
    found = _pattern(lines[0], lines[1], cause)
    if found and not any(_GOES_ON.search(line) for line in lines):
        yield f"^{found}$"
    ends = [match.end() for match in _SENTENCE_END.finditer(after, start, place)]
    begin = ends[-1] if ends else start
    if ends and not after[begin : begin + 1].isspace() and after[begin - 1] != "。":
        return
    begin += len(after[begin:place]) - len(after[begin:place].lstrip(" "))
    opened = "(?<=[.!?] )" if ends and after[begin - 1 : begin] == " " else "" if ends else "^"
    for old, new in itertools.product(*(_sentences(text, begin, place) for text in (before, after))):
        found = _pattern(old, new, cause)
        if found:
            yield f"{opened}{found} ?"
    if ends:  # the last one of the line
        found = _pattern(_to_end(before, begin, place), _to_end(after, begin, place), cause)
        if found:
            yield f"{opened}{found}$"


def _sentences(text: str, begin: int, place: int) -> list[str]:
    """What may be the sentence: a dot may be of a date."""
    line = _to_end(text, begin, place)
    ends = [match.end() for match in _SENTENCE_END.finditer(line, place - begin)][:_ENDS]
    return [line[:end] for end in ends if end < len(line)]


def _pattern(before: str, after: str, cause: str) -> str:
    """What finds both texts and hardly any other; "" if there is nothing of that kind."""
    if any(
        len(text) > _LONGEST
        or len(text.split()) > _MOST_WORDS.get(cause, _FEW_WORDS)
        or INSTRUCTION.search(text)
        or (cause != "clock" and _ORDINAL.search(text))
        for text in (before, after)
    ):
        return ""
    found = _with_slots(before, after, cause) or _behind_label(before, after)
    return found if found and all(re.fullmatch(found, text) for text in (before, after)) else ""


def _with_slots(before: str, after: str, cause: str) -> str:
    """The text itself, where only values differ."""
    old, new = (list(_TOKEN.finditer(text)) for text in (before, after))
    if len(old) != len(new):
        return ""
    dated = {match.start() for match in date_words(after)} if cause == "clock" else set()
    is_date = bool(dated) or any(token.lastgroup == "number" for token in new)
    parts: list[str] = []
    head: str | None = None  # what stands before the first value
    end, last = 0, ""  # of the last one, and what finds it
    for x, y in zip(old, new, strict=True):
        kinds = {x.lastgroup, y.lastgroup}
        same = x[0] == y[0]
        if kinds == {"number"} and (not same or cause == "clock"):
            counted = cause != "clock" and _LABELLED.search(after[: y.start()]) is not None
            parts.append(_number(x[0] + y[0], any_value=counted))
        elif kinds == {"half"} and (not same or cause == "clock"):
            parts.append(_HALF)
        elif kinds == {"word"} and same and y.start() in dated:
            parts.append(_word(x[0], y[0]))
        elif same:
            parts.append(_literal(y[0]))
            continue
        elif kinds == {"word"} and ((cause == "clock" and is_date) or {x[0].lower(), y[0].lower()} <= STATES):
            parts.append(_word(x[0], y[0]))
        elif kinds <= {"id", "number", "word"} and cause in ("random_id", "counter", "clock") and "id" in kinds:
            parts.append(_ID)
        else:
            return ""
        head = after[: y.start()] if head is None else head
        end, last = y.end(), parts[-1]
    if _GOES_ON_BEHIND.search(after[end:]):
        return ""
    if cause == "clock" and (_says_more(after, end) or _has_constant(old, new, after)):
        return ""
    if last == _ID and _LETTER.search(after[end:]):
        return ""
    return "".join(parts) if head and (sum(map(str.isalpha, head)) >= _SHORTEST_HEAD or not head.isascii()) else ""


def _says_more(text: str, end: int) -> bool:
    """Is there text behind a clock of which the last value ends there, and is it neither date nor zone? Then it is no
    value: `21:43 - quiet hours`.
    """
    spans = list(clocks(text))
    end = max([end, *(span.stop for span in spans if span.start < end <= span.stop)])
    of_clock = {at for span in spans for at in range(span.start, span.stop)}
    left = "".join(" " if at in of_clock else text[at] for at in range(end, len(text)))
    return _LETTER.search(_OF_CLOCK.sub(" ", left)) is not None


def _has_constant(old: list[re.Match[str]], new: list[re.Match[str]], text: str) -> bool:
    """Is there a number beside a clock that stays the same, and is neither of that clock nor a date or a zone? What it
    says is not of now: `It is 21:43 and the target is 20 degrees.`
    """
    same = [y for x, y in zip(old, new, strict=True) if x[0] == y[0] and y.lastgroup in ("number", "id")]
    changed = [y.start() for x, y in zip(old, new, strict=True) if x[0] != y[0]]
    spans = [
        span
        for span in clocks(text)
        if any(span.start <= at < span.stop for at in changed) or _TIME_OF_DAY.search(text[span]) is None
    ]
    return any(
        not any(span.start <= token.start() < span.stop for span in spans)
        and _OFFSET.search(text[: token.end()]) is None
        for token in same
    )


def _word(*seen: str) -> str:
    """What finds words of their form: a name of a day or month has a capital in many languages."""
    return r"[A-Z][^\W\d_]{1,15}" if all("A" <= word[0] <= "Z" for word in seen) else r"[^\W\d_]{1,16}"


def _number(seen: str, *, any_value: bool = False) -> str:
    """What finds numbers, or dates in numbers, of the form of those that were seen. `any_value`: they are of something
    measured or counted, which may get a fraction, or fall below 0.
    """
    if any_value and seen.isdecimal():
        return r"[-+−]?\d{1,12}(?:[.,]\d{1,12})?"
    if seen.isdecimal():
        return r"\d{1,12}"
    letters = {char for char in seen if char.isalpha()}
    digits = r"[\d.,:/T Z+-]{1,40}" if letters & {"T", "Z"} else r"[\d.,:/-]{1,24}"
    sign = "[-+−]?" if any_value or not seen.isascii() or "+" in seen else ""
    return sign + digits.replace(" ", "") + (r"\w{0,2}" if letters - {"T", "Z"} else "")


def _behind_label(before: str, after: str) -> str:
    label = _LABEL.match(after)
    if label is None or not before.startswith(label[0]) or common_length(before, after) < label.end():
        return ""
    values = [text[label.end() :].removesuffix(".") for text in (before, after)]
    if any(len(value.split()) > _MOST_VALUE_WORDS or _IN_SENTENCES.search(value) for value in values):
        return ""
    return rf"{_literal(label[0])}{_VALUE}\.?"


def _literal(text: str) -> str:
    """As a regular expression that a person can read."""
    return re.escape(text).replace("\\ ", " ").replace("\\-", "-")


def _to_end(text: str, start: int, place: int) -> str:
    end = text.find("\n", place)
    return text[start : end if end >= 0 else len(text)]


def _stands_in_a_list(text: str, start: int, line: str) -> bool:
    """Do its neighbours look like it? Then it is one of many that may change, and moving one helps little."""
    if _SENTENCE.fullmatch(_shape(line)):  # all of them look alike
        return False
    end = start + len(line)
    above = text[:start].rstrip("\n").rsplit("\n", 1)[-1]
    below = text[end:].lstrip("\n").split("\n", 1)[0]
    return _shape(line) in {_shape(other) for other in (above, below) if other}


def _shape(line: str) -> str:
    return re.sub(r"\w+(?:[ .'-]\w+)*", "w", line.strip())
