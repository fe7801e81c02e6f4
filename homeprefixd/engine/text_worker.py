"""A worker for a model that generates text: its parts, and the threads that run them.

Threads: the engine's loop (the caller's), the reader of the daemon's frames, the intake (templates and tokens), the
heartbeat, and for a while the model's hash.
"""

from __future__ import annotations

import gc
import logging
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from ..channel import Channel, ChannelClosedError
from ..chat.stable import Stabilizer
from ..frames import Frame, Stop
from ..frames.worker import (
    ApplyTemplate,
    Cancel,
    DescribeTemplate,
    Detokenize,
    Embed,
    Generate,
    LoadModel,
    ModelInfo,
    Ready,
    SetLogLevel,
    SetRules,
    Tokenize,
    TokenizeRequest,
    ToWorker,
    UseStore,
)
from .adapters import Adapters
from .embedding import Embedder
from .intake import Intake
from .model_files import LoadedFiles
from .namespaces import Namespaces
from .scheduler import Engine

_HEARTBEAT = 1.0  # seconds
_NAMESPACE_PATIENCE = 2.0  # seconds that `Ready` may wait for the model's hash
_LAST_STEP = 10.0  # seconds that a step may still take once the daemon is gone

logger = logging.getLogger(__name__)


@dataclass
class TextWorker:
    """Serves requests for text until it is told to stop."""

    engine: Engine
    intake: Intake
    namespaces: Namespaces | None  # None: cache mode off
    store: Any  # StoreClient: `engine.store.Store`, and `attach`
    info: ModelInfo
    emit: Callable[[Frame], None]
    embedder: Embedder
    adapters: Adapters
    stabilizer: Stabilizer
    files: LoadedFiles

    def run(self, channel: Channel[ToWorker]) -> None:
        """Serve until `Stop` or the daemon's end. On the calling thread: the engine."""
        self.intake.start()
        threading.Thread(target=self._read, args=(channel,), name="reader", daemon=True).start()
        if self.namespaces is not None:
            self.namespaces.start()
            # After a restart the hash is remembered, and the first request must find what is stored.
            if not self.namespaces.wait(_NAMESPACE_PATIENCE):
                logger.info("%s is being hashed; until then requests are served without the cache", self.info.path)
            self.info = msgspec.structs.replace(
                self.info,
                namespace=self.namespaces.description,
                mismatch=self.namespaces.mismatch,
                adapters=list(self.adapters.infos),
            )
        self.emit(Ready(model=self.info))
        done = threading.Event()
        threading.Thread(target=self._beat, args=(done,), name="heartbeat", daemon=True).start()
        gc.freeze()  # what is there now stays: no collection walks it, which would hold all streams up
        try:
            self.engine.run(channel.together)
        finally:
            done.set()

    def _read(self, channel: Channel[ToWorker]) -> None:
        try:
            while True:
                self._take(channel.receive(), channel)
        except ChannelClosedError:
            self.engine.quit()
            # The engine may be in a long llama_decode; nobody waits for its result.
            timer = threading.Timer(_LAST_STEP, os._exit, args=(0,))
            timer.daemon = True
            timer.start()

    def _take(self, frame: ToWorker, channel: Channel[ToWorker]) -> None:
        match frame:
            case Generate():
                self.files.end_if_changed()
                self.intake.put(frame)
            case Tokenize() | Detokenize() | ApplyTemplate() | DescribeTemplate() | TokenizeRequest():
                self.intake.convert(frame)
            case SetLogLevel():
                logging.getLogger().setLevel(frame.level.upper())
            case SetRules():
                self.stabilizer.rules = frame.rules
            case Embed():
                self.embedder.put(frame)
            case Cancel():
                self.intake.cancel(frame.rid)
                self.embedder.cancel(frame.rid)
            case Stop():
                self.engine.stop(frame.grace)
            case UseStore():
                self._use_store(socket.socket(fileno=channel.take_descriptor()))
            case LoadModel():
                logger.warning("a second LoadModel was ignored: a worker has one model")

    def _use_store(self, sock: socket.socket) -> None:
        if self.namespaces is None:
            sock.close()
            return
        self.store.attach(sock)
        self.namespaces.reset()
        # Told from a thread of its own: the reader must stay free for a Cancel.
        threading.Thread(target=self.namespaces.open_usual, name="open-namespace", daemon=True).start()

    def _beat(self, done: threading.Event) -> None:
        try:
            while not done.wait(_HEARTBEAT):
                self.files.end_if_changed()
                self.emit(self.engine.figures())
        except ChannelClosedError:
            return
