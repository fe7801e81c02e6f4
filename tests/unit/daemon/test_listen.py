"""Binding addresses, and what is said when that fails."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from homeprefixd import listen
from homeprefixd.config import ServerConfig
from homeprefixd.errors import ConfigError


@contextlib.contextmanager
def bound(config: ServerConfig) -> Iterator[list[socket.socket]]:
    sockets = listen.bind(config)
    try:
        yield sockets
    finally:
        listen.close(sockets)


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
        port = sock.getsockname()[1]
        assert listen.url_of(sock) == f"http://127.0.0.1:{port}"
        assert listen.addresses([sock], "https", 0) == f"https://0.0.0.0:{port}"


def test_people_are_told_each_port_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        second = free.getsockname()[1]
    with bound(ServerConfig(host="localhost", port=0, ollama_port=second)) as sockets:
        first = sockets[0].getsockname()[1]
        said = listen.addresses(sockets, "http", second)
    [one, two] = said.split(" and ")
    assert one.endswith(f":{first}")
    assert two.endswith(f":{second} (for Ollama's clients)")


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


# ------------------------------------------------------------------------------------------------- a second port


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def test_a_port_for_ollamas_clients() -> None:
    port = free_port()
    with bound(ServerConfig(port=0, ollama_port=port)) as (first, second):
        assert second.getsockname()[1] == port != first.getsockname()[1]


def test_a_port_for_ollamas_clients_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"^server\.ollama_port: port {port} on .* in use by another program$"):
            listen.bind(ServerConfig(port=0, ollama_port=port))


# ------------------------------------------------------------------------------------------------- who can reach it


def test_beyond_this_machine_only_with_keys_or_when_told_so() -> None:
    with bound(ServerConfig(host="0.0.0.0", port=0)) as sockets:
        for config, has_keys in ((ServerConfig(allow_open=True), False), (ServerConfig(), True)):
            listen.check_exposure(sockets, config, has_keys=has_keys)
        with pytest.raises(ConfigError) as caught:
            listen.check_exposure(sockets, ServerConfig(), has_keys=False)
        assert caught.value.exit_code == 2
        for word in ("0.0.0.0", "server.keys_file", "server.host", "server.allow_open"):
            assert word in caught.value.message


def test_this_machine_needs_no_keys() -> None:
    with bound(ServerConfig(host="localhost", port=0)) as sockets:
        listen.check_exposure(sockets, ServerConfig(), has_keys=False)
    with socket.socket(socket.AF_UNIX) as sock:
        listen.check_exposure([sock], ServerConfig(), has_keys=False)


# ------------------------------------------------------------------------------------------------- TLS


def test_no_certificate_no_tls() -> None:
    assert listen.tls(ServerConfig()) is None


@pytest.mark.parametrize("name", ["tls_cert", "tls_key"])
def test_certificates_that_are_none(tmp_path: Path, name: str) -> None:
    file = tmp_path / "x.pem"
    file.write_text("not a certificate")
    missing = str(tmp_path / "missing.pem")
    files = {"tls_cert": str(file), "tls_key": str(file), name: missing}
    with pytest.raises(ConfigError, match=rf"server\.{name}: .*missing\.pem cannot be read"):
        listen.tls(ServerConfig(**files))
    with pytest.raises(ConfigError, match=r"server\.tls_cert, server\.tls_key: .*x\.pem"):
        listen.tls(ServerConfig(tls_cert=str(file)))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_a_key_that_is_encrypted_is_not_asked_for(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-subj", "/CN=nas", "-passout", "pass:secret"]
    subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True)
    with pytest.raises(ConfigError, match="encrypted"):
        listen.tls(ServerConfig(tls_cert=str(cert), tls_key=str(key)))
