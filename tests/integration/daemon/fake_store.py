"""A child process that speaks the store's frames, for tests of the daemon alone.

`--fail MESSAGE`: ends with status 6, as on a directory that cannot be used. `--once FILE`: with `--fail`, only while
FILE does not exist. `--slow-stop SECONDS`: as if much had to be flushed. Each client that is adopted gets a Welcome.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from homeprefixd.channel import Channel, ChannelClosedError
from homeprefixd.child import become_child
from homeprefixd.frames import Stop
from homeprefixd.frames.store import (
    Adopt,
    Hello,
    ListPrefixes,
    Prefixes,
    Purge,
    Purged,
    Stats,
    StatsReply,
    ToStore,
    Welcome,
)


def serve_client(channel: Channel[Any]) -> None:
    try:
        while True:
            if isinstance(channel.receive(), Hello):
                channel.send(Welcome(0, f"store-{os.getpid()}"))
    except ChannelClosedError:
        channel.close()


def main() -> int:
    become_child("store", "info")
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--fail", default="")
    parser.add_argument("--mute", action="store_true")
    parser.add_argument("--slow-stop", type=float, default=0.0)
    given = parser.parse_args()
    if given.fail:
        print(f"ERROR {given.fail}", file=sys.stderr)
        return 6
    if given.dir:
        given.dir.mkdir(exist_ok=True, mode=0o700)
    adopted: list[str] = []
    channel: Channel[Any] = Channel(socket.socket(fileno=given.fd), ToStore)
    try:
        while True:
            match channel.receive():
                case Hello():
                    channel.send(Welcome(0, f"store-{os.getpid()}"))
                case Adopt(role=_, name=name):
                    client: Channel[Any] = Channel(socket.socket(fileno=channel.take_descriptor()), ToStore)
                    adopted.append(name)
                    threading.Thread(target=serve_client, args=(client,), daemon=True).start()
                case Stats(ticket=ticket) if not given.mute:
                    channel.send(StatsReply(ticket, {"adopted": adopted, "pid": os.getpid()}))
                case ListPrefixes(ticket=ticket):
                    channel.send(Prefixes(ticket, [], 7))
                case Purge(ticket=ticket, prefix=prefix):
                    error = f"there is no prefix {prefix}" if prefix == "ffff" else ""
                    channel.send(Purged(ticket, 0 if error else 3, 300, error))
                case Stop():
                    break
    except ChannelClosedError:
        pass
    time.sleep(given.slow_stop)
    print("INFO flushed", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
