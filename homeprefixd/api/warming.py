"""Prefixes by hand: `POST /cache/warm`, `/cache/match`, `/cache/pin`, `/cache/unpin`.

A prompt is given as the very body of the request that is to come: of `/v1/chat/completions` (`messages`) or of
`/v1/completions` (`prompt`). What matters of it is the prompt: `warm` computes it by the way of a real request, at
background priority, and generates nothing; `match` says what such a request would find, and touches nothing.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

from ..errors import ContextOverflowError, HomeprefixdError, RequestError, UnavailableError
from ..frames.store import Pin, Pinned, Plan, Unpin
from ..frames.worker import Finished, Generate, LoraChoice, ModelInfo, TokenizeRequest
from ..lora import choose, described
from ..prefix.blocks import ADAPTER_NAMES, BLOCK_TOKENS
from . import fields
from .durations import seconds
from .errors import json_response, read_body
from .fields import Number
from .keys import ADMIN, BACKEND, IDENTITY
from .models import base_of
from .openai import ChatBody, CompletionBody, chat_request, completion_requests, vocabulary
from .operation import Operation
from .standing import with_standing

MAX_LABEL = 200  # characters
_LOOKS, _LOOK_AGAIN = 5, 0.1  # at most, for what was just computed, and s between them
MAX_TTL = 100 * 365 * 86400.0  # s


_PREFIX = re.compile(r"[0-9a-f]{1,64}", re.ASCII)


class _Kind(msgspec.Struct):
    """Which body it is."""

    messages: Any = None
    prompt: Any = None


class PinBody(msgspec.Struct):
    """What is pinned, by one of these or by a prompt, and how; `all` and `label` say what is unpinned."""

    prefix: str | None = None
    request_id: str | None = None
    label: str | None = None
    ttl: Number | str = None
    all: bool | None = None


def _asked(request: web.Request, body: bytes) -> tuple[str, Generate] | None:
    """The model and the request that a body describes; None if it has no prompt. Raises RequestError."""
    kind = fields.decode(body, _Kind)
    rid = f"{request.path.rsplit('/', 1)[-1]}-{request.app[IDENTITY].token()}"
    if kind.messages is not None and kind.prompt is not None:
        raise RequestError("Give `messages` or `prompt`, not both.", code="ambiguous_prompt")
    if kind.messages is not None:
        chat = fields.decode(body, ChatBody)
        alias = request.app[BACKEND].resolve(chat.model)
        return alias, chat_request(chat, rid, vocabulary(request, alias))
    if kind.prompt is not None:
        text = fields.decode(body, CompletionBody)
        alias = request.app[BACKEND].resolve(text.model)
        asked = completion_requests(text, rid, vocabulary(request, alias))
        if len(asked) > 1:
            raise RequestError("Give one `prompt` at a time.", param="prompt", code="unsupported_value")
        return alias, asked[0]
    return None


def _needed(request: web.Request, body: bytes) -> tuple[str, Generate]:
    found = _asked(request, body)
    if found is None:
        raise RequestError(
            "Give the body of the request that is to come: with `messages`, as for /v1/chat/completions, or with"
            " `prompt`, as for /v1/completions.",
            code="missing_field",
        )
    return found


def _info(request: web.Request, alias: str) -> ModelInfo:
    """Of a model whose cache can be asked. Raises UnavailableError."""
    info = next((info for info in request.app[BACKEND].models() if info.alias == alias), None)
    if info is None:
        raise UnavailableError(f"the model {alias} is loading: try again soon", code="model_loading", retry_after=2)
    if info.cache_mode == "off":
        raise UnavailableError(info.cache_reason or f"nothing is cached of the model {alias}")
    if not info.namespace:
        raise UnavailableError(f"the file of the model {alias} is still being read: try again soon", retry_after=2)
    return info


def description_of(info: ModelInfo, salt: str, lora: list[LoraChoice] | None = None) -> dict[str, Any]:
    """The namespace of a request with these, as the worker makes it. Raises UnavailableError, RequestError."""
    found = info.namespace
    if lora is not None:
        adapters = described(info.adapters, choose(info.adapters, lora))
        if adapters is None:
            raise UnavailableError("the adapter's file is still being read: try again soon", retry_after=2)
        found = {**{key: value for key, value in found.items() if key != ADAPTER_NAMES}, **adapters}
    if not salt:
        return found
    own = str(found.get("salt", ""))
    return {**found, "salt": f"{len(own)}:{own}{salt}"}


async def prompt_of(request: web.Request, alias: str, asked: Generate) -> tuple[ModelInfo, dict[str, Any], list[int]]:
    """What the worker would look up: the model, its namespace's description, the tokens."""
    converted = await request.app[BACKEND].convert(alias, TokenizeRequest(asked.rid, asked))
    info = _info(request, alias)
    return info, description_of(info, asked.salt, asked.lora), converted.tokens


