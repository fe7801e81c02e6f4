"""A dialect is one file: its routes, its errors and its description are found there, and all the rest is shared."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer
from scripted_backend import MemoryAdmin, ScriptedBackend

import homeprefixd.api
from homeprefixd.api.app import create_app
from homeprefixd.config import ServerConfig

PARROT = '''
"""A dialect with one route: `say` goes in, `said` comes out."""

from __future__ import annotations

import msgspec
from aiohttp import web

from ..errors import HomeprefixdError
from ..frames.worker import Delta, Finished, Generate
from . import fields
from .errors import encode, read_body
from .keys import BACKEND, CONFIG, IDENTITY
from .operation import EVENTS, Operation
from .replies import respond
from .sse import EventStream


class ParrotBody(fields.SamplingFields, kw_only=True):
    say: str
    stream: bool = False


class Said(msgspec.Struct):
    said: str


class Writer:
    rid = "parrot"

    def event(self, event):
        return encode({"said": event.text}) + b"\\n\\n" if isinstance(event, Delta) else b""

    def whole(self, finished):
        return {"said": finished.text}

    def failure(self, error):
        return encode(error_form(error))


def error_form(error: HomeprefixdError):
    return {"squawk": error.message}


async def parrot(request: web.Request) -> web.StreamResponse:
    body = fields.decode(await read_body(request), ParrotBody)
    backend = request.app[BACKEND]
    alias = backend.resolve(None)
    wanted = Generate("parrot", None, body.say, None, {}, 5, [], body.sampling(None), body.stream)
    events = EventStream(request, request.app[CONFIG].keep_alive) if body.stream else None
    return await respond(request, backend.generate(alias, wanted), Writer(), events)


def routes() -> list[web.RouteDef]:
    return [web.post("/parrot", parrot)]


ERROR_FORMS = {"/parrot": error_form}
OPERATIONS = (Operation("POST", "/parrot", "Says it", ParrotBody, Said, EVENTS, dialect="Parrot"),)
'''


async def test_one_file_is_a_dialect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: ScriptedBackend, admin: MemoryAdmin
) -> None:
    (tmp_path / "parrot.py").write_text(PARROT)
    monkeypatch.setattr(homeprefixd.api, "__path__", [*homeprefixd.api.__path__, str(tmp_path)])
    try:
        async with TestClient(TestServer(create_app(backend, admin, ServerConfig()))) as client:
            reply = await client.post("/parrot", json={"say": "hello", "seed": 7})
            assert (await reply.json())["said"]
            assert (backend.asked.prompt, backend.asked.sampling.seed) == ("hello", 7)
            streamed = await client.post("/parrot", json={"say": "hello", "stream": True})
            assert streamed.content_type == "text/event-stream"
            refused = await client.post("/parrot", json={"say": 7})
            assert await refused.json() == {"squawk": "`say` must be string, not integer."}
            described = (await (await client.get("/openapi.json")).json())["paths"]["/parrot"]["post"]
            assert described["tags"] == ["Parrot"]
    finally:
        sys.modules.pop("homeprefixd.api.parrot", None)


FOREIGN = {"engine", "chat", "prefix"}
NAMES = {"blocks"}
"""Of `prefix`: how a namespace is described, which requests name."""


def test_no_engine_and_no_cache_in_the_api() -> None:
    """The API asks a backend and a store by their protocols; it imports nothing of what does the work."""
    for file in Path(homeprefixd.api.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == 2 and node.module:
                room, _, module = node.module.partition(".")
                assert room not in FOREIGN or module in NAMES, f"{file.name} imports {node.module}"
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not {"llama_cpp", "lmdb", "numpy", "jinja2"}.intersection(names), file.name
