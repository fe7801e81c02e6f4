"""The API over a scripted backend, and a client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from aiohttp.test_utils import TestClient, TestServer
from scripted_backend import MemoryAdmin, ScriptedBackend

from homeprefixd.api.app import create_app
from homeprefixd.config import ServerConfig


@pytest.fixture
def backend() -> ScriptedBackend:
    return ScriptedBackend()


@pytest.fixture
def admin() -> MemoryAdmin:
    return MemoryAdmin()


@pytest.fixture
def config() -> ServerConfig:
    return ServerConfig(max_body=1 << 20, keep_alive=10.0)


@pytest.fixture
async def client(backend: ScriptedBackend, admin: MemoryAdmin, config: ServerConfig) -> AsyncIterator[TestClient]:
    ids = iter(range(10**9))
    app = create_app(backend, admin, config, clock=lambda: 1_800_000_000.5, token=lambda: f"id{next(ids)}")
    async with TestClient(TestServer(app)) as client:
        yield client
