"""Connections on real sockets: clients that end their half, that leave, and that do not speak HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from scripted_backend import TIMINGS, MemoryAdmin, ScriptedBackend

from homeprefixd.api import connection
from homeprefixd.api.app import create_app
from homeprefixd.config import ServerConfig
from homeprefixd.errors import UnavailableError
from homeprefixd.frames.worker import Accepted, Delta, Finished, Progress

CHAT = {"messages": [{"role": "user", "content": "x"}]}
STREAM = {**CHAT, "stream": True}


@pytest.fixture
def crowd() -> connection.Crowd:
    return connection.Crowd(8)


@pytest.fixture
async def address(
    backend: ScriptedBackend, admin: MemoryAdmin, config: ServerConfig, crowd: connection.Crowd
) -> AsyncIterator[tuple[str, int]]:
    runner = web.AppRunner(create_app(backend, admin, config), handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    with socket.create_server(("127.0.0.1", 0)) as sock:
        await connection.Site(runner, sock, crowd).start()
        yield sock.getsockname()
        await runner.cleanup()


@contextlib.asynccontextmanager
async def connected(
    address: tuple[str, int],
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(*address)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def begun(backend: ScriptedBackend) -> None:
    while not (backend.generations and backend.generations[0].entered):  # noqa: ASYNC110  # it has no event
        await asyncio.sleep(0.01)


def post(body: Any, path: str = "/v1/chat/completions", version: str = "1.1", more: str = "") -> bytes:
    data = json.dumps(body).encode()
    return f"POST {path} HTTP/{version}\r\nHost: x\r\n{more}Content-Length: {len(data)}\r\n\r\n".encode() + data


def last_reply(received: bytes) -> tuple[int, dict[str, Any]]:
    """Status and JSON of what follows a `100 Continue`."""
    while received.startswith(b"HTTP/1.1 100"):
        _, _, received = received.partition(b"\r\n\r\n")
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


# ---------------------------------------------------------------------------------------------------- half open


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("path", ["/health", "/nothing"])
async def test_a_quick_reply_reaches_a_client_that_ended_its_half(
    address: tuple[str, int], version: str, path: str
) -> None:
    async with connected(address) as (reader, writer):
        writer.write(f"GET {path} HTTP/{version}\r\nHost: x\r\n\r\n".encode())
        writer.write_eof()
        async with asyncio.timeout(5):
            received = await reader.read()
    assert received.startswith(b"HTTP/1.")
    assert last_reply(received)[0] == (200 if path == "/health" else 404)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("pause", [0.0, 0.2])
@pytest.mark.parametrize("work", [0.0, 0.3, 0.7])
async def test_a_slow_reply_reaches_a_client_that_ended_its_half(
    address: tuple[str, int],
    backend: ScriptedBackend,
    monkeypatch: pytest.MonkeyPatch,
    pause: float,
    work: float,
    version: str,
) -> None:
    monkeypatch.setattr(connection, "PROBE_FIRST", 0.05)
    monkeypatch.setattr(connection, "PROBE_EVERY", 0.05)  # 0.7 s is longer than the reply has letters for
    backend.script[1:1] = [lambda: asyncio.sleep(work)]
    async with connected(address) as (reader, writer):
        writer.write(post(CHAT, version=version))
        await asyncio.sleep(pause)
        writer.write_eof()
        async with asyncio.timeout(5):
            received = await reader.read()
    assert received.startswith(f"HTTP/{version} 200 OK\r\n".encode())
    assert received.count(b"HTTP/") == 1
    assert last_reply(received)[1]["choices"][0]["message"]["content"] == 'Hello "wörld"\n!'


async def test_a_late_refusal_reaches_a_client_that_ended_its_half(
    address: tuple[str, int], backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "PROBE_FIRST", 0.05)

    def refuse() -> None:
        raise UnavailableError("the worker has died")

    async def refuse_late() -> None:
        await asyncio.sleep(0.2)
        refuse()

    backend.script[1:] = [refuse_late]
    async with connected(address) as (reader, writer):
        writer.write(post(CHAT))
        writer.write_eof()
        async with asyncio.timeout(5):
            received = await reader.read()
    assert received.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
    assert "the worker has died" in last_reply(received)[1]["error"]["message"]


def test_a_reply_that_begins_otherwise_is_cut_off() -> None:
    class Sink:
        def __init__(self) -> None:
            self.sent = b""
            self.aborted = False

        def write(self, data: bytes) -> None:
            self.sent += data

        def abort(self) -> None:
            self.aborted = True

    for data, signs, sent in ((b"HTTP/1.1 200", 3, b"HTTP/1.1 200"), (b"HTTP/1.1 200", 20, b"HTTP/1.1 200")):
        sink = Sink()
        begun = connection.BegunReply(sink, b"HTTP/1.1 ", lambda: None)  # type: ignore[arg-type]
        for _ in range(signs):
            begun.sign()
        begun.writelines([data[:10], data[10:]])
        assert (sink.sent, sink.aborted) == (sent, False)
    sink = Sink()
    begun = connection.BegunReply(sink, b"HTTP/1.1 ", lambda: None)  # type: ignore[arg-type]
    begun.sign()
    begun.write(b"SSH-2.0")
    assert (sink.sent, sink.aborted) == (b"H", True)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_a_stream_reaches_a_client_that_ended_its_half(
    address: tuple[str, int], backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(connection, "PROBE_FIRST", 0.1)
    backend.script[0:0] = [lambda: asyncio.sleep(0.2)]  # tokenising
    backend.script[3:3] = [lambda: asyncio.sleep(0.3)]
    async with connected(address) as (reader, writer):
        writer.write(post(STREAM, version=version))
        writer.write_eof()
        async with asyncio.timeout(5):
            received = await reader.read()
    assert received.startswith(f"HTTP/{version} 200 OK\r\n".encode())
    assert b"data: [DONE]\n\n" in received
    assert b": prefill: 100 of 100 tokens" in received
    assert received.count(b"HTTP/") == 1
    assert backend.generations[0].finished


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (b"User-Agent: caf\xe9/1.0", b"200"),
        (b"Authorization: Bearer caf\xe9", b"200"),
        (b"X-Homeprefixd-Priority: caf\xe9", b"400"),
        (b"Origin: http://caf\xe9", b"200"),
        (b"Accept: caf\xe9", b"200"),
        (b"Content-Type: application/json; charset=caf\xe9", b"200"),
    ],
    ids=lambda given: given.decode("latin-1"),
)
async def test_headers_may_have_any_bytes(
    address: tuple[str, int], backend: ScriptedBackend, header: bytes, status: bytes
) -> None:
    async with connected(address) as (reader, writer):
        head, _, rest = post(CHAT).partition(b"\r\n")
        writer.write(head + b"\r\n" + header + b"\r\n" + rest)
        writer.write_eof()
        async with asyncio.timeout(5):
            received = await reader.read()
    assert received.split(b" ", 2)[1] == status, received
    for generation in backend.generations:
        generation.request.client.encode()


async def test_all_replies_of_a_pipeline_reach_a_client_that_ended_its_half(address: tuple[str, int]) -> None:
    async with connected(address) as (reader, writer):
        writer.write(post(CHAT) * 3)
        writer.write_eof()
        async with asyncio.timeout(5):
            received = await reader.read()
    assert received.count(b"HTTP/1.1 200 OK") == received.count(b"HTTP/") == 3


async def test_a_request_cut_short_ends(address: tuple[str, int], backend: ScriptedBackend) -> None:
    async with connected(address) as (reader, writer):
        writer.write(post(CHAT)[:-5])
        writer.write_eof()
        async with asyncio.timeout(5):
            with contextlib.suppress(ConnectionError):
                await reader.read()
    assert not backend.generations


async def test_an_idle_client_that_ends_its_half_is_let_go(address: tuple[str, int]) -> None:
    async with connected(address) as (reader, writer):
        writer.write_eof()
        async with asyncio.timeout(5):
            assert await reader.read() == b""


# ---------------------------------------------------------------------------------------------------- gone


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("body", [CHAT, STREAM])
@pytest.mark.parametrize("half_open", [False, True])
async def test_a_client_that_leaves_during_prefill_ends_its_work(
    address: tuple[str, int],
    backend: ScriptedBackend,
    monkeypatch: pytest.MonkeyPatch,
    body: dict[str, Any],
    half_open: bool,
    version: str,
) -> None:
    # what is lost while it is half open is seen at the next sign of life only
    monkeypatch.setattr(connection, "PROBE_FIRST", 0.1 if half_open else 10.0)
    monkeypatch.setattr(connection, "PROBE_EVERY", 0.1 if half_open else 10.0)
    backend.script[2:2] = [asyncio.Event().wait]  # type: ignore[list-item]
    async with connected(address) as (_reader, writer):
        writer.write(post(body, version=version))
        await begun(backend)
        if half_open:
            writer.write_eof()
            await asyncio.sleep(0.3)
            assert not backend.generations[0].left.is_set()
        writer.close()
        async with asyncio.timeout(1):
            await backend.generations[0].left.wait()


async def test_a_client_that_leaves_while_text_comes_ends_its_work(
    address: tuple[str, int], backend: ScriptedBackend
) -> None:
    chunk = [Delta("", "x", 1), lambda: asyncio.sleep(0.02)]
    backend.script = [Accepted("", 1), Progress("", 0, 1, 1), *chunk * 200, Finished("", "stop", "", None, TIMINGS)]
    async with connected(address) as (reader, writer):
        writer.write(post(STREAM))
        await reader.readuntil(b'"content":"x"')
        await asyncio.sleep(0.1)
        writer.close()
        async with asyncio.timeout(1):
            await backend.generations[0].left.wait()
    assert not backend.generations[0].finished


# ---------------------------------------------------------------------------------------------------- no HTTP


@pytest.mark.parametrize(
    "sent",
    [
        b"hello\r\n\r\n",
        b"GET / HTTP/9.9.9\r\n\r\n",
        b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 20_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"".join(b"X%d: 1\r\n" % n for n in range(2000)) + b"\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: minus\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 200,
    ],
)
async def test_broken_http_is_told_as_json(
    address: tuple[str, int], sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected(address) as (reader, writer):
        writer.write(sent)
        async with asyncio.timeout(5):
            received = await reader.read()
    status, body = last_reply(received)
    assert status == 400
    assert b"Content-Type: application/json" in received
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["code"] == "bad_http"
    assert "\n" not in body["error"]["message"]
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


async def test_a_broken_body_is_told_as_json(address: tuple[str, int]) -> None:
    async with connected(address) as (reader, writer):
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n")
        async with asyncio.timeout(5):
            received = await reader.read()
    status, body = last_reply(received)
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize(
    ("path", "expect", "status"),
    [("/v1/chat/completions", "100-continue", 200), ("/v1/chat/completions", "miracles", 417), ("/x", "miracles", 417)],
)
async def test_expectations(address: tuple[str, int], path: str, expect: str, status: int) -> None:
    async with connected(address) as (reader, writer):
        writer.write(post(CHAT, path, more=f"Expect: {expect}\r\nConnection: close\r\n"))
        async with asyncio.timeout(5):
            received = await reader.read()
    assert received.startswith(b"HTTP/1.1 100 Continue") == (status == 200)
    got, body = last_reply(received)
    assert got == status
    if status != 200:
        assert body["error"]["code"] == "bad_expect"


async def test_a_sign_of_life_is_given_less_and_less_often(
    address: tuple[str, int], backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "PROBE_FIRST", 0.1)
    monkeypatch.setattr(connection, "PROBE_EVERY", 0.3)
    backend.script[2:2] = [lambda: asyncio.sleep(1.0)]
    async with connected(address) as (reader, writer):
        writer.write(post(CHAT))
        writer.write_eof()
        signs = 0
        async with asyncio.timeout(5):
            while len(await reader.read(1 << 16)) == 1:
                signs += 1
    assert 4 <= signs <= 5  # after 0.05, 0.15, 0.35, 0.65, 0.95 s


# ------------------------------------------------------------------------------------------------- idle and slow


async def ended(reader: asyncio.StreamReader) -> bytes:
    """What comes until the connection's end."""
    async with asyncio.timeout(5):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""


