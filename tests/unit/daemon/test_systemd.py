"""systemd's protocols against real sockets."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from homeprefixd.systemd import Systemd


@pytest.mark.parametrize("abstract", [False, True])
def test_notify_sends_one_datagram(tmp_path: Path, abstract: bool) -> None:
    name = f"@homeprefixd-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind("\0" + name[1:] if abstract else name)
        server.settimeout(5)
        environ = {"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid()), "HOME": "/"}
        systemd = Systemd(environ)
        assert environ == {"HOME": "/"}
        assert systemd.watchdog == 30.0
        assert systemd.notify(READY="1", STATUS="loads\nthe model")
        assert server.recv(1000) == b"READY=1\nSTATUS=loads the model"


def test_without_systemd_nothing_happens(tmp_path: Path) -> None:
    assert Systemd({}).watchdog is None
    assert not Systemd({}).notify(READY="1")
    assert Systemd({}).take_sockets() == []
    assert not Systemd({"NOTIFY_SOCKET": str(tmp_path / "nobody")}).notify(READY="1")
    assert not Systemd({"NOTIFY_SOCKET": "vsock:2:1234"}).notify(READY="1")


def test_what_was_meant_for_another_process_is_ignored() -> None:
    environ = {"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1", "LISTEN_FDS": "1", "LISTEN_PID": "1"}
    systemd = Systemd(environ)
    assert systemd.watchdog is None
    assert systemd.take_sockets() == []


def test_socket_activation() -> None:
    code = (
        "import os\nos.environ['LISTEN_PID'] = str(os.getpid())\n"
        "from homeprefixd.systemd import Systemd\ns = Systemd(os.environ)\n[sock] = s.take_sockets()\n"
        "print(sock.getsockname()[1], sock.get_inheritable(), s.take_sockets())\nsock.close()"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        shell = 'exec 3<&"$0"; exec "$@"'
        done = subprocess.run(
            ["bash", "-c", shell, str(server.fileno()), sys.executable, "-c", code],
            env={**os.environ, "LISTEN_FDS": "1"},
            pass_fds=[server.fileno()],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    assert done.stdout.split() == [str(port), "False", "[]"]
