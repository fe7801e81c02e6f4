"""Ollama's dialect, replies: lines of JSON, the last with `done` and the figures; durations in ns."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from ..errors import HomeprefixdError
from ..frames.worker import CallPiece, Delta, Finished, Timings, TokenLogprob
from ..models.backend import Event
from .errors import encode
from .openai_reply import token_objects
from .replies import Call, settled

_REASONS = {"stop": "stop", "length": "length", "tool_calls": "stop", "cancelled": "length"}


def time_text(seconds: float) -> str:
    """Unix time as Ollama writes it: RFC 3339 in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def figures(timings: Timings) -> dict[str, int]:
    """Of a reply. `prompt_eval_count` is the whole prompt; `prompt_cached_count`, our own, what was skipped of it.

    What passed before the prefill began (waiting, restoring) is `load_duration`.
    """

    def ns(ms: float) -> int:
        return round(ms * 1e6)

    before = timings.queue_ms + timings.restore_ms
    return {
        "total_duration": ns(before + timings.prompt_ms + timings.predicted_ms),
        "load_duration": ns(before),
        "prompt_eval_count": timings.total_prompt_n,
        "prompt_cached_count": timings.cache_n,
        "prompt_eval_duration": ns(timings.prompt_ms),
        "eval_count": timings.predicted_n,
        "eval_duration": ns(timings.predicted_ms),
    }


class LineWriter:
    """Implements `replies.Writer`. `clock`: Unix time, s."""

    def __init__(
        self,
        rid: str,
        model: str,
        clock: Callable[[], float],
        error_form: Callable[[HomeprefixdError], dict[str, Any]],
    ) -> None:
        self.rid = rid
        self._model = model
        self._clock = clock
        self._error_form = error_form
        self._call: Call | None = None  # whose pieces still come

    def content(self, text: str, thinking: str, calls: list[Call]) -> dict[str, Any]:
        """What a line says beside its head."""
        raise NotImplementedError

    def _line(
        self,
        text: str = "",
        thinking: str = "",
        calls: list[Call] | None = None,
        logprobs: list[TokenLogprob] | None = None,
    ) -> dict[str, Any]:
        head = {"model": self._model, "created_at": time_text(self._clock())}
        told = {"logprobs": token_objects(logprobs)} if logprobs else {}
        return {**head, **self.content(text, thinking, calls or []), **told, "done": False}

    def without_prompt(self, reason: str) -> dict[str, Any]:
        """The reply where nothing was to be said."""
        return {**self._line(), "done": True, "done_reason": reason}

    def event(self, event: Event) -> bytes:
        match event:
            case Delta():
                return b"".join(encode(line) + b"\n" for line in self._delta(event))
            case Finished():
                lines = self._completed(None)
                lines.append({**self._line(), **self._end(event)})
                return b"".join(encode(line) + b"\n" for line in lines)
            case _:
                return b""

    def _delta(self, delta: Delta) -> list[dict[str, Any]]:
        lines = []
        if delta.reasoning:
            lines.append(self._line(thinking=delta.reasoning))
        if delta.text or delta.logprobs:
            lines.append(self._line(delta.text, logprobs=delta.logprobs))
        for piece in delta.calls:
            lines += self._completed(piece)
        return lines

    def _completed(self, piece: CallPiece | None) -> list[dict[str, Any]]:
        """The line of a call that is whole now that `piece` (None: the end) has come. One whose arguments are no object
        was cut short: it is text."""
        if piece is not None and self._call is not None and piece.index == self._call.index:
            self._call.add(piece)
            return []
        done, self._call = self._call, None if piece is None else Call(piece)
        if done is None:
            return []
        return [self._line(done.written) if done.arguments() is None else self._line(calls=[done])]

    def _end(self, finished: Finished) -> dict[str, Any]:
        return {"done": True, "done_reason": _REASONS[finished.reason], **figures(finished.timings)}

    def whole(self, finished: Finished) -> dict[str, Any]:
        good, text = settled(finished)
        line = self._line(text, finished.reasoning, good, finished.logprobs)
        return {**line, **self._end(finished)}

    def failure(self, error: HomeprefixdError) -> bytes:
        return encode(self._error_form(error)) + b"\n"


class ChatLines(LineWriter):
    """`/api/chat`."""

    def content(self, text: str, thinking: str, calls: list[Call]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "function": {"index": call.index, "name": call.name, "arguments": call.arguments()},
                }
                for call in calls
            ]
        return {"message": message}


class TextLines(LineWriter):
    """`/api/generate`."""

    def content(self, text: str, thinking: str, calls: list[Call]) -> dict[str, Any]:
        return {"response": text, **({"thinking": thinking} if thinking else {})}
