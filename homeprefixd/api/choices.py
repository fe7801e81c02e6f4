"""Replies with several choices (`n`, or several prompts): one generation for each, all at once, as one reply."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from aiohttp import web

from ..frames.worker import Finished
from ..models.backend import Event, Generation
from .errors import json_response
from .openai_reply import ReplyWriter, stream_events, usage_object, write_event
from .sse import EventStream


def _usage(finished: Sequence[Finished], per_prompt: int) -> dict[str, Any]:
    """Each prompt counts once, however many replies were made of it: the others shared it."""
    total = usage_object(finished[0].timings)
    prompts = [usage_object(end.timings) for end in finished[::per_prompt]]
    total["prompt_tokens"] = sum(usage["prompt_tokens"] for usage in prompts)
    total["completion_tokens"] = sum(end.timings.predicted_n for end in finished)
    total["total_tokens"] = total["prompt_tokens"] + total["completion_tokens"]
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in prompts)
    total["prompt_tokens_details"] = {"cached_tokens": cached}
    total["completion_tokens_details"] = {"reasoning_tokens": sum(end.timings.thought_n for end in finished)}
    return total


def _best(ends: Sequence[Finished], count: int) -> Sequence[Finished]:
    """Those whose tokens are the most probable, by the mean of their log-probabilities."""
    if len(ends) == count:
        return ends
    best = sorted(ends, key=_mean, reverse=True)[:count]
    best[0].prompt_logprobs = ends[0].prompt_logprobs  # the first was asked for those, on behalf of all
    return best


def _mean(end: Finished) -> float:
    """Without any token, nothing can be said for it."""
    return sum(token.logprob for token in end.logprobs) / len(end.logprobs) if end.logprobs else -math.inf


async def respond_choices(
    request: web.Request,
    generations: Sequence[Generation],
    writers: Sequence[ReplyWriter],
    per_prompt: int,
    *,
    stream: bool,
    usage: bool,
    progress: bool,
    keep_alive: float,
) -> web.StreamResponse:
    """Run all of them and answer; otherwise as `openai_reply.respond`. `per_prompt`: generations of one prompt.

    If there are fewer writers, the best are told, which cannot be streamed.
    """
    ends: dict[int, Finished] = {}
    if not stream:
        async with contextlib.aclosing(_merged(generations)) as merged:
            ends = {index: event async for index, event in merged if isinstance(event, Finished)}
        finished = [ends[index] for index in range(len(generations))]
        told = len(writers) * per_prompt // len(generations)
        groups = [finished[at : at + per_prompt] for at in range(0, len(finished), per_prompt)]
        kept = [end for group in groups for end in _best(group, told)]
        choices = [writer.whole_choice(end) for writer, end in zip(writers, kept, strict=True)]
        return json_response(writers[0].whole_reply(choices, _usage(finished, per_prompt), finished[0].timings))

    async def run(events: EventStream) -> None:
        async with contextlib.aclosing(_merged(generations)) as merged:
            async for index, event in merged:
                if not events.started:
                    await events.start()  # the first event comes when all were accepted
                if isinstance(event, Finished):
                    ends[index] = event
                    await events.send(writers[index].final(event))
                else:
                    await write_event(event, writers[index], events, progress)
        finished = [ends[index] for index in range(len(generations))]
        await events.send(writers[0].end(_usage(finished, per_prompt) if usage else None, finished[0].timings))
        await events.end()

    return await stream_events(request, writers[0].rid, run, keep_alive)


async def _merged(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, Event], None]:
    """Events of all, each with its generation's index; the first ones when all were accepted.

    Whoever reads slowly holds all of them back. Raises HomeprefixdError of the first that fails; then all end.
    """
    async with contextlib.AsyncExitStack() as stack:
        sources = []
        for generation in generations:
            await stack.enter_async_context(generation)
            sources.append(aiter(generation))
        accepted = [await anext(source) for source in sources]
        for index, event in enumerate(accepted):
            yield index, event
        queue: asyncio.Queue[tuple[int, Event | Exception | None]] = asyncio.Queue(maxsize=1)
        tasks = [asyncio.create_task(_pump(index, source, queue)) for index, source in enumerate(sources)]
        try:
            left = len(tasks)
            while left:
                index, item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield index, item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    index: int, source: AsyncIterator[Event], queue: asyncio.Queue[tuple[int, Event | Exception | None]]
) -> None:
    try:
        async for event in source:
            await queue.put((index, event))
        await queue.put((index, None))
    except Exception as error:
        await queue.put((index, error))
