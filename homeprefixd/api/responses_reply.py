"""OpenAI's newer dialect, replies: a response, or its events in OpenAI's order.

`response.created`, `response.in_progress`, then for each item `response.output_item.added`, its own events and
`response.output_item.done`, last `response.completed` (or `.incomplete`, `.failed`); all are numbered.
"""

from __future__ import annotations

from typing import Any

from ..errors import HomeprefixdError
from ..frames.worker import Accepted, CallPiece, Delta, Finished, Timings
from ..models.backend import Event
from .errors import encode
from .replies import Call, settled
from .responses_tools import Offered


def usage_object(timings: Timings) -> dict[str, Any]:
    """In tokens."""
    return {
        "input_tokens": timings.total_prompt_n,
        "input_tokens_details": {"cached_tokens": timings.cache_n},
        "output_tokens": timings.predicted_n,
        "output_tokens_details": {"reasoning_tokens": timings.thought_n},
        "total_tokens": timings.total_prompt_n + timings.predicted_n,
    }


_CUT = "max_output_tokens"
_BROKEN = "incomplete_tool_call"
"""`incomplete_details.reason`; OpenAI has no word for a model that ends its reply within a call."""


def _is_cut(finished: Finished) -> bool:
    return finished.reason in ("length", "cancelled")


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _thought_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


class _Item:
    """An item of the output: a message, a thought, or a call."""

    def __init__(self, index: int, ident: str, call: Call | None = None, name: dict[str, str] | None = None) -> None:
        """`name`: fields of a call that say what is called."""
        self.index = index  # in the output
        self.id = ident
        self.call = call
        self.name = name or {}
        self.text = ""
        self.status = "completed"  # at its end

    @property
    def is_broken(self) -> bool:
        """A call that cannot be carried out, since it broke off?"""
        return self.call is not None and self.status == "incomplete"

    def end(self, cut: bool) -> None:
        """Nothing more comes, of the reply neither if that was `cut`. A call is complete if its arguments are."""
        incomplete = cut if self.call is None else self.call.arguments() is None
        self.status = "incomplete" if incomplete else "completed"

    def shown(self, status: str) -> dict[str, Any]:
        """As it stands in the output; without its text while `status` is in_progress."""
        raise NotImplementedError

    def place(self) -> dict[str, Any]:
        """Where a piece of it belongs."""
        return {"item_id": self.id, "output_index": self.index}


class _Message(_Item):
    def shown(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [_text_part(self.text)]
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}