# ---------------------------------------------------------------------------------------------------------- warm


async def warm(request: web.Request) -> web.Response:
    """`POST /cache/warm`: compute a prompt now, so that it is known later. The reply comes when it is done."""
    alias, asked = _needed(request, await read_body(request))
    if any(info.alias == alias for info in request.app[BACKEND].models()):  # else it is waited for
        _info(request, alias)
    if not asked.cache:
        raise RequestError("`cache_prompt` is false: then nothing would be kept.", param="cache_prompt")
    generate = msgspec.structs.replace(
        with_standing(request, asked, None),
        priority="background",
        max_tokens=0,
        stream=False,
        stop=[],
        warming=True,
        prompt_logprobs=-1,
    )
    began = time.monotonic()
    finished: Finished | None = None
    async with request.app[BACKEND].generate(alias, generate) as generation:
        async for event in generation:
            if isinstance(event, Finished):
                finished = event
    if finished is None:
        raise HomeprefixdError("the prompt was not computed to its end")
    timings = finished.timings
    least = next((info.least for info in request.app[BACKEND].models() if info.alias == alias), 0)
    return json_response(
        {
            "id": generate.rid,
            "model": alias,
            "prompt_tokens": timings.total_prompt_n,
            "cached_tokens": timings.cache_n,
            "computed_tokens": timings.prompt_n,
            "seconds": round(time.monotonic() - began, 3),
            "least_tokens": least,  # what is shorter is not kept
            "known_tokens": await _known(request, alias, asked),
        }
    )


async def _known(request: web.Request, alias: str, asked: Generate) -> int | None:
    """How many tokens of a prompt that was just computed are kept; None where that cannot be said.

    The store may hear of its last blocks a moment later than the reply comes.
    """
    try:
        info, description, tokens = await prompt_of(request, alias, asked)
        if info.cache_mode != "blocks":  # a prompt itself is not gone on from where it ends
            return None
        most = len(tokens) - 1
        if info.exact:
            most -= most % BLOCK_TOKENS
        known = 0
        for _ in range(_LOOKS):
            plan = usable(await request.app[ADMIN].match(description, tokens, most, info.exact), info)
            known = sum(node.use for node in plan.nodes)
            if known >= most:
                return len(tokens)
            await asyncio.sleep(_LOOK_AGAIN)
    except HomeprefixdError:
        return None
    return known


# ---------------------------------------------------------------------------------------------------------- match


