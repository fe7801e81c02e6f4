"""Tool calls in the forms of single families of models, as they are written: see `layout.py` for what each looks like.

`reply.py` has the common ones, and calls these with what they need of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from .layout import KIMI, MINIMAX_MARK, SOLAR
from .reader import Reader, Sink, Wait

_M3 = re.escape(MINIMAX_MARK)
_NAME = re.compile(r"[\w.\-]{1,128}")
_KIMI_ID = re.compile(r"(?:functions\.)?([\w.\-]{1,128}?)(?::\d{1,9})?")
_M3_INVOKE = re.compile(rf'{_M3}<invoke name="([^"]+)">(.*?){_M3}</invoke>', re.DOTALL)
_M3_PAIR = re.compile(rf"{_M3}<([^/<>\s]+)>(.*?){_M3}</\1>", re.DOTALL)
_DEEPEST = 16  # levels of tags within tags
_FENCE = "```"
_RECIPIENT = ">>>"


@dataclass
class Hands:
    """What a form does with what it reads."""

    reader: Reader
    text: Sink
    begin: Callable[[str, str], Sink]  # a call, by its name and its id ("": a new one); the sink takes its arguments
    end: Callable[[], None]  # the call is complete
    whole: Callable[[str, dict[str, Any]], None]  # a call at once
    listed: Callable[[], Wait]  # calls as JSON, in a list that begins now
    single: Callable[[], Generator[None, None, bool]]  # a call as a JSON object that begins now; False: it is none
    known: Callable[[str], bool]  # is it the name of a tool?
    arguments_of: Callable[[str, str], dict[str, Any]]  # of a tool, of a text with tags
    is_over: Callable[[], bool]  # nothing more is looked at


def _arguments(hands: Hands, name: str, ident: str = "") -> Wait:
    """JSON, up to its end, as the arguments of `name`."""
    sink = hands.begin(name, ident)
    yield from hands.reader.space()
    if (yield from hands.reader.json_value(sink)):
        hands.end()


def kimi(hands: Hands) -> Wait:
    """Kimi's templates show a call's id again, so the model's own is kept."""
    reader = hands.reader
    section, section_end, begin, separator, end = KIMI
    while not hands.is_over():
        found = yield from reader.until((section, begin, section_end), hands.text)
        if not found:
            return
        if found != begin:
            continue
        head: list[str] = []
        found = yield from reader.until((separator, end), head.append)
        ident = "".join(head).strip()
        named = _KIMI_ID.fullmatch(ident)
        if found != separator or named is None:
            hands.text(begin + "".join(head) + found)
            continue
        yield from _arguments(hands, named[1], ident)
        if not hands.is_over():
            yield from reader.until((end,), lambda _space: None)


def solar(hands: Hands) -> Wait:
    """As Kimi's, with the name beside the id."""
    reader = hands.reader
    begin_all, begin, before_name, before_arguments, end = SOLAR
    while not hands.is_over():
        found = yield from reader.until((begin_all, begin), hands.text)
        if not found:
            return
        if found != begin:
            continue
        head: list[str] = []
        found = yield from reader.until((before_arguments, end), head.append)
        ident, middle, name = "".join(head).partition(before_name)
        if found != before_arguments or not middle or not _NAME.fullmatch(name.strip()):
            hands.text(begin + "".join(head) + found)
            continue
        yield from _arguments(hands, name.strip(), ident.strip())
        if not hands.is_over():
            yield from reader.until((end,), lambda _space: None)


def minimax_m3(hands: Hands) -> Wait:
    """Values within values are tags within tags, and lists are tags that are all called `item`."""
    opening, closing = f"{MINIMAX_MARK}<tool_call>", f"{MINIMAX_MARK}</tool_call>"
    body: list[str] = []
    closed = yield from hands.reader.until((closing,), body.append)
    whole = "".join(body)
    found = _M3_INVOKE.findall(whole)
    if not found:
        hands.text(opening + whole + closed)
    for name, inner in found:
        pairs = "".join(
            f'<parameter name="{key}">{_m3_value(text)}</parameter>' for key, text in _M3_PAIR.findall(inner)
        )
        hands.whole(name, hands.arguments_of(name, pairs))


def _m3_value(text: str, depth: int = 0) -> str:
    """A value as text: what has tags in it as JSON."""
    pairs = _M3_PAIR.findall(text) if depth < _DEEPEST else []
    return json.dumps(_m3_tree(text, depth), ensure_ascii=False) if pairs else text


