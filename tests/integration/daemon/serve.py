"""A daemon with children that compute nothing and a small HTTP application, as a program of its own.

`serve.py SETTINGS STORE-ARGUMENTS WORKER-ARGUMENTS`, each as JSON; states go to stdout, a line of JSON each.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
from typing import Any

import msgspec
from aiohttp import web

from homeprefixd.api.keyring import KeyRing
from homeprefixd.config import Config, ServerConfig
from homeprefixd.daemon import Daemon, DaemonState
from homeprefixd.errors import HomeprefixdError
from homeprefixd.frames.worker import Delta
from homeprefixd.logs import configure_logging
from homeprefixd.models.backend import Backend, CacheAdmin
from tests.integration.daemon.house import fake, say


def create_app(backend: Backend, admin: CacheAdmin, _server: ServerConfig, _keys: KeyRing) -> web.Application:
    async def health(_request: web.Request) -> web.Response:
        return web.json_response(backend.status())

    async def stats(_request: web.Request) -> web.Response:
        return web.json_response(await admin.stats())

    async def generate(request: web.Request) -> web.StreamResponse:
        order = await request.json()
        response = web.StreamResponse()
        try:
            alias = backend.resolve(order.get("model"))
            async with backend.generate(alias, say(order["rid"], order["prompt"])) as generation:
                async for event in generation:
                    if not response.prepared:
                        await response.prepare(request)
                    if isinstance(event, Delta):
                        await response.write(event.text.encode() + b"\n")
        except HomeprefixdError as error:
            if not response.prepared:
                return web.json_response({"error": str(error)}, status=error.status)
            await response.write(f"error: {error}\n".encode())
        return response

    app = web.Application()
    app.add_routes([web.get("/health", health), web.get("/stats", stats), web.post("/generate", generate)])
    return app


def show(state: DaemonState) -> None:
    print(json.dumps(dataclasses.asdict(state)), flush=True)


async def main(config: Config, store: list[str], worker: list[str]) -> int:
    return await Daemon(
        config,
        os.environ,
        on_state=show,
        create_app=create_app,
        store_command=fake("store", "--dir", config.cache.dir, *store),
        worker_command=fake("worker", *worker),
    ).serve()


if __name__ == "__main__":
    given: list[Any] = [json.loads(argument) for argument in sys.argv[1:]]
    configure_logging("info", os.environ, sys.stderr)
    try:
        sys.exit(asyncio.run(main(msgspec.convert(given[0], Config), given[1], given[2])))
    except HomeprefixdError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
