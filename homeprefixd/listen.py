"""The sockets that the daemon listens on: bound before anything else is started, so that a refusal costs nothing."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from .config import ServerConfig
from .errors import ConfigError

if TYPE_CHECKING:
    import ssl

_CHANGE_PORT = "choose another with server.port (--port)"
_CHANGE_HOST = "change server.host (--host)"


def bind(config: ServerConfig) -> list[socket.socket]:
    """Bind, without listening yet, every address of `config.host`; port 0 takes a free one, the same for all.

    With `config.ollama_port`, that port too, after the others. Raises ConfigError naming host, port and setting.
    """
    sockets = _bind(config.host, config.port)
    if config.ollama_port:
        try:
            sockets += _bind(config.host, config.ollama_port)
        except ConfigError as error:
            close(sockets)
            raise ConfigError(f"server.ollama_port: {error.message.partition(': choose')[0]}") from error
    return sockets


def check_host(host: str) -> None:
    """Raises ConfigError if `host` cannot be listened on, whatever the port."""
    close(_bind(host, 0))


def _bind(host: str, port: int) -> list[socket.socket]:
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


def check_exposure(sockets: Sequence[socket.socket], config: ServerConfig, *, has_keys: bool) -> None:
    """Refuse to let the whole network use the models and purge the cache, unless that is wanted. Raises ConfigError."""
    if has_keys or config.allow_open:
        return
    for sock in sockets:
        if not is_local(sock):
            raise ConfigError(
                f"{sock.getsockname()[0]} can be reached from other machines, and no API keys are set: whoever reaches"
                " it could use the model and purge the cache. Name a file of keys (server.keys_file, see the README),"
                ' stay on this machine (server.host = "127.0.0.1"), or, in a network that you trust, set'
                " server.allow_open = true (HOMEPREFIXD_SERVER_ALLOW_OPEN=1)",
                param="server.allow_open",
            )


def is_local(sock: socket.socket) -> bool:
    """Can only this machine reach it?"""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return True
    return ipaddress.ip_address(sock.getsockname()[0].partition("%")[0]).is_loopback


def tls(config: ServerConfig) -> ssl.SSLContext | None:
    """How connections are encrypted; None: they are not. Raises ConfigError naming the file."""
    if not config.tls_cert:
        return None
    import ssl  # large, and mostly not needed

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    key = config.tls_key or config.tls_cert
    for name, file in (("tls_cert", config.tls_cert), ("tls_key", key)):
        try:
            open(file, "rb").close()
        except OSError as error:
            raise ConfigError(f"server.{name}: {file} cannot be read: {error.strerror}") from error
    try:
        context.load_cert_chain(config.tls_cert, key, password=_no_password)
    except ssl.SSLError as error:
        reason = (error.reason or str(error)).replace("_", " ").lower()
        raise ConfigError(
            f"server.tls_cert, server.tls_key: {config.tls_cert} and {key} are no certificate and its key in PEM:"
            f" {reason}"
        ) from error
    return context


def _no_password() -> str:
    raise ConfigError("server.tls_key: the key is encrypted; a daemon has nobody to ask for its password")


def close(sockets: Sequence[socket.socket]) -> None:
    """Close all of them."""
    for sock in sockets:
        sock.close()


def url_of(sock: socket.socket, scheme: str = "http") -> str:
    """The base URL that a program on this machine can use for a listening socket; "" for a Unix socket."""
    return _url(sock, scheme, {"0.0.0.0": "127.0.0.1", "::": "::1"})


def addresses(sockets: Sequence[socket.socket], scheme: str, ollama_port: int) -> str:
    """Where we listen, for people: as it is bound, so that 0.0.0.0 is seen to be that; one URL for each port."""
    found: dict[int, str] = {}
    for sock in sockets:
        if url := _url(sock, scheme, {}):
            port = sock.getsockname()[1]
            found.setdefault(port, f"{url} (for Ollama's clients)" if port == ollama_port else url)
    return " and ".join(found.values())


def _url(sock: socket.socket, scheme: str, instead: Mapping[str, str]) -> str:
    """`instead`: what is written for a host."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return ""
    host, port = sock.getsockname()[:2]
    host = instead.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
