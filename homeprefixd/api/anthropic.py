"""Anthropic's dialect, requests: `POST /v1/messages` and `POST /v1/messages/count_tokens`.

What `anthropic-version` and `anthropic-beta` say is not looked at, nor are `cache_control` marks: everything is kept
anyway.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import msgspec
from aiohttp import web

from ..errors import ContextOverflowError, HomeprefixdError, RequestError
from ..frames.worker import Constraint, Generate, Message, Sampling, TokenizeRequest
from . import conversation, fields
from . import reply_shapes as shape
from .anthropic_reply import CLIENTS_HEADER, MessageWriter
from .conversation import joined, missing, unsupported
from .errors import json_response, read_body
from .fields import Messages, Number, Parts, SamplingFields, Tools
from .keys import BACKEND, CONFIG, IDENTITY
from .openai import vocabulary
from .operation import COUNT, EVENTS, Operation
from .replies import respond
from .sse import EventStream
from .standing import with_standing

_HOSTED = "is a tool that runs at Anthropic, which is not supported here; tools need an `input_schema`"

_IGNORED = frozenset({"metadata", "service_tier", "container", "context_management", "mcp_servers", "betas"})


class Block(msgspec.Struct):
    """A block of a message's content; which fields it has depends on `type`."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | Parts[Block] | None = None
    source: Any = None


class MessageBody(msgspec.Struct):
    role: Annotated[str, msgspec.Meta(extra_json_schema={"enum": ["user", "assistant", "system"]})]
    content: str | Parts[Block]


class Tool(msgspec.Struct):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    type: str


class OutputFormat(msgspec.Struct):
    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct):
    effort: str | None = None
    format: OutputFormat | None = None