@pytest.mark.parametrize("sent", [b"", b"GET /hea", b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-L"])
async def test_who_sends_no_request_is_cut_off(
    address: tuple[str, int], crowd: connection.Crowd, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(connection, "PATIENCE", 0.2)
    async with connected(address) as (reader, writer):
        writer.write(sent)
        assert await ended(reader) == b""
    assert len(crowd) == 0


async def test_a_body_may_be_slow_but_must_come(
    address: tuple[str, int], backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "PATIENCE", 0.3)
    monkeypatch.setattr(connection, "LEAST_RATE", 20)
    whole = post(CHAT)
    async with connected(address) as (reader, writer):
        head, _, body = whole.partition(b"\r\n\r\n")
        writer.write(head + b"\r\n\r\n")
        for at in range(0, len(body), 8):  # takes several times as long as the patience
            writer.write(body[at : at + 8])
            await asyncio.sleep(0.15)
        async with asyncio.timeout(5):
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    async with connected(address) as (reader, writer):
        writer.write(whole[:-5])
        received = await ended(reader)
        assert received.startswith(b"HTTP/1.1 408 ")
        assert last_reply(received)[1]["error"]["code"] == "body_too_slow"
    assert len(backend.generations) == 1


async def test_a_body_that_comes_byte_by_byte_is_refused(
    address: tuple[str, int], backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "PATIENCE", 0.2)
    received = b""
    async with connected(address) as (reader, writer):
        head, _, body = post(CHAT).partition(b"\r\n\r\n")
        writer.write(head + b"\r\n\r\n")
        reading = asyncio.create_task(ended(reader))
        for byte in body:
            writer.write(bytes([byte]))
            await asyncio.sleep(0.05)
            if reading.done():
                break
        received = await reading
    assert received.startswith(b"HTTP/1.1 408 ")
    assert backend.generations == []


async def test_a_long_reply_is_not_slow(
    address: tuple[str, int], backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "PATIENCE", 0.1)
    backend.script[1:1] = [lambda: asyncio.sleep(0.6)]
    async with connected(address) as (reader, writer):
        writer.write(post(CHAT))
        async with asyncio.timeout(5):
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")


async def test_when_there_are_too_many_the_oldest_that_wait_for_nothing_go(
    address: tuple[str, int], backend: ScriptedBackend, crowd: connection.Crowd
) -> None:
    release = asyncio.Event()
    backend.script[1:1] = [release.wait]
    async with contextlib.AsyncExitStack() as stack:
        reader, writer = await stack.enter_async_context(connected(address))
        writer.write(post(CHAT))
        await begun(backend)
        idle = [await stack.enter_async_context(connected(address)) for _ in range(20)]
        for _reader, other in idle:
            other.write(b"GET /hea")
        other_reader, other = await stack.enter_async_context(connected(address))
        other.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(5):
            assert (await other_reader.readline()).startswith(b"HTTP/1.1 200")
        assert len(crowd) == 8
        assert await ended(idle[0][0]) == b""
        release.set()
        async with asyncio.timeout(5):
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    async with asyncio.timeout(5):
        while len(crowd):  # noqa: ASYNC110  # it has no event
            await asyncio.sleep(0.01)
