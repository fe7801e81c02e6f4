"""The HTTP application: routes and what stands before them. Builds nothing; the daemon passes everything in."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection

from aiohttp import web

from ..config import ServerConfig
from ..models.backend import Backend, CacheAdmin
from . import admin as admin_routes
from . import anthropic as anthropic_routes
from . import embeddings as embedding_routes
from . import llamacpp as llamacpp_routes
from . import metrics as metrics_routes
from . import models as model_routes
from . import ollama as ollama_routes
from . import ollama_embed as ollama_embed_routes
from . import ollama_models as ollama_model_routes
from . import openai as openai_routes
from . import openapi as openapi_routes
from . import record_routes
from . import responses as responses_routes
from . import token_counts as token_count_routes
from . import transfer as transfer_routes
from . import warming as warming_routes
from .access import KEYS, Gate
from .connection import connection_middleware
from .errors import ERROR_FORMS, error_middleware
from .keyring import KeyRing
from .keys import ADMIN, BACKEND, CONFIG, IDENTITY, OBSERVATIONS, RECORDS, Identity
from .observed import Observations, ObservedBackend
from .origin import OriginGuard
from .records import Records


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
    guard = OriginGuard([config.host, *hosts], config.cors_origins.replace(",", " ").split())
    app = web.Application(
        client_max_size=config.max_body,
        middlewares=[connection_middleware, error_middleware, guard.middleware, Gate(keys).middleware],
    )
    kept = Records() if records is None else records
    app[KEYS] = keys
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
    app[ERROR_FORMS] = {**anthropic_routes.ERROR_FORMS, **ollama_routes.ERROR_FORMS}
    rooms = (
        model_routes,
        openai_routes,
        responses_routes,
        token_count_routes,
        embedding_routes,
        anthropic_routes,
        ollama_routes,
        ollama_embed_routes,
        ollama_model_routes,
        llamacpp_routes,
        admin_routes,
        warming_routes,
        transfer_routes,
        metrics_routes,
        record_routes,
        openapi_routes,
    )
    app.add_routes([route for room in rooms for route in room.routes()])
    return app
