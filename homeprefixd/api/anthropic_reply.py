"""Anthropic's dialect, replies: one message, or its events in Anthropic's order.

`message_start`, then for each block `content_block_start`, deltas and `content_block_stop`, then `message_delta` with
the reason and the figures, and `message_stop`.

A call is sent once it is complete: the SDK makes `{}` of arguments that break off, which an agent would carry out.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from ..errors import HomeprefixdError
from ..frames.worker import Accepted, Delta, Finished, Progress, Timings
from ..models.backend import Event
from .errors import encode
from .replies import Call, whole_calls

CLIENTS_HEADER = "anthropic-version"
"""All of Anthropic's clients send it, and no others: where dialects share a route, these get Anthropic's form."""

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "cancelled": "max_tokens"}


def _signature(thoughts: Any) -> str:
    """Of a block's thoughts, whose digest (a `hashlib` object) this is. Readers keep a block only if it has one; sent
    back, it is looked at no more than Anthropic's own are elsewhere.
    """
    return base64.b64encode(thoughts.digest()).decode()


def _digest() -> Any:
    return hashlib.sha256(b"homeprefixd thinking\n")


def _event(kind: str, **more: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + encode({"type": kind, **more}) + b"\n\n"


def usage_object(prompt_n: int, cache_n: int, predicted_n: int) -> dict[str, int]:
    """In tokens. `input_tokens` are those that were computed; with the reused ones they are the whole prompt.

    Everything computed is kept without being asked and costs nothing more, so none is counted as "creation".
    """
    return {
        "input_tokens": prompt_n - cache_n,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cache_n,
        "output_tokens": predicted_n,
    }


def model_object(alias: str, created: int) -> dict[str, Any]:
    """A model in Anthropic's form. `created`: Unix time, s."""
    moment = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"type": "model", "id": alias, "display_name": alias, "created_at": moment}


def models_object(models: list[dict[str, Any]]) -> dict[str, Any]:
    """All of them, which is one page."""
    ends = (models[0]["id"], models[-1]["id"]) if models else (None, None)
    return {"data": models, "has_more": False, "first_id": ends[0], "last_id": ends[1]}


def _usage(timings: Timings) -> dict[str, int]:
    return usage_object(timings.total_prompt_n, timings.cache_n, timings.predicted_n)


def _stop(finished: Finished) -> dict[str, Any]:
    """`stop_reason` and `stop_sequence`."""
    if finished.reason == "stop" and finished.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": finished.stop}
    return {"stop_reason": _REASONS[finished.reason], "stop_sequence": None}


class MessageWriter:
    """Implements `replies.Writer`."""

    def __init__(self, rid: str, model: str, error_form: Callable[[HomeprefixdError], dict[str, Any]]) -> None:
        self.rid = rid
        self._model = model
        self._error_form = error_form
        self._prompt_n = 0
        self._started = False
        self._blocks = 0  # that were begun
        self._open = ""  # type of the block that is being written
        self._call: Call | None = None  # whose pieces still come
        self._arguments: list[str] = []  # these pieces
        self._thoughts = _digest()  # of the block that is being written

    def _message(self, content: list[dict[str, Any]], usage: dict[str, int], **stop: Any) -> dict[str, Any]:
        return {
            "id": self.rid,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            **stop,
            "usage": usage,
        }

    # ------------------------------------------------------------------------------------------------- streamed

    def event(self, event: Event) -> bytes:
        """The figures of the prompt's reuse come with the first `Progress`, so the message begins there."""
        match event:
            case Accepted():
                self._prompt_n = event.prompt_n
                return b""
            case Progress():
                return self._start(event.total, event.reused)
            case Delta():
                return self._start(self._prompt_n, 0) + self._delta(event)
            case Finished():
                return self._start(event.timings.total_prompt_n, event.timings.cache_n) + self._end(event)

    def _start(self, prompt_n: int, cache_n: int) -> bytes:
        if self._started:
            return b""
        self._started = True
        message = self._message([], usage_object(prompt_n, cache_n, 0))
        return _event("message_start", message=message) + _event("ping")

    def _delta(self, delta: Delta) -> bytes:
        pieces = delta.calls
        if pieces and self._call is not None and pieces[0].index == self._call.index:
            first, *pieces = pieces  # text of the same delta comes after it
            self._arguments.append(first.arguments)
        data = self._completed() if delta.reasoning or delta.text or pieces else b""
        if delta.reasoning:
            data += self._block("thinking", {"thinking": "", "signature": ""})
            data += self._piece({"type": "thinking_delta", "thinking": delta.reasoning})
            self._thoughts.update(delta.reasoning.encode(errors="surrogatepass"))
        if delta.text:
            data += self._block("text", {"text": ""})
            data += self._piece({"type": "text_delta", "text": delta.text})
        for piece in pieces:
            data += self._completed()
            self._call, self._arguments = Call(piece), [piece.arguments]
        return data

    def _completed(self) -> bytes:
        """The block of the call whose pieces have all come; one that broke off is text, as in a whole reply."""
        call, self._call = self._call, None
        if call is None:
            return b""
        call.text = "".join(self._arguments)
        data = self._close()
        if call.arguments() is None:
            data += self._block("text", {"text": ""})
            return data + self._piece({"type": "text_delta", "text": call.written}) + self._close()
        data += self._block("tool_use", {"id": call.id, "name": call.name, "input": {}})
        for part in filter(None, self._arguments):
            data += self._piece({"type": "input_json_delta", "partial_json": part})
        return data + self._close()

    def _block(self, kind: str, empty: dict[str, Any]) -> bytes:
        """Begin a block of this kind, unless one is open."""
        if self._open == kind:
            return b""
        data = self._close()
        self._open = kind
        self._blocks += 1
        return data + _event("content_block_start", index=self._blocks - 1, content_block={"type": kind, **empty})

    def _piece(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._blocks - 1, delta=delta)

    def _close(self) -> bytes:
        if not self._open:
            return b""
        data = b""
        if self._open == "thinking":
            data = self._piece({"type": "signature_delta", "signature": _signature(self._thoughts)})
            self._thoughts = _digest()
        self._open = ""
        return data + _event("content_block_stop", index=self._blocks - 1)

    def _end(self, finished: Finished) -> bytes:
        return (
            self._completed()
            + self._close()
            + _event("message_delta", delta=_stop(finished), usage=_usage(finished.timings))
            + _event("message_stop")
        )

    def failure(self, error: HomeprefixdError) -> bytes:
        return b"event: error\ndata: " + encode(self._error_form(error)) + b"\n\n"

    # ------------------------------------------------------------------------------------------------- whole

    def whole(self, finished: Finished) -> dict[str, Any]:
        """A call that was cut short has no input that is an object, so it is text: nobody shall carry it out. There is
        always a block, since readers look at the first.
        """
        content: list[dict[str, Any]] = []
        if finished.reasoning:
            thoughts = _digest()
            thoughts.update(finished.reasoning.encode(errors="surrogatepass"))
            content.append({"type": "thinking", "thinking": finished.reasoning, "signature": _signature(thoughts)})
        if finished.text:
            content.append({"type": "text", "text": finished.text})
        for call in whole_calls(finished.calls):
            arguments = call.arguments()
            if arguments is not None:
                content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments})
            else:
                content.append({"type": "text", "text": call.written})
        content = content or [{"type": "text", "text": ""}]
        return self._message(content, _usage(finished.timings), **_stop(finished))
