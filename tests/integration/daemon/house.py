"""Links to real child processes that speak the frames but compute nothing."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

from homeprefixd.config import Config
from homeprefixd.frames.worker import Generate, LoadModel, Sampling
from homeprefixd.models.catalog import Catalog, ModelSpec
from homeprefixd.models.loading import load_frame
from homeprefixd.models.pool import Pool
from homeprefixd.models.store_link import StoreLink
from homeprefixd.models.worker_link import Limits
from homeprefixd.supervise import Backoff

HERE = Path(__file__).parent
Command = Callable[[int], list[str]]


def fake(name: str, *arguments: str) -> Command:
    """The command of fake_store.py or fake_worker.py."""
    return lambda fd: [sys.executable, str(HERE / f"fake_{name}.py"), "--fd", str(fd), *arguments]


def say(rid: str, prompt: str, *, stream: bool = True) -> Generate:
    """A request; `prompt` is an order to fake_worker.py."""
    return Generate(rid, None, prompt, None, {}, 8, [], Sampling(), stream)


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  # what is waited for has no event
            await asyncio.sleep(0.01)


class House:
    """Makes a store and a pool; all of them end with the test."""

    def __init__(self) -> None:
        self.stores: list[StoreLink] = []
        self.pools: list[Pool] = []

    async def store(self, *arguments: str, ping_every: float = 60.0, ping_timeout: float = 60.0) -> StoreLink:
        link = StoreLink(
            fake("store", *arguments),
            os.environ,
            backoff=Backoff(first=0.05),
            ping_every=ping_every,
            ping_timeout=ping_timeout,
        )
        self.stores.append(link)
        return link

    def pool(
        self,
        *arguments: str,
        store: StoreLink | None = None,
        limits: Limits | None = None,
        backoff: float = 0.05,
        changed: Callable[[], None] = lambda: None,
    ) -> Pool:
        def load(spec: ModelSpec) -> LoadModel:
            return load_frame(spec, Config(), cores=2, memory=1 << 20)

        catalog = Catalog((ModelSpec("fake", Path("/models/fake.gguf"), 12345, 8),))
        pool = Pool(
            catalog,
            load,
            fake("worker", *arguments),
            os.environ,
            store,
            limits=limits,
            backoff=lambda: Backoff(first=backoff),
            changed=changed,
        )
        self.pools.append(pool)
        return pool

    async def end(self) -> None:
        for pool in self.pools:
            await pool.stop(0.0)
        for store in self.stores:
            await store.stop(1.0)
