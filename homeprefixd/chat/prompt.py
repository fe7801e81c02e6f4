"""From messages to the text of a prompt, by the model's own chat template.

Runs in the worker. Knows nothing of llama.cpp, of tokens or of HTTP.
"""

from __future__ import annotations

import ctypes
import json
import threading
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
import msgspec

from ..errors import HomeprefixdError, ModelError, RequestError
from ..frames.worker import Message
from .adapting import adapted
from .layout import Layout, detect_layout, takes_tools
from .sandbox import ChatEnvironment, TemplateRaisedError
from .writing import written_calls

MAX_TEXT = 64 << 20
"""Characters of a rendered prompt; the longest context known takes about a tenth of it."""

_OWN_NAMES = frozenset({"messages", "tools"})
_CONTINUES = "continue_final_message"
_CUT = "\u2063the reply goes on here\u2063"
"""Stands at the end of a text while the template is rendered, to find that end again."""

_FAILED = "template_failed"

_PATIENCE = 0.5  # seconds that an interrupted thread gets; one in a long call of C code ends after it

NO_TEMPLATE = (
    "This model's file has no chat template, so it cannot take messages. Set `model.chat_template` (in the file given"
    " with --config) to a jinja template's path, or send a finished prompt to /v1/completions."
)


class _TimeUp(BaseException):
    """Raised inside the rendering thread. No Exception, so that nothing in a template's way catches it."""


class Arguments(dict[str, Any]):
    """Arguments of a tool call for templates of both habits: an object (`arguments | tojson`, `arguments.items()`),
    and the text that the client sent (`'...' + arguments`, `{{ arguments }}`).
    """

    def __init__(self, values: dict[str, Any], text: str) -> None:
        super().__init__(values)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: object) -> str:
        return self._text + other if isinstance(other, str) else NotImplemented

    def __radd__(self, other: object) -> str:
        return other + self._text if isinstance(other, str) else NotImplemented


def _arguments(value: Any) -> Any:
    if isinstance(value, dict):
        return Arguments(value, json.dumps(value, ensure_ascii=False))
    if isinstance(value, str):
        if not value.strip():
            return Arguments({}, value)
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError):
            return value  # a model's slip in the history; templates that can print text print it
        if isinstance(parsed, dict):
            return Arguments(parsed, value)
    return value


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or "arguments" not in function:
        return call
    return {**call, "function": {**function, "arguments": _arguments(function["arguments"])}}


