"""OpenAI's dialect, requests: `POST /v1/chat/completions` and `POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from ..errors import RequestError
from ..frames import Generate, Message
from . import fields
from .errors import read_body
from .fields import Number, SamplingFields
from .keys import BACKEND, CONFIG, IDENTITY
from .openai_reply import ChatWriter, CompletionWriter, ReplyWriter, respond
from .standing import with_standing

_MAX_SALT = 1024  # characters
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",  # what results of tools were called before
}
"""A message's role -> what the templates know."""

MAX_TOKEN = 2**31  # ids are below it, where the vocabulary's size is not known

_IGNORED = frozenset(
    {
        "user",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
        "timings_per_token",
        "store",
        "metadata",
        "safety_identifier",
        "id_slot",
    }
)


class Part(msgspec.Struct):
    """A part of a message's content. Others than `text` are refused later, by name."""

    type: str
    text: str | None = None


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(msgspec.Struct):
    function: FunctionCall
    id: str | None = None
    type: str = "function"


class MessageBody(msgspec.Struct):
    role: str
    content: str | list[Part] | msgspec.UnsetType | None = msgspec.UNSET
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class Format(msgspec.Struct):
    type: str = "text"


class CommonBody(SamplingFields, kw_only=True):
    """Fields that both routes take."""

    model: str | None = None
    stop: str | list[str] | None = None
    max_tokens: Number = None
    max_completion_tokens: Number = None
    n_predict: Number = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None
    cache_prompt: bool | None = None
    cache_salt: str | None = None
    n: Number = None
    response_format: Format | None = None
    grammar: Any = None
    json_schema: Any = None
    service_tier: Any = None

    def check_unsupported(self) -> None:
        """Refuse what would change the reply and is not done, rather than ignore it. Raises RequestError."""
        if fields.whole("n", self.n, 0) not in (None, 1):
            raise _unsupported("n", "Only one reply per request is supported: leave `n` out or set it to 1.")
        if self.response_format is not None and self.response_format.type != "text":
            raise _unsupported(
                "response_format",
                f"`response_format` {self.response_format.type[:40]!r} is not supported yet, only 'text'.",
            )
        for name in ("grammar", "json_schema"):
            if getattr(self, name):
                raise _unsupported(name, f"`{name}` is not supported yet.")

    def limit(self) -> int:
        """Tokens to generate at most; -1: until the context is full."""
        for name in ("n_predict", "max_completion_tokens", "max_tokens"):
            value = fields.whole(name, getattr(self, name), -1)
            if value == 0:
                raise RequestError(
                    f"`{name}` must be at least 1, or -1 for as many as fit.", param=name, code="out_of_range"
                )
            if value is not None:
                return value
        return -1

    def salt(self) -> str:
        salt = self.cache_salt or ""
        if len(salt) > _MAX_SALT:
            raise RequestError(
                f"`cache_salt` must have at most {_MAX_SALT} characters.", param="cache_salt", code="out_of_range"
            )
        return salt


