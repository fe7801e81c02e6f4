"""The HTTP application: routes and what stands before them. Builds nothing; the daemon passes everything in."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection

from aiohttp import web

from ..config import ServerConfig
from ..errors import RequestError
from ..models.backend import Backend, CacheAdmin
from . import admin as admin_routes
from . import llamacpp as llamacpp_routes
from . import metrics as metrics_routes
from . import models as model_routes
from . import openai as openai_routes
from .connection import connection_middleware
from .errors import error_middleware, error_object, json_response
from .keys import ADMIN, BACKEND, CONFIG, IDENTITY, OBSERVATIONS, Identity
from .observed import Observations, ObservedBackend
from .origin import OriginGuard


def _random_token() -> str:
    return secrets.token_hex(12)


async def _expect(request: web.Request) -> web.StreamResponse | None:
    """What an `Expect` header asks for; aiohttp asks here, before any middleware. None: go on."""
    if request.version < (1, 1):
        return None
    if request.headers.get("Expect", "").lower() != "100-continue":
        return json_response({"error": error_object(RequestError("`Expect` can only be 100-continue."))}, 417)
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # that was no part of the reply
    return None


def _expecting(route: web.RouteDef) -> web.RouteDef:
    return web.RouteDef(route.method, route.path, route.handler, {**route.kwargs, "expect_handler": _expect})


def create_app(
    backend: Backend,
    admin: CacheAdmin,
    config: ServerConfig,
    *,
    hosts: Collection[str] = (),
    clock: Callable[[], float] = time.time,
    token: Callable[[], str] = _random_token,
) -> web.Application:
    """The whole API over a backend and a store.

    Serve it by a runner with `handler_cancellation=True`, that is how the generation of a client that left ends, and
    listen with `connection.Site`.
    `hosts`: names of this machine under which administration is allowed, beside localhost and `config.host`. `clock`
    (Unix time, s) and `token` (unique texts) make `created` and `id` of replies.
    """
    guard = OriginGuard([config.host, *hosts])
    app = web.Application(
        client_max_size=config.max_body, middlewares=[connection_middleware, error_middleware, guard.middleware]
    )
    app[OBSERVATIONS] = observations = Observations()
    app[BACKEND] = ObservedBackend(backend, observations)
    app[ADMIN] = admin
    app[CONFIG] = config
    app[IDENTITY] = Identity(clock, token)
    app.on_response_prepare.append(guard.on_prepare)
    rooms = (model_routes, openai_routes, llamacpp_routes, admin_routes, metrics_routes)
    app.add_routes([_expecting(route) for room in rooms for route in room.routes()])
    return app
