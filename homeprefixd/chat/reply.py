"""Splits a model's reply into text, thoughts and tool calls, as it is written.

The pieces joined do not depend on how the reply is cut. What only looks like a call stays text. Knows nothing of
tokens; which family writes how is in `layout.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..frames.worker import CallPiece
from .call_object import CallObject, MalformedError
from .layout import DEEPSEEK, DSML, GEMMA_QUOTES, LISTS, Layout
from .other_forms import (
    Hands,
    apertus,
    command_r,
    function_tag,
    functionary,
    gigachat,
    invocations,
    kimi,
    minimax_m3,
    named_function,
    solar,
)
from .reader import Reader, Sink, Wait
from .spoken_calls import (
    arguments_of_braces,
    arguments_of_dsml,
    arguments_of_tags,
    calls_of_python,
    calls_of_tags,
)

_NAME = re.compile(r"[\w.\-]{1,128}")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_FENCE = "```"


@dataclass
class Split:
    """What a part of a reply came to."""

    text: str = ""
    reasoning: str = ""
    calls: list[CallPiece] = field(default_factory=list)


class _Trimmed:
    """Text without white space at its ends: what may be its end is held back."""

    def __init__(self, strip_start: bool) -> None:
        self.text = ""  # not fetched yet
        self._space = ""
        self.at_start = strip_start
        self.any = False  # something else than white space was written

    def add(self, text: str) -> None:
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            self.text += kept.lstrip() if self.at_start else kept
            self.at_start = False
            self.any = True

    def part(self) -> None:
        """Something else begins here: white space before and after it goes."""
        self._space = ""
        self.at_start = True

    def separate(self) -> None:
        """Another stretch of it begins: in a line of its own."""
        if self.any:
            self._space = "\n\n"

    def close(self, keep_space: bool) -> None:
        """The end; with `keep_space` also what was held back."""
        if keep_space and not self.at_start:
            self.text += self._space
        self._space = ""

    def fetch(self) -> str:
        text, self.text = self.text, ""
        return text


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
        self._reader = Reader()
        self._text = _Trimmed(strip_start=False)
        self._reasoning = _Trimmed(strip_start=True)
        self._pieces: list[CallPiece] = []
        self._trim_end = False
        self.count = 0  # calls that have begun
        self.ended = False
        self._machine = self._run()
        self._over = False
        self._advance()

    def feed(self, text: str) -> Split:
        """Take what was written; return what is certain now."""
        if not self.ended:
            self._reader.buffer += text
            self._advance()
        return self._fetch()

    def finish(self) -> Split:
        """The reply is over: return what was held back."""
        self._reader.final = True
        self._advance()
        self._reasoning.close(keep_space=False)
        self._text.close(keep_space=not self.count and not self._trim_end)
        return self._fetch()

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
            yield from self._reader.until((), self._text.add)  # whatever is left is text

    def _thoughts(self, opening: str, closing: str) -> Wait:
        reader = self._reader
        if not self._opened:
            space = yield from reader.space()
            if not (yield from reader.starts((opening,))):
                self._text.add(space)
                return
            reader.take(len(opening))
        yield from reader.until((closing,), self._reasoning.add)
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
            yield from self._marked(("[TOOL_CALLS]",), self._mistral)
        elif kind.startswith("deepseek"):
            yield from self._marked((DEEPSEEK[0],), self._deepseek)
        elif kind in LISTS:
            yield from self._marked(self._layout.markers[:1], self._marked_list)
        elif kind in ("lfm", "olmo"):
            yield from self._marked(self._layout.markers[:1], self._python_list)
        elif kind in DSML:
            yield from self._marked(tuple(f"<｜DSML｜{tag}>" for tag in DSML.values()), self._dsml)
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
            text=self._text.add,
            begin=self._begin,
            end=self._end,
            whole=self._whole,
            listed=self._list,
            single=lambda: self._object(self._may_call),
            known=lambda name: self._look_for_calls and name in self._tools,
            arguments_of=lambda name, body: arguments_of_tags(body, self._parameters(name)),
            is_over=lambda: self.ended,
        )

    def _marked(self, markers: tuple[str, ...], body: Callable[[], Wait]) -> Wait:
        """Text, in which each of `markers` begins what `body` reads."""
        while not self.ended:
            if not (yield from self._reader.until(markers, self._text.add)):
                return
            yield from body()

    # ------------------------------------------------------------------------------------------ calls

    def _begin(self, name: str, ident: str = "") -> Sink:
        """A call begins; the sink takes its arguments. `ident` "": a new one. What may not be called becomes text."""
        if not self._may_call(name):
            self._text.add(name)
            return self._text.add
        index, self.count = self.count, self.count + 1
        self._text.part()
        self._pieces.append(CallPiece(index, "", ident or self._new_id(), name))
        return lambda text: self._pieces.append(CallPiece(index, text))

    def _may_call(self, name: str) -> bool:
        return not self._only or name in self._tools

    def _end(self) -> None:
        """A call is complete."""
        self.ended = self.ended or (not self._parallel and self.count > 0)

    def _whole(self, name: str, arguments: dict[str, Any]) -> None:
        """A call that had to be read to its end before it was understood."""
        if not self.ended:
            self._begin(name)(json.dumps(arguments, ensure_ascii=False))
            self._end()

    def _hermes(self, opening: str, closing: str) -> Wait:
        reader = self._reader
        while not self.ended:
            if not (yield from reader.until((opening,), self._text.add)):
                return
            reader.record()
            yield from reader.space()
            first = yield from reader.peek()
            body: list[str] = []
            if first == "{":
                if not (yield from self._object(self._may_call)):
                    self._text.add(opening + reader.recorded())
                    continue
                reader.recorded()
                yield from reader.until((closing,), body.append)
                continue
            space = reader.recorded()
            closed = yield from reader.until((closing,), body.append)
            calls = calls_of_tags("".join(body), bool(closed), self._parameters)
            for name, arguments in calls:
                self._whole(name, arguments)
            if not calls:
                self._text.add(opening + space + "".join(body) + closed)

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
            self._text.add(reader.recorded())
            return
        if fence == "[":
            reader.take(1)
        while not self.ended:
            yield from reader.space()
            if (yield from reader.peek()) != "{" or not (yield from self._object(self._tools.__contains__)):
                self._text.add(reader.recorded())
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

    def _object(self, known: Callable[[str], bool]) -> Generator[None, None, bool]:
        """A call as a JSON object. False: it is none, and nothing of it was sent."""
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
            self._text.add(opening + code + closing)

    def _mistral(self) -> Wait:
        reader = self._reader
        yield from reader.space()
        if (yield from reader.peek()) == "[":
            yield from self._list()
            return
        name: list[str] = []
        found = yield from reader.until(("[ARGS]", "[CALL_ID]", "{"), name.append)
        if found == "[CALL_ID]":
            yield from reader.until(("[ARGS]",), lambda _id: None)
        elif found == "{":
            reader.buffer = "{" + reader.buffer
        if not found or not _NAME.fullmatch("".join(name).strip()):
            self._text.add("[TOOL_CALLS]" + "".join(name) + ("" if found == "{" else found))
            return
        yield from self._arguments("".join(name).strip())

    def _list(self) -> Wait:
        """Calls in a list that begins here."""
        reader = self._reader
        reader.take(1)
        while not self.ended:
            yield from reader.space()
            if (yield from reader.peek()) == ",":
                reader.take(1)
                continue
            if (yield from reader.peek()) != "{" or not (yield from self._object(self._may_call)):
                break
        if not self.ended and (yield from reader.peek()) == "]":
            reader.take(1)

    def _marked_list(self) -> Wait:
        """What stands behind the mark: a list, or by a slip a call without one."""
        reader = self._reader
        opening, *closing = LISTS[self._layout.calls]
        reader.record()
        yield from reader.space()
        first = yield from reader.peek()
        space = reader.recorded()
        before = self.count
        if first == "[":
            yield from self._list()
        while first == "{" and not self.ended and (yield from self._object(self._may_call)):
            yield from reader.space()
            first = yield from reader.peek()
        if self.count == before:
            self._text.add(opening + space)
        elif not self.ended and closing:
            yield from reader.space()
            if (yield from reader.starts(closing)):
                reader.take(len(closing[0]))

    def _arguments(self, name: str) -> Wait:
        """JSON, up to its end, as the arguments of `name`."""
        sink = self._begin(name)
        yield from self._reader.space()
        if not (yield from self._reader.peek()) or not (yield from self._reader.json_value(sink)):
            return
        self._end()

    def _deepseek(self) -> Wait:
        reader = self._reader
        _, begin, separator, end, end_of_all = DEEPSEEK
        while not self.ended:
            if (yield from reader.until((begin, end_of_all), lambda _space: None)) != begin:
                return
            head: list[str] = []
            found = yield from reader.until((separator,), head.append)
            name = "".join(head).strip()
            if name == "function":
                rest: list[str] = []
                found = yield from reader.until(("\n",), rest.append)
                name = "".join(rest).strip()
                yield from reader.space()
                if (yield from reader.starts((f"{_FENCE}json",))):
                    reader.take(len(f"{_FENCE}json"))
            if not found or not _NAME.fullmatch(name):
                return
            yield from self._arguments(name)
            if not self.ended:
                yield from reader.until((end,), lambda _fence: None)

    def _dsml(self) -> Wait:
        reader = self._reader
        ends = tuple(f"</｜DSML｜{tag}>" for tag in DSML.values())
        while not self.ended:
            if (yield from reader.until(('<｜DSML｜invoke name="', *ends), lambda _space: None)).startswith("</"):
                return
            head: list[str] = []
            body: list[str] = []
            yield from reader.until(('">',), head.append)
            if not (yield from reader.until(("</｜DSML｜invoke>",), body.append)):
                return  # cut short, or none at all
            name = "".join(head)
            if _NAME.fullmatch(name):
                self._whole(name, arguments_of_dsml("".join(body), self._parameters(name)))

    def _parameters(self, name: str) -> Any:
        return self._tools.get(name, {}).get("parameters")

    def _braces(self, opening: str, closing: str, quote: str, response: str) -> Wait:
        while not self.ended:
            found = yield from self._reader.until((opening, response), self._text.add)
            if found == response:
                self.ended = True  # the model waits for the results
            if found != opening:
                return
            body: list[str] = []
            closed = yield from self._reader.until((closing,), body.append)
            call = arguments_of_braces("".join(body), quote)
            if call is None:
                self._text.add(opening + "".join(body) + closed)
            else:
                self._whole(*call)

    def _harmony(self) -> Wait:
        reader = self._reader
        if not (yield from reader.starts(("<|channel|>", "<|start|>", " to=", "to="))):
            return  # it does not keep to its form: all is text
        ends = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
        while not self.ended:
            header: list[str] = []
            if not (yield from reader.until(("<|message|>",), header.append)):
                return
            head = "".join(header)
            channel, recipient = _CHANNEL.search(head), _RECIPIENT.search(head)
            sink: Sink
            if recipient is not None and self._look_for_calls:
                sink = self._begin(recipient[1].removeprefix("functions."))
            elif channel is not None and channel[1] == "analysis":
                self._reasoning.separate()
                sink = self._reasoning.add
            else:
                if self._text.any:
                    self._text.separate()  # a preamble, then the answer
                else:
                    self._text.part()
                self._trim_end = True
                sink = self._text.add
            yield from reader.until(ends, sink)
            if recipient is not None and self._look_for_calls:
                self._end()


def _joined(pieces: list[CallPiece]) -> list[CallPiece]:
    """With consecutive pieces of a call as one."""
    joined: list[CallPiece] = []
    for piece in pieces:
        if joined and joined[-1].index == piece.index:
            joined[-1].arguments += piece.arguments
        else:
            joined.append(piece)
    return joined
