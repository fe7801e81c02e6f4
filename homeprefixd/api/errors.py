"""The edge where errors become replies: `{"error": {"message", "type", "param", "code"}}`, or what a dialect has.

Knows the tree of errors and HTTP; knows nothing of dialects' requests. A dialect whose errors look different says so
by the beginning of its paths, or by a header that only its clients send (`ERROR_FORMS`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from aiohttp import ClientError, web
from aiohttp.http_exceptions import HttpProcessingError

from ..errors import HomeprefixdError, NotFoundError, PayloadTooLargeError, RequestError
from .keys import CONFIG

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ErrorForm = Callable[[HomeprefixdError], dict[str, Any]]
"""From an error to the object that a dialect's clients read."""

ERROR_FORMS: web.AppKey[Mapping[str, ErrorForm]] = web.AppKey("error_forms")
"""The beginning of a path (with its slash), or a header's name -> the errors' form; all others have OpenAI's."""

INTERNAL = "Something went wrong inside homeprefixd; its log says what."


class UnreadableBodyError(RequestError):
    """The body's coding is broken, so nothing after it on this connection can be understood either."""


class SlowBodyError(UnreadableBodyError):
    """The body came too slowly, or stopped coming."""

    status = 408


def encode(value: Any) -> bytes:
    """JSON; what has no form there becomes its text rather than an error in an error's reply."""
    return msgspec.json.encode(value, enc_hook=str)


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """A reply with `value` as JSON."""
    return web.Response(body=encode(value), status=status, headers=headers, content_type="application/json")


def error_object(error: HomeprefixdError) -> dict[str, Any]:
    """What clients read: the message and its kind; details (counts of tokens) beside them, as llama-server has it."""
    details = {key: value for key, value in error.details.items() if key != "retry_after"}
    return {**details, "message": error.message, "type": error.type, "param": error.param, "code": error.code}


def openai_form(error: HomeprefixdError) -> dict[str, Any]:
    """As OpenAI and llama-server have it."""
    return {"error": error_object(error)}


def form_of(request: web.Request) -> ErrorForm:
    """How the errors look that this request's client reads."""
    forms = request.app.get(ERROR_FORMS, {})
    for beginning, form in forms.items():
        if request.path.startswith(beginning) if beginning.startswith("/") else beginning in request.headers:
            return form
    return openai_form


def error_response(error: HomeprefixdError, form: ErrorForm = openai_form) -> web.Response:
    """The reply for an error that came before the first byte of a stream."""
    headers = {}
    retry_after = error.details.get("retry_after")
    if retry_after is None and error.status in (429, 503):
        retry_after = 1
    if isinstance(retry_after, int | float) and math.isfinite(retry_after):
        headers["Retry-After"] = str(max(0, math.ceil(retry_after)))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(form(error), error.status, headers)


def is_gone(request: web.Request) -> bool:
    """Has the client left?"""
    return request.transport is None or request.transport.is_closing()


async def read_body(request: web.Request) -> bytes:
    """The whole body. Raises PayloadTooLargeError, RequestError (a coding that cannot be undone)."""
    limit = request.app[CONFIG].max_body
    too_large = PayloadTooLargeError(
        f"The request's body is larger than {limit} bytes, which is `server.max_body`.", code="body_too_large"
    )
    if request.content_length is not None and request.content_length > limit:
        raise too_large
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise too_large from error
    except (web.RequestPayloadError, HttpProcessingError, ClientError) as error:
        if is_gone(request):
            raise
        request.content.feed_eof()  # else aiohttp goes on reading, fails, and drops the reply with the connection
        what = " ".join(str(error).split())
        raise UnreadableBodyError(f"The request's body cannot be read: {what}", code="bad_body") from error


def http_refusal(request: web.BaseRequest, error: web.HTTPException, form: ErrorForm = openai_form) -> web.Response:
    """aiohttp's own refusals (routing, mostly) in our shape; headers such as `Allow` are kept."""
    shown: HomeprefixdError
    if error.status == 404:
        shown = NotFoundError(f"There is no route {request.method} {request.path}.", code="unknown_route")
    elif isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        shown = RequestError(f"{request.path} takes {allowed}, not {request.method}.", code="method_not_allowed")
    elif isinstance(error, web.HTTPExpectationFailed):
        shown = RequestError("`Expect` can only be 100-continue.", code="bad_expect")
    else:
        shown = RequestError(error.reason or "bad request")
    headers = {
        key: value for key, value in error.headers.items() if key.lower() not in ("content-type", "content-length")
    }
    return json_response(form(shown), error.status, headers)


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error as a reply. 500 only for our own bugs; those are logged and not shown."""
    try:
        return await handler(request)
    except HomeprefixdError as error:
        level = logging.WARNING if error.status == 500 else logging.DEBUG
        logger.log(level, "%s %s: %d, %s", request.method, request.path, error.status, error.message)
        response = error_response(error, form_of(request))
        if isinstance(error, UnreadableBodyError):
            response.force_close()
        return response
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return http_refusal(request, error, form_of(request))
    except Exception:
        if is_gone(request):
            raise  # the client left while we talked to it; aiohttp ends the connection quietly
        logger.exception("%s %s failed", request.method, request.path)
        return error_response(HomeprefixdError(INTERNAL, code="internal_error"), form_of(request))
