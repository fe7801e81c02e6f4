"""OpenAI's dialect, requests: `POST /v1/chat/completions` and `POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from aiohttp import web

from ..errors import RequestError
from ..frames.worker import Constraint, Detokenize, Generate, Message
from . import conversation, fields
from . import reply_shapes as shape
from .choices import respond_choices
from .errors import read_body
from .fields import LoraField, Messages, Number, Parts, SamplingFields, Tools
from .keys import BACKEND, CONFIG, IDENTITY
from .openai_reply import ChatWriter, CompletionWriter, Echo, ReplyWriter, respond
from .openai_tools import check_tools, tool_choice
from .operation import EVENTS, Operation, both
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

MAX_CHOICES = 64
"""Replies to one request: `n` times the number of prompts."""


MAX_PROMPT_LOGPROBS = 200_000
"""Log-probabilities of prompts in one reply, all its choices together: about ten megabytes of JSON."""

MAX_TOKEN = 2**31  # ids are below it, where the vocabulary's size is not known

_IGNORED = frozenset(
    {
        "user",
        "prompt_cache_key",
        "prompt_cache_retention",
        "timings_per_token",
        "store",
        "metadata",
        "safety_identifier",
        "id_slot",
    }
)


class Part(msgspec.Struct):
    """A part of a message's content. Others than texts are refused later, by name."""

    type: str
    text: str | None = None
    refusal: str | None = None  # what an assistant once said instead


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct):
    function: FunctionCall
    id: str | None = None
    type: str = "function"


class MessageBody(msgspec.Struct):
    role: Annotated[str, msgspec.Meta(extra_json_schema={"enum": [*_ROLES]})]
    content: str | Parts[Part] | msgspec.UnsetType | None = msgspec.UNSET
    name: str | None = None
    tool_calls: Tools[ToolCall] | None = None
    function_call: FunctionCall | None = None  # what `tool_calls` was before
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class NamedSchema(msgspec.Struct):
    schema: Any = None
    name: str | None = None
    strict: bool | None = None


