"""Tool calls in the forms of single families of models, as they are written: see `layout.py` for what each looks like.

`reply.py` has the common ones, and calls these with what they need of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .layout import DEEPSEEK, DSML, KIMI, MINIMAX_MARK, SOLAR
from .reader import Answer, Reader, Sink, Wait
from .tags import NAME, Part, arguments_of_dsml, arguments_of_tags, calls_of_invocations, calls_of_trees
from .values import json_value

_KIMI_ID = re.compile(r"(?:functions\.)?([\w.\-]{1,128}?)(?::\d{1,9})?")
_FENCE = "```"
_RECIPIENT = ">>>"


class Arguments(Protocol):
    """JSON that begins now, as the arguments of `name`. False: it is no call, and `raw`, its beginning, is text. One of
    `ends` may follow instead, where there are no arguments. `ident`: the call's id, "" for a new one."""

    def __call__(self, name: str, raw: str, ends: tuple[str, ...] = (), ident: str = "") -> Answer: ...


class Rest(Protocol):
    """What stands behind a call, up to `end`, which is taken, or to one of `others`, which is not: text, but for
    brackets and `slips` at its beginning."""

    def __call__(self, end: str, others: tuple[str, ...] = (), slips: tuple[str, ...] = ()) -> Wait: ...


@dataclass
class Hands:
    """What a form does with what it reads."""

    reader: Reader
    text: Sink
    whole: Callable[[str, dict[str, Any]], None]  # a call at once
    spoken: Callable[[Sequence[Part], str], None]  # several, with what is between; all as it was written
    arguments: Arguments
    rest: Rest
    listed: Callable[[str], Wait]  # calls as JSON, in a list that begins now, behind this text
    single: Callable[[], Answer]  # a call as a JSON object that begins now; False: it is none
    known: Callable[[str], bool]  # is it the name of a tool?
    parameters: Callable[[str], Any]  # the schema of a tool's
    is_over: Callable[[], bool]  # nothing more is looked at

    def after(self, opening: str) -> Sink:
        """For what stands behind `opening`: if it is more than white space, both are text."""
        held = [opening]

        def add(text: str) -> None:
            if held:
                held.append(text)
                if not text.strip():
                    return
                text = "".join(held)
                held.clear()
            self.text(text)

        return add


def mistral(hands: Hands) -> Wait:
    """A list of objects or, since tokenizer version 11, a name and arguments."""
    reader = hands.reader
    opening = "[TOOL_CALLS]"
    space = yield from reader.space()
    if (yield from reader.peek()) == "[":
        yield from hands.listed(opening + space)
        return
    head: list[str] = []
    found = yield from reader.until(("[ARGS]", "[CALL_ID]", "{"), head.append)
    name = "".join(head)
    raw = opening + space + name
    if found == "{":
        reader.put_back(found)
    else:
        raw += found
    if found == "[CALL_ID]":
        ident: list[str] = []
        closed = yield from reader.until(("[ARGS]",), ident.append)
        raw += "".join(ident) + closed
        found = closed
    if found and NAME.fullmatch(name.strip()):
        yield from hands.arguments(name.strip(), raw)
    else:
        hands.text(raw)


def deepseek(hands: Hands) -> Wait:
    """A section of calls, each a name and JSON; with `function` before the name the JSON is in a fence."""
    reader = hands.reader
    opening, begin, separator, end, end_of_all = DEEPSEEK
    between = hands.after(opening)
    while not hands.is_over():
        if (yield from reader.until((begin, end_of_all), between)) != begin:
            return
        raw = [begin]
        found = yield from reader.until((separator, end_of_all), raw.append)
        name = "".join(raw[1:]).strip()
        raw.append(found)
        if name == "function" and found == separator:
            rest: list[str] = []
            found = yield from reader.until(("\n",), rest.append)
            name = "".join(rest).strip()
            raw += [*rest, found, (yield from reader.space())]
            if (yield from reader.starts((f"{_FENCE}json",))):
                raw.append(reader.take(len(f"{_FENCE}json")))
        if not found or found == end_of_all or not NAME.fullmatch(name):
            between("".join(raw))
        elif (yield from hands.arguments(name, "".join(raw), (end,))):
            between = hands.text
            yield from hands.rest(end, (begin, end_of_all), (_FENCE,))
        else:
            between = hands.text


