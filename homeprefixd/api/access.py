"""Who may call: a request's key, and how many requests it may have at once. The same for every dialect.

Without keys everybody may. A key comes as `Authorization: Bearer KEY` or `x-api-key: KEY`; for administration, which
people do in a browser, also as the password of HTTP's own dialog. Nowhere else: a browser sends that along with
requests of other pages too, and only administration looks at whose page it is.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from ..errors import BusyError, ForbiddenError, UnauthorizedError
from .errors import Handler, error_response, form_of
from .keyring import Key, KeyRing
from .origin import is_admin

KEYS: web.AppKey[KeyRing] = web.AppKey("keyring")
_KEY: web.RequestKey[Key] = web.RequestKey("key")

_OPEN = frozenset({"/", "/health", "/v1/health", "/openapi.json", "/api/version"})
"""What tells a caller without a key nothing of models, prompts and people: monitors and clients look there first."""

_HOW = "Send it as `Authorization: Bearer KEY` or `x-api-key: KEY`."
_BROWSER = 'Bearer, Basic realm="homeprefixd: any name, and an API key as the password", charset="UTF-8"'
_USUAL = 5.0  # s that a request takes, before one has been measured
_LONGEST_WAIT = 600  # s; of `Retry-After`


def key_of(request: web.Request) -> Key | None:
    """Whose request it is; None where no keys are asked for."""
    return request.get(_KEY)


def is_stranger(request: web.Request) -> bool:
    """Did it come without a key where there are keys?"""
    return bool(request.app[KEYS]) and key_of(request) is None


def presented(request: web.Request) -> str:
    """The key that came with a request, "" for none."""
    scheme, _, value = request.headers.get("Authorization", "").strip().partition(" ")
    if scheme.lower() == "bearer" and value.strip():
        return value.strip()
    if scheme.lower() == "basic" and is_admin(request):
        try:
            return base64.b64decode(value).decode().partition(":")[2]
        except (binascii.Error, ValueError):
            return ""
    return request.headers.get("x-api-key", "").strip()


class Turnstile:
    """Lets so many requests of one key in, makes some wait in their order, and turns away the rest."""

    def __init__(self) -> None:
        self.running = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._usual = _USUAL  # s that a request takes, a moving average

    @asynccontextmanager
    async def passing(self, key: Key) -> AsyncIterator[None]:
        """While a request of `key` runs. Raises BusyError."""
        if key.requests:
            await self._enter(key)
        else:
            self.running += 1
        begun = asyncio.get_running_loop().time()
        try:
            yield
        finally:
            self._usual += (asyncio.get_running_loop().time() - begun - self._usual) / 4
            self._leave(key)

    async def _enter(self, key: Key) -> None:
        if self.running < key.requests and not self._waiting:
            self.running += 1
            return
        if len(self._waiting) >= key.queued:
            wait = self._usual * (1 + len(self._waiting)) / key.requests
            raise BusyError(
                f"The key {key.name!r} has {self.running} requests running and {len(self._waiting)} waiting,"
                f" and may have {key.requests} and {key.queued}.",
                code="key_limit",
                retry_after=min(max(1.0, wait), _LONGEST_WAIT),
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # its turn had come
                self._leave(key)
            else:
                with contextlib.suppress(ValueError):  # whoever left in the same moment has passed it by
                    self._waiting.remove(turn)
            raise

    def _leave(self, key: Key) -> None:
        self.running -= 1
        while self._waiting and (not key.requests or self.running < key.requests):
            turn = self._waiting.popleft()
            if not turn.done():
                self.running += 1
                turn.set_result(None)


class Gate:
    """The middleware that asks for keys."""

    def __init__(self, keys: KeyRing) -> None:
        self._keys = keys
        self._turnstiles: dict[str, Turnstile] = {}  # by name of key

    def identify(self, request: web.Request) -> Key | None:
        """Raises UnauthorizedError, ForbiddenError. None: no key is needed here, and none that is known was sent."""
        if not self._keys:
            return None
        text = presented(request)
        if request.path in _OPEN and request.method in ("GET", "HEAD"):
            return self._keys.find(text) if text else None
        if not text:
            raise UnauthorizedError(f"This server asks for an API key. {_HOW}", code="missing_api_key")
        key = self._keys.find(text)
        if key is None:
            raise UnauthorizedError(f"This API key is not known here. {_HOW}")
        if is_admin(request) and not key.admin:
            raise ForbiddenError(
                f"The key {key.name!r} may not do this: it needs `admin = true` in the server's file of keys.",
                code="not_admin",
            )
        return key

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """A request without its key is refused before its body is read; so is one too many."""
        try:
            key = self.identify(request)
        except UnauthorizedError as error:
            response = error_response(error, form_of(request))
            if is_admin(request):
                response.headers["WWW-Authenticate"] = _BROWSER
            return response
        if key is None:
            return await handler(request)
        request[_KEY] = key
        if request.method != "POST" or is_admin(request):
            return await handler(request)
        turnstile = self._turnstiles.setdefault(key.name, Turnstile())
        async with turnstile.passing(key):
            return await handler(request)
