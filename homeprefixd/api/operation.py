"""What a route takes and answers, for the description of the API. Each room describes its own routes: `OPERATIONS`."""

from __future__ import annotations

import msgspec

from . import reply_shapes as shape

EVENTS = "text/event-stream"
LINES = "application/x-ndjson"
PLAIN = "text/plain"
JSON = "application/json"

COUNT = "How long a prompt is"


class Operation(msgspec.Struct, frozen=True):
    """What one route takes and answers."""

    method: str
    path: str
    summary: str
    body: type[msgspec.Struct] | tuple[type[msgspec.Struct], ...] | None = None  # several: any of them
    reply: type[msgspec.Struct] | None = None  # None: any JSON, or not JSON
    stream: str = ""  # media type of a reply that comes in pieces, "" where there is none
    media: str = JSON
    query: tuple[str, ...] = ()
    key: bool = True  # is a key asked for, where there are keys?
    dialect: str = "OpenAI and llama.cpp"
    error: type[msgspec.Struct] = shape.Error
    body_needed: bool = True  # False: a request without one is one with {}

    @property
    def bodies(self) -> tuple[type[msgspec.Struct], ...]:
        """What may be sent."""
        if self.body is None:
            return ()
        return self.body if isinstance(self.body, tuple) else (self.body,)


def both(operation: Operation) -> tuple[Operation, Operation]:
    """Under its path, and the same under /v1."""
    return operation, msgspec.structs.replace(operation, path=f"/v1{operation.path}")
