"""OpenAI's newer dialect, requests: `POST /v1/responses`. Nothing is stored: a client sends earlier items along."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from ..errors import NotFoundError, RequestError
from ..frames.worker import Constraint, Generate, Message
from . import conversation, fields
from . import reply_shapes as shape
from .conversation import joined, missing, unsupported
from .errors import read_body
from .fields import Messages, Number, Parts, SamplingFields, Tools
from .keys import BACKEND, CONFIG, IDENTITY
from .openai import vocabulary
from .operation import EVENTS, Operation
from .replies import respond
from .responses_reply import ResponseWriter
from .responses_tools import HOSTED, NamedTool, Tool, choice_of, offered, one_name
from .sse import EventStream
from .standing import with_standing

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TEXTS = frozenset({"input_text", "output_text", "text", "reasoning_text", "summary_text"})

_STORED = "Nothing is stored here: send the earlier items of the conversation in `input`."

_IGNORED = frozenset(
    {
        "user",
        "store",
        "include",
        "truncation",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "stream_options",
        "max_tool_calls",
        "client_metadata",
    }
)


class Part(msgspec.Struct):
    """A part of an item's content. Others than texts are refused later, by name."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Item(msgspec.Struct):
    """An item of `input`: a message, a call, its output, a thought; which fields it has depends on `type`."""

    type: str = "message"
    role: str | None = None
    content: str | Parts[Part] | None = None
    id: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    output: str | list[dict[str, Any]] | dict[str, Any] | None = None
    input: str | None = None
    summary: Parts[Part] | None = None


class Format(msgspec.Struct):
    type: str
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextOptions(msgspec.Struct):
    format: Format | None = None
    verbosity: str | None = None


class Reasoning(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesBody(SamplingFields, kw_only=True):
    """`POST /v1/responses`."""

    input: str | Messages[Item]
    model: str | None = None
    instructions: str | None = None
    tools: Tools[Tool] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: Number = None
    stream: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    top_logprobs: Number = None
    metadata: dict[str, Any] | None = None
    service_tier: Any = None
    cache_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


# ---------------------------------------------------------------------------------------------------- messages


def _text(where: str, content: str | list[Part] | None) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content or []):
        at = f"{where}[{index}]"
        if part.type == "refusal":
            texts.append(part.refusal or "")
        elif part.type not in _TEXTS:
            raise unsupported(f"{at}.type", f"`{at}`: parts of type {part.type[:40]!r} are not supported here.")
        elif part.text is None:
            raise missing(f"{at}.text")
        else:
            texts.append(part.text)
    return joined(texts) or ""


def _output(where: str, given: Any) -> str:
    """What came of a call, which of other tools' calls may be anything. Raises RequestError."""
    try:
        return _text(where, msgspec.convert(given, str | Parts[Part] | None))
    except msgspec.ValidationError as error:
        raise RequestError(f"`{where}` must be a text or a list of parts.", param=where, code="wrong_type") from error


class _Turns:
    """Items become messages: a thought, a text and calls that follow each other are one turn of the assistant's."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._turn: Message | None = None
        self._thoughts: list[tuple[Message, list[str]]] = []

    def add(self, message: Message) -> None:
        self._turn = None
        self.messages.append(message)

    def turn(self) -> Message:
        """The assistant's current one, or a new one."""
        if self._turn is None:
            self._turn = Message("assistant")
            self.messages.append(self._turn)
        return self._turn

    def think(self, text: str) -> None:
        turn = self.turn()
        if turn.content is not None or turn.tool_calls:
            self._turn = None
            turn = self.turn()
        if not self._thoughts or self._thoughts[-1][0] is not turn:
            self._thoughts.append((turn, []))
        self._thoughts[-1][1].append(text)

    def say(self, text: str) -> None:
        turn = self.turn()
        if turn.content is not None or turn.tool_calls:
            self._turn = None
            turn = self.turn()
        turn.content = text

    def call(self, call: dict[str, Any]) -> None:
        turn = self.turn()
        if turn.tool_calls is None:
            turn.tool_calls = []
        turn.tool_calls.append(call)

    def all(self) -> list[Message]:
        for turn, thoughts in self._thoughts:
            turn.reasoning_content = "\n".join(filter(None, thoughts)) or None
        return self.messages


