"""llama-server's own completions: `POST /completion` (also `/completions`) and `POST /infill`, with its form of SSE."""

from __future__ import annotations

import math
from typing import Annotated, Any

import msgspec
from aiohttp import web

from ..errors import RequestError
from ..frames.worker import Accepted, Delta, Finished, Generate, Progress, Timings, Tokenize, TokenLogprob
from . import fields
from .content_parts import checked_content, object_text
from .errors import encode, read_body
from .fields import Number
from .keys import BACKEND, IDENTITY
from .openai import MAX_CHOICES, CommonBody, answer, prompts, vocabulary
from .openai_reply import ReplyWriter, finite, timings_object, token_object
from .operation import EVENTS, Operation, both

_MAX_PROBS = 100
_MAX_FILES = 1000
_MAX_BIASED_TEXTS = 1000
_MAX_FIELDS = 256
_LONGEST_FIELD = 256  # letters of its path

_IGNORED = frozenset({"id_slot", "timings_per_token", "n_keep", "t_max_predict_ms"})


ResponseFields = Annotated[
    list[Annotated[str, msgspec.Meta(max_length=_LONGEST_FIELD)]], msgspec.Meta(max_length=_MAX_FIELDS)
]


class NativeBody(CommonBody, kw_only=True):
    """What both routes take."""

    n_probs: Number = None
    return_tokens: bool | None = None
    post_sampling_probs: bool | None = None
    response_fields: ResponseFields | None = None


NativePrompt = (
    Annotated[str, msgspec.Meta(min_length=1)]
    | dict[str, Any]
    | Annotated[list[str | int | dict[str, Any] | list[str | int]], msgspec.Meta(min_length=1)]
)


class CompletionBody(NativeBody, kw_only=True):
    """`POST /completion`. A prompt is a text, token ids, both mixed, or an object with `prompt_string`."""

    prompt: NativePrompt


class InfillFile(msgspec.Struct):
    text: str = ""
    filename: str = "tmp"


class InfillBody(NativeBody, kw_only=True):
    """`POST /infill`."""

    input_prefix: str
    input_suffix: str
    prompt: str = ""
    input_extra: list[InfillFile] | None = None


def native_prompts(given: NativePrompt) -> list[str | list[str | int]]:
    """What `prompt` holds, one by one. Raises RequestError."""
    if not isinstance(given, list) or any(isinstance(item, int) for item in given):
        return [_one(given)]
    if len(given) > MAX_CHOICES:
        raise RequestError(f"`prompt` holds at most {MAX_CHOICES} prompts.", param="prompt", code="out_of_range")
    return [_one(item) for item in given or [[]]]


def _one(given: Any) -> str | list[str | int]:
    if isinstance(given, dict):
        given = object_text("prompt", given)
    if isinstance(given, list) and all(isinstance(item, str | int) for item in given):
        prompt: str | list[str | int] = given
    elif isinstance(given, str):
        prompt = given
    else:
        raise RequestError(
            "`prompt` must hold texts, token ids, lists of these, or objects with `prompt_string`.",
            param="prompt",
            code="wrong_type",
        )
    if not prompt:
        raise RequestError("`prompt` must not be empty.", param="prompt", code="out_of_range")
    return prompt


async def _taken(request: web.Request, alias: str, given: NativePrompt) -> list[str | list[int]]:
    """The prompts as the worker takes them: texts beside token ids become tokens. Raises RequestError."""
    n_vocab = vocabulary(request, alias)
    taken: list[str | list[int]] = []
    for prompt in native_prompts(given):
        if isinstance(prompt, list) and any(isinstance(item, str) for item in prompt):
            ask = Tokenize(
                f"ask-{request.app[IDENTITY].token()}", checked_content(prompt, n_vocab, "prompt"), True, True, False
            )
            taken.append((await request.app[BACKEND].convert(alias, ask)).tokens)
        else:
            taken += prompts(prompt, n_vocab)  # type: ignore[arg-type]  # no mixture any more
    return taken


