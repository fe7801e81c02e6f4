"""Ollama's dialect, requests: `POST /api/chat` and `/api/generate`, and what is not done here.

A model's memory is not divided by requests, so `num_ctx` and the like change nothing: a prompt finds its blocks
whatever is asked for.
"""

from __future__ import annotations

from collections import defaultdict, deque
from functools import partial
from typing import Annotated, Any

import msgspec
from aiohttp import web

from ..errors import HomeprefixdError, RequestError
from ..frames.worker import Constraint, Generate, Message, Sampling
from . import conversation, fields
from . import reply_shapes as shape
from .conversation import unsupported
from .errors import json_response, read_body
from .fields import MAX_MESSAGES, Number, SamplingFields, Tools
from .keys import BACKEND, CONFIG, IDENTITY
from .ollama_fields import KeepAlive, permitted_keep_alive
from .ollama_models import resolve
from .ollama_reply import ChatLines, LineWriter, TextLines
from .openai import vocabulary
from .operation import LINES, Operation
from .origin import GUARD
from .replies import respond
from .sse import LineStream
from .standing import with_standing

_ROLES = ("system", "user", "assistant", "tool")
_LEVELS = ("low", "medium", "high", "max")

_BY_HAND = "put a GGUF file on the server's disk and name it in its configuration."

ABSENT = {
    "/api/pull": f"Models cannot be pulled here: {_BY_HAND}",
    "/api/push": "Models cannot be pushed here.",
    "/api/create": f"Models cannot be created here: {_BY_HAND}",
    "/api/copy": "Models cannot be copied here.",
    "/api/delete": "Models cannot be deleted here: remove the file on the server's disk.",
}
"""Ollama's routes that are not done here -> what is answered."""


class Options(SamplingFields, kw_only=True):
    """What is known of `options`; the rest is about memory and threads, which are the server's."""

    num_predict: Number = None
    stop: str | list[str] | None = None


class FunctionCall(msgspec.Struct):
    name: str
    arguments: dict[str, Any] = {}


class ToolCall(msgspec.Struct):
    function: FunctionCall
    id: str | None = None


