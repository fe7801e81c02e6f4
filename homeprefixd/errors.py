"""The one tree of errors: what the user is told, the HTTP status, the exit code of a command.

Raised where a thing is understood, turned into a message once, at the edge (`api/` or `cli/`). This file knows
nothing of HTTP libraries, of llama.cpp or of the store.
"""

from __future__ import annotations

from typing import Any, ClassVar


class HomeprefixdError(Exception):
    """Something that a person can be told about. `str(error)` is the whole message for that person."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    exit_code: ClassVar[int] = 1
    code: str | None = None
    """Short machine-readable reason, where clients look for one."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.details = details
        if code is not None:
            self.code = code


class ConfigError(HomeprefixdError):
    """A setting is unknown or has a value that is not allowed. Names the source, the key and what is allowed."""

    exit_code = 2


class RequestError(HomeprefixdError):
    """A field of a request is missing, of the wrong type or out of range."""

    status = 400
    type = "invalid_request_error"
    exit_code = 2


class ContextOverflowError(RequestError):
    """The prompt does not fit the context. `details`: n_prompt_tokens, n_ctx (both in tokens)."""

    type = "exceed_context_size_error"
    code = "context_length_exceeded"


class UnauthorizedError(HomeprefixdError):
    """No API key, or a wrong one."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class ForbiddenError(HomeprefixdError):
    """The request comes from somewhere that may not do this (an admin route called across sites)."""

    status = 403
    type = "permission_error"


class NotFoundError(HomeprefixdError):
    """There is no such model, prefix or route."""

    status = 404
    type = "not_found_error"
    exit_code = 4


class PayloadTooLargeError(HomeprefixdError):
    """The request's body is larger than `server.max_body`."""

    status = 413
    type = "invalid_request_error"


class BusyError(HomeprefixdError):
    """The queue is full. `details`: retry_after (seconds)."""

    status = 429
    type = "rate_limit_error"
    code = "queue_full"


class UnavailableError(HomeprefixdError):
    """Cannot be answered now, may be later: a model that loads, a daemon that stops. `details`: retry_after (s)."""

    status = 503
    type = "unavailable_error"
    exit_code = 5


class WorkerDiedError(UnavailableError):
    """The process that computed this request ended. The request can be sent again; its finished blocks are kept."""

    type = "server_error"
    code = "worker_died"


class ModelError(HomeprefixdError):
    """A model's file is missing, damaged, or cannot do what was asked."""

    status = 503
    type = "model_error"
    exit_code = 3


class StoreError(HomeprefixdError):
    """The store cannot be opened or used. Never reaches a client of the API: there, requests compute instead."""

    type = "store_error"
    exit_code = 6


BY_TYPE: dict[str, type[HomeprefixdError]] = {}


def _register(base: type[HomeprefixdError]) -> None:
    for sub in base.__subclasses__():
        BY_TYPE[sub.__name__] = sub
        _register(sub)


_register(HomeprefixdError)


def from_frame(
    name: str, message: str, code: str | None, param: str | None, details: dict[str, Any]
) -> HomeprefixdError:
    """Build again an error that crossed a process border by its class name."""
    return BY_TYPE.get(name, HomeprefixdError)(message, code=code, param=param, **details)
