"""One client's connection, where aiohttp's own rules do not suit: its errors, and clients that end their half.

Knows TCP and aiohttp, and of a reply only how to see whether its client still wants it.

Connections that ask nothing cost nothing: who has not sent a request within some seconds is cut off, whose body comes
too slowly is refused, and when there are too many, those that wait for nothing go first.

A client may say that it sends no more (`shutdown(SHUT_WR)`, as `nc -N` does) and wait for its reply. To us that is the
same packet as that of a client that has left: only what we send shows the difference, for the machine of the one that
left answers it with a reset. So when the end comes while a request is being answered, something is sent that no reply
is changed by: a comment in a stream that has begun; before it, and before any other reply, the first letters of the
reply itself, one at a time, which are the same whatever it will say (`HTTP/1.1 `). Until the reply is written the
kernel is watched for the reset. When all these letters are sent, the kernel asks on its own (keep-alive), and gets the
reset about a minute after the client has left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import select
import socket
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

from aiohttp import StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError

from ..errors import HomeprefixdError, RequestError
from .errors import INTERNAL, Handler, SlowBodyError, error_response, http_refusal

if TYPE_CHECKING:
    import ssl

SETTLE = 0.05
"""Seconds after the client's end or a reply until a connection that serves nothing is closed: what was sent before the
end may still be on its way to its handler."""

PROBE_FIRST = 0.25
PROBE_EVERY = 5.0
"""Seconds until the second sign of life to a client that has ended its half, and at most between later ones. The client
may leave later, and a proxy or tunnel between us notices only with the second that its client has left."""

PROBE_TIMEOUT_MS = 30_000
"""A client whose machine acknowledges nothing for so long has left (it was switched off, or a firewall is silent)."""

PATIENCE = 30.0
"""Seconds for the head of a connection's first request; how often a request's body is looked at."""

LEAST_RATE = 1000
"""Bytes a second of a request's body, from one look to the next."""

MAX_CONNECTIONS = 1024
"""Open ones, where the system allows so many descriptors."""

KEEP_ALIVE = 10
"""Seconds between the kernel's questions to a client that has ended its half."""

_MAX_MESSAGE = 300  # letters of aiohttp's words about broken HTTP

_SPARE_DESCRIPTORS = 48  # for everything else that the daemon opens

logger = logging.getLogger(__name__)


class BegunReply:
    """In a transport's place while the first letters of the next reply are sent ahead of it, as signs of life.

    `head`: those that it begins with whatever it says. `end`: puts the transport back; called by the first write, which
    sends what is left.
    """

    def __init__(self, transport: asyncio.Transport, head: bytes, end: Callable[[], None]) -> None:
        self._transport = transport
        self._head = head
        self._end = end
        self._sent = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def sign(self) -> None:
        """Send the next letter, if one is left."""
        self._transport.write(self._head[self._sent : self._sent + 1])
        self._sent = min(self._sent + 1, len(self._head))

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._end()
        if bytes(data[: self._sent]) == self._head[: self._sent]:
            self._transport.write(data[self._sent :])
        else:
            logger.error("a reply does not begin with %r: its connection is cut off", self._head)
            self._transport.abort()

    def writelines(self, pieces: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(pieces))


class Crowd:
    """All open connections of a daemon."""

    def __init__(self, most: int = MAX_CONNECTIONS) -> None:
        """`most`: that may be open at once; fewer where the system allows less."""
        soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = most if soft == resource.RLIM_INFINITY else max(8, min(most, soft - _SPARE_DESCRIPTORS))
        self._open: dict[Connection, None] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, connection: Connection) -> None:
        """One that waits for nothing goes, the oldest, or else `connection` itself, when there are too many."""
        if len(self._open) >= self._most:
            victim = next((other for other in self._open if not other.is_serving), connection)
            self.leave(victim)
            victim.cut_off()
            if victim is connection:
                return
        self._open[connection] = None

    def leave(self, connection: Connection) -> None:
        self._open.pop(connection, None)


