"""Splits a model's reply into text, thoughts and tool calls, as it is written.

The pieces joined do not depend on how the reply is cut. What only looks like a call stays text. Knows nothing of
tokens; which family writes how is in `layout.py`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..frames.worker import CallPiece
from .call_object import CallObject, MalformedError
from .layout import DEEPSEEK, DSML, GEMMA_QUOTES, LISTS, Layout
from .other_forms import (
    Hands,
    apertus,
    command_r,
    deepseek,
    dsml,
    function_tag,
    functionary,
    gigachat,
    invocations,
    kimi,
    minimax_m3,
    mistral,
    named_function,
    solar,
)
from .reader import Answer, Reader, Sink, Wait
from .spoken_calls import arguments_of_braces, calls_of_python
from .tags import Part, calls_of_tags
from .trimmed import Trimmed
from .values import json_text, whole_text

_CALLABLE = re.compile(r"[^\s\x00-\x1f\x7f<>{}\"]{1,128}")
"""A name that nobody offered and that may be a tool's all the same."""

_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_HEADER = re.compile(
    r"(<\|start\|> ?\w{0,9})? ?(to=\S{0,128})? ?(<\|channel\|> ?\w{0,40})? ?(to=\S{0,128})? ?(<\|constrain\|>)?"
    r" ?(json)?"
)
"""What may stand before a message, whole or cut short; white space is one space."""
_SLIPS = ("}", "]", " ", "\n", "\r", "\t")
"""What models write too much of behind a call."""
_FENCE = "```"


@dataclass
class Split:
    """What a part of a reply came to."""

    text: str = ""
    reasoning: str = ""
    calls: list[CallPiece] = field(default_factory=list)