class MessageBody(msgspec.Struct):
    role: Annotated[str, msgspec.Meta(extra_json_schema={"enum": [*_ROLES]})]
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: Tools[ToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class CommonBody(msgspec.Struct, kw_only=True):
    """Fields that both routes take."""

    model: str | None = None
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: Options | None = None
    keep_alive: KeepAlive = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: Number = None

    def sampling(self, n_vocab: int | None) -> Sampling:
        return (self.options or Options()).sampling(n_vocab)

    def limit(self) -> int:
        """Tokens to generate at most; Ollama's -1 and -2 mean that the context is the only bound."""
        value = fields.whole("options.num_predict", self.options.num_predict if self.options else None, -2)
        return -1 if value is None or value <= 0 else value

    def stops(self) -> list[str]:
        return fields.stop_strings(self.options.stop if self.options else None)

    def constraint(self) -> Constraint | None:
        if isinstance(self.format, dict):
            return conversation.schema_constraint(self.format, "format")
        if self.format not in (None, "", "json"):
            raise RequestError(
                f"`format` must be 'json' or a JSON schema, not {str(self.format)[:40]!r}.", param="format"
            )
        return Constraint("json_object") if self.format else None

    def template_kwargs(self) -> dict[str, Any]:
        if self.think is None:
            return {}
        if isinstance(self.think, bool):
            return {"enable_thinking": self.think}
        if self.think not in _LEVELS:
            raise RequestError(
                f"`think` must be true, false or one of {', '.join(_LEVELS)}, not {self.think[:40]!r}.", param="think"
            )
        return {"enable_thinking": True, "reasoning_effort": self.think}

    def request(
        self,
        rid: str,
        n_vocab: int | None,
        *,
        messages: list[Message] | None = None,
        prompt: str | None = None,
        tools: list[dict[str, Any]] | None = None,
        suffix: str | None = None,
    ) -> Generate:
        """What the worker takes, checked; one of `messages` and `prompt` is given. Raises RequestError."""
        tools, strict = conversation.without_strict(tools)
        generate = Generate(
            rid=rid,
            messages=messages,
            prompt=prompt,
            tools=tools,
            template_kwargs=self.template_kwargs(),
            max_tokens=self.limit(),
            stop=self.stops(),
            sampling=self.sampling(n_vocab),
            stream=self.stream is not False,
            constraint=self.constraint(),
            suffix=suffix,
            logprobs=fields.logprobs(self.logprobs, self.top_logprobs),
            strict_tools=strict,
        )
        conversation.check_call(generate)
        return generate


class ChatBody(CommonBody, kw_only=True):
    """`POST /api/chat`."""

    messages: Annotated[list[MessageBody], msgspec.Meta(max_length=MAX_MESSAGES)] | None = None
    tools: Tools[dict[str, Any]] | None = None


class GenerateBody(CommonBody, kw_only=True):
    """`POST /api/generate`."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None
    template: str | None = None
    images: list[Any] | None = None
    context: list[int] | None = None


_IGNORED = frozenset({"truncate", "shift"})


# ---------------------------------------------------------------------------------------------------- messages


class _CallIds:
    """Ids for calls that came without: templates of some models insist on them, and on nine letters and digits.

    Results follow their calls in order, or say the tool's name.
    """

    def __init__(self) -> None:
        self._ids: list[str] = []  # of all calls
        self._open: set[int] = set()  # which of them have no result so far
        self._in_order: deque[int] = deque()  # this and the next ones also hold some that have one
        self._by_name: defaultdict[str, deque[int]] = defaultdict(deque)
        self._by_id: defaultdict[str, list[int]] = defaultdict(list)

    def of_call(self, call: ToolCall) -> str:
        number = len(self._ids)
        ident = call.id or f"call{number + 1:05}"
        self._ids.append(ident)
        self._open.add(number)
        self._in_order.append(number)
        self._by_name[call.function.name].append(number)
        self._by_id[ident].append(number)
        return ident

    def of_result(self, message: MessageBody) -> str | None:
        if message.tool_call_id:
            self._open.difference_update(self._by_id.pop(message.tool_call_id, ()))
            return message.tool_call_id
        waiting = self._by_name.get(message.tool_name, deque()) if message.tool_name else self._in_order
        while waiting:
            number = waiting.popleft()
            if number in self._open:
                self._open.remove(number)
                return self._ids[number]
        return None


def _message(index: int, body: MessageBody, ids: _CallIds) -> Message:
    where = f"messages[{index}]"
    if body.role not in _ROLES:
        raise RequestError(
            f"`{where}.role` must be {', '.join(_ROLES[:-1])} or {_ROLES[-1]}, not {body.role[:40]!r}.",
            param=f"{where}.role",
            code="unknown_role",
        )
    if body.images:
        raise unsupported(f"{where}.images", f"`{where}.images`: images are not supported here.")
    calls = [
        conversation.tool_call(ids.of_call(call), call.function.name, call.function.arguments)
        for call in body.tool_calls or []
    ]
    content = body.content or ("" if not calls else None)
    return Message(
        role=body.role,
        content=content,
        name=body.tool_name or None,
        tool_calls=calls or None,
        tool_call_id=ids.of_result(body) if body.role == "tool" else None,
        reasoning_content=body.thinking or None,
    )


def _tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    for index, tool in enumerate(tools or []):
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"`tools[{index}].function.name` is missing.", param=f"tools[{index}].function.name")
        conversation.check_parameters(f"tools[{index}].function.parameters", function.get("parameters"))
    return tools or None


def chat_request(body: ChatBody, rid: str, n_vocab: int | None) -> Generate:
    """Checked and turned into what the worker takes. Raises RequestError."""
    ids = _CallIds()
    messages = [_message(index, message, ids) for index, message in enumerate(body.messages or [])]
    return body.request(rid, n_vocab, messages=messages, tools=_tools(body.tools))


def generate_request(body: GenerateBody, rid: str, n_vocab: int | None) -> Generate:
    """Checked and turned into what the worker takes; `raw`, or a gap before `suffix`, is without a template. Raises
    RequestError.
    """
    for name, why in (
        ("template", "`template` is not supported here: the server's `model.chat_template` sets it."),
        ("images", "`images` is not supported here."),
        ("context", "`context` is not supported here: send the conversation to /api/chat; what is known is reused."),
    ):
        if getattr(body, name):
            raise unsupported(name, why)
    prompt = body.prompt or ""
    if body.raw or body.suffix:
        return body.request(rid, n_vocab, prompt=prompt, suffix=body.suffix or None)
    system = [Message("system", body.system)] if body.system else []
    return body.request(rid, n_vocab, messages=[*system, Message("user", prompt)])


# ---------------------------------------------------------------------------------------------------- routes


def error_form(error: HomeprefixdError) -> dict[str, Any]:
    """As Ollama's clients read errors."""
    return {"error": error.message}


async def _load(request: web.Request, alias: str, body: CommonBody, writer: LineWriter) -> web.Response:
    """No prompt: only see to it that the model is loaded (`keep_alive` 0: that it is not). Not for strangers' pages."""
    request.app[GUARD].check_client(request)
    backend, seconds = request.app[BACKEND], permitted_keep_alive(request, body.keep_alive, prompt=False)
    if seconds == 0:
        await backend.unload(alias)
        return json_response(writer.without_prompt("unload"))
    await backend.load(alias, seconds)
    return json_response(writer.without_prompt("load"))


async def chat(request: web.Request) -> web.StreamResponse:
    """`POST /api/chat`."""
    body = fields.decode(await read_body(request), ChatBody, _IGNORED)
    alias = resolve(request, body.model)
    identity = request.app[IDENTITY]
    writer = ChatLines(f"ollama-{identity.token()}", alias, identity.clock, error_form)
    if not body.messages:
        return await _load(request, alias, body, writer)
    return await _answer(request, chat_request(body, writer.rid, vocabulary(request, alias)), alias, body, writer)


async def generate(request: web.Request) -> web.StreamResponse:
    """`POST /api/generate`."""
    body = fields.decode(await read_body(request), GenerateBody, _IGNORED)
    alias = resolve(request, body.model)
    identity = request.app[IDENTITY]
    writer = TextLines(f"ollama-{identity.token()}", alias, identity.clock, error_form)
    if not body.prompt:
        return await _load(request, alias, body, writer)
    return await _answer(request, generate_request(body, writer.rid, vocabulary(request, alias)), alias, body, writer)


async def _answer(
    request: web.Request, wanted: Generate, alias: str, body: CommonBody, writer: LineWriter
) -> web.StreamResponse:
    backend, seconds = request.app[BACKEND], permitted_keep_alive(request, body.keep_alive, prompt=True)
    if body.keep_alive is not None:  # how long a model stays is not for pages of strangers to say
        request.app[GUARD].check_client(request)
    wanted = with_standing(request, wanted, None)
    lines = LineStream(request, request.app[CONFIG].keep_alive) if wanted.stream else None
    if seconds:
        await backend.load(alias, seconds)
    response = await respond(request, backend.generate(alias, wanted), writer, lines)
    if seconds == 0:
        await backend.unload(alias)
    return response


async def absent(request: web.Request) -> web.Response:
    """What Ollama does and we do not. The body is not looked at."""
    raise RequestError(f"{ABSENT[request.path]} (not supported by homeprefixd)", code="unsupported_route")


ERROR_FORMS = {"/api/": error_form}


def routes() -> list[web.RouteDef]:
    return [
        web.post("/api/chat", chat),
        web.post("/api/generate", generate),
        *(web.route("DELETE" if path == "/api/delete" else "POST", path, absent) for path in ABSENT),
    ]


_operation = partial(Operation, dialect="Ollama", error=shape.OllamaError)

OPERATIONS = (
    _operation("POST", "/api/chat", "Chat", ChatBody, shape.OllamaChat, LINES),
    _operation("POST", "/api/generate", "Text", GenerateBody, shape.OllamaText, LINES),
    *(
        _operation("DELETE" if path == "/api/delete" else "POST", path, f"Always 400: {why}")
        for path, why in ABSENT.items()
    ),
)