class _Thought(_Item):
    def shown(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [_thought_part(self.text)]
        return {"id": self.id, "type": "reasoning", "status": status, "summary": [], "content": content}


class _FunctionCall(_Item):
    kind, field = "function_call", "arguments"

    @property
    def given(self) -> str:
        """What the tool takes, as far as it was written."""
        return self.call.text if self.call else ""

    def shown(self, status: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": self.kind,
            "status": status,
            "call_id": self.call.id if self.call else "",
            **self.name,
            self.field: "" if status == "in_progress" else self.given,
        }


class _CustomCall(_FunctionCall):
    kind, field = "custom_tool_call", "input"

    @property
    def given(self) -> str:
        """The text in its arguments; where it broke off, what was written."""
        text = ((self.call.arguments() if self.call else None) or {}).get("input")
        return text if isinstance(text, str) else super().given


class ResponseWriter:
    """Implements `replies.Writer`. `token` makes all ids of this response; `echo`: what it repeats of the request.
    `tools`: of the request. The text that a custom one takes is sent once it is complete.
    """

    def __init__(
        self, token: str, model: str, created: int, echo: dict[str, Any], tools: Offered | None = None
    ) -> None:
        self.rid = f"resp_{token}"
        self._token = token
        self._model = model
        self._created = created
        self._echo = echo
        self._tools = tools or Offered()
        self._number = 0  # of the next event
        self._items: list[_Item] = []
        self._open: _Item | None = None  # that is being written: the last one

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        return {
            "id": self.rid,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._model,
            "output": [],
            "usage": None,
            **self._echo,
            **more,
        }

    def _ended(self, finished: Finished) -> dict[str, Any]:
        """The whole response at its end."""
        reason = _CUT if _is_cut(finished) else _BROKEN if any(item.is_broken for item in self._items) else None
        return self._response(
            "incomplete" if reason else "completed",
            incomplete_details={"reason": reason} if reason else None,
            output=[item.shown(item.status) for item in self._items],
            usage=usage_object(finished.timings),
        )

    def _new(
        self, kind: type[_Item], prefix: str, call: Call | None = None, name: dict[str, str] | None = None
    ) -> _Item:
        index = len(self._items)
        item = kind(index, f"{prefix}_{self._token}_{index}", call, name)
        self._items.append(item)
        return item

    def _new_call(self, call: Call) -> _Item:
        namespace, name = self._tools.spaces.get(call.name, ("", call.name))
        told = {"name": name, "namespace": namespace} if namespace else {"name": name}
        if call.name in self._tools.custom:
            return self._new(_CustomCall, "ctc", call, told)
        return self._new(_FunctionCall, "fc", call, told)

    # ------------------------------------------------------------------------------------------------- streamed

    def _event(self, kind: str, **more: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        data = encode({"type": kind, "sequence_number": number, **more})
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"

    def _created_events(self) -> bytes:
        response = self._response("in_progress")
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def event(self, event: Event) -> bytes:
        match event:
            case Accepted():
                return self._created_events()
            case Delta():
                return self._delta(event)
            case Finished():
                data = b"" if self._items else self._begin(_Message, "msg", _text_part(""))
                data += self._close(_is_cut(event))
                response = self._ended(event)
                return data + self._event(f"response.{response['status']}", response=response)
            case _:
                return b""

    def _delta(self, delta: Delta) -> bytes:
        data, pieces = b"", delta.calls
        call = self._open.call if self._open is not None else None
        if pieces and call is not None and call.index == pieces[0].index:
            data = self._call_piece(pieces[0])  # text of the same delta comes after it
            pieces = pieces[1:]
        if delta.reasoning:
            data += self._begin(_Thought, "rs", _thought_part(""))
            data += self._piece("response.reasoning_text.delta", delta.reasoning)
        if delta.text:
            data += self._begin(_Message, "msg", _text_part(""))
            data += self._piece("response.output_text.delta", delta.text, logprobs=[])
        for piece in pieces:
            data += self._call_piece(piece)
        return data

    def _begin(self, kind: type[_Item], prefix: str, part: dict[str, Any]) -> bytes:
        """A new item with one part, unless one of its kind is open."""
        if isinstance(self._open, kind):
            return b""
        data = self._close()
        self._open = item = self._new(kind, prefix)
        data += self._event("response.output_item.added", output_index=item.index, item=item.shown("in_progress"))
        return data + self._event("response.content_part.added", **item.place(), content_index=0, part=part)

    def _piece(self, kind: str, text: str, **more: Any) -> bytes:
        item = self._items[-1]
        item.text += text
        return self._event(kind, **item.place(), content_index=0, delta=text, **more)

    def _call_piece(self, piece: CallPiece) -> bytes:
        item = self._open
        data = b""
        if item is None or item.call is None or item.call.index != piece.index:
            data = self._close()
            self._open = item = self._new_call(Call(piece))
            data += self._event("response.output_item.added", output_index=item.index, item=item.shown("in_progress"))
        elif item.call is not None:
            item.call.add(piece)
        if piece.arguments and not isinstance(item, _CustomCall):
            kind = "response.function_call_arguments.delta"
            data += self._event(kind, **item.place(), delta=piece.arguments)
        return data

    def _close(self, cut: bool = False) -> bytes:
        """The end of the item that is open. The arguments of a call that broke off are never done."""
        item, self._open = self._open, None
        if item is None:
            return b""
        place = item.place()
        item.end(cut)
        done = item.shown(item.status)
        if isinstance(item, _CustomCall):
            kind, text = "response.custom_tool_call_input", item.given
            data = b""
            if not item.is_broken:
                data = self._event(f"{kind}.delta", **place, delta=text) + self._event(
                    f"{kind}.done", **place, input=text
                )
        elif item.call is not None:
            kind = "response.function_call_arguments.done"
            told = {"name": item.name["name"], "arguments": item.call.text}
            data = b"" if item.is_broken else self._event(kind, **place, **told)
        elif isinstance(item, _Thought):
            data = self._event("response.reasoning_text.done", **place, content_index=0, text=item.text)
        else:
            data = self._event("response.output_text.done", **place, content_index=0, text=item.text, logprobs=[])
        if item.call is None:
            data += self._event("response.content_part.done", **place, content_index=0, part=done["content"][0])
        return data + self._event("response.output_item.done", output_index=item.index, item=done)

    def failure(self, error: HomeprefixdError) -> bytes:
        told = {"code": error.code or "server_error", "message": error.message}
        output = [item.shown("incomplete" if item is self._open else item.status) for item in self._items]
        begun = b"" if self._number else self._created_events()  # clients' libraries want to see them first
        return begun + self._event("response.failed", response=self._response("failed", error=told, output=output))

    # ------------------------------------------------------------------------------------------------- whole

    def whole(self, finished: Finished) -> dict[str, Any]:
        calls, text = settled(finished)
        if finished.reasoning:
            self._new(_Thought, "rs").text = finished.reasoning
        if text or not (calls or finished.reasoning):
            self._new(_Message, "msg").text = text
        for call in calls:
            self._new_call(call)
        self._items[-1].end(_is_cut(finished))
        return self._ended(finished)