class ReplyParser:
    """One reply. `feed` what the model writes, then `finish`.

    `tools`: the functions that may be called, by name; where nothing but its form marks a call, only these are taken
    for one; with `only` all others stay text, however they are marked. `opened`: the prompt ends within the thoughts.
    `calls` False: calls are left in the text. `parallel` False: after one call `ended` is True, and nothing more is
    looked at. `new_id` makes the ids of calls.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        tools: Mapping[str, dict[str, Any]],
        opened: bool,
        calls: bool,
        parallel: bool,
        new_id: Callable[[], str],
        only: bool = False,
    ) -> None:
        self._only = only
        self._layout, self._tools, self._opened = layout, tools, opened
        self._look_for_calls, self._parallel, self._new_id = calls, parallel, new_id
        self._reader = Reader(lambda: self.count > 0)
        self._text = Trimmed(strip_start=False)
        self._reasoning = Trimmed(strip_start=True)
        self._pieces: list[CallPiece] = []
        self._trim_end = False
        self._written: list[str] = []
        self._next_from = 0  # where in what was written the next call begins, with its marks
        self._last_from: int | None = None  # where the last one began; None: none did, or text followed
        self.count = 0  # calls that have begun
        self.ended = False
        self._machine = self._run()
        self._over = False
        self._advance()

    def feed(self, text: str) -> Split:
        """Take what was written; return what is certain now."""
        if not self.ended:
            self._written.append(text)
            self._reader.add(text)
            self._advance()
        return self._fetch()

    def finish(self) -> Split:
        """The reply is over: return what was held back."""
        self._reader.final = True
        self._advance()
        self._reasoning.close(keep_space=False)
        self._text.close(keep_space=not self.count and not self._trim_end)
        return self._fetch()

    @property
    def unfinished(self) -> str:
        """All that was written from the last call on, with its marks: what a call is that was cut short. "" if there is
        none, or something was told after it."""
        return "" if self._last_from is None else "".join(self._written)[self._last_from :]

    def _advance(self) -> None:
        if not self._over:
            try:
                next(self._machine)
            except StopIteration:
                self._over = True

    def _fetch(self) -> Split:
        split = Split(self._text.fetch(), self._reasoning.fetch(), _joined(self._pieces))
        self._pieces = []
        return split

    # ------------------------------------------------------------------------------------------ the whole

    def _run(self) -> Wait:
        if self._layout.calls == "harmony":
            yield from self._harmony()
        elif self._layout.calls == "functionary":
            yield from functionary(self._hands())
        else:
            if self._layout.thoughts is not None:
                yield from self._thoughts(*self._layout.thoughts)
            if self._look_for_calls:
                yield from self._answer()
        if not self.ended:
            yield from self._reader.until((), self._say)  # whatever is left is text

    def _thoughts(self, opening: str, closing: str) -> Wait:
        reader = self._reader
        if not self._opened:
            space = yield from reader.space()
            if not (yield from reader.starts((opening,))):
                self._say(space)
                return
            reader.take(len(opening))
        yield from reader.until((closing,), self._reasoning.add)
        self._next_from = reader.taken
        self._text.part()

    def _answer(self) -> Wait:
        kind = self._layout.calls
        if kind in ("hermes", "llama3", "generic", "gemma", "lfm", *LISTS):
            yield from self._bare_json()
        if kind in ("hermes", "seed"):
            yield from self._hermes(*self._layout.markers[:2])
        elif kind == "llama3":
            yield from self._marked(("<|python_tag|>",), self._python_tag)
        elif kind.startswith("mistral"):
            yield from self._marked(("[TOOL_CALLS]",), lambda: mistral(self._hands()))
        elif kind.startswith("deepseek"):
            yield from self._marked((DEEPSEEK[0],), lambda: deepseek(self._hands()))
        elif kind in LISTS:
            yield from self._marked(self._layout.markers[:1], self._marked_list)
        elif kind in ("lfm", "olmo"):
            yield from self._marked(self._layout.markers[:1], self._python_list)
        elif kind in DSML:
            yield from self._dsml()
        elif kind in GEMMA_QUOTES:
            yield from self._braces(*self._layout.markers[:4])
        elif kind == "gemma":
            yield from self._marked((f"{_FENCE}tool_code",), self._tool_code)
        else:
            yield from self._other_form(kind)

    def _other_form(self, kind: str) -> Wait:
        hands, markers = self._hands(), self._layout.markers
        if kind == "kimi":
            yield from kimi(hands)
        elif kind == "solar":
            yield from solar(hands)
        elif kind == "minimax_m3":
            yield from self._marked((markers[0] + markers[1],), lambda: minimax_m3(hands))
        elif kind == "command_r":
            yield from self._marked(("Action:",), lambda: command_r(hands))
        elif kind == "gigachat":
            yield from self._marked(markers[:1], lambda: gigachat(hands))
        elif kind == "function_tag":
            yield from self._marked(("<function=",), lambda: function_tag(hands))
        elif kind == "minimax":
            yield from self._marked(markers[:1], lambda: invocations(hands, *markers[:2]))
        elif kind == "minicpm":
            yield from self._marked(('<function name="',), lambda: named_function(hands, '<function name="'))
        elif kind == "apertus":
            yield from self._marked(markers[:1], lambda: apertus(hands, *markers[:2]))

    def _hands(self) -> Hands:
        return Hands(
            reader=self._reader,
            text=self._say,
            whole=self._whole,
            spoken=self._spoken,
            arguments=self._arguments,
            rest=self._rest,
            listed=self._list,
            single=lambda: self._object(self._may_call),
            known=lambda name: self._look_for_calls and name in self._tools,
            parameters=self._parameters,
            is_over=lambda: self.ended,
        )

    def _say(self, text: str) -> None:
        """It is text."""
        self._text.add(text)
        self._next_from = self._reader.taken
        if text.strip():
            self._last_from = None

    def _marked(self, markers: tuple[str, ...], body: Callable[[], Wait]) -> Wait:
        """Text, in which each of `markers` begins what `body` reads."""
        while not self.ended:
            found = yield from self._reader.until(markers, self._say)
            if not found:
                return
            self._next_from = self._reader.taken - len(found)
            yield from body()

    # ------------------------------------------------------------------------------------------ calls

    def _begin(self, name: str, ident: str = "") -> Sink:
        """A call begins; the sink takes its arguments. `ident` "": a new one. What may not be called becomes text."""
        name, ident = whole_text(name), whole_text(ident)
        if not self._may_call(name):
            self._say(name)
            return lambda text: self._say(whole_text(text))
        self._last_from = self._next_from
        index, self.count = self.count, self.count + 1
        self._text.part()
        self._pieces.append(CallPiece(index, "", ident or self._new_id(), name))
        return lambda text: self._pieces.append(CallPiece(index, whole_text(text)))

    def _may_call(self, name: str) -> bool:
        return name in self._tools or (not self._only and _CALLABLE.fullmatch(name) is not None)

    def _end(self) -> None:
        """A call is complete."""
        self._next_from = self._reader.taken
        self.ended = self.ended or (not self._parallel and self.count > 0)

    def _whole(self, name: str, arguments: dict[str, Any]) -> None:
        """A call that had to be read to its end before it was understood."""
        if not self.ended:
            self._begin(name)(json_text(arguments))
            self._end()

    def _spoken(self, parts: Sequence[Part], raw: str) -> None:
        """Calls that had to be read to their end, and what stood between. `raw`: all of it, which is text where there
        is no call."""
        if not any(isinstance(part, tuple) for part in parts):
            self._say(raw)
            return
        for part in parts:
            if self.ended:
                return
            if isinstance(part, tuple):
                self._whole(*part)
            elif part.strip():
                self._say(part)

    def _arguments(self, name: str, raw: str, ends: tuple[str, ...] = (), ident: str = "") -> Answer:
        """An object as JSON, up to its end, as the arguments of `name`; none if one of `ends` follows. False: it is no
        call, and `raw`, as which it was written so far, is text."""
        reader = self._reader
        space = yield from reader.space()
        if (yield from reader.peek()) == "{":
            if (yield from reader.json_value(self._begin(name, ident))):
                self._end()
            return True
        if ends and (yield from reader.starts(ends)):
            self._begin(name, ident)("{}")
            self._end()
            return True
        self._say(raw + space)
        return False

    def _rest(self, end: str, others: tuple[str, ...] = (), slips: tuple[str, ...] = ()) -> Wait:
        """What stands behind a call, up to `end` or one of `others`, which is not taken: but for slips it is text."""
        reader = self._reader
        if self.ended:
            return
        yield from self._slips(slips)
        found = yield from reader.until((end, *others), self._say)
        if found in others:
            reader.put_back(found)

    def _slips(self, more: tuple[str, ...] = ()) -> Wait:
        while slip := (yield from self._reader.starts((*_SLIPS, *more))):
            self._reader.take(len(slip))

    def _hermes(self, opening: str, closing: str) -> Wait:
        reader = self._reader
        while not self.ended:
            if not (yield from reader.until((opening,), self._say)):
                return
            self._next_from = reader.taken - len(opening)
            reader.record()
            yield from reader.space()
            if (yield from reader.peek()) == "{":
                if (yield from self._object(self._may_call)):
                    yield from self._behind(opening, closing)
                else:
                    self._say(opening + reader.recorded())
                continue
            body: list[str] = []
            space = reader.recorded()
            closed = yield from reader.until((closing,), body.append)
            inner = "".join(body)
            self._spoken(calls_of_tags(inner, bool(closed), self._parameters), opening + space + inner + closed)

    def _behind(self, opening: str, closing: str) -> Wait:
        """What stands behind a call in the same tags: perhaps others."""
        reader = self._reader
        reader.recorded()
        while not self.ended:
            yield from self._slips((",", ";"))
            reader.record()
            if (yield from reader.peek()) != "{":
                reader.recorded()
                break
            found = yield from self._object(self._may_call)
            raw = reader.recorded()
            if not found:
                self._say(raw)
                break
        yield from self._rest(closing, (opening,))

    def _bare_json(self) -> Wait:
        """A reply that begins with a call's JSON, perhaps in a fence, has nothing but calls."""
        reader = self._reader
        reader.record()
        yield from reader.space()
        fence = yield from reader.starts((f"{_FENCE}json", f"{_FENCE}\n", "{", "["))
        if fence.startswith(_FENCE):
            reader.take(len(fence))
            yield from reader.space()
            fence = yield from reader.starts(("{", "["))
        if not fence:
            self._say(reader.recorded())
            return
        if fence == "[":
            reader.take(1)
        while not self.ended:
            yield from reader.space()
            if (yield from reader.peek()) != "{" or not (yield from self._object(self._tools.__contains__)):
                self._say(reader.recorded())
                return
            reader.recorded()
            reader.record()
            # Other calls may follow, however they are separated; what is no call is text again.
            yield from reader.space()
            while separator := (yield from reader.starts((";", ",", "]", _FENCE))):
                reader.take(len(separator))
                yield from reader.space()
            if not (yield from reader.starts(("{",))):
                break
        reader.recorded()

    def _object(self, known: Callable[[str], bool]) -> Answer:
        """A call as a JSON object. False: it is none, and nothing of it was sent. What is taken is remembered."""
        before = self.count
        try:
            yield from CallObject(self._reader, known, self._begin).read()
        except MalformedError:
            if self.count == before:
                return False
        self._end()
        return True

    def _python_tag(self) -> Wait:
        """JSON objects, or `name.call(key="value")`."""
        reader = self._reader
        reader.record()
        yield from reader.space()
        if (yield from reader.peek()) == "{":
            reader.recorded()
            yield from self._bare_json()
            return
        reader.recorded()
        code: list[str] = []
        yield from reader.until((), code.append)
        self._python("".join(code), "")

    def _tool_code(self) -> Wait:
        code: list[str] = []
        closed = yield from self._reader.until((_FENCE,), code.append)
        self._python("".join(code), f"{_FENCE}tool_code", closed)

    def _python_list(self) -> Wait:
        opening, closing, *_ = self._layout.markers
        code: list[str] = []
        closed = yield from self._reader.until((closing,), code.append)
        self._python("".join(code), opening, closed)

    def _python(self, code: str, opening: str, closing: str = "") -> None:
        calls = calls_of_python(code)
        for name, arguments in calls:
            self._whole(name, arguments)
        if not calls:
            self._say(opening + code + closing)

    def _list(self, opening: str) -> Wait:
        """Calls in a list that begins here, behind `opening`."""
        reader = self._reader
        before = self.count
        reader.record()
        reader.take(1)
        while not self.ended:
            yield from reader.space()
            first = yield from reader.peek()
            if first == ",":
                reader.take(1)
                continue
            if first != "{":
                raw = reader.recorded()
                if self.count == before:
                    self._say(opening + raw)
                elif first == "]":
                    reader.take(1)
                return
            if not (yield from self._object(self._may_call)):
                self._say((opening if self.count == before else "") + reader.recorded())
                return
            reader.recorded()
            reader.record()
        reader.recorded()

    def _marked_list(self) -> Wait:
        """What stands behind the mark: a list, or by a slip a call without one."""
        reader = self._reader
        opening, *closing = LISTS[self._layout.calls]
        before = self.count
        reader.record()
        yield from reader.space()
        first = yield from reader.peek()
        if first == "[":
            yield from self._list(opening + reader.recorded())
        else:
            while first == "{" and not self.ended and (yield from self._object(self._may_call)):
                reader.recorded()
                reader.record()
                yield from reader.space()
                first = yield from reader.peek()
            raw = reader.recorded()
            self._say(opening + raw if self.count == before else raw)
        if self.count > before and not self.ended and closing:
            yield from reader.space()
            if (yield from reader.starts(closing)):
                reader.take(len(closing[0]))

    def _dsml(self) -> Wait:
        while not self.ended:
            opening = yield from self._reader.until(tuple(f"<｜DSML｜{tag}>" for tag in DSML.values()), self._say)
            if not opening:
                return
            self._next_from = self._reader.taken - len(opening)
            yield from dsml(self._hands(), opening)

    def _parameters(self, name: str) -> Any:
        return self._tools.get(name, {}).get("parameters")

    def _braces(self, opening: str, closing: str, quote: str, response: str) -> Wait:
        while not self.ended:
            found = yield from self._reader.until((opening, response), self._say)
            if found == response:
                self.ended = True  # the model waits for the results
            if found != opening:
                return
            body: list[str] = []
            closed = yield from self._reader.until((closing,), body.append)
            call = arguments_of_braces("".join(body), quote)
            if call is None:
                self._say(opening + "".join(body) + closed)
            else:
                self._whole(*call)

    def _harmony(self) -> Wait:
        reader = self._reader
        if not (yield from reader.starts(("<|channel|>", "<|start|>", " to=", "to="))):
            return  # it does not keep to its form: all is text
        ends = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
        found = ""
        while not self.ended:
            header = [found] if found == "<|start|>" else []
            self._next_from = reader.taken - len("".join(header))
            found = yield from reader.until(("<|message|>", *ends[:3]), header.append)
            head = "".join(header)
            if found != "<|message|>":
                if not _HEADER.fullmatch(" ".join(head.split())):
                    self._say(head)
                if not found:
                    return
                continue
            channel, recipient = _CHANNEL.search(head), _RECIPIENT.search(head)
            sink: Sink = self._say
            if recipient is not None and self._look_for_calls:
                name = recipient[1].removeprefix("functions.")
                if (yield from self._arguments(name, "", ends)) and not self.ended:
                    yield from self._slips()
            elif channel is not None and channel[1] == "analysis":
                self._reasoning.separate()
                sink = self._reasoning.add
            else:
                if self._text.any:
                    self._text.separate()  # a preamble, then the answer
                else:
                    self._text.part()
                self._trim_end = True
            if not self.ended:
                found = yield from reader.until(ends, sink)


def _joined(pieces: list[CallPiece]) -> list[CallPiece]:
    """With consecutive pieces of a call as one."""
    joined: list[CallPiece] = []
    for _, same in itertools.groupby(pieces, key=lambda piece: piece.index):
        first, *more = same
        joined.append(
            CallPiece(first.index, first.arguments + "".join(p.arguments for p in more), first.id, first.name)
        )
    return joined
