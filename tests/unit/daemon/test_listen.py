"""Binding addresses, and what is said when that fails."""

from __future__ import annotations

import socket

import pytest

from homeprefixd import listen
from homeprefixd.config import ServerConfig
from homeprefixd.errors import ConfigError


def test_a_free_port_and_its_url() -> None:
    [sock] = listen.bind(ServerConfig(port=0))
    with sock:
        assert listen.url_of(sock) == f"http://127.0.0.1:{sock.getsockname()[1]}"


def test_all_addresses_of_a_name_get_the_same_port() -> None:
    sockets = listen.bind(ServerConfig(host="localhost", port=0))
    assert len({sock.getsockname()[1] for sock in sockets}) == 1
    listen.close(sockets)


def test_every_address_of_the_machine() -> None:
    [sock] = listen.bind(ServerConfig(host="0.0.0.0", port=0))
    with sock:
        assert listen.url_of(sock).startswith("http://127.0.0.1:")


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
def test_ipv6() -> None:
    try:
        [sock] = listen.bind(ServerConfig(host="::1", port=0))
    except ConfigError:
        pytest.skip("no IPv6 loopback here")
    with sock:
        assert listen.url_of(sock).startswith("http://[::1]:")


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} on 127\.0\.0\.1 is in use.*server\.port") as caught:
            listen.bind(ServerConfig(port=port))
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("host", ["203.0.113.7", "x" * 300])
def test_a_host_that_is_not_ours(host: str) -> None:
    with pytest.raises(ConfigError, match=r"server\.host"):
        listen.bind(ServerConfig(host=host, port=0))


def test_a_host_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_arguments: object, **_more: object) -> list[object]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")  # what a real look-up ends with

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ConfigError, match=r"server\.host 'nas' .*Name or service not known"):
        listen.bind(ServerConfig(host="nas"))