async def _biased(request: web.Request, alias: str, body: NativeBody) -> None:
    """A bias on a text is one on each of its tokens. Raises RequestError."""
    given = body.logit_bias
    biased: list[tuple[int | str, float | bool]] = []
    texts = 0
    for key, amount in given.items() if isinstance(given, dict) else given or []:
        if isinstance(key, int) or (key.isascii() and key.isdigit()):
            biased.append((key, amount))
            continue
        texts += 1
        if texts > _MAX_BIASED_TEXTS:
            raise RequestError(
                f"`logit_bias` takes at most {_MAX_BIASED_TEXTS} texts.", param="logit_bias", code="out_of_range"
            )
        content = checked_content(key, None, "logit_bias")
        ask = Tokenize(f"ask-{request.app[IDENTITY].token()}", content, False, False, False)
        biased += [(token, amount) for token in (await request.app[BACKEND].convert(alias, ask)).tokens]
    body.logit_bias = biased


def _generate(body: NativeBody, rid: str, prompt: str | list[int], n_vocab: int | None, **more: Any) -> Generate:
    if body.post_sampling_probs:
        raise RequestError(
            "`post_sampling_probs` is not supported: probabilities are those before any sampler.",
            param="post_sampling_probs",
            code="unsupported_value",
        )
    probs = fields.whole("n_probs", body.n_probs, 0, _MAX_PROBS) or 0
    return Generate(
        rid=rid,
        messages=None,
        prompt=prompt,
        tools=None,
        template_kwargs={},
        max_tokens=body.limit(0),
        stop=fields.stop_strings(body.stop),
        sampling=body.sampling(n_vocab),
        stream=bool(body.stream),
        cache=body.cache_prompt is not False,
        salt=body.salt(),
        constraint=body.constraint(),
        logprobs=probs if probs or body.return_tokens else -1,
        lora=fields.lora(body.lora),
        **more,
    )


class NativeWriter(ReplyWriter):
    """One reply as llama-server has it: `content` and `stop`, without a mark of the end."""

    object = chunk_object = "completion"
    before_text = after_text = b""

    def __init__(self, generate: Generate, model: str, index: int, body: NativeBody, *, several: bool) -> None:
        super().__init__(generate.rid, model, 0, index)
        self._generate, self._several = generate, several
        self._probs = (body.n_probs or 0) > 0
        self._tokens = bool(body.return_tokens)
        self._fields = body.response_fields or []
        self._prompt_n = 0
        self._head_bytes = b'data: {"index":%d,"content":' % index

    def text(self, text: str) -> bytes:
        return self._head_bytes + encode(text) + b',"tokens":[],"stop":false}\n\n'

    def accepted(self, event: Accepted) -> bytes:
        self._prompt_n = event.prompt_n
        return b""

    def delta(self, event: Delta) -> bytes:
        if not event.text and not event.logprobs:
            return b""
        shown = {
            "index": self.index,
            "content": event.text,
            "tokens": [token.token for token in event.logprobs] if self._tokens else [],
            "stop": False,
            "tokens_predicted": event.tokens,
            "tokens_evaluated": self._prompt_n,
        }
        return self._event({**shown, **self._probabilities(event.logprobs)})

    def progress(self, event: Progress) -> bytes:
        shown = {"total": event.total, "cache": event.reused, "processed": event.done}
        return self._event({"index": self.index, "content": "", "tokens": [], "stop": False, "prompt_progress": shown})

    def _event(self, value: dict[str, Any]) -> bytes:
        return b"data: " + encode(value) + b"\n\n"

    def _probabilities(self, tokens: list[TokenLogprob]) -> dict[str, Any]:
        if not self._probs or not tokens:
            return {}

        def shown(token: TokenLogprob) -> dict[str, Any]:
            return {"id": token.token, **token_object(token), "logprob": finite(token.logprob)}

        return {
            "completion_probabilities": [
                {**shown(token), "top_logprobs": [shown(other) for other in token.top]} for token in tokens
            ]
        }

    def _end(self, finished: Finished) -> dict[str, Any]:
        """All of it, or what `response_fields` names: `generation_settings/seed` is a field of a field."""
        whole = self._everything(finished)
        return {name: found[0] for name in self._fields if (found := _nested(whole, name))} if self._fields else whole

    def _everything(self, finished: Finished) -> dict[str, Any]:
        timings = finished.timings
        stop = "word" if finished.stop is not None else "eos" if finished.reason == "stop" else "limit"
        return {
            "index": self.index,
            "content": finished.text,
            "tokens": [token.token for token in finished.logprobs] if self._tokens else [],
            "id_slot": -1,
            "stop": True,
            "model": self.model,
            "tokens_predicted": timings.predicted_n,
            "tokens_evaluated": timings.total_prompt_n,
            "generation_settings": _settings(self._generate),
            "prompt": self._generate.prompt if isinstance(self._generate.prompt, str) else "",
            "has_new_line": "\n" in finished.text,
            "truncated": False,
            "stop_type": stop,
            "stopping_word": finished.stop or "",
            "tokens_cached": timings.total_prompt_n + timings.predicted_n,
            "timings": timings_object(timings),
            **self._probabilities(finished.logprobs),
        }

    def final(self, finished: Finished) -> bytes:
        return self._event(self._end(finished))

    def end(self, usage: dict[str, Any] | None, timings: Timings) -> bytes:
        return b""

    def whole_choice(self, finished: Finished) -> dict[str, Any]:
        return self._end(finished)

    def whole_reply(self, choices: list[dict[str, Any]], usage: dict[str, Any], timings: Timings) -> Any:
        return choices if self._several else choices[0]