class Format(msgspec.Struct):
    type: str = "text"
    json_schema: NamedSchema | None = None
    schema: Any = None  # as llama-server takes it


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
    grammar: str | None = None
    json_schema: Any = None
    service_tier: Any = None
    lora: list[LoraField] | None = None

    def constraint(self) -> Constraint | None:
        """What the reply must look like. Raises RequestError."""
        found: list[tuple[str, Constraint]] = []
        if self.grammar:
            found.append(("grammar", Constraint("grammar", self.grammar)))
        if self.json_schema is not None:
            found.append(("json_schema", conversation.schema_constraint(self.json_schema, "json_schema")))
        form = self.response_format
        if form is not None and form.type != "text":
            where = "response_format"
            if form.type == "json_schema" and form.json_schema is not None:
                schema, at = form.json_schema.schema, f"{where}.json_schema.schema"
                found.append((where, conversation.schema_constraint(schema, at, where)))
            elif form.type in ("json_schema", "json_object") and form.schema is not None:
                found.append((where, conversation.schema_constraint(form.schema, f"{where}.schema", where)))
            elif form.type == "json_object":
                found.append((where, Constraint("json_object")))
            elif form.type == "json_schema":
                raise RequestError(
                    "`response_format.json_schema` is missing.",
                    param="response_format.json_schema",
                    code="missing_field",
                )
            else:
                raise _unsupported(
                    where,
                    f"`response_format.type` must be text, json_object or json_schema, not {form.type[:40]!r}.",
                )
        if len(found) > 1:
            names = " and ".join(f"`{name}`" for name, _ in found)
            raise RequestError(f"{names} exclude each other: send one of them.", param=found[1][0], code="conflict")
        return found[0][1] if found else None

    def count(self) -> int:
        """How many replies are wanted for a prompt."""
        return fields.whole("n", self.n, 1, MAX_CHOICES) or 1

    def limit(self, least: int = 1) -> int:
        """Tokens to generate at most; -1: until the context is full. `least`: 0 where a prompt alone makes sense."""
        for name in ("n_predict", "max_completion_tokens", "max_tokens"):
            value = fields.whole(name, getattr(self, name), -1)
            if value == 0 and least:
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

    messages: Messages[MessageBody]
    tools: Tools[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Number = None


Prompt = Annotated[str, msgspec.Meta(min_length=1)] | Annotated[list[str | int | list[int]], msgspec.Meta(min_length=1)]


class CompletionBody(CommonBody, kw_only=True):
    """`POST /v1/completions`."""

    prompt: Prompt
    logprobs: Number = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Number = None

    def candidates(self) -> int:
        """How many replies are made of a prompt, of which `n` are given back. Raises RequestError."""
        best_of = fields.whole("best_of", self.best_of, 0, MAX_CHOICES)
        if best_of in (None, 0, 1) or best_of == self.count():
            return self.count()
        if best_of < self.count():
            raise RequestError(
                f"`best_of` must be at least `n`, which is {self.count()}.", param="best_of", code="out_of_range"
            )
        if self.stream:
            raise RequestError(
                "`best_of` cannot be streamed: which replies are best is known at their end. Leave `stream` out.",
                param="best_of",
                code="conflict",
            )
        return best_of


def _unsupported(param: str, message: str) -> RequestError:
    return RequestError(message, param=param, code="unsupported_value")


# ---------------------------------------------------------------------------------------------------- chat


def _content(where: str, content: str | list[Part] | None) -> str | None:
    """Text of a message. Parts are joined by line ends, as llama-server does."""
    if not isinstance(content, list):
        return content
    texts = []
    for index, part in enumerate(content):
        if part.type == "refusal":
            texts.append(part.refusal or "")
            continue
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
    made = body.tool_calls or ([] if body.function_call is None else [ToolCall(body.function_call)])
    if content is msgspec.UNSET:
        if body.role != "assistant" or not (made or body.reasoning_content):
            raise RequestError(f"`{where}.content` is missing.", param=f"{where}.content", code="missing_field")
        content = None
    calls = None
    if made:
        fields.check_plain(f"{where}.tool_calls", [call.function.arguments for call in made])
        calls = [
            {
                **({} if call.id is None else {"id": call.id}),
                "type": call.type,
                "function": {"name": call.function.name, "arguments": call.function.arguments or ""},
            }
            for call in made
        ]
    return Message(
        role=role,
        content=_content(f"{where}.content", content),
        name=body.name,
        tool_calls=calls,
        tool_call_id=body.tool_call_id,
        reasoning_content=body.reasoning_content,
    )


def chat_request(body: ChatBody, rid: str, n_vocab: int | None) -> Generate:
    """Checked and turned into what the worker takes. Raises RequestError."""
    check_tools(body.tools, body.functions)
    tools, strict = conversation.without_strict(body.tools)
    choice, allowed = tool_choice(body.tool_choice, tools)
    kwargs = dict(body.chat_template_kwargs or {})
    fields.check_plain("chat_template_kwargs", kwargs)
    fields.set_effort(kwargs, body.reasoning_effort)
    for name in ("add_generation_prompt", "continue_final_message"):
        if (value := getattr(body, name)) is not None:
            kwargs[name] = value
    generate = Generate(
        rid=rid,
        messages=[_message(index, message) for index, message in enumerate(body.messages)],
        prompt=None,
        tools=tools,
        template_kwargs=kwargs,
        max_tokens=body.limit(),
        stop=fields.stop_strings(body.stop),
        sampling=body.sampling(n_vocab),
        stream=bool(body.stream),
        cache=body.cache_prompt is not False,
        salt=body.salt(),
        constraint=body.constraint(),
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        logprobs=fields.logprobs(body.logprobs, body.top_logprobs),
        lora=fields.lora(body.lora),
        allowed_tools=allowed,
        strict_tools=strict,
    )
    conversation.check_form(generate)
    return generate


# ---------------------------------------------------------------------------------------------------- completions


def prompts(given: Prompt, n_vocab: int | None) -> list[str | list[int]]:
    """What `prompt` holds: a string, a list of token ids, or a list of these. Raises RequestError."""
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        return [_prompt(given, n_vocab)]
    if len(given) > MAX_CHOICES:
        raise RequestError(f"`prompt` holds at most {MAX_CHOICES} prompts.", param="prompt", code="out_of_range")
    if any(isinstance(item, int) for item in given):
        raise RequestError("`prompt` must hold prompts or token ids, not a mixture.", param="prompt")
    return [_prompt(item, n_vocab) for item in given or [[]]]  # type: ignore[arg-type]


def _prompt(prompt: Prompt, n_vocab: int | None) -> str | list[int]:
    """A string or a list of token ids."""
    if not prompt:
        raise RequestError("`prompt` must not be empty.", param="prompt", code="out_of_range")
    if isinstance(prompt, str):
        return prompt
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


def check_choices(count: int, param: str = "n") -> None:
    """Raises RequestError if `count` replies are too many. `param`: the field that says how many of each prompt."""
    if count > MAX_CHOICES:
        raise RequestError(
            f"`{param}` times the number of prompts must be at most {MAX_CHOICES}, not {count}.",
            param=param,
            code="out_of_range",
        )


def completion_requests(body: CompletionBody, rid: str, n_vocab: int | None) -> list[Generate]:
    """Checked and turned into what the worker takes, one for each prompt. Raises RequestError."""
    logprobs = fields.whole("logprobs", body.logprobs, 0, fields.MAX_LOGPROBS)
    given = prompts(body.prompt, n_vocab)
    tells_prompt = bool(body.echo) and logprobs is not None
    if tells_prompt and body.suffix:
        raise RequestError(
            "`suffix` excludes `echo` with `logprobs`: the prompt is no text of its own then. Leave one of them out.",
            param="suffix",
            code="conflict",
        )
    if body.suffix and not all(isinstance(prompt, str) for prompt in given):
        raise _unsupported("suffix", "`suffix` needs `prompt` to be text.")
    return [
        Generate(
            rid=rid,
            messages=None,
            prompt=prompt,
            tools=None,
            template_kwargs={},
            max_tokens=body.limit(0 if body.echo else 1),
            stop=fields.stop_strings(body.stop),
            sampling=body.sampling(n_vocab),
            stream=bool(body.stream),
            cache=body.cache_prompt is not False,
            salt=body.salt(),
            constraint=body.constraint(),
            logprobs=(0 if body.candidates() > body.count() else -1) if logprobs is None else logprobs,
            suffix=body.suffix or None,
            lora=fields.lora(body.lora),
            prompt_logprobs=logprobs if logprobs is not None and tells_prompt else -1,
            most_prompt_logprobs=MAX_PROMPT_LOGPROBS // (len(given) * body.count()) if tells_prompt else 0,
        )
        for prompt in given
    ]


# ---------------------------------------------------------------------------------------------------- routes


def vocabulary(request: web.Request, alias: str) -> int | None:
    """How many tokens the model has; None while it is not known."""
    return next((info.n_vocab for info in request.app[BACKEND].models() if info.alias == alias), None)


def choices(bases: list[Generate], count: int) -> list[Generate]:
    """`count` requests for each of `bases`, with ids and seeds of their own. Raises RequestError: too many."""
    check_choices(len(bases) * count)
    made: list[Generate] = []
    for base in bases:
        for number in range(count):
            sampling, rid = base.sampling, base.rid
            if number and sampling.seed >= 0:  # the same seed would give the same reply
                sampling = msgspec.structs.replace(sampling, seed=(sampling.seed + number) % 2**32)
            if made:
                rid = f"{rid}-{len(made)}"
            # the prompt's own log-probabilities are the same for all of them
            told = -1 if number else base.prompt_logprobs
            made.append(msgspec.structs.replace(base, rid=rid, sampling=sampling, prompt_logprobs=told))
    return made


async def answer(
    request: web.Request,
    body: CommonBody,
    alias: str,
    bases: list[Generate],
    writer: Callable[[int], ReplyWriter],
    candidates: int = 0,
) -> web.StreamResponse:
    """Run the requests, `n` of each, and reply. `writer`: of the choice with an index. `candidates`: more than `n` of
    each are run, and the best are told, none of them streamed.
    """
    per_prompt = max(body.count(), candidates)
    generates = choices([with_standing(request, base, body.service_tier) for base in bases], per_prompt)
    backend = request.app[BACKEND]
    stream = bool(body.stream)
    usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    progress, keep_alive = bool(body.return_progress), request.app[CONFIG].keep_alive
    if len(generates) == 1:
        generation = backend.generate(alias, generates[0])
        return await respond(
            request, generation, writer(0), stream=stream, usage=usage, progress=progress, keep_alive=keep_alive
        )
    return await respond_choices(
        request,
        [backend.generate(alias, generate) for generate in generates],
        [writer(index) for index in range(len(bases) * body.count())],
        per_prompt,
        stream=stream,
        usage=usage,
        progress=progress,
        keep_alive=keep_alive,
    )


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """`POST /v1/chat/completions`."""
    body = fields.decode(await read_body(request), ChatBody, _IGNORED)
    alias = request.app[BACKEND].resolve(body.model)
    identity = request.app[IDENTITY]
    rid, created = f"chatcmpl-{identity.token()}", int(identity.clock())
    generate = chat_request(body, rid, vocabulary(request, alias))
    return await answer(request, body, alias, [generate], lambda index: ChatWriter(rid, alias, created, index))


async def completions(request: web.Request) -> web.StreamResponse:
    """`POST /v1/completions`."""
    body = fields.decode(await read_body(request), CompletionBody, _IGNORED)
    alias = request.app[BACKEND].resolve(body.model)
    identity = request.app[IDENTITY]
    rid, created = f"cmpl-{identity.token()}", int(identity.clock())
    generates = completion_requests(body, rid, vocabulary(request, alias))
    check_choices(len(generates) * body.candidates(), "n" if body.candidates() == body.count() else "best_of")
    echoes = [
        Echo(await _echo(request, alias, generate), logprobs=generate.prompt_logprobs >= 0) if body.echo else Echo()
        for generate in generates
    ]
    told = body.logprobs is not None

    def writer(index: int) -> CompletionWriter:
        return CompletionWriter(rid, alias, created, index, echoes[index // body.count()], told=told)

    return await answer(request, body, alias, generates, writer, body.candidates())


async def _echo(request: web.Request, alias: str, generate: Generate) -> str:
    """The prompt as text."""
    if isinstance(generate.prompt, str):
        return generate.prompt
    ask = Detokenize(f"{generate.rid}-echo", generate.prompt or [])
    return (await request.app[BACKEND].convert(alias, ask)).text


def routes() -> list[web.RouteDef]:
    """OpenAI's routes, and llama-server's spelling of them."""
    return [
        web.post("/v1/chat/completions", chat_completions),
        web.post("/chat/completions", chat_completions),
        web.post("/v1/completions", completions),
    ]


OPERATIONS = (
    *both(Operation("POST", "/chat/completions", "Chat", ChatBody, shape.ChatCompletion, EVENTS)),
    Operation("POST", "/v1/completions", "Text", CompletionBody, shape.TextCompletion, EVENTS),
)
