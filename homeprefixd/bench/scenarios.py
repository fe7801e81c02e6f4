"""Small scenarios of scheduling, each with the bar that it is there for: burst, streams, interrupt.

Nothing is warmed up unless the scenario's words say so. Prompts differ from round to round, so that nothing is cached
that should not be.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from ..errors import UnavailableError
from .client import Client, Reply
from .household import household_messages, household_prompt, household_question
from .rows import Row, at_least, at_most
from .targets import OURS, Target

Say = Callable[[str], None]

BURST_BAR = 1.05
STREAMS_BAR = 0.97
PYTHON_BAR, PYTHON_STREAMS = 0.05, 4  # of the time of the steps that generate, with so many streams
INTERRUPT_TTFT_BAR = 2.0  # x idle TTFT, plus max_stall
INTERRUPT_PAUSE_BAR = 1.5  # x max_stall

_CELLS_EVERY = 0.2  # seconds
_PATIENCE = 60.0  # seconds
_HEARTBEAT = 3.0  # seconds: longer than the time between two of the worker
_LONG_REPLY = 4000  # tokens: longer than what it is measured beside


def _body(messages: list[dict[str, str]], max_tokens: int, **more: Any) -> dict[str, Any]:
    return {"messages": messages, "temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, **more}


def _checked(target: Target, reply: Reply) -> Reply:
    """The reply. Raises UnavailableError where it is an error or has no output."""
    if reply.error or not reply.arrivals:
        raise UnavailableError(f"{target.name}: {reply.error or 'a reply had no output'} {target.died()}".rstrip())
    return reply


async def _ask(target: Target, client: Client, body: dict[str, Any]) -> Reply:
    return _checked(target, await client.send(body))


def _client(target: Target) -> Client:
    return Client(target.base, api_key=target.api_key, model=target.model, timeout=600.0)


# ----------------------------------------------------------------------------------------------------------- burst


async def burst(target: Target, *, requests: int, prefix: int, rounds: int, say: Say) -> list[Row]:
    """Requests with one cold prefix that arrive together: how many tokens are computed for all of them.

    The least is one prefix and every tail. How long the prefix is says a request of its own after the burst, with a
    question of one letter and `cache_prompt` off: what its prompt has is taken for the prefix, and what another prompt
    has more, for its tail. So the few tokens of the chat template that end each prompt count once only, against us.
    """
    computed: list[float] = []
    cells: list[float] = []
    spread: list[float] = []
    note = ""
    async with _client(target) as client:
        for number in range(rounds):
            say(f"{target.name}: burst {number + 1} of {rounds}")
            system = household_prompt(seed=5000 + number, size=prefix)
            watch = asyncio.create_task(_most_cells(target))
            replies = await asyncio.gather(*(_burst_one(target, client, system, index) for index in range(requests)))
            await asyncio.sleep(2 * _CELLS_EVERY)
            watch.cancel()
            used = await watch
            short = [{"role": "system", "content": system}, {"role": "user", "content": "?"}]
            alone = await _ask(target, client, _body(short, 1, cache_prompt=False))
            least = alone.prompt_tokens + sum(reply.prompt_tokens - alone.prompt_tokens for reply in replies)
            total = sum(reply.prompt_tokens - reply.cached_tokens for reply in replies)
            computed.append(total / least)
            spread.append(max(reply.arrivals[0] - reply.sent for reply in replies))
            note = f"{total} tokens computed, {least} at least; the last had its first token after {spread[-1]:.1f} s"
            if used:
                cells.append(used / (least + sum(reply.output_tokens for reply in replies)))
    bar = BURST_BAR if target.kind == OURS else None
    what = f"{target.name}: {requests} at once, one cold prefix: tokens computed / least"
    rows = [at_most(what, max(computed), bar, note)]
    if cells:
        what = f"{target.name}: {requests} at once, one cold prefix: KV cells / least"
        rows.append(at_most(what, max(cells), bar, "most at any look, replies included"))
    return rows


async def _burst_one(target: Target, client: Client, system: str, index: int) -> Reply:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": household_question(index * 14)}]
    return await _ask(target, client, _body(messages, 32))


async def _workers(target: Target) -> list[dict[str, Any]]:
    """What `/cache/stats` says of each worker; [] where there is none."""
    stats = await asyncio.to_thread(target.stats)
    return ((stats or {}).get("daemon") or {}).get("workers") or []


async def _most_cells(target: Target) -> int:
    """The most cells in use at any look until it is cancelled; 0 where not told."""
    most = 0
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            most = max(most, sum(int(worker.get("cells_used") or 0) for worker in await _workers(target)))
            await asyncio.sleep(_CELLS_EVERY)
    return most


# --------------------------------------------------------------------------------------------------------- streams


async def streams(
    ours: Target, peer: Target | None, *, counts: Sequence[int], pairs: int, tokens: int, say: Say
) -> list[Row]:
    """Decode throughput with n streams at once; the two servers are asked in turn, so a slow minute falls on both.

    Counted are the events with output while all n streams run: from the latest first token to the earliest last one.
    """
    rows = []
    for count in counts:
        many = f"{count} stream{'s' * (count > 1)}"
        rates: list[float] = []
        ratios: list[float] = []
        before = await _step_seconds(ours) if count == PYTHON_STREAMS else None
        for pair in range(pairs):
            say(f"{many}, pair {pair + 1} of {pairs}")
            order = [target for target in (ours, peer) if target is not None]
            measured = {
                target.kind: await decode_rate(target, count, tokens, 100 * count + pair)
                for target in (order if pair % 2 else reversed(order))
            }
            rates.append(measured[ours.kind])
            if peer is not None:
                ratios.append(measured[ours.kind] / measured[peer.kind])
        value, what = (median(ratios), " / llama-server's") if ratios else (median(rates), ", tokens/s")
        note = f"{median(rates):.1f} tokens/s together, {pairs} {'pair' if ratios else 'round'}{'s' * (pairs > 1)}"
        bar = STREAMS_BAR if ratios else None
        rows.append(at_least(f"decode throughput, {many}{what}", value, bar, note))
        if before is None:
            continue
        steps, native = (now - then for now, then in zip(await _step_seconds(ours), before, strict=True))
        if steps > 0:
            note = f"{steps:.2f} s of steps, {native:.2f} s of them within llama.cpp"
            rows.append(at_most(f"Python's share of decode, {many}", 1 - native / steps, PYTHON_BAR, note))
    return rows


async def _step_seconds(target: Target) -> tuple[float, float]:
    """What the steps that generate have taken until now, and how much of it within llama.cpp; zeros if it is unknown.

    Worth asking of this daemon only.
    """
    await asyncio.sleep(_HEARTBEAT)  # the figures come with it
    counters = [worker.get("counters") or {} for worker in await _workers(target)]
    steps, native = (
        sum(float(each.get(name) or 0) for each in counters)
        for name in ("decode_step_seconds", "decode_native_seconds")
    )
    return steps, native


async def decode_rate(target: Target, count: int, tokens: int, number: int) -> float:
    """Tokens per second of `count` streams together, of `tokens` each."""
    async with _client(target) as client:
        replies = await asyncio.gather(
            *(
                _ask(target, client, _body(_story(f"{number} {index}"), tokens, cache_prompt=False))
                for index in range(count)
            )
        )
    return common_rate(replies)


def common_rate(replies: Sequence[Reply]) -> float:
    """Tokens per second while all `replies` were coming; each event of a reply holds the same share of its tokens.

    Raises UnavailableError where they never ran at the same time.
    """
    begin = max(reply.arrivals[0] for reply in replies)
    end = min(reply.arrivals[-1] for reply in replies)
    if end <= begin:
        raise UnavailableError("the streams did not run at the same time; ask for longer replies")
    counted = 0.0
    for reply in replies:
        share = reply.output_tokens / len(reply.arrivals)
        counted += share * sum(begin < when <= end for when in reply.arrivals)
    return counted / (end - begin)


def _story(mark: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Story {mark}: tell a long one about a lighthouse keeper."}]


# ------------------------------------------------------------------------------------------------------- interrupt


async def interrupt(target: Target, *, tokens: int, max_stall: float, asks: int, say: Say) -> list[Row]:
    """A voice request whose prefix is warm, and a running stream, while a long prompt is prefilled.

    The prefix is warmed by one request, as the scenario has it; idle TTFT is the median of `asks` more.
    """
    async with _client(target) as client:
        say(f"{target.name}: warming the voice prefix")
        await _voice(target, client, 0)
        say(f"{target.name}: idle")
        idle = median([_ttft(await _voice(target, client, 1 + index)) for index in range(asks)])
        stream = Reply(0.0)
        running = asyncio.create_task(client.send(_body(_story("that never ends"), _LONG_REPLY), stream))
        busy: list[float] = []
        try:
            await _until(lambda: len(stream.arrivals) >= 8 or bool(stream.error))
            begin = time.monotonic()
            prefill = asyncio.create_task(_ask(target, client, _body(household_messages("?", seed=77, size=tokens), 4)))
            say(f"{target.name}: asking while {tokens} tokens are prefilled")
            await asyncio.sleep(max_stall)
            number = 100
            while not prefill.done() and len(busy) < asks:
                busy.append(_ttft(await _voice(target, client, number)))
                number += 1
            long = await prefill
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        if stream.error:
            raise UnavailableError(f"{target.name}: the running stream failed: {stream.error}")
        end = long.arrivals[0] if stream.finish_reason is None else min(long.arrivals[0], stream.arrivals[-1])
        pause = longest_pause(stream.arrivals, begin, end)
    mine = target.kind == OURS
    what = f"{target.name}: voice TTFT while {tokens} tokens are prefilled, s"
    bar = INTERRUPT_TTFT_BAR * idle + max_stall if mine else None
    note = f"the worst of {len(busy)} sent meanwhile; idle {idle:.3f} s"
    rows = [at_most(what, max(busy, default=None), bar, note)]
    what = f"{target.name}: longest pause of a running stream, s"
    note = f"beside a prefill of {long.prompt_tokens} tokens that took {_ttft(long):.1f} s"
    rows.append(at_most(what, pause, INTERRUPT_PAUSE_BAR * max_stall if mine else None, note))
    return rows


def longest_pause(arrivals: Sequence[float], begin: float, end: float) -> float:
    """The longest time without an event between `begin` and `end`, the pauses that reach over them included."""
    before = [when for when in arrivals if when <= begin][-1:]
    inside = [when for when in arrivals if begin < when < end]
    after = [when for when in arrivals if when >= end][:1]
    marks = [*(before or [begin]), *inside, *(after or [end])]
    return max(later - sooner for sooner, later in pairwise(marks))


async def _voice(target: Target, client: Client, number: int) -> Reply:
    messages = household_messages(f"Which window is number {number}, {number * 7919 % 10007}?", size=2200)
    return await _ask(target, client, _body(messages, 8))


def _ttft(reply: Reply) -> float:
    return reply.arrivals[0] - reply.sent


async def _until(there: Callable[[], bool]) -> None:
    """Wait for something that no event tells of. Raises UnavailableError after _PATIENCE."""
    deadline = time.monotonic() + _PATIENCE
    while not there():
        if time.monotonic() > deadline:
            raise UnavailableError(f"nothing came for {_PATIENCE:.0f} s")
        await asyncio.sleep(0.02)