class Connection(web.RequestHandler):
    """aiohttp's protocol with our errors and with half-open connections.

    `probe`, while a reply is or will be a stream: send a comment there if it has begun, and tell whether it has.
    """

    __slots__ = (
        "_asked", "_begun", "_crowd", "_half_open", "_patience", "_pause", "_received", "_request", "_seen", "_timer",
        "_watch", "probe",
    )  # fmt: skip

    def __init__(self, manager: web.Server, crowd: Crowd, **options: Any) -> None:
        """`options`: those of `web.RequestHandler`."""
        super().__init__(manager, **options)
        self._crowd = crowd
        self._asked = False  # has it ever sent a request's head?
        self._seen = -1  # bytes of a request's body at the last look for slow ones
        self._patience: asyncio.TimerHandle | None = None
        self.probe: Callable[[], bool] | None = None
        self._half_open = False
        self._pause = PROBE_FIRST  # s until the next sign of life
        self._begun: BegunReply | None = None  # what stands in the transport's place
        self._request: web.Request | None = None  # that is being answered
        self._received = -1  # bytes of its body at the last look
        self._timer: asyncio.TimerHandle | None = None
        self._watch: select.epoll | None = None

    @contextlib.contextmanager
    def serving(self, request: web.Request) -> Iterator[None]:
        """While `request` is being answered. aiohttp answers a connection's requests one by one."""
        self._request, self._received, self._pause = request, -1, PROBE_FIRST
        self._asked, self._seen = True, -1
        if self._half_open:
            self._look_in(SETTLE)
        try:
            yield
        finally:
            self._request = None
            if self._half_open:
                self._look_in(SETTLE)

    @property
    def is_serving(self) -> bool:
        """Whether a request of it is being answered."""
        return self._request is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._patience = asyncio.get_running_loop().call_later(PATIENCE, self._look_for_slow)
        self._crowd.enter(self)

    def cut_off(self) -> None:
        """End it, whatever it does."""
        if self.transport is not None:
            self.transport.abort()

    def _look_for_slow(self) -> None:
        """Has it sent its first request, or enough more of the one that is being read? aiohttp ends those that sleep
        later."""
        later = asyncio.get_running_loop().call_later
        if not self._asked:
            logger.debug("a connection was cut off: nothing came for %.0f s", PATIENCE)
            self.cut_off()
            return
        content = self._request.content if self._request is not None else None
        if content is None or content.is_eof() or self._reading_paused:  # paused: it is we who are slow
            self._seen = -1
        elif self._seen >= 0 and content.total_bytes - self._seen < LEAST_RATE * PATIENCE:
            self._refuse_slow(content)
            self._patience = later(PATIENCE, self.cut_off)
            return
        else:
            self._seen = content.total_bytes
        self._patience = later(PATIENCE, self._look_for_slow)

    def _refuse_slow(self, content: StreamReader) -> None:
        """Whoever reads the body fails, which is the reply; nothing more is read."""
        if self.transport is not None:
            self.transport.pause_reading()
        content.set_exception(
            SlowBodyError(
                f"The request's body came more slowly than {LEAST_RATE} bytes a second.", code="body_too_slow"
            )
        )
        content.feed_eof()

    def eof_received(self) -> bool | None:  # type: ignore[override]  # a protocol may keep the connection open so
        """The client sends no more. True keeps the connection open for what we have to say."""
        if self.transport is not None and self.transport.get_extra_info("sslcontext") is not None:
            return None  # TLS knows no half-open connections: asyncio closes it
        self._half_open = True
        self._look_in(0.0 if self._request is not None else SETTLE)
        return True

    def connection_lost(self, exc: BaseException | None) -> None:
        for timer in (self._timer, self._patience):
            if timer is not None:
                timer.cancel()
        self._crowd.leave(self)
        self._forget_watch()
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The reply for bytes that are no HTTP, and for bugs outside of the handlers. Ends the connection."""
        error: HomeprefixdError
        if isinstance(exc, HttpProcessingError):
            logger.debug("no HTTP from %s: %s", request.remote, exc.message)
            what = " ".join(exc.message.split())[:_MAX_MESSAGE]
            error = RequestError(f"The request is not valid HTTP: {what}", code="bad_http")
        else:
            logger.error("the request %s failed outside of its handler", request.path, exc_info=exc)
            error = HomeprefixdError(INTERNAL, code="internal_error")
        if request.writer.output_size > 0:
            raise ConnectionError("a reply was begun already")
        response = error_response(error)
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """aiohttp's own refusals that no middleware sees (a strange `Expect`) in our shape, too."""
        if isinstance(resp, web.HTTPException) and resp.status >= 400:
            resp = http_refusal(request, resp)
        return await super().finish_response(request, resp, start_time)

    # ------------------------------------------------------------------------------------------------- half open

    def _look_in(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        """Is there a reply to wait for, and somebody who waits for it?"""
        transport, request = self.transport, self._request
        if transport is None:
            return
        if request is None:
            transport.close()
        elif not request.content.is_eof():
            # Its end will not come. Unless it has come and is still being unpacked:
            if request.content.total_bytes == self._received:
                transport.abort()
            else:
                self._received = request.content.total_bytes
                self._look_in(SETTLE)
        elif self.probe is not None and self.probe():
            self._wait_for_reset(transport)
        else:
            if request.writer.output_size == 0:  # else what is being written is a sign of its own
                self._begin_reply(transport, request)
            self._wait_for_reset(transport)

    def _begin_reply(self, transport: asyncio.Transport, request: web.Request) -> None:
        """Send one more letter of it."""
        if self._begun is None:

            def end() -> None:
                self._begun = None
                if self.transport is not None:
                    self.transport = transport

            self._begun = BegunReply(transport, b"HTTP/%d.%d " % request.version, end)
            self.transport = cast(asyncio.Transport, self._begun)
        self._begun.sign()

    def _wait_for_reset(self, transport: asyncio.Transport) -> None:
        """asyncio does not look at a connection that it neither reads nor writes."""
        self._look_in(self._pause)
        self._pause = min(2 * self._pause, PROBE_EVERY)
        sock = transport.get_extra_info("socket")
        if self._watch is not None or sock is None or transport.is_closing():
            return
        with contextlib.suppress(OSError):  # a Unix socket
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, PROBE_TIMEOUT_MS)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
                sock.setsockopt(socket.IPPROTO_TCP, option, KEEP_ALIVE)
        self._watch = select.epoll()
        self._watch.register(sock.fileno(), 0)  # a reset and errors are always told
        asyncio.get_running_loop().add_reader(self._watch.fileno(), self._reset)

    def _reset(self) -> None:
        self._forget_watch()
        if self.transport is not None:
            self.transport.abort()

    def _forget_watch(self) -> None:
        if self._watch is not None:
            asyncio.get_running_loop().remove_reader(self._watch.fileno())
            self._watch.close()
            self._watch = None