def _m3_tree(text: str, depth: int) -> Any:
    pairs = _M3_PAIR.findall(text) if depth < _DEEPEST else []
    if not pairs:
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text
    if all(key == "item" for key, _ in pairs):
        return [_m3_tree(inner, depth + 1) for _, inner in pairs]
    return {key: _m3_tree(inner, depth + 1) for key, inner in pairs}


def functionary(hands: Hands) -> Wait:
    """Each part begins with a line that says for whom it is: all, or a tool."""
    reader = hands.reader
    mark = ""
    if (yield from reader.starts((_RECIPIENT,))):
        mark = reader.take(len(_RECIPIENT))
    while not hands.is_over():
        head: list[str] = []
        found = yield from reader.until(("\n", _RECIPIENT), head.append)
        name = "".join(head).strip()
        if found == _RECIPIENT:
            hands.text(mark + "".join(head))
            mark = found
            continue
        if found and hands.known(name):
            yield from _arguments(hands, name)
        elif not (found and name == "all"):
            hands.text(mark + "".join(head) + found)
        if hands.is_over() or not (yield from reader.until((_RECIPIENT,), hands.text)):
            return
        mark = _RECIPIENT


def command_r(hands: Hands) -> Wait:
    """A list in a fence. Its tool `directly_answer` means that none is called."""
    reader = hands.reader
    reader.record()
    yield from reader.space()
    if fence := (yield from reader.starts((f"{_FENCE}json", f"{_FENCE}\n"))):
        reader.take(len(fence))
        yield from reader.space()
    if (yield from reader.peek()) != "[":
        hands.text("Action:" + reader.recorded())
        return
    reader.recorded()
    yield from hands.listed()
    if not hands.is_over():
        yield from reader.space()
        if (yield from reader.starts((_FENCE,))):
            reader.take(len(_FENCE))


def gigachat(hands: Hands) -> Wait:
    """Behind a separator, which may stand elsewhere too."""
    reader = hands.reader
    head = "function call<|role_sep|>"
    reader.record()
    yield from reader.space()
    if not (yield from reader.starts((head,))):
        hands.text(reader.recorded())
        return
    reader.take(len(head))
    yield from reader.space()
    if (yield from reader.peek()) == "{" and (yield from hands.single()):
        reader.recorded()
    else:
        hands.text(reader.recorded())


def function_tag(hands: Hands) -> Wait:
    """A name within a tag, and JSON."""
    reader = hands.reader
    head: list[str] = []
    found = yield from reader.until((">", "\n"), head.append)
    if found != ">" or not _NAME.fullmatch("".join(head)):
        hands.text("<function=" + "".join(head) + found)
        return
    yield from _arguments(hands, "".join(head))
    if not hands.is_over():
        yield from reader.until(("</function>",), lambda _space: None)


def invocations(hands: Hands, opening: str, closing: str) -> Wait:
    """`<invoke name="name">tags of parameters</invoke>`, up to `closing`."""
    reader = hands.reader
    body: list[str] = []
    closed = yield from reader.until((closing,), body.append)
    whole = "".join(body)
    found = re.findall(r'<invoke name="([^"]+)">(.*?)</invoke>', whole, re.DOTALL)
    if not found:
        hands.text(opening + whole + closed)
    for name, inner in found:
        hands.whole(name, hands.arguments_of(name, inner))


def named_function(hands: Hands, opening: str) -> Wait:
    """`<function name="name">tags of parameters</function>`."""
    reader = hands.reader
    head: list[str] = []
    body: list[str] = []
    found = yield from reader.until(('">',), head.append)
    closed = yield from reader.until(("</function>",), body.append)
    name = "".join(head)
    if closed and _NAME.fullmatch(name):
        hands.whole(name, hands.arguments_of(name, "".join(body)))
    else:
        hands.text(opening + name + found + "".join(body) + closed)


def apertus(hands: Hands, opening: str, closing: str) -> Wait:
    """`[{"name": {arguments}}]`."""
    body: list[str] = []
    closed = yield from hands.reader.until((closing,), body.append)
    try:
        listed = json.loads("".join(body))
        calls = [(str(name), value) for one in listed for name, value in one.items()]
        good = bool(calls) and all(isinstance(value, dict) for _, value in calls)
    except (ValueError, RecursionError, TypeError, AttributeError):
        good, calls = False, []
    if not good:
        hands.text(opening + "".join(body) + closed)
        return
    for name, value in calls:
        hands.whole(name, value)