def _nested(value: Any, path: str) -> tuple[Any, ...]:
    """What is at a path, as the one item; nothing where nothing is."""
    for name in path.split("/"):
        if not isinstance(value, dict) or name not in value:
            return ()
        value = value[name]
    return (value,)


def _settings(generate: Generate) -> dict[str, Any]:
    """What the reply was made with."""
    biases = generate.sampling.logit_bias.items()
    return {
        **msgspec.to_builtins(generate.sampling, str_keys=True),
        "logit_bias": [{"token": token, "bias": bias if math.isfinite(bias) else None} for token, bias in biases],
        "n_predict": generate.max_tokens,
        "max_tokens": generate.max_tokens,
        "stop": generate.stop,
        "stream": generate.stream,
        "n_probs": max(0, generate.logprobs),
    }


async def _respond(request: web.Request, body: NativeBody, alias: str, generates: list[Generate]) -> web.StreamResponse:
    several = len(generates) * body.count() > 1

    def writer(index: int) -> NativeWriter:
        return NativeWriter(generates[index // body.count()], alias, index, body, several=several)

    return await answer(request, body, alias, generates, writer)


def _new_id(request: web.Request) -> str:
    return f"cmpl-{request.app[IDENTITY].token()}"


async def completion(request: web.Request) -> web.StreamResponse:
    """`POST /completion`. With `n_predict` 0 the prompt is only computed, and kept."""
    body = fields.decode(await read_body(request), CompletionBody, _IGNORED)
    alias = request.app[BACKEND].resolve(body.model)
    n_vocab, rid = vocabulary(request, alias), _new_id(request)
    await _biased(request, alias, body)
    generates = [_generate(body, rid, prompt, n_vocab) for prompt in await _taken(request, alias, body.prompt)]
    return await _respond(request, body, alias, generates)


async def infill(request: web.Request) -> web.StreamResponse:
    """`POST /infill`: what belongs between `input_prefix` and `input_suffix`, for models with tokens for it."""
    body = fields.decode(await read_body(request), InfillBody, _IGNORED)
    alias = request.app[BACKEND].resolve(body.model)
    extra = body.input_extra or []
    if len(extra) > _MAX_FILES:
        raise RequestError(f"`input_extra` takes at most {_MAX_FILES} files.", param="input_extra", code="out_of_range")
    await _biased(request, alias, body)
    files = [(file.filename, file.text) for file in extra]
    prompt = body.input_prefix + body.prompt
    generate = _generate(
        body, _new_id(request), prompt, vocabulary(request, alias), suffix=body.input_suffix, files=files
    )
    return await _respond(request, body, alias, [generate])


def routes() -> list[web.RouteDef]:
    """With `/v1`, `/completions` is OpenAI's."""
    return [
        web.post("/completion", completion),
        web.post("/v1/completion", completion),
        web.post("/completions", completion),
        web.post("/infill", infill),
        web.post("/v1/infill", infill),
    ]


OPERATIONS = (
    *both(Operation("POST", "/completion", "Text", CompletionBody, stream=EVENTS)),
    Operation("POST", "/completions", "Text", CompletionBody, stream=EVENTS),
    *both(Operation("POST", "/infill", "What stands between", InfillBody, stream=EVENTS)),
)