def connection_of(request: web.Request) -> Connection | None:
    """The connection that a request came by; None if it has been lost, or is served by something else (in tests)."""
    protocol = request.protocol if request.transport is not None else None
    return protocol if isinstance(protocol, Connection) else None


@web.middleware
async def connection_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Tells the connection what it serves. Stands before all others."""
    connection = connection_of(request)
    if connection is None:
        return await handler(request)
    with connection.serving(request):
        return await handler(request)


class Site(web.BaseSite):
    """A bound socket that listens for a runner, with our `Connection`. `options`: of `web.RequestHandler`."""

    def __init__(
        self,
        runner: web.AppRunner,
        sock: socket.socket,
        crowd: Crowd,
        *,
        tls: ssl.SSLContext | None = None,
        **options: Any,
    ) -> None:
        super().__init__(runner)
        self._sock = sock
        self._crowd = crowd
        self._tls = tls
        self._options = options

    @property
    def name(self) -> str:
        return f"http:{self._sock.getsockname()}"

    async def start(self) -> None:
        """Listen. Raises OSError."""
        server = self._runner.server
        if server is None:
            raise RuntimeError("the runner is not set up")
        await super().start()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Connection(server, self._crowd, loop=loop, **self._options),
            sock=self._sock,
            backlog=128,
            ssl=self._tls,
            ssl_handshake_timeout=None if self._tls is None else PATIENCE,
        )
