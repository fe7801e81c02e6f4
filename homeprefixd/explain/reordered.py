"""Whether two texts differ in the order of something only: keys or entries of JSON, tools, lines, items of a sentence.

Pure functions on two texts and the position of the first character that differs.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from .prompt import common_length, tool_name
from .volatile import STATES

_WINDOW = 16_384  # characters behind the difference that are compared
_LONGEST = 1024  # characters of a line whose items are compared
_BETWEEN_ITEMS = re.compile(
    r"\s*(?:[,;、，；・|]|\s(?:and|or|und|oder|et|ou|y|o|e|och|eller|og|en|of|i|ja|tai|и|или|та|або|&)\s)\s*"
)
_OF_ITEM = re.compile(r"[^\W\d_]")


def canonical(value: Any) -> str:
    """JSON with its keys in order."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str)


def without_order(value: Any) -> str:
    """The same of JSON whose objects and lists differ in order only."""
    if isinstance(value, dict):
        return canonical({key: without_order(item) for key, item in value.items()})
    return canonical(sorted(map(without_order, value))) if isinstance(value, list) else canonical(value)


def reordered(a: str, b: str, place: int) -> str:
    """Are it keys, tools or lines that come in another order from `place` on? The cause, or ""."""
    for start in _json_starts(a, place):
        values = [_json_at(text, start, place) for text in (a, b)]
        if values[0] is None or values[1] is None:
            continue
        if canonical(values[0]) == canonical(values[1]):
            return "keys_reordered"
        if _same_items(values[0], values[1]):
            return "tools_reordered" if _are_tools(values[0]) else "entries_reordered"
    start = a.rfind("\n", 0, place) + 1
    line, other = (text[start : start + _LONGEST].partition("\n")[0] for text in (a, b))
    if _are_listed_otherwise(line, other, place - start):
        return "entries_reordered"
    lines = [text[start : start + _WINDOW].split("\n") for text in (a, b)]
    if len(lines[0]) < 2 or len(lines[1]) < 2:
        return ""
    heads = lines[0][0].strip(), lines[1][0].strip()
    if not all(len(head) >= 3 for head in heads) or heads[0] == heads[1]:
        return ""
    if _json_line(heads[0]) is not None and canonical(_json_line(heads[0])) == canonical(_json_line(heads[1])):
        return "keys_reordered"
    counts = [Counter(line.strip().rstrip(",") for line in part) for part in lines]
    often = [[count[head.rstrip(",")] for count in counts] for head in heads]
    if min(*often[0], *often[1]) < 1:
        return ""
    # A line that has only moved is there as often as before; `state: 'on'` that comes a second time is another value,
    # and so are two states that change places in entries that stay.
    repeated = max(*often[0], *often[1]) > 1
    stays = lines[0][1].strip() == lines[1][1].strip()
    if all(count == other for count, other in often) and not (repeated and stays):
        return "tools_reordered" if _are_tools([_json_line(head) for head in heads]) else "entries_reordered"
    return ""


def _are_listed_otherwise(a: str, b: str, place: int) -> bool:
    """Two lines: is what differs a list of the same items (`Anna, Bo and Eva`), each of which is there once? States
    and numbers that change places are other values.
    """
    if min(len(a), len(b)) <= place:
        return False
    begin = max(a.rfind(" ", 0, place), a.rfind(":", 0, place), a.rfind("：", 0, place)) + 1
    tail = common_length(a[begin:][::-1], b[begin:][::-1])
    while tail and a[-tail] not in ".,;!?。、)|":
        tail -= 1
    items = [_BETWEEN_ITEMS.split(text[begin : len(text) - tail].strip()) for text in (a, b)]
    one = set(items[0])
    return (
        len(one) == len(items[0]) == len(items[1]) >= 2
        and one == set(items[1])
        and all(_OF_ITEM.search(item) and item.lower() not in STATES for item in one)
    )


def _json_starts(text: str, place: int) -> Sequence[int]:
    """Where JSON that holds `place` may begin, the outermost last: the nearest brackets before it."""
    found = [match.start() for match in re.finditer(r"[\[{]", text[max(0, place - _WINDOW) : place + 1])]
    base = max(0, place - _WINDOW)
    near = [base + start for start in found[-6:][::-1]]
    return [*near, *(base + start for start in found[:2])]


def _json_at(text: str, start: int, place: int) -> Any | None:
    try:
        value, end = json.JSONDecoder().raw_decode(text[start : start + 4 * _WINDOW])
    except (ValueError, RecursionError):
        return None
    return value if start + end > place else None


def _json_line(line: str) -> Any | None:
    if not line.startswith(("{", "[")):
        return None
    try:
        return json.loads(line.rstrip(","))
    except (ValueError, RecursionError):
        return None


def _same_items(a: Any, b: Any) -> bool:
    if not isinstance(a, list) or not isinstance(b, list) or len(a) != len(b) or len(a) < 2:
        return False
    return sorted(map(canonical, a)) == sorted(map(canonical, b))


def _are_tools(values: Any) -> bool:
    return isinstance(values, list) and all(
        isinstance(value, dict)
        and bool(tool_name(value))
        and ("function" in value or "parameters" in value or "description" in value)
        for value in values
    )