def _add_message(turns: _Turns, where: str, item: Item) -> None:
    role = _ROLES.get(item.role or "")
    if role is None:
        raise RequestError(
            f"`{where}.role` must be {', '.join(list(_ROLES)[:-1])} or {list(_ROLES)[-1]},"
            f" not {(item.role or '')[:40]!r}.",
            param=f"{where}.role",
            code="unknown_role",
        )
    if item.content is None:
        raise missing(f"{where}.content")
    text = _text(f"{where}.content", item.content)
    if role == "assistant":
        turns.say(text)
    else:
        turns.add(Message(role, text))


def messages_of(body: ResponsesBody) -> list[Message]:
    """The conversation as the template sees it. Raises RequestError."""
    turns = _Turns()
    if body.instructions:
        turns.add(Message("system", body.instructions))
    items = [Item(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    for index, item in enumerate(items):
        where = f"input[{index}]"
        match item.type:
            case "message":
                _add_message(turns, where, item)
            case "reasoning":
                parts = item.content if isinstance(item.content, list) and item.content else item.summary
                turns.think(_text(f"{where}.content", parts))
            case "function_call":
                if item.name is None:
                    raise missing(f"{where}.name")
                turns.call(
                    conversation.tool_call(item.call_id, one_name(item.namespace, item.name), item.arguments or "")
                )
            case "custom_tool_call":
                if item.name is None:
                    raise missing(f"{where}.name")
                written = msgspec.json.encode({"input": item.input or ""}).decode()
                turns.call(conversation.tool_call(item.call_id, one_name(item.namespace, item.name), written))
            case "function_call_output" | "custom_tool_call_output":
                if item.call_id is None:
                    raise missing(f"{where}.call_id")
                turns.add(Message("tool", _output(f"{where}.output", item.output), tool_call_id=item.call_id))
            case "item_reference":
                raise unsupported(f"{where}.type", f"`{where}` refers to an item that was stored. {_STORED}")
            case kind if kind.startswith(HOSTED):
                continue
            case _:
                raise unsupported(
                    f"{where}.type", f"`{where}`: items of type {item.type[:40]!r} are not supported here."
                )
    if not turns.messages:
        raise RequestError("`input` has nothing that a model here is told of.", param="input", code="out_of_range")
    return turns.all()


# ---------------------------------------------------------------------------------------------------- all else


def _constraint(body: ResponsesBody) -> Constraint | None:
    given = body.text.format if body.text is not None else None
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return Constraint("json_object")
    if given.type != "json_schema":
        raise unsupported(
            "text.format.type",
            f"`text.format.type` must be text, json_object or json_schema, not {given.type[:40]!r}.",
        )
    if given.schema is None:
        raise missing("text.format.schema")
    return conversation.schema_constraint(given.schema, "text.format.schema")


def _check_unsupported(body: ResponsesBody) -> None:
    for name in ("previous_response_id", "conversation"):
        if getattr(body, name):
            raise unsupported(name, f"`{name}` is not supported. {_STORED}")
    if body.background:
        raise unsupported("background", f"`background` is not supported. {_STORED}")
    if fields.whole("top_logprobs", body.top_logprobs, 0):
        raise unsupported("top_logprobs", "`top_logprobs` is not supported here: /v1/chat/completions has it.")


def _check_echoed(body: ResponsesBody) -> None:
    """What a response repeats of its request must be what JSON can be made of again."""
    fields.check_plain("metadata", body.metadata)
    if isinstance(body.tool_choice, NamedTool):
        fields.check_plain("tool_choice", [body.tool_choice.tools, body.tool_choice.allowed_tools])


def request_of(body: ResponsesBody, rid: str, n_vocab: int | None) -> Generate:
    """Checked and turned into what the worker takes. Raises RequestError."""
    _check_unsupported(body)
    _check_echoed(body)
    known = offered(body.tools)
    tools, strict = conversation.without_strict(known.functions)
    choice, allowed = choice_of(body.tool_choice, known)
    kwargs = dict(body.chat_template_kwargs or {})
    fields.set_effort(kwargs, body.reasoning.effort if body.reasoning is not None else None)
    limit = fields.whole("max_output_tokens", body.max_output_tokens, 1)
    generate = Generate(
        rid=rid,
        messages=messages_of(body),
        prompt=None,
        tools=tools,
        template_kwargs=kwargs,
        max_tokens=-1 if limit is None else limit,
        stop=[],
        sampling=body.sampling(n_vocab),
        stream=bool(body.stream),
        cache=body.cache_prompt is not False,
        constraint=_constraint(body),
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        allowed_tools=allowed,
        strict_tools=strict,
    )
    conversation.check_call(generate)
    return generate


def echo(body: ResponsesBody) -> dict[str, Any]:
    """What a response repeats of its request."""
    text_format = {"type": "text"} if body.text is None or body.text.format is None else _plain(body.text.format)
    reasoning = body.reasoning or Reasoning()
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": None if body.max_output_tokens is None else int(body.max_output_tokens),
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
        "service_tier": "default",
        "store": False,
        "temperature": body.temperature,
        "text": {"format": text_format},
        "tool_choice": "auto" if body.tool_choice is None else _plain(body.tool_choice),
        "tools": [_shown(tool) for tool in body.tools or []],
        "top_logprobs": 0,
        "top_p": body.top_p,
        "truncation": "disabled",
        "user": None,
    }


def _shown(tool: Tool) -> dict[str, Any]:
    if tool.type == "namespace":
        return {**_plain(tool), "tools": [_shown(inner) for inner in tool.tools or []]}
    return {"parameters": None, "strict": None, **_plain(msgspec.structs.replace(tool, tools=None))}


def _plain(value: Any) -> Any:
    """Without what is None."""
    found = msgspec.to_builtins(value)
    return {key: item for key, item in found.items() if item is not None} if isinstance(found, dict) else found


# ---------------------------------------------------------------------------------------------------- routes


async def responses(request: web.Request) -> web.StreamResponse:
    """`POST /v1/responses`."""
    body = fields.decode(await read_body(request), ResponsesBody, _IGNORED)
    backend = request.app[BACKEND]
    alias = backend.resolve(body.model)
    identity = request.app[IDENTITY]
    token = identity.token()
    generate = with_standing(request, request_of(body, f"resp_{token}", vocabulary(request, alias)), body.service_tier)
    writer = ResponseWriter(token, alias, int(identity.clock()), echo(body), offered(body.tools))
    events = EventStream(request, request.app[CONFIG].keep_alive) if generate.stream else None
    return await respond(request, backend.generate(alias, generate), writer, events)


async def stored(request: web.Request) -> web.Response:
    """`GET`, `DELETE /v1/responses/{id}`: there are none."""
    raise NotFoundError(f"There is no response {request.match_info['id'][:80]!r}. {_STORED}", code="not_stored")


def routes() -> list[web.RouteDef]:
    return [
        web.post("/v1/responses", responses),
        web.get("/v1/responses/{id}", stored),
        web.delete("/v1/responses/{id}", stored),
    ]


OPERATIONS = (
    Operation("POST", "/v1/responses", "Chat, item by item", ResponsesBody, shape.Response, EVENTS),
    Operation("GET", "/v1/responses/{id}", "Always 404: nothing is stored", reply=shape.Response),
    Operation("DELETE", "/v1/responses/{id}", "Always 404: nothing is stored"),
)
