"""systemd's small protocols: readiness, status, watchdog, socket activation. Without systemd all of it does nothing.

sd_notify(3), sd_watchdog_enabled(3) and sd_listen_fds(3) in own code: a datagram, a number, some descriptors.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import MutableMapping

_FIRST_DESCRIPTOR = 3
_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES")


class Systemd:
    """What the service manager that started this process told it. Takes its variables out of `environ`."""

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        self._address, usec, watchdog_pid, count, listen_pid, _names = (environ.pop(n, "") for n in _VARIABLES)
        mine = str(os.getpid())
        usec = usec if watchdog_pid in ("", mine) else ""
        self.watchdog: float | None = int(usec) / 1e6 if usec.isdigit() and int(usec) > 0 else None
        """Seconds within which `notify(WATCHDOG="1")` must come again; None: nobody watches."""
        self._descriptors = int(count) if listen_pid == mine and count.isdigit() else 0

    def notify(self, **state: str) -> bool:
        """Send e.g. READY="1", STATUS="...", STOPPING="1", WATCHDOG="1". True if somebody was told. Never raises."""
        if not self._address.startswith(("/", "@")):
            return False
        text = "\n".join(f"{name}={' '.join(value.split())}" for name, value in state.items())
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as s:
            s.setblocking(False)
            s.connect(address)
            s.sendall(text.encode())
            return True
        return False

    def take_sockets(self) -> list[socket.socket]:
        """The listening sockets of a .socket unit, once; the caller owns them."""
        count, self._descriptors = self._descriptors, 0
        sockets = [socket.socket(fileno=number) for number in range(_FIRST_DESCRIPTOR, _FIRST_DESCRIPTOR + count)]
        for sock in sockets:
            sock.set_inheritable(False)
            sock.setblocking(False)
        return sockets