def dsml(hands: Hands, opening: str) -> Wait:
    """DeepSeek's since V3.2: tags, up to the one that closes all. A call that is cut short is text."""
    reader = hands.reader
    ends = tuple(f"</｜DSML｜{tag}>" for tag in DSML.values())
    begin, middle, end = '<｜DSML｜invoke name="', '">', "</｜DSML｜invoke>"
    between = hands.after(opening)
    while not hands.is_over():
        found = yield from reader.until((begin, *ends), between)
        if found != begin:
            return
        head: list[str] = []
        body: list[str] = []
        middle_found = yield from reader.until((middle,), head.append)
        closed = yield from reader.until((end,), body.append)
        name, inner = "".join(head), "".join(body)
        arguments, stray = arguments_of_dsml(inner, hands.parameters(name))
        if closed and arguments is not None and NAME.fullmatch(name):
            hands.whole(name, arguments)
            between = hands.text
            if stray and not hands.is_over():
                hands.text(stray)
        else:
            between(begin + name + middle_found + inner + closed)


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
        if (yield from hands.arguments(named[1], begin + "".join(head) + found, (end,), ident)):
            yield from hands.rest(end, (begin, section_end))


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
        if found != before_arguments or not middle or not NAME.fullmatch(name.strip()):
            hands.text(begin + "".join(head) + found)
            continue
        if (yield from hands.arguments(name.strip(), begin + "".join(head) + found, (end,), ident.strip())):
            yield from hands.rest(end, (begin,))


def minimax_m3(hands: Hands) -> Wait:
    """Values within values are tags within tags."""
    opening, closing = f"{MINIMAX_MARK}<tool_call>", f"{MINIMAX_MARK}</tool_call>"
    body: list[str] = []
    closed = yield from hands.reader.until((closing,), body.append)
    whole = "".join(body)
    hands.spoken(calls_of_trees(whole, hands.parameters), opening + whole + closed)


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
            yield from hands.arguments(name, mark + "".join(head) + found, (_RECIPIENT,))
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
    is_list = (yield from reader.peek()) == "["
    opening = "Action:" + reader.recorded()
    if not is_list:
        hands.text(opening)
        return
    yield from hands.listed(opening)
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
    """A name within a tag, and JSON. Prose has such tags too, so only tools that were offered are called."""
    reader = hands.reader
    head: list[str] = []
    opening, end = "<function=", "</function>"
    found = yield from reader.until((">", "\n"), head.append)
    name = "".join(head)
    if found != ">" or not hands.known(name):
        hands.text(opening + name + found)
    elif (yield from hands.arguments(name, opening + name + found, (end,))):
        yield from hands.rest(end, (opening,))


def invocations(hands: Hands, opening: str, closing: str) -> Wait:
    """`<invoke name="name">tags of parameters</invoke>`, up to `closing`."""
    body: list[str] = []
    closed = yield from hands.reader.until((closing,), body.append)
    whole = "".join(body)
    hands.spoken(calls_of_invocations(whole, hands.parameters), opening + whole + closed)


def named_function(hands: Hands, opening: str) -> Wait:
    """`<function name="name">tags of parameters</function>`. Prose may have such tags too, see `function_tag`."""
    reader = hands.reader
    head: list[str] = []
    body: list[str] = []
    found = yield from reader.until(('">', "\n"), head.append)
    name = "".join(head)
    if found != '">' or not hands.known(name):
        hands.text(opening + name + found)
        return
    closed = yield from reader.until(("</function>",), body.append)
    inner = "".join(body)
    arguments, stray = arguments_of_tags(inner, hands.parameters(name))
    good = closed and arguments is not None
    hands.spoken([(name, arguments or {}), stray] if good else [], opening + name + found + inner + closed)


def apertus(hands: Hands, opening: str, closing: str) -> Wait:
    """`[{"name": {arguments}}]`."""
    body: list[str] = []
    closed = yield from hands.reader.until((closing,), body.append)
    try:
        listed = json_value("".join(body))
        calls = [(str(name), value) for one in listed for name, value in one.items()]
        good = bool(calls) and all(isinstance(value, dict) for _, value in calls)
    except (ValueError, RecursionError, TypeError, AttributeError):
        good, calls = False, []
    if not good:
        hands.text(opening + "".join(body) + closed)
        return
    for name, value in calls:
        hands.whole(name, value)
