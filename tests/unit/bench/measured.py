"""A server that answers as a test wants, in this process, and runs as they would have been measured."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from homeprefixd.bench.load import GOOD, Record, Run
from homeprefixd.bench.targets import OTHER, Target
from homeprefixd.bench.workloads import Plan, Session, Turn


class FakeTarget(Target):
    """An OpenAI-compatible server. While it is `away`, connections break; `stop` and `start` take `pause` seconds."""

    def __init__(self) -> None:
        super().__init__("fake", OTHER, model="m")
        self.asked: list[tuple[float, dict[str, Any]]] = []
        self.delay = 0.0  # before the first token
        self.gap = 0.0  # between tokens
        self.status: Callable[[dict[str, Any]], int] = lambda _body: 200
        self.pause = 0.1
        self.away = False

    def stop(self) -> None:
        self.away = True
        time.sleep(self.pause)

    def start(self) -> None:
        time.sleep(self.pause)
        self.away = False

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """A reply of `max_tokens` words, which names how many messages there were."""
        body = await request.json()
        self.asked.append((time.monotonic(), body))
        if self.away or request.transport is None:
            return self._hang_up(request)
        if (status := self.status(body)) != 200:
            return web.json_response({"error": {"message": f"no: {status}"}}, status=status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await self._sleep(self.delay)
        for number in range(body["max_tokens"]):
            if self.away:
                return self._hang_up(request)
            delta = {"content": f"{len(body['messages'])}.{number} "}
            await response.write(b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode() + b"\n\n")
            await self._sleep(self.gap)
        usage = {"prompt_tokens": 100, "completion_tokens": body["max_tokens"]}
        details = {"usage": {**usage, "prompt_tokens_details": {"cached_tokens": 40}}}
        last = {"choices": [{"delta": {}, "finish_reason": "length"}], **details}
        await response.write(b"data: " + json.dumps(last).encode() + b"\n\ndata: [DONE]\n\n")
        return response

    async def _sleep(self, seconds: float) -> None:
        """Wake up when it goes away."""
        for _ in range(round(seconds / 0.01)):
            if not self.away:
                await asyncio.sleep(0.01)

    def _hang_up(self, request: web.Request) -> web.StreamResponse:
        if request.transport is not None:
            request.transport.abort()
        return web.Response()


@asynccontextmanager
async def running(target: FakeTarget) -> AsyncIterator[FakeTarget]:
    """`target`, on a free port."""
    app = web.Application()
    app.router.add_post("/v1/chat/completions", target.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    target.base = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    try:
        yield target
    finally:
        await runner.cleanup()


def session(start: float, *thinks: float, app: str = "chat", number: int = 0, max_tokens: int = 3) -> Session:
    """A session of one turn and one more for each think time."""
    turns = [
        Turn(({"role": "user", "content": f"turn {index}"},), max_tokens, think)
        for index, think in enumerate((0.0, *thinks))
    ]
    return Session(app, number, start, tuple(turns))


def plan_of(*sessions: Session, duration: float = 10.0, workload: str = "household") -> Plan:
    return Plan(workload, 0, 1.0, 1.0, duration, tuple(sessions))


def record(sent: float, ttft: float | None, *, app: str = "voice", **more: Any) -> Record:
    """A request that went well unless `more` says otherwise: four tokens, 0.1 s apart."""
    arrivals = [] if ttft is None else [sent + ttft + 0.1 * index for index in range(4)]
    fields: dict[str, Any] = {
        "outcome": GOOD,
        "ttft": ttft,
        "ttft_ready": ttft,
        "arrivals": arrivals,
        "total": (ttft or 0.0) + 0.3,
        "prompt_tokens": 1000,
        "cached_tokens": 600,
        "output_tokens": 4,
        "tiers": {"hot": 500, "warm": 100},
        "timings": {"prompt_n": 400, "prompt_ms": 800.0, "predicted_n": 4, "predicted_ms": 100.0},
    }
    return Record(app, 0, 0, sent, sent=sent, served=sent, attempts=1, **{**fields, **more})


def run_of(*records: Record, **more: Any) -> Run:
    """A run of ten seconds with these requests."""
    apps = dict.fromkeys(one.app for one in records)
    sessions = [session(0.0, app=app) for app in apps]
    fields = {"target": "homeprefixd", "kind": "homeprefixd", "phase": "cold", "plan": plan_of(*sessions)}
    return Run(records=list(records), elapsed=10.0, **{**fields, **more})