def predicted(plan: Plan, total: int, rates: Mapping[str, float]) -> float | None:
    """Seconds until the first token of a prompt of `total` tokens; None while too little was measured.

    `rates`: of the worker, see `engine/gate.py`.
    """
    if not rates:
        return None
    known = sum(node.use for node in plan.nodes)
    count = total - known
    calls = -(-count // max(1, int(rates["batch"])))
    found = rates["call"] * calls + rates["token"] * count + rates["depth"] * count * (known + count / 2)
    for node in plan.nodes:
        found += rates["restore"] * node.count
        if node.tier == "warm" and plan.warm_rate > 0:
            found += node.size / plan.warm_rate
    return found


def usable(plan: Plan, info: ModelInfo) -> Plan:
    """What a request would use of it: too short a match is left alone."""
    if plan.nodes and plan.nodes[-1].start + plan.nodes[-1].use < info.least:
        return Plan(plan.ticket, [], warm_rate=plan.warm_rate)
    return plan


async def match(request: web.Request) -> web.Response:
    """`POST /cache/match`: how far is a prompt known, in which tiers, and how long would its first token take?"""
    alias, asked = _needed(request, await read_body(request))
    info, description, tokens = await prompt_of(request, alias, asked)
    if len(tokens) >= info.n_ctx:
        raise ContextOverflowError(
            f"The prompt has {len(tokens)} tokens, which exceeds the available context size of {info.n_ctx} (reply"
            " included): no such request would be answered.",
            n_prompt_tokens=len(tokens),
            n_ctx=info.n_ctx,
        )
    found = await request.app[ADMIN].match(description, tokens, len(tokens) - 1, info.exact)
    plan = usable(found, info) if asked.cache else Plan(0, [])
    tiers: dict[str, int] = {}
    for node in plan.nodes:
        tiers[node.tier] = tiers.get(node.tier, 0) + node.use
    workers, base = request.app[BACKEND].status().get("workers", []), base_of(request.app[BACKEND], alias)
    rates = next((worker.get("rates") or {} for worker in workers if worker["alias"] == base), {})
    ttft, cold = predicted(plan, len(tokens), rates), predicted(Plan(0, []), len(tokens), rates)
    cached = sum(tiers.values())
    return json_response(
        {
            "model": alias,
            "prompt_tokens": len(tokens),
            "cached_tokens": cached,
            "computed_tokens": len(tokens) - cached,
            "cache_tiers": tiers,
            "bytes": sum(node.size for node in plan.nodes),
            "predicted_ttft_ms": None if ttft is None else round(1e3 * ttft, 1),
            "predicted_cold_ttft_ms": None if cold is None else round(1e3 * cold, 1),
            "nodes": [
                {"start": node.start, "tokens": node.count, "used": node.use, "tier": node.tier, "bytes": node.size}
                for node in plan.nodes
            ],
        }
    )


# ---------------------------------------------------------------------------------------------------------- pins


async def pin(request: web.Request) -> web.Response:
    """`POST /cache/pin`: keep a prefix on disk, whatever else is stored. An empty body lists what is pinned.

    What is pinned already gets the new label and time to live.
    """
    body = await read_body(request) or b"{}"
    wanted = fields.decode(body, PinBody)
    _check_label(wanted)
    ttl = seconds("ttl", wanted.ttl, MAX_TTL) or 0.0
    asked = one_name(request, wanted, body)
    if asked is None and not (wanted.prefix or wanted.request_id) and (wanted.label or ttl):
        raise RequestError(
            "Say what to pin: by `prefix` (an id of /cache/prefixes), `request_id`, or a request with `messages` or"
            " `prompt`.",
            code="missing_field",
        )
    frame = Pin(0, prefix=wanted.prefix or "", request=wanted.request_id or "", label=wanted.label or "", ttl=ttl)
    if asked is None:
        return _pins(await request.app[ADMIN].pin(frame, None, []))
    _, description, tokens = await prompt_of(request, *asked)
    reply = _report(await request.app[ADMIN].pin(frame, description, tokens))
    return json_response({**reply, "prompt_tokens": len(tokens)})


async def unpin(request: web.Request) -> web.Response:
    """`POST /cache/unpin`: it may be evicted again."""
    body = await read_body(request)
    wanted = fields.decode(body, PinBody)
    _check_label(wanted)
    asked = one_name(request, wanted, body)
    names = [asked is not None, bool(wanted.prefix), bool(wanted.request_id), bool(wanted.label), bool(wanted.all)]
    if names.count(True) > 1:
        raise RequestError(
            "Name what to unpin in one way: by `label`, `prefix`, `request_id`, a request, or `all`.",
            code="ambiguous_pin",
        )
    if not any(names):
        raise RequestError(
            "Say what to unpin: by `label`, `prefix`, `request_id`, a request with `messages` or `prompt`, or `all`.",
            code="missing_field",
        )
    frame = Unpin(
        0,
        prefix=wanted.prefix or "",
        request=wanted.request_id or "",
        label=wanted.label or "",
        all=bool(wanted.all),
    )
    if asked is None:
        return _pins(await request.app[ADMIN].unpin(frame, None, []))
    _, description, tokens = await prompt_of(request, *asked)
    return _pins(await request.app[ADMIN].unpin(frame, description, tokens))


def _check_label(body: PinBody) -> None:
    if body.label is not None and (len(body.label) > MAX_LABEL or not body.label.strip()):
        raise RequestError(f"`label` must have 1 to {MAX_LABEL} characters.", param="label", code="out_of_range")


def one_name(request: web.Request, wanted: PinBody, body: bytes) -> tuple[str, Generate] | None:
    """The prompt that is named, if one is. Raises RequestError where more than one name is given."""
    if wanted.prefix is not None and not _PREFIX.fullmatch(wanted.prefix):
        raise RequestError("`prefix` must be an id from /cache/prefixes: hexadecimal digits.", param="prefix")
    if wanted.request_id is not None and not 0 < len(wanted.request_id) <= MAX_LABEL:
        raise RequestError(
            f"`request_id` must have 1 to {MAX_LABEL} characters.", param="request_id", code="out_of_range"
        )
    asked = _asked(request, body)
    names = [bool(wanted.prefix), bool(wanted.request_id), asked is not None]
    if names.count(True) > 1:
        raise RequestError("Name one prefix: by `prefix`, `request_id`, `messages` or `prompt`.", code="ambiguous_pin")
    return asked


def _report(found: Pinned) -> dict[str, Any]:
    return {"pins": found.pins}


def _pins(found: Pinned) -> web.Response:
    return json_response(_report(found))


def routes() -> list[web.RouteDef]:
    return [
        web.post("/cache/warm", warm),
        web.post("/cache/match", match),
        web.post("/cache/pin", pin),
        web.post("/cache/unpin", unpin),
    ]


PROMPTS = (ChatBody, CompletionBody)
"""Bodies of which only the prompt counts."""

OPERATIONS = (
    Operation("POST", "/cache/warm", "Compute a prompt now", PROMPTS),
    Operation("POST", "/cache/match", "How much of a prompt is known", PROMPTS),
    Operation("POST", "/cache/pin", "Keep a prefix", (PinBody, *PROMPTS), body_needed=False),
    Operation("POST", "/cache/unpin", "Let a prefix be evicted again", (PinBody, *PROMPTS)),
)
