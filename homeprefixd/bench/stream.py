"""One streamed request as a client sees it: when each piece of text came, and what the server said of it.

Uses http.client on purpose: little overhead of its own, the same for every server measured.
"""

from __future__ import annotations

import http.client
import json
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from ..errors import UnavailableError


@dataclass
class Answer:
    """Times in seconds on `time.perf_counter`'s clock."""

    sent: float
    arrivals: list[float] = field(default_factory=list)  # of each event with text
    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, Any] = field(default_factory=dict)
    id: str = ""

    @property
    def ttft(self) -> float:
        """Seconds from sending the request to the first text."""
        if not self.arrivals:
            raise UnavailableError("the reply had no text, so it has no time to first token")
        return self.arrivals[0] - self.sent

    @property
    def decode_rate(self) -> float:
        """Tokens a second after the first, by the server's count of tokens and the client's clock."""
        count = self.usage.get("completion_tokens") or len(self.arrivals)
        elapsed = self.arrivals[-1] - self.arrivals[0]
        return float((count - 1) / elapsed) if elapsed > 0 else float("nan")


def ask(url: str, body: dict[str, Any], path: str = "/v1/chat/completions", timeout: float = 600.0) -> Answer:
    """Send `body` with `stream` on; read to the end.

    Raises UnavailableError with the server's message on an error status or an error event.
    """
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port, timeout=timeout)
    payload = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}})
    try:
        answer = Answer(sent=time.perf_counter())
        connection.request("POST", path, payload, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        if reply.status != 200:
            raise UnavailableError(f"HTTP {reply.status}: {reply.read().decode(errors='replace')[:500]}")
        for line in reply:
            now = time.perf_counter()
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise UnavailableError(str(event["error"].get("message", event["error"])))
            _take(answer, event, now)
        if answer.finish_reason is None:
            raise UnavailableError("the stream ended before the reply did")
        return answer
    finally:
        connection.close()


def _take(answer: Answer, event: dict[str, Any], now: float) -> None:
    answer.id = event.get("id") or answer.id
    answer.usage = event.get("usage") or answer.usage
    answer.timings = event.get("timings") or answer.timings
    for choice in event.get("choices", []):
        delta = choice.get("delta") or {}
        text = delta.get("content") or choice.get("text") or ""
        if text:
            answer.text += text
            answer.arrivals.append(now)
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
