"""What a client is told of an error that ended its request. Loads nothing of llama.cpp."""

from __future__ import annotations

from ..errors import HomeprefixdError
from ..frames.worker import Failure


class DecodeError(Exception):
    """llama_decode failed for good. `code` is its result (< 0)."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"llama_decode: {code}" + (f" ({reason})" if reason else ""))
        self.code = code


def failure_of(rid: str | None, error: BaseException) -> Failure:
    """The frame. An unexpected exception is named, its details stay in the log."""
    if isinstance(error, HomeprefixdError):
        return Failure(
            rid=rid,
            error=type(error).__name__,
            message=error.message,
            code=error.code,
            param=error.param,
            details=dict(error.details),
        )
    if isinstance(error, DecodeError):
        message = f"llama.cpp could not compute this request ({error}). It can be sent again."
        return Failure(rid=rid, error=HomeprefixdError.__name__, message=message, code="decode_failed")
    return Failure(
        rid=rid,
        error=HomeprefixdError.__name__,
        message=f"The engine failed on this request ({type(error).__name__}); the daemon's log has the details.",
        code="engine_error",
    )
