"""A worker for a model that makes embeddings and nothing else: no context for chats, no cache, no scheduler."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

from ..channel import Channel, ChannelClosedError
from ..errors import RequestError
from ..frames import Frame, Stop
from ..frames.worker import (
    ApplyTemplate,
    Cancel,
    DescribeTemplate,
    Detokenize,
    Embed,
    Generate,
    Heartbeat,
    ModelInfo,
    Ready,
    Tokenize,
    ToWorker,
    UseStore,
)
from .embedding import Embedder
from .failures import failure_of
from .model_files import LoadedFiles

_HEARTBEAT = 1.0  # seconds


class EmbeddingWorker:
    """Serves `Embed` frames until it is told to stop."""

    def __init__(self, embedder: Embedder, info: ModelInfo, emit: Callable[[Frame], None], files: LoadedFiles) -> None:
        self._embedder, self.info, self._emit, self._files = embedder, info, emit, files

    def run(self, channel: Channel[ToWorker]) -> None:
        """On the calling thread, until `Stop` or the daemon's end."""
        self._emit(Ready(model=self.info))
        done = threading.Event()
        threading.Thread(target=self._beat, args=(done,), name="heartbeat", daemon=True).start()
        try:
            while True:
                frame = channel.receive()
                if isinstance(frame, Stop):
                    return
                self._take(frame, channel)
        finally:
            done.set()

    def _take(self, frame: ToWorker, channel: Channel[ToWorker]) -> None:
        match frame:
            case Embed():
                self._files.end_if_changed()
                self._embedder.put(frame)
            case Cancel():
                self._embedder.cancel(frame.rid)
            case Generate() | Tokenize() | Detokenize() | ApplyTemplate() | DescribeTemplate():
                message = f"the model {self.info.alias} makes embeddings only: it generates no text"
                self._emit(failure_of(frame.rid, RequestError(message, param="model", code="unsupported_model")))
            case UseStore():
                socket.socket(fileno=channel.take_descriptor()).close()

    def _beat(self, done: threading.Event) -> None:
        steps = 0
        try:
            while not done.wait(_HEARTBEAT):
                self._files.end_if_changed()
                steps += 1
                self._emit(Heartbeat(steps, 0.0, 0, 0, 0, 0, {}))
        except ChannelClosedError:
            return
