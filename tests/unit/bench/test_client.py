"""The client: streams in whatever pieces they come, and what is noted of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from homeprefixd.bench.client import Client, EventParser, Reply, take
from homeprefixd.errors import RequestError, UnavailableError

STREAM = (
    b": hello\n\ndata: one\n\nevent: x\r\ndata:two\r\n\r\ndata: three\rdata: four\r\r"
    b"id: 7\n\ndata: five\r\ndata: six\r\n\r\n"
)
EVENTS = [b"one", b"two", b"three\nfour", b"five\nsix"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_in_pieces(size: int) -> None:
    parser = EventParser()
    found = [event for at in range(0, len(STREAM), size) for event in parser.feed(STREAM[at : at + size])]
    assert found == EVENTS


def test_an_event_comes_as_soon_as_it_is_whole() -> None:
    parser = EventParser()
    assert parser.feed(b"data: a\n") == []
    assert parser.feed(b"\n") == [b"a"]


def test_what_chunks_say() -> None:
    reply = Reply(0.0)
    for now, event in enumerate(
        [
            {"choices": [{"delta": {"role": "assistant", "content": None}}]},
            {"choices": [{"delta": {"content": ""}}]},
            {"choices": [{"delta": {"reasoning_content": "Hm"}}]},
            {"choices": [{"delta": {"content": "Yes"}}]},
            {
                "choices": [{"delta": {"content": "."}, "finish_reason": "stop"}],
                "timings": {"cache_n": 7, "prompt_n": 3},
            },
            {"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": 5}},
            "nonsense",
            {"choices": None},
        ]
    ):
        take(reply, event, float(now))
    assert reply.text == "Yes."
    assert reply.arrivals == [2.0, 3.0, 4.0]
    assert reply.finish_reason == "stop"
    assert (reply.prompt_tokens, reply.cached_tokens, reply.output_tokens) == (10, 7, 5)
    assert reply.error == ""


def test_usage_comes_before_timings() -> None:
    details = {"prompt_tokens": 10, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}
    reply = Reply(0.0, usage=details, timings={"cache_n": 4})
    assert reply.cached_tokens == 0
    assert Reply(0.0, timings={"cache_n": 4, "prompt_n": 5, "predicted_n": 3}).prompt_tokens == 9
    assert Reply(0.0, arrivals=[1.0, 2.0]).output_tokens == 2


def test_an_error_in_the_stream() -> None:
    reply = Reply(0.0, status=200)
    take(reply, {"error": {"message": "out of memory"}}, 1.0)
    assert reply.error == "out of memory"
    assert reply.broken


@pytest.mark.parametrize(
    ("reply", "broken"),
    [
        (Reply(0.0, status=200), False),
        (Reply(0.0, status=400, error="bad"), False),
        (Reply(0.0, status=429, error="busy"), False),
        (Reply(0.0, status=503, error="loading"), True),
        (Reply(0.0, status=0, error="refused"), True),
        (Reply(0.0, status=200, error="late", timed_out=True), False),
    ],
)
def test_what_is_worth_another_try(reply: Reply, broken: bool) -> None:
    assert reply.broken is broken


# ---------------------------------------------------------------------------------------------- on a real socket


@asynccontextmanager
async def serving(handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/v1/{rest:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


def chunk(text: str | None = None, reason: str | None = None) -> bytes:
    return (
        b"data: " + json.dumps({"choices": [{"delta": {"content": text}, "finish_reason": reason}]}).encode() + b"\n\n"
    )


async def test_times_are_those_of_the_client() -> None:
    asked: list[dict[str, object]] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        asked.append({**await request.json(), "key": request.headers.get("Authorization")})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await asyncio.sleep(0.15)
        await response.write(chunk("a"))
        await asyncio.sleep(0.1)
        await response.write(chunk("b") + chunk(None, "stop") + b"data: [DONE]\n\n")
        return response

    async with serving(handler) as base, Client(base, model="m", api_key="k") as client:
        reply = await client.send({"messages": []})
    assert reply.error == ""
    assert reply.text == "ab"
    assert 0.14 < reply.arrivals[0] - reply.sent < 1.0
    assert 0.09 < reply.arrivals[1] - reply.arrivals[0] < 1.0
    assert reply.ended >= reply.arrivals[-1]
    assert asked == [
        {"messages": [], "stream": True, "stream_options": {"include_usage": True}, "model": "m", "key": "Bearer k"}
    ]


async def test_refusals_breaks_and_time_outs() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        kind = (await request.json())["kind"]
        if kind == "refused":
            return web.json_response({"error": {"message": "too long"}}, status=400)
        if kind == "loading":
            return web.Response(text="wait", status=503)
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(chunk("a") if kind != "nonsense" else b"data: {oops\n\n")
        if kind == "slow":
            await asyncio.sleep(5)
        if kind == "broken" and request.transport is not None:
            request.transport.abort()
        return response

    async with serving(handler) as base, Client(base, timeout=0.5) as client:
        replies = {
            kind: await client.send({"kind": kind})
            for kind in ("refused", "loading", "broken", "short", "nonsense", "slow")
        }
    assert replies["refused"].error == "HTTP 400: too long"
    assert replies["loading"].error == "HTTP 503: wait"
    assert replies["loading"].broken
    assert replies["broken"].error.startswith("connection: ")
    assert replies["broken"].text == "a"
    assert replies["short"].error == "the stream ended before the reply did"
    assert "no chunk of a chat completion: {oops" in replies["nonsense"].error
    assert replies["slow"].timed_out
    assert not replies["slow"].broken
    async with Client(base) as client:  # nobody listens there now
        assert (await client.send({})).broken


async def test_the_first_model() -> None:
    answers = [web.json_response({"data": [{"id": "one"}, {"id": "two"}]}), web.json_response([])]

    async def handler(_request: web.Request) -> web.StreamResponse:
        return answers.pop(0)

    async with serving(handler) as base, Client(base) as client:
        assert await client.first_model() == "one"
        with pytest.raises(RequestError, match="no list of models"):
            await client.first_model()
    async with Client(base) as client:
        with pytest.raises(UnavailableError, match="nothing answers"):
            await client.first_model()