class ChatBody(CommonBody, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[MessageBody]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    logprobs: bool | None = None
    top_logprobs: Number = None


class CompletionBody(CommonBody, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | int | list[int]]
    logprobs: Number = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Number = None


Body = TypeVar("Body", bound=CommonBody)


def _unsupported(param: str, message: str) -> RequestError:
    return RequestError(message, param=param, code="unsupported_value")


# ---------------------------------------------------------------------------------------------------- chat


def _content(where: str, content: str | list[Part] | None) -> str | None:
    """Text of a message. Parts are joined by line ends, as llama-server does."""
    if not isinstance(content, list):
        return content
    texts = []
    for index, part in enumerate(content):
        if part.type != "text":
            raise _unsupported(
                f"{where}[{index}].type",
                f"`{where}[{index}]`: only parts of type 'text' are supported, not {part.type[:40]!r}.",
            )
        if part.text is None:
            raise RequestError(
                f"`{where}[{index}].text` is missing.", param=f"{where}[{index}].text", code="missing_field"
            )
        texts.append(part.text)
    return "\n".join(texts)


def _message(index: int, body: MessageBody) -> Message:
    where = f"messages[{index}]"
    role = _ROLES.get(body.role)
    if role is None:
        raise RequestError(
            f"`{where}.role` must be {', '.join(list(_ROLES)[:-1])} or {list(_ROLES)[-1]}, not {body.role[:40]!r}.",
            param=f"{where}.role",
            code="unknown_role",
        )
    content = body.content
    if content is msgspec.UNSET:
        if body.role != "assistant" or not (body.tool_calls or body.reasoning_content):
            raise RequestError(f"`{where}.content` is missing.", param=f"{where}.content", code="missing_field")
        content = None
    calls = None
    if body.tool_calls:
        fields.check_plain(f"{where}.tool_calls", [call.function.arguments for call in body.tool_calls])
        calls = [
            {
                **({} if call.id is None else {"id": call.id}),
                "type": call.type,
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in body.tool_calls
        ]
    return Message(
        role=role,
        content=_content(f"{where}.content", content),
        name=body.name,
        tool_calls=calls,
        tool_call_id=body.tool_call_id,
        reasoning_content=body.reasoning_content,
    )


def _check_tools(body: ChatBody) -> None:
    fields.check_plain("tools", body.tools)
    for index, tool in enumerate(body.tools or []):
        if not isinstance(tool.get("function", {}), dict):
            raise RequestError(f"`tools[{index}].function` must be object.", param=f"tools[{index}].function")
    # "none": the tools stay in the prompt all the same, as in llama-server, so that its prefix stays the same.
    if body.tool_choice not in (None, "auto", "none"):
        raise _unsupported("tool_choice", "`tool_choice` can be 'auto' or 'none'; calls cannot be forced yet.")


def chat_request(body: ChatBody, rid: str, n_vocab: int | None) -> Generate:
    """Checked and turned into what the worker takes. Raises RequestError."""
    body.check_unsupported()
    if not body.messages:
        raise RequestError("`messages` must not be empty.", param="messages", code="out_of_range")
    if body.logprobs or fields.whole("top_logprobs", body.top_logprobs, 0):
        raise _unsupported("logprobs", "`logprobs` is not supported yet.")
    _check_tools(body)
    kwargs = dict(body.chat_template_kwargs or {})
    fields.check_plain("chat_template_kwargs", kwargs)
    if body.reasoning_effort:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    return Generate(
        rid=rid,
        messages=[_message(index, message) for index, message in enumerate(body.messages)],
        prompt=None,
        tools=body.tools or None,
        template_kwargs=kwargs,
        max_tokens=body.limit(),
        stop=fields.stop_strings(body.stop),
        sampling=body.sampling(n_vocab),
        stream=bool(body.stream),
        cache=body.cache_prompt is not False,
        salt=body.salt(),
    )


# ---------------------------------------------------------------------------------------------------- completions


def _prompt(prompt: str | list[str | int | list[int]], n_vocab: int | None) -> str | list[int]:
    """A string, a list of token ids, or a list that holds one of these."""
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise _unsupported("prompt", "Only one prompt per request is supported; send one request for each.")
        prompt = prompt[0]  # type: ignore[assignment]
    if isinstance(prompt, str):
        if not prompt:
            raise RequestError("`prompt` must not be empty.", param="prompt", code="out_of_range")
        return prompt
    if not prompt:
        raise RequestError("`prompt` must not be empty.", param="prompt", code="out_of_range")
    limit = MAX_TOKEN if n_vocab is None else n_vocab
    ids: list[int] = []
    for item in prompt:
        if not isinstance(item, int):
            raise RequestError("`prompt` must be a string or a list of token ids, not a mixture.", param="prompt")
        if not 0 <= item < limit:
            raise RequestError(
                f"`prompt` contains a token id that is not from 0 to {limit - 1}.", param="prompt", code="bad_token"
            )
        ids.append(item)
    return ids


def completion_request(body: CompletionBody, rid: str, n_vocab: int | None) -> Generate:
    """Checked and turned into what the worker takes. Raises RequestError."""
    body.check_unsupported()
    if fields.whole("logprobs", body.logprobs, 0):
        raise _unsupported("logprobs", "`logprobs` is not supported yet.")
    if body.echo:
        raise _unsupported("echo", "`echo` is not supported: the reply is only what is generated.")
    if body.suffix:
        raise _unsupported("suffix", "`suffix` is not supported.")
    if fields.whole("best_of", body.best_of, 0) not in (None, 1):
        raise _unsupported("best_of", "`best_of` is not supported: leave it out or set it to 1.")
    return Generate(
        rid=rid,
        messages=None,
        prompt=_prompt(body.prompt, n_vocab),
        tools=None,
        template_kwargs={},
        max_tokens=body.limit(),
        stop=fields.stop_strings(body.stop),
        sampling=body.sampling(n_vocab),
        stream=bool(body.stream),
        cache=body.cache_prompt is not False,
        salt=body.salt(),
    )


# ---------------------------------------------------------------------------------------------------- routes


def vocabulary(request: web.Request, alias: str) -> int | None:
    """How many tokens the model has; None while it is not known."""
    return next((info.n_vocab for info in request.app[BACKEND].models() if info.alias == alias), None)


async def _answer(
    request: web.Request,
    kind: type[Body],
    writer: type[ReplyWriter],
    id_prefix: str,
    convert: Callable[[Body, str, int | None], Generate],
) -> web.StreamResponse:
    """One request of either route: `kind` is its body, `convert` checks it, `writer` writes the reply."""
    body = fields.decode(await read_body(request), kind, _IGNORED)
    alias = request.app[BACKEND].resolve(body.model)
    identity = request.app[IDENTITY]
    rid = f"{id_prefix}-{identity.token()}"
    generate = with_standing(request, convert(body, rid, vocabulary(request, alias)), body.service_tier)
    return await respond(
        request,
        request.app[BACKEND].generate(alias, generate),
        writer(rid, alias, int(identity.clock())),
        stream=generate.stream,
        usage=body.stream_options is not None and bool(body.stream_options.include_usage),
        progress=bool(body.return_progress),
        keep_alive=request.app[CONFIG].keep_alive,
    )


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """`POST /v1/chat/completions`."""
    return await _answer(request, ChatBody, ChatWriter, "chatcmpl", chat_request)


async def completions(request: web.Request) -> web.StreamResponse:
    """`POST /v1/completions`."""
    return await _answer(request, CompletionBody, CompletionWriter, "cmpl", completion_request)


def routes() -> list[web.RouteDef]:
    """OpenAI's routes, and llama-server's spelling of them."""
    return [
        web.post("/v1/chat/completions", chat_completions),
        web.post("/chat/completions", chat_completions),
        web.post("/v1/completions", completions),
    ]
