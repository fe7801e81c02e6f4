"""The sockets that the daemon listens on: bound before anything else is started, so that a refusal costs nothing."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence

from .config import ServerConfig
from .errors import ConfigError

_CHANGE_PORT = "choose another with server.port (--port)"
_CHANGE_HOST = "change server.host (--host)"


def bind(config: ServerConfig) -> list[socket.socket]:
    """Bind, without listening yet, every address of `config.host`; port 0 takes a free one, the same for all.

    Raises ConfigError naming host, port and setting.
    """
    host, port = config.host, config.port
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"server.host {host!r} is no address of this machine: {reason}; {_CHANGE_HOST}") from error
    sockets: list[socket.socket] = []
    missing: OSError | None = None
    for family, kind, protocol, _name, address in dict.fromkeys(found):
        try:
            sock = socket.socket(family, kind, protocol)
        except OSError as error:  # no IPv6 in this kernel
            missing = error
            continue
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if host == "::" else 1)
            sock.bind((address[0], port, *address[2:]))
            sock.setblocking(False)
        except OSError as error:
            sock.close()
            if error.errno == errno.EADDRNOTAVAIL:
                missing = error
                continue
            close(sockets)
            raise refusal(error, host, port) from error
        except BaseException:
            sock.close()
            close(sockets)
            raise
        sockets.append(sock)
        port = sock.getsockname()[1]
    if not sockets:
        reason = missing.strerror if missing else "it has none"
        raise ConfigError(f"server.host {host!r} is no address of this machine: {reason}; {_CHANGE_HOST}")
    return sockets


def refusal(error: OSError, host: str, port: int) -> ConfigError:
    """Why the kernel does not let us have `port` on `host`, for a person."""
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"port {port} on {host} is in use by another program: {_CHANGE_PORT}")
    if error.errno in (errno.EACCES, errno.EPERM):
        return ConfigError(f"port {port} on {host} may not be used by this user (below 1024?): {_CHANGE_PORT}")
    return ConfigError(f"cannot listen on {host} port {port}: {error.strerror}; check server.host and server.port")


def close(sockets: Sequence[socket.socket]) -> None:
    """Close all of them."""
    for sock in sockets:
        sock.close()


def url_of(sock: socket.socket) -> str:
    """The base URL that a program on this machine can use for a listening socket; "" for a Unix socket."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return ""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