class PromptBody(SamplingFields, kw_only=True):
    """`POST /v1/messages/count_tokens`: what decides about the prompt."""

    messages: Messages[MessageBody]
    model: str | None = None
    system: str | Parts[Block] | None = None
    tools: Tools[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesBody(PromptBody, kw_only=True):
    """`POST /v1/messages`."""

    max_tokens: Number = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    cache_prompt: bool | None = None
    service_tier: Any = None


# ---------------------------------------------------------------------------------------------------- messages


def _texts(where: str, content: str | list[Block] | None) -> list[str]:
    """Content that can only be text."""
    if isinstance(content, str):
        return [content]
    return [_text(f"{where}[{index}]", block) for index, block in enumerate(content or [])]


def _text(where: str, block: Block) -> str:
    if block.type == "text":
        if block.text is None:
            raise missing(f"{where}.text")
        return block.text
    source = block.source if isinstance(block.source, dict) else {}
    if block.type == "document" and source.get("type") == "text" and isinstance(source.get("data"), str):
        return str(source["data"])
    raise unsupported(f"{where}.type", f"`{where}`: blocks of type {block.type[:40]!r} are not supported here.")


def system_text(system: str | list[Block] | None) -> str | None:
    """The system prompt. Its billing line stays for the rule that drops it, which may be off, and is counted."""
    return joined(_texts("system", system)) or None


def _user_messages(where: str, content: str | list[Block]) -> list[Message]:
    """Results of tools are messages of their own, where they stand."""
    if isinstance(content, str):
        return [Message("user", content)]
    found: list[Message] = []
    texts: list[str] = []
    for index, block in enumerate(content):
        if block.type != "tool_result":
            texts.append(_text(f"{where}[{index}]", block))
            continue
        if texts:
            found.append(Message("user", joined(texts)))
            texts = []
        if block.tool_use_id is None:
            raise missing(f"{where}[{index}].tool_use_id")
        result = joined(_texts(f"{where}[{index}].content", block.content))
        found.append(Message("tool", result or "", tool_call_id=block.tool_use_id))
    if texts or not found:
        found.append(Message("user", joined(texts) or ""))
    return found


def _assistant_message(where: str, content: str | list[Block]) -> Message:
    if isinstance(content, str):
        return Message("assistant", content)
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(content):
        at = f"{where}[{index}]"
        match block.type:
            case "thinking":
                thoughts.append(block.thinking or "")
            case "redacted_thinking":
                continue  # only Anthropic could read it
            case "tool_use":
                if block.name is None:
                    raise missing(f"{at}.name")
                calls.append(conversation.tool_call(block.id, block.name, block.input or {}))
            case _:
                texts.append(_text(at, block))
    return Message(
        "assistant",
        joined(texts),
        tool_calls=calls or None,
        reasoning_content=joined([thought for thought in thoughts if thought]),
    )


def messages_of(body: PromptBody) -> list[Message]:
    """The conversation as the template sees it. Raises RequestError."""
    system = system_text(body.system)
    found = [] if system is None else [Message("system", system)]
    for index, message in enumerate(body.messages):
        where = f"messages[{index}].content"
        match message.role:
            case "user":
                found += _user_messages(where, message.content)
            case "assistant":
                found.append(_assistant_message(where, message.content))
            case "system":
                found.append(Message("system", joined(_texts(where, message.content)) or ""))
            case _:
                raise RequestError(
                    f"`messages[{index}].role` must be user or assistant, not {message.role[:40]!r}.",
                    param=f"messages[{index}].role",
                    code="unknown_role",
                )
    return found


# ---------------------------------------------------------------------------------------------------- all else


def _tools(tools: list[Tool] | None) -> list[dict[str, Any]] | None:
    found = []
    for index, tool in enumerate(tools or []):
        if tool.input_schema is None:
            raise unsupported(f"tools[{index}]", f"`tools[{index}]` ({(tool.type or tool.name)[:60]!r}) {_HOSTED}.")
        conversation.check_parameters(f"tools[{index}].input_schema", tool.input_schema)
        found.append(conversation.function_tool(tool.name, tool.description, tool.input_schema, tool.strict))
    return found or None


def _choice(choice: ToolChoice | None, tools: list[dict[str, Any]] | None) -> str:
    if choice is None:
        return "auto"
    kinds = {"auto": "auto", "none": "none", "any": "required", "tool": f"={choice.name or ''}"}
    if choice.type not in kinds:
        raise RequestError(
            f"`tool_choice.type` must be auto, any, tool or none, not {choice.type[:40]!r}.", param="tool_choice.type"
        )
    return conversation.checked_choice(kinds[choice.type], tools)


def _template_kwargs(body: PromptBody) -> dict[str, Any]:
    """Thinking is off unless asked for, as at Anthropic; templates that know no such switch do not see it."""
    wanted: dict[str, Any] = {"enable_thinking": body.thinking is not None and body.thinking.type != "disabled"}
    if body.output_config is not None and body.output_config.effort:
        wanted["reasoning_effort"] = body.output_config.effort
    return {**wanted, **(body.chat_template_kwargs or {})}


def _constraint(body: PromptBody) -> Constraint | None:
    given = body.output_format
    where = "output_format"
    if body.output_config is not None and body.output_config.format is not None:
        given, where = body.output_config.format, "output_config.format"
    if given is None:
        return None
    if given.type != "json_schema":
        raise unsupported(f"{where}.type", f"`{where}.type` must be 'json_schema', not {given.type[:40]!r}.")
    if given.schema is None:
        raise missing(f"{where}.schema")
    return conversation.schema_constraint(given.schema, f"{where}.schema")


def request_of(body: MessagesBody, rid: str, n_vocab: int | None) -> Generate:
    """Checked and turned into what the worker takes. Raises RequestError."""
    tools, strict = conversation.without_strict(_tools(body.tools))
    limit = fields.whole("max_tokens", body.max_tokens, 1)
    generate = Generate(
        rid=rid,
        messages=messages_of(body),
        prompt=None,
        tools=tools,
        template_kwargs=_template_kwargs(body),
        max_tokens=-1 if limit is None else limit,
        stop=fields.stop_strings(body.stop_sequences),
        sampling=body.sampling(n_vocab),
        stream=bool(body.stream),
        cache=body.cache_prompt is not False,
        constraint=_constraint(body),
        tool_choice=_choice(body.tool_choice, tools),
        parallel_tool_calls=not (body.tool_choice is not None and body.tool_choice.disable_parallel_tool_use),
        strict_tools=strict,
    )
    conversation.check_call(generate)
    return generate


# ---------------------------------------------------------------------------------------------------- errors, routes

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_form(error: HomeprefixdError) -> dict[str, Any]:
    """As Anthropic's clients read errors. Claude Code shortens its conversation when it reads "prompt is too long"."""
    message = error.message
    if isinstance(error, ContextOverflowError):
        counts = error.details.get("n_prompt_tokens", "?"), error.details.get("n_ctx", "?")
        message = f"prompt is too long: {counts[0]} tokens > {counts[1]} maximum. {message}"
    return {"type": "error", "error": {"type": _TYPES.get(error.status, "api_error"), "message": message}}


async def messages(request: web.Request) -> web.StreamResponse:
    """`POST /v1/messages`."""
    body = fields.decode(await read_body(request), MessagesBody, _IGNORED)
    backend = request.app[BACKEND]
    alias = backend.resolve(body.model)
    rid = f"msg_{request.app[IDENTITY].token()}"
    generate = with_standing(request, request_of(body, rid, vocabulary(request, alias)), body.service_tier)
    events = EventStream(request, request.app[CONFIG].keep_alive) if generate.stream else None
    return await respond(request, backend.generate(alias, generate), MessageWriter(rid, alias, error_form), events)


async def count_tokens(request: web.Request) -> web.Response:
    """`POST /v1/messages/count_tokens`: how long the prompt of the same body would be."""
    body = fields.decode(await read_body(request), PromptBody, _IGNORED)
    backend = request.app[BACKEND]
    alias = backend.resolve(body.model)
    rid = f"ask-{request.app[IDENTITY].token()}"
    tools, kwargs = conversation.without_strict(_tools(body.tools))[0], _template_kwargs(body)
    asked = Generate(rid, messages_of(body), None, tools, kwargs, 1, [], Sampling(), False)
    conversation.check_call(asked)
    found = await backend.convert(alias, TokenizeRequest(rid, with_standing(request, asked, None)))
    return json_response({"input_tokens": len(found.tokens)})


ERROR_FORMS = {"/v1/messages": error_form, CLIENTS_HEADER: error_form}


def routes() -> list[web.RouteDef]:
    return [web.post("/v1/messages", messages), web.post("/v1/messages/count_tokens", count_tokens)]


_operation = partial(Operation, dialect="Anthropic", error=shape.AnthropicError)

OPERATIONS = (
    _operation("POST", "/v1/messages", "A message", MessagesBody, shape.AnthropicMessage, EVENTS),
    _operation("POST", "/v1/messages/count_tokens", COUNT, PromptBody, shape.TokenCount),
)
