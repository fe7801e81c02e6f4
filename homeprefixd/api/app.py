"""The HTTP application: routes and what stands before them. Builds nothing; the daemon passes everything in."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection

from aiohttp import web

from ..config import ServerConfig
from ..models.backend import Backend, CacheAdmin
from .access import KEYS, Gate
from .connection import connection_middleware
from .errors import ERROR_FORMS, error_middleware
from .keyring import KeyRing
from .keys import ADMIN, BACKEND, CONFIG, IDENTITY, OBSERVATIONS, RECORDS, Identity
from .observed import Observations, ObservedBackend
from .origin import GUARD, OriginGuard
from .records import Records
from .rooms import rooms


def _random_token() -> str:
    return secrets.token_hex(12)


def create_app(
    backend: Backend,
    admin: CacheAdmin,
    config: ServerConfig,
    *,
    hosts: Collection[str] = (),
    keys: KeyRing | None = None,
    clock: Callable[[], float] = time.time,
    token: Callable[[], str] = _random_token,
    records: Records | None = None,
) -> web.Application:
    """The whole API over a backend and a store.

    Serve it by a runner with `handler_cancellation=True`, that is how the generation of a client that left ends, and
    listen with `connection.Site`.
    `hosts`: names of this machine under which administration is allowed, beside localhost and `config.host`. `keys`:
    who may call; without any, everybody. `clock` (Unix time, s) and `token` (unique texts) make `created` and `id` of
    replies. `records`: of requests.
    """
    keys = KeyRing() if keys is None else keys
    guard = OriginGuard([config.host, *hosts], config.cors_origins.replace(",", " ").split(), lambda: bool(keys))
    app = web.Application(
        client_max_size=config.max_body,
        middlewares=[connection_middleware, error_middleware, guard.middleware, Gate(keys).middleware],
    )
    kept = Records() if records is None else records
    app[KEYS] = keys
    app[GUARD] = guard
    app[OBSERVATIONS] = observations = Observations()
    app[BACKEND] = ObservedBackend(backend, observations, records=kept)
    app[RECORDS] = kept

    async def end(_app: web.Application) -> None:
        await kept.close()

    app.on_cleanup.append(end)
    app[ADMIN] = admin
    app[CONFIG] = config
    app[IDENTITY] = Identity(clock, token)
    app.on_response_prepare.append(guard.on_prepare)
    all_rooms = rooms()
    app[ERROR_FORMS] = {path: form for room in all_rooms for path, form in room.error_forms.items()}
    app.add_routes([route for room in all_rooms for route in room.routes()])
    return app
