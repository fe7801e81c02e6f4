"""Main of the worker process: one loaded model, served over the daemon's socket.

    python -m homeprefixd.engine.worker --fd N --log-level LEVEL

What it serves is in `text_worker.py` and `embedding_worker.py`. Exit codes: 0 told to stop or the daemon is gone, 3 the
model cannot be served, 4 somebody has written into its file, so that it has to be loaded again.
"""

from __future__ import annotations

import argparse
import logging
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ..channel import Channel, ChannelClosedError
from ..child import become_child
from ..errors import HomeprefixdError, ModelError
from ..frames import Frame
from ..frames.worker import LoadModel, ToWorker
from ..last_loads import LastLoads, Remembering
from .failures import failure_of

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until told to stop."""
    parser = argparse.ArgumentParser(prog="homeprefixd-worker")
    parser.add_argument("--fd", type=int, required=True, help="socket to the daemon")
    parser.add_argument("--log-level", default="info")
    options = parser.parse_args(argv)
    become_child("worker", options.log_level)
    channel: Channel[ToWorker] = Channel(socket.socket(fileno=options.fd), ToWorker)
    try:
        return _serve(channel)
    except ChannelClosedError:
        return 0  # the daemon is gone; nobody is left to tell


def _serve(channel: Channel[ToWorker]) -> int:
    load = channel.receive()
    try:
        if not isinstance(load, LoadModel):
            raise ModelError(f"The first frame was {type(load).__name__}, not LoadModel.")
        # Here, as it loads llama.cpp: only once this process is tied to its parent, and what fails is told.
        from ..prefix.client import StoreClient
        from .building import build

        worker = build(load, _remembered(channel.send, load), StoreClient())
    except ChannelClosedError:
        raise
    except Exception as error:
        if not isinstance(error, HomeprefixdError):
            logger.exception("loading the model failed")
        channel.send(failure_of(None, error))
        return ModelError.exit_code
    worker.run(channel)
    return 0


def _remembered(send: Callable[[Frame], None], load: LoadModel) -> Callable[[Frame], None]:
    """`send`, with what is said of the model remembered for when it is not loaded."""
    if not load.probes:
        return send
    remembering = Remembering(LastLoads(Path(load.probes)), Path(load.path))

    def emit(frame: Frame) -> None:
        send(frame)
        remembering.watch(frame)

    return emit


if __name__ == "__main__":
    sys.exit(main())
