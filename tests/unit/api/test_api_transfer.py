"""`/cache/export`, `/cache/import`, `/cache/compact`: bytes pass through, errors are told, a cut file shows."""

from __future__ import annotations

import io
import os

import aiohttp
import msgspec
import pytest
from aiohttp.test_utils import TestClient
from scripted_backend import MODEL, MemoryAdmin, ScriptedBackend

from homeprefixd.errors import NotFoundError, RequestError
from homeprefixd.frames.worker import Converted

LONG = os.urandom(3 << 20)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_export(client: TestClient, backend: ScriptedBackend, admin: MemoryAdmin) -> None:
    admin.exported = LONG
    reply = await client.post("/cache/export", json={"prefix": "00ff"})
    assert (reply.status, await reply.read() == LONG) == (200, True)
    backend.loaded = [msgspec.structs.replace(MODEL, namespace={"salt": ""})]
    backend.converted = Converted("", tokens=[1, 2])
    reply = await client.post("/cache/export", json={"prompt": "x"})
    assert (reply.status, await reply.read() == LONG) == (200, True)


async def test_nothing_to_export(client: TestClient, admin: MemoryAdmin) -> None:
    admin.refusal = NotFoundError("no prefix '00'")
    reply = await client.post("/cache/export", json={"prefix": "00"})
    assert (reply.status, (await reply.json())["error"]["message"]) == (404, "no prefix '00'")
    assert (await client.post("/cache/export", json={})).status == 400


async def test_an_export_that_breaks_is_no_whole_reply(client: TestClient, admin: MemoryAdmin) -> None:
    admin.exported = LONG
    admin.refusal = NotFoundError("it was purged meanwhile")
    reply = await client.post("/cache/export", json={"prefix": "00"})
    with pytest.raises(aiohttp.ClientError):
        await reply.read()


async def test_import(client: TestClient, admin: MemoryAdmin) -> None:
    reply = await client.post("/cache/import", data=io.BytesIO(LONG))  # more than `server.max_body`
    assert reply.status == 200
    sums = {"nodes": 3, "tokens": 100, "bytes": len(LONG), "known_nodes": 1}
    assert await reply.json() == {**sums, "kept": 64, "not_kept": "the disk is full"}
    assert admin.imported == LONG


async def test_an_import_that_is_refused_at_once(client: TestClient, admin: MemoryAdmin) -> None:
    admin.refusal = RequestError("it is a prefix of another model: kv_type: q8_0 there, f16 here")
    reply = await client.post("/cache/import", data=b"x" * 1000)
    assert reply.status == 400
    assert "kv_type" in (await reply.json())["error"]["message"]


async def test_no_descriptor_is_left(client: TestClient, admin: MemoryAdmin) -> None:
    admin.exported = b"abc"
    await (await client.post("/cache/export", json={"prefix": "00"})).read()
    before = descriptors()
    for _time in range(5):
        await (await client.post("/cache/export", json={"prefix": "00"})).read()
        await (await client.post("/cache/import", data=b"abc")).read()
    assert descriptors() <= before + 1


async def test_compact(client: TestClient) -> None:
    for more in ({"json": {}}, {}):
        assert await (await client.post("/cache/compact", **more)).json() == {"before": 2000, "after": 1000}
    assert (await client.post("/cache/compact", data=b"{bad")).status == 400
