"""Which rule of `[stable]` would keep a prompt stable, tried on the two texts that differ before it is proposed.

Pure. A rule that would change nothing is worse than none: somebody turns it on, restarts, and waits for nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

from ..chat import stable
from ..expressions import UnfitError
from ..frames.worker import StableRules
from .prompt import common_length
from .volatile import date_words

_LONGEST = 240  # characters of a line or sentence that is moved
_SHORTEST_HEAD = 3  # letters by which a line is known again
_GAIN = 16  # characters that must be the same behind what is moved
_SENTENCE_END = re.compile(r"[.!?。](?:\s|$)|。")
_STRUCTURE = re.compile(r"[{}\"]|^\s+\S")
"""A line that says nothing without those around it: JSON, or indented."""

_NOT_FIXED = re.compile(r"\d|[^\s=:#@\[(<\u3000-\u9fff\uac00-\ud7af]*$")
"""A number, and the word that has begun, in scripts that part words."""

_TRIED = 2048  # characters of a system message, from the line that changes on, on which a rule is tried


class Proposal(NamedTuple):
    rule: str = ""  # of StableRules; "": none helps
    setting: str = "on"  # "on", or a regular expression


NOTHING = Proposal()


def moving(before: str, after: str, place: int) -> Proposal:
    """How to move what changes at `place` (in both) out of a system message, of which both texts are the whole."""
    start = after.rfind("\n", 0, place) + 1
    start = after.rfind("\n", 0, max(0, start - 1)) + 1  # the line above; what stands before it changes in both alike
    if place - start > _TRIED // 2:
        return NOTHING
    whole = after
    before, after, place = before[start : start + _TRIED], after[start : start + _TRIED], place - start
    lines = StableRules(move_volatile_line=True)
    if _helps(lines, before, after, place) and stable.taken_out(whole, lines, Counter())[1]:
        return Proposal("move_volatile_line")
    for pattern in _patterns(before, after, place):
        if _helps(StableRules(move=pattern), before, after, place):
            return Proposal("move", pattern)
    return NOTHING


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


def _patterns(before: str, after: str, place: int) -> list[str]:
    """Of the line that changes, then of the sentence."""
    start = after.rfind("\n", 0, place) + 1
    lines = [_to_end(text, start, place) for text in (before, after)]
    if any(_STRUCTURE.search(line) for line in lines) or _stands_in_a_list(after, start, lines[1]):
        return []
    found = []
    if all(len(line) <= _LONGEST for line in lines):
        head = _head(lines[1], place - start)
        if head:
            found.append(f"^{_literal(head)}[^\\n]*$")
    ends = [match.end() for match in _SENTENCE_END.finditer(after, start, place)]
    if ends or not found:
        begin = ends[-1] if ends else start
        head = _head(after[begin:place], place - begin)
        if head:
            opened = "(?<=[.!?。] )" if ends and after[begin - 1].isspace() else "^" if begin == start else ""
            found.append(f"{opened}{_literal(head)}[^\\n]{{0,{_LONGEST}}}?(?:[.!?](?=\\s|$)|。|$) ?")
    return found


def _literal(text: str) -> str:
    """As a regular expression that a person can read."""
    return re.escape(text).replace("\\ ", " ").replace("\\-", "-")


def _to_end(text: str, start: int, place: int) -> str:
    end = text.find("\n", place)
    return text[start : end if end >= 0 else len(text)]


def _head(line: str, place: int) -> str:
    """The words by which a line is known again: those before what changes, without numbers and dates."""
    head = line[:place]
    ends = [match.start() for match in _NOT_FIXED.finditer(head)]
    ends += [match.start() for match in date_words(line) if match.start() < place]
    cut = head[: min(ends, default=len(head))]
    return cut if sum(char.isalpha() for char in cut) >= _SHORTEST_HEAD or (cut and not cut.isascii()) else ""


def _stands_in_a_list(text: str, start: int, line: str) -> bool:
    """Do its neighbours look like it? Then it is one of many that may change, and moving one helps little."""
    end = start + len(line)
    above = text[:start].rstrip("\n").rsplit("\n", 1)[-1]
    below = text[end:].lstrip("\n").split("\n", 1)[0]
    return _shape(line) in {_shape(other) for other in (above, below) if other}


def _shape(line: str) -> str:
    return re.sub(r"\w+(?:[ .'-]\w+)*", "w", line.strip())
