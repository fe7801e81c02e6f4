"""Connections with TLS: streams arrive, and a client that leaves ends its work."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from scripted_backend import MemoryAdmin, ScriptedBackend

from homeprefixd import listen
from homeprefixd.api.app import create_app
from homeprefixd.api.connection import Crowd, Site
from homeprefixd.config import ServerConfig

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


@pytest.fixture
def config(tmp_path: Path) -> ServerConfig:
    file = tmp_path / "both.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    subprocess.run([*command, "-subj", "/CN=nas", "-keyout", file, "-out", tmp_path / "cert"], check=True)
    file.write_bytes(file.read_bytes() + (tmp_path / "cert").read_bytes())
    return ServerConfig(tls_cert=str(file))


@pytest.fixture
async def port(backend: ScriptedBackend, admin: MemoryAdmin, config: ServerConfig) -> AsyncIterator[int]:
    runner = web.AppRunner(create_app(backend, admin, config), handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    with socket.create_server(("127.0.0.1", 0)) as sock:
        await Site(runner, sock, Crowd(8), tls=listen.tls(config)).start()
        yield sock.getsockname()[1]
        await runner.cleanup()


async def ask(port: int, config: ServerConfig) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    context = ssl.create_default_context(cafile=config.tls_cert)
    context.check_hostname = False
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "stream": True}).encode()
    head = f"POST /v1/messages HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    return reader, writer


async def test_a_stream(port: int, config: ServerConfig) -> None:
    reader, writer = await ask(port, config)
    async with asyncio.timeout(10):
        received = await reader.read()
    assert b"event: message_stop" in received
    writer.close()
    await writer.wait_closed()


async def test_a_client_that_leaves_ends_its_work(port: int, config: ServerConfig, backend: ScriptedBackend) -> None:
    backend.script[3:3] = [asyncio.Event().wait]
    reader, writer = await ask(port, config)
    async with asyncio.timeout(10):
        await reader.readuntil(b"message_start")
        writer.transport.abort()
        await backend.generations[0].left.wait()
    assert not backend.generations[0].finished


async def test_one_that_speaks_no_tls_harms_nobody(port: int, config: ServerConfig) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    async with asyncio.timeout(10):
        assert b"HTTP/1.1" not in await reader.read()
    writer.close()
    await test_a_stream(port, config)
