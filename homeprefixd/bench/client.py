"""An OpenAI-compatible client that measures: one streamed chat completion, what came when, what the server said of it.

It shares the machine with the server, so it does little for each token: one `recv`, one small JSON document, one time
stamp. All times are seconds on `time.monotonic`'s clock. Proxies in the environment are not used.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from ..errors import RequestError, UnavailableError

_MESSAGE = 300  # characters of an error that are kept
_REPLY_KEYS = ("content", "reasoning_content", "reasoning", "tool_calls")
"""Fields of a delta that are output: the first of them to come is the first token."""


@dataclass
class Reply:
    """One attempt at a request."""

    sent: float
    arrivals: list[float] = field(default_factory=list)  # of each event with output
    parts: list[str] = field(default_factory=list)  # of the content
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, Any] = field(default_factory=dict)
    status: int = 0  # of HTTP; 0: none came
    error: str = ""  # "" if it went well
    timed_out: bool = False
    ended: float = 0.0

    @property
    def broken(self) -> bool:
        """Did the server fail, rather than refuse the request or be too slow? Then another try may be worth it."""
        return bool(self.error) and not self.timed_out and not 400 <= self.status < 500

    @property
    def text(self) -> str:
        """The content."""
        return "".join(self.parts)

    @property
    def prompt_tokens(self) -> int:
        """Of the whole prompt, by the server's count; 0: not told."""
        if count := int(self.usage.get("prompt_tokens") or 0):
            return count
        return int(self.timings.get("cache_n") or 0) + int(self.timings.get("prompt_n") or 0)

    @property
    def cached_tokens(self) -> int:
        """Of the prompt's, that were not computed, by the server's count."""
        details = self.usage.get("prompt_tokens_details") or {}
        count = details.get("cached_tokens")
        return int(self.timings.get("cache_n") or 0) if count is None else int(count)

    @property
    def output_tokens(self) -> int:
        """By the server's count, else one for each event."""
        return int(self.usage.get("completion_tokens") or self.timings.get("predicted_n") or len(self.arrivals))


class EventParser:
    """Server-sent events out of pieces of a byte stream: the data of each event, as soon as its empty line is there.

    Line ends may be LF, CRLF or CR; data of several lines is joined by LF; comments and other fields are skipped.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of all events that `piece` completes."""
        buffer = self._rest + piece
        hold = b""
        if buffer.endswith(b"\r"):  # its LF may come with the next piece
            buffer, hold = buffer[:-1], b"\r"
        if b"\r" in buffer:
            buffer = buffer.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, rest = buffer.split(b"\n")
        self._rest = rest + hold
        events: list[bytes] = []
        for line in lines:
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])
        return events


def take(reply: Reply, event: Any, now: float) -> None:
    """Note what one event of a stream says. Events of unknown shape are passed over."""
    if not isinstance(event, dict):
        return
    if problem := event.get("error"):
        reply.error = _error_text(event) or str(problem)[:_MESSAGE]
        return
    reply.usage = event.get("usage") or reply.usage
    reply.timings = event.get("timings") or reply.timings
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        if text := delta.get("content") or choice.get("text"):
            reply.parts.append(text)
            reply.arrivals.append(now)
        elif any(delta.get(name) for name in _REPLY_KEYS):
            reply.arrivals.append(now)
        reply.finish_reason = choice.get("finish_reason") or reply.finish_reason


def _error_text(document: Any) -> str:
    """The message inside an error's JSON; "" if it is none."""
    if not isinstance(document, dict):
        return ""
    problem = document.get("error")
    if isinstance(problem, dict):
        problem = problem.get("message")
    return str(problem)[:_MESSAGE] if problem else ""


class Client:
    """One server. `base` is the URL below which `/chat/completions` lies. Use in `async with`."""

    def __init__(self, base: str, *, model: str = "", api_key: str = "", timeout: float = 300.0) -> None:
        self.base = base.rstrip("/")
        self.model = model
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = timeout
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        # No limit: an open loop sends when it is time. New connections: a restart leaves none that only seems alive.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=self._timeout, sock_connect=10.0),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """The open session."""
        if self._session is None:
            raise RuntimeError("the client is used outside of its `async with`")
        return self._session

    async def first_model(self) -> str:
        """The id of the first model that the server lists. Raises UnavailableError, RequestError."""
        try:
            async with self.session.get(f"{self.base}/models") as response:
                document = msgspec.json.decode(await response.read())
                if response.status != 200:
                    raise RequestError(f"{self.base}/models: {_error_text(document) or response.status}")
                return str(document["data"][0]["id"])
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UnavailableError(f"nothing answers at {self.base}/models: {_why(error)}") from error
        except (msgspec.DecodeError, LookupError, TypeError) as error:
            raise RequestError(f"{self.base}/models is no list of models; is it an OpenAI-compatible URL?") from error

    async def send(self, body: Mapping[str, Any], reply: Reply | None = None) -> Reply:
        """Send a chat request with `stream` on, and read to the end. Never raises for what the server does.

        `reply` may be the caller's own, to watch while it grows.
        """
        payload = {**body, "stream": True, "stream_options": {"include_usage": True}}
        if self.model:
            payload["model"] = self.model
        data = msgspec.json.encode(payload)
        reply = reply if reply is not None else Reply(0.0)
        reply.sent = time.monotonic()
        try:
            async with self.session.post(
                f"{self.base}/chat/completions", data=data, headers={"Content-Type": "application/json"}
            ) as response:
                await self._read(reply, response)
        except TimeoutError:
            reply.error, reply.timed_out = f"no end after {self._timeout:.0f} s", True
        except (aiohttp.ClientError, OSError) as error:
            reply.error = f"connection: {_why(error)}"
        reply.ended = time.monotonic()
        return reply

    async def _read(self, reply: Reply, response: aiohttp.ClientResponse) -> None:
        reply.status = response.status
        if response.status != 200:
            text = await response.read()
            try:
                message = _error_text(msgspec.json.decode(text))
            except msgspec.DecodeError:
                message = ""
            reply.error = f"HTTP {response.status}: {message or text[:_MESSAGE].decode(errors='replace')}"
            return
        parser = EventParser()
        async for piece in response.content.iter_any():
            now = time.monotonic()
            for data in parser.feed(piece):
                if data == b"[DONE]":
                    continue
                try:
                    take(reply, msgspec.json.decode(data), now)
                except (msgspec.DecodeError, AttributeError, TypeError):
                    reply.error = f"an event is no chunk of a chat completion: {data[:80].decode(errors='replace')}"
        if not reply.error and reply.finish_reason is None:
            reply.error = "the stream ended before the reply did"


def _why(error: BaseException) -> str:
    return str(error)[:_MESSAGE] or type(error).__name__


async def at(when: float) -> None:
    """Sleep until `when` on the monotonic clock."""
    await asyncio.sleep(max(0.0, when - time.monotonic()))