def template_message(message: Message) -> dict[str, Any]:
    """A message as templates expect it: a dict without what is None, only `content` is always there.

    No content is "", as in llama.cpp: most templates print it unconditionally, and would print the word None.
    """
    plain: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    for key in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(message, key)
        if value is not None:
            plain[key] = value
    if message.tool_calls:
        plain["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    return plain


_TOOLS = (
    "You can call these tools. To call one, answer with nothing but JSON of the form"
    ' {"name": "the tool", "arguments": {...}}; else answer as usual.'
)


def describe_tools(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages for a template that knows no tools: those in the system message, calls and results as text."""
    shown = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    text = f"{_TOOLS}\n{shown}"
    described = []
    for message in calls_as_text(messages, Layout("generic")):
        if message["role"] == "tool":
            message = {"role": "user", "content": f"Result of the tool: {message['content']}"}
        described.append(message)
    if described and described[0]["role"] == "system":
        first = {**described[0], "content": f"{described[0]['content']}\n\n{text}"}
        return [first, *described[1:]]
    return [{"role": "system", "content": text}, *described]


def calls_as_text(messages: list[dict[str, Any]], layout: Layout) -> list[dict[str, Any]]:
    """Messages for a template that shows no calls: they are in the text, as the model of `layout` writes them."""
    shown = []
    for message in messages:
        functions = [call.get("function", call) for call in message.get("tool_calls") or []]
        rest = {key: value for key, value in message.items() if key != "tool_calls"}
        written = [written_calls(functions, layout)] if functions else []
        shown.append({**rest, "content": "\n".join(filter(None, [message["content"], *written]))})
    return shown


def _is_begun(messages: list[Message], continues: Any, generation_prompt: bool) -> bool:
    """Is the last message the beginning of the reply? Raises RequestError: it is not, or cannot be, but must."""
    last = messages[-1] if messages else None
    possible = last is not None and last.role == "assistant" and bool(last.content) and not last.tool_calls
    if continues and generation_prompt:
        raise RequestError(
            f"`{_CONTINUES}` and `add_generation_prompt` exclude each other: set one of them.", param=_CONTINUES
        )
    if continues and not possible:
        raise RequestError(
            f"`{_CONTINUES}` needs a last message of the assistant, with text and without calls.", param=_CONTINUES
        )
    return possible and continues is not False and not generation_prompt


class PromptBuilder:
    """A compiled chat template. Thread-safe.

    `bos`, `eos`: text of those tokens, "" where the model has none. A template that prints `bos_token` gives a prompt
    that begins with it: tokenise it as special text and add no second one. `timeout`: seconds that rendering may take.
    `tool_source`: another template for chats with tools, "" where there is none; it says how calls are written.
    Raises ModelError if the template does not compile. An empty `template_source` is a model without one: `render`
    says so.
    """

    def __init__(
        self,
        template_source: str,
        bos: str,
        eos: str,
        timeout: float,
        *,
        max_text: int = MAX_TEXT,
        now: Callable[[], datetime] = datetime.now,
        tool_source: str = "",
    ) -> None:
        self.source = template_source
        self.layout = detect_layout(tool_source or template_source)
        self._with_tools: PromptBuilder | None = None
        if tool_source and template_source.strip():
            self._with_tools = PromptBuilder(tool_source, bos, eos, timeout, max_text=max_text, now=now)
        self._takes_tools = takes_tools(template_source)
        self._shows_calls = "tool_calls" in template_source
        self.bos, self.eos = bos, eos
        self._timeout = timeout
        self._max_text = max_text
        self._tokens = {"bos_token": bos, "eos_token": eos}
        self._template: jinja2.Template | None = None
        if not template_source.strip():
            return
        try:
            self._template = ChatEnvironment(max_text, now).from_string(template_source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(
                f"The chat template does not compile: line {error.lineno}: {error.message}."
                " Set `model.chat_template` to a template that does.",
                code="bad_chat_template",
            ) from error
        except (jinja2.TemplateError, SyntaxError, ValueError, RecursionError) as error:
            raise ModelError(
                f"The chat template does not compile: {error}. Set `model.chat_template` to a template that does.",
                code="bad_chat_template",
            ) from error

    @property
    def has_template(self) -> bool:
        return self._template is not None

    def render(self, messages: list[Message], tools: list[dict[str, Any]] | None, kwargs: dict[str, Any]) -> str:
        """The prompt, up to where the assistant's reply begins, or to the end of the last message if that has begun it.

        `kwargs` are the client's `chat_template_kwargs`; `continue_final_message` among them is not for the template:
        false closes that last message, true insists on going on. Raises RequestError: the template refuses these
        messages however they are adapted (then with its own first words), or fails on them, the time is up, or the
        prompt is too long.
        """
        if taken := _OWN_NAMES.intersection(kwargs):
            raise RequestError(
                f"`chat_template_kwargs` must not contain {' or '.join(sorted(taken))}: they are fields of their own.",
                param="chat_template_kwargs",
            )
        if tools and self._with_tools is not None:
            return self._with_tools.render(messages, tools, kwargs)
        kwargs = dict(kwargs)
        continues = kwargs.pop(_CONTINUES, None)
        if _is_begun(messages, continues, bool(kwargs.get("add_generation_prompt"))):
            begun = msgspec.structs.replace(messages[-1], content=f"{messages[-1].content}{_CUT}")
            whole = self._render([*messages[:-1], begun], tools, {**kwargs, "add_generation_prompt": False})
            text, found, _ = whole.rpartition(_CUT)
            if found:
                return text
            if continues:
                raise RequestError(
                    "The model's chat template does not show the last message's text, so it cannot be continued.",
                    param=_CONTINUES,
                )
        return self._render(messages, tools, kwargs)

    def _render(self, messages: list[Message], tools: list[dict[str, Any]] | None, kwargs: dict[str, Any]) -> str:
        template = self._template
        if template is None:
            raise RequestError(NO_TEMPLATE, param="messages", code="no_chat_template")
        plain = [template_message(message) for message in messages]
        if tools and not self._takes_tools:
            plain = describe_tools(plain, tools)
        elif not self._shows_calls:
            plain = calls_as_text(plain, self.layout)
        variables = {
            **self._tokens,
            "documents": None,  # transformers defines it always
            "add_generation_prompt": True,
            **kwargs,
        }

        def rendered(taken: list[dict[str, Any]], tools: list[dict[str, Any]] | None = tools or None) -> str:
            values = {**variables, "messages": taken, "tools": tools}
            try:
                return _Rendering(template, values, self._timeout, self._max_text).result()
            except RequestError as error:
                if error.code != _FAILED or tools is not None:
                    raise
                try:
                    return rendered(taken, [])  # some look through them without asking whether there are any
                except RequestError:
                    raise error from None

        return adapted(plain, rendered, self._timeout)


class _Rendering:
    """One render in a thread of its own, which can be interrupted at any time without harm to others.

    There is one ticket. The thread takes it when it is done; the caller takes it when the time is up, and may then
    send the one exception. A thread that finds the ticket gone waits until the exception was sent and ends by it. So
    the thread is alive when the exception is sent: it cannot reach another thread that got the same id, let alone the
    caller. No lock is held in the thread, so none can be left locked.
    """

    def __init__(self, template: jinja2.Template, variables: dict[str, Any], timeout: float, max_text: int) -> None:
        self._template = template
        self._variables = variables
        self._timeout = timeout
        self._max_text = max_text
        self._ticket = [True]  # list.pop is atomic
        self._sent = threading.Event()
        self._outcome: str | HomeprefixdError | None = None  # None: interrupted

    def result(self) -> str:
        thread = threading.Thread(target=self._run, name="render", daemon=True)
        thread.start()
        thread.join(self._timeout)
        if self._take_ticket():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_TimeUp))
            self._sent.set()
            thread.join(_PATIENCE)
        outcome = self._outcome
        if isinstance(outcome, HomeprefixdError):
            raise outcome
        if outcome is None:
            raise RequestError(
                f"The chat template took longer than {self._timeout:g} s for these messages. Send less, or raise"
                " `model.template_timeout`.",
                param="messages",
                code="template_timeout",
            )
        return outcome

    def _take_ticket(self) -> bool:
        try:
            return self._ticket.pop()
        except IndexError:
            return False

    def _run(self) -> None:
        try:
            try:
                self._outcome = self._render()
            except Exception as problem:
                self._outcome = self._explain(problem)
            if not self._take_ticket():
                self._sent.wait()
                for _ in range(10_000):  # it strikes here; bounded, should something have swallowed it before
                    pass
        except _TimeUp:
            pass  # sent once, so nothing can strike from here on

    def _render(self) -> str:
        deadline = time.monotonic() + self._timeout
        pieces: list[str] = []
        size = 0
        for piece in self._template.generate(self._variables):
            pieces.append(piece)
            size += len(piece)
            if size > self._max_text:
                raise RequestError(
                    f"The chat template made a prompt of more than {self._max_text} characters.", param="messages"
                )
            if time.monotonic() > deadline:
                break  # the caller sees it too, and says so
        else:
            return "".join(pieces)
        self._sent.wait()
        raise _TimeUp

    @staticmethod
    def _explain(problem: Exception) -> HomeprefixdError:
        if isinstance(problem, HomeprefixdError):
            return problem
        if isinstance(problem, TemplateRaisedError):
            return RequestError(str(problem.message), param="messages", code="template_refused")
        what = str(problem) or type(problem).__name__
        return RequestError(
            f"The model's chat template failed on these messages: {what}. If they are as they should be, set"
            " `model.chat_template` to a template that takes them.",
            param="messages",
            code=_FAILED,
        )
