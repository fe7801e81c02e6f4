"""A child process that speaks the worker's frames, for tests of the daemon. Prompts are orders, see `Work.run`."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from homeprefixd.channel import Channel, ChannelClosedError
from homeprefixd.child import become_child
from homeprefixd.frames import Stop
from homeprefixd.frames.store import FromStore, Hello
from homeprefixd.frames.worker import (
    Accepted,
    Account,
    Cancel,
    Converted,
    Delta,
    Failure,
    Finished,
    Generate,
    Heartbeat,
    Loading,
    LoadModel,
    ModelInfo,
    Progress,
    Ready,
    Timings,
    Tokenize,
    ToWorker,
    UseStore,
)

TIMINGS = Timings(0, 1, 0.0, 0.0, 0.0, 1, 0.0, {}, 1)


def info(load: LoadModel, said: str) -> ModelInfo:
    return ModelInfo(
        load.alias,
        load.path,
        "fake",
        said,
        1,
        1,
        1,
        1,
        1,
        64,
        64,
        1.0,
        load.parallel,
        load.threads,
        True,
        "blocks",
        "",
        {},
    )


class Work:
    def __init__(self, channel: Channel[Any]) -> None:
        self.channel = channel
        self.cancelled: set[str] = set()
        self.running = 0
        self.beats = True
        self.steps = 0
        self.stuck = False
        self.stores: list[str] = []

    def beat(self) -> None:
        while True:
            if self.beats:
                if not self.stuck:
                    self.steps += 1
                self.channel.send(Heartbeat(self.steps, 0.0, self.running, 0, 0, 64, {}))
            time.sleep(0.05)

    def run(self, request: Generate) -> None:
        self.running += 1
        rid, send = request.rid, self.channel.send
        order, _, rest = str(request.prompt).partition(" ")
        send(Accepted(rid, len(str(request.prompt))))
        match order:
            case "say":
                send(Progress(rid, 0, 1, 1))
                for number, word in enumerate(rest.split()):
                    send(Delta(rid, word, number + 1))
            case "abort":
                print("ggml.c:42: GGML_ASSERT(a == b) failed", file=sys.stderr, flush=True)
                os.abort()
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "error":
                send(Failure(rid, "ContextOverflowError", "too long", details={"n_prompt_tokens": 9, "n_ctx": 4}))
                self.running -= 1
                return
            case "stop-beating":
                self.beats = False
            case "stand-still":
                self.stuck = True
            case "stores":
                for name in self.stores:
                    send(Delta(rid, name, 1))
            case "flood":
                while rid not in self.cancelled:
                    send(Delta(rid, "x" * 10_000, 1))
        if order in ("wait", "stop-beating", "stand-still"):
            end = time.monotonic() + float(rest or "60")
            while time.monotonic() < end and rid not in self.cancelled:
                time.sleep(0.01)
        self.running -= 1
        if rid in self.cancelled:
            print(f"INFO cancelled {rid}", file=sys.stderr, flush=True)
            send(Finished(rid, "cancelled", "", None, TIMINGS))
        else:
            send(Finished(rid, "stop", rest, None, TIMINGS))
        if order == "account-late":
            time.sleep(0.02)
            send(Account(rid, [], True, 0, 0, None))

    def use_store(self, descriptor: int) -> None:
        store: Channel[Any] = Channel(socket.socket(fileno=descriptor), FromStore)
        store.send(Hello(arena=False))
        self.stores.append(store.receive().store_id)
        store.close()


def main() -> int:
    become_child("worker", "info")
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--load-time", type=float, default=0.0)
    parser.add_argument("--progress", type=float, default=0.25, help="of loading, told before --load-time")
    parser.add_argument("--fail", default="", help="the message with which loading fails")
    parser.add_argument("--fail-alias", default="", help="the only model that fails")
    parser.add_argument(
        "--die", default="", help="file that counts loads; all die by SIGKILL but the one after --deaths"
    )
    parser.add_argument("--deaths", type=int, default=0)
    parser.add_argument("--on-device", type=int, default=0, help="bytes that it takes of GPU0, if it is to use one")
    given = parser.parse_args()
    channel: Channel[Any] = Channel(socket.socket(fileno=given.fd), ToWorker)
    load = channel.receive()
    channel.send(Loading(given.progress))
    time.sleep(given.load_time)
    if given.fail and given.fail_alias in ("", load.alias):
        channel.send(Failure(None, "ModelError", given.fail))
        return 3
    if given.die:
        count = Path(given.die)
        deaths = int(count.read_text()) if count.exists() else 0
        count.write_text(str(deaths + 1))
        if deaths < given.deaths:
            os.kill(os.getpid(), signal.SIGKILL)
    environment = {n: v for n, v in os.environ.items() if n.startswith(("GGML_", "LLAMA_", "MALLOC_"))}
    there = {"GPU0": given.on_device} if given.on_device and load.gpu_layers else {}
    channel.send(Ready(msgspec.structs.replace(info(load, repr(environment)), on_devices=there)))
    work = Work(channel)
    threading.Thread(target=work.beat, daemon=True).start()
    try:
        while True:
            match channel.receive():
                case Generate() as request:
                    threading.Thread(target=work.run, args=(request,), daemon=True).start()
                case Cancel(rid=rid):
                    work.cancelled.add(rid)
                case UseStore():
                    work.use_store(channel.take_descriptor())
                case Tokenize() as asked:
                    channel.send(Converted(asked.rid, tokens=[len(asked.content)]))
                case Stop():
                    return 0
    except ChannelClosedError:
        return 0


if __name__ == "__main__":
    sys.exit(main())
