"""Whatever a client sends, it gets a reply or a clear refusal: never a 500, never a 422, nothing a worker chokes on."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted_backend import MODEL, MemoryAdmin, ScriptedBackend

from homeprefixd import channel
from homeprefixd.api import anthropic, ollama, ollama_embed, responses
from homeprefixd.api.admin import PurgeBody
from homeprefixd.api.app import create_app
from homeprefixd.api.llamacpp_completion import CompletionBody as NativeBody
from homeprefixd.api.llamacpp_completion import InfillBody
from homeprefixd.api.openai import ChatBody, CompletionBody
from homeprefixd.api.warming import PinBody
from homeprefixd.config import ServerConfig
from homeprefixd.frames.worker import Converted, ToWorker

NUMBERS = st.one_of(
    st.integers(-3, 5),
    st.integers(),
    st.sampled_from([2**31, 2**32, 2**63, 2**64, -(2**63) - 1, 10**400]),
    st.floats(allow_nan=False, allow_infinity=False),
)
TEXTS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(["user", "text", "demo", "auto", "5", "30d", "\ud800", "\0", "x" * 2000, "json_object"]),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=8,
)


def mostly(kind: type[msgspec.Struct], likely: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Bodies with some fields of `kind`, any values in them; what is in `likely` is mostly as it should be."""
    names = [name for name in kind.__struct_fields__ if name not in likely]
    simple = st.one_of(st.none(), st.booleans(), st.integers(0, 1), st.just({}), st.text("ab", max_size=2))
    other = st.one_of(
        st.dictionaries(st.sampled_from(names), simple, max_size=2),
        st.dictionaries(st.sampled_from(names), VALUES, max_size=2),
    )
    spoiled = st.fixed_dictionaries(dict.fromkeys(likely, VALUES))
    return st.builds(lambda a, b: {**a, **b}, st.one_of(st.just(likely), spoiled), other)


MESSAGE = st.fixed_dictionaries(
    {},
    optional={
        "role": st.one_of(st.sampled_from(["user", "assistant", "tool", "developer"]), VALUES),
        "content": st.one_of(TEXTS, st.lists(st.dictionaries(st.sampled_from(["type", "text"]), TEXTS)), VALUES),
        "name": VALUES,
        "tool_calls": st.one_of(st.none(), st.just([{"function": {"name": "f", "arguments": {}}}]), VALUES),
        "tool_call_id": VALUES,
        "reasoning_content": VALUES,
    },
)
CHAT = st.one_of(
    mostly(ChatBody, {"messages": [{"role": "user", "content": "x"}]}),
    st.fixed_dictionaries({"messages": st.lists(MESSAGE, max_size=3), "stream": st.booleans()}),
)
BLOCK = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "tool_use", "tool_result", "thinking", "input_text", "image"])},
    optional={
        name: st.one_of(TEXTS, VALUES) for name in ("text", "thinking", "name", "input", "tool_use_id", "content")
    },
)
ITEM = st.fixed_dictionaries(
    {"type": st.sampled_from(["message", "function_call", "function_call_output", "reasoning", "item_reference"])},
    optional={
        "role": st.sampled_from(["user", "assistant", "developer", "tool"]),
        "content": st.one_of(TEXTS, st.lists(BLOCK, max_size=2), VALUES),
        **{name: st.one_of(TEXTS, VALUES) for name in ("call_id", "name", "arguments", "output", "summary")},
    },
)
DIALECTS = st.one_of(
    st.tuples(
        st.just("/v1/messages"),
        st.fixed_dictionaries(
            {
                "messages": st.lists(
                    st.fixed_dictionaries(
                        {
                            "role": st.sampled_from(["user", "assistant", "system"]),
                            "content": st.one_of(TEXTS, st.lists(BLOCK, max_size=3)),
                        }
                    ),
                    max_size=3,
                )
            },
            optional={"system": st.lists(BLOCK, max_size=2), "tools": VALUES, "stream": st.booleans()},
        ),
    ),
    st.tuples(st.just("/v1/responses"), st.fixed_dictionaries({"input": st.lists(ITEM, max_size=4)})),
    st.tuples(st.just("/api/chat"), st.fixed_dictionaries({"messages": st.lists(MESSAGE, max_size=3)})),
)
BODIES = st.one_of(
    st.tuples(st.just("/v1/chat/completions"), CHAT),
    st.tuples(st.just("/v1/completions"), mostly(CompletionBody, {"prompt": "x"})),
    st.tuples(st.just("/completion"), mostly(NativeBody, {"prompt": "x"})),
    st.tuples(st.just("/infill"), mostly(InfillBody, {"input_prefix": "x", "input_suffix": "y"})),
    st.tuples(st.just("/cache/purge"), mostly(PurgeBody, {"older_than": 5})),
    st.tuples(st.sampled_from(["/cache/warm", "/cache/match", "/cache/pin", "/cache/unpin"]), CHAT),
    st.tuples(st.sampled_from(["/cache/pin", "/cache/unpin"]), mostly(PinBody, {"label": "a", "prefix": "00"})),
    st.tuples(
        st.just("/v1/messages"), mostly(anthropic.MessagesBody, {"messages": [{"role": "user", "content": "x"}]})
    ),
    st.tuples(st.just("/v1/responses"), mostly(responses.ResponsesBody, {"input": "x"})),
    st.tuples(st.just("/api/chat"), mostly(ollama.ChatBody, {"messages": [{"role": "user", "content": "x"}]})),
    st.tuples(st.just("/api/generate"), mostly(ollama.GenerateBody, {"prompt": "x"})),
    st.tuples(st.just("/api/embed"), mostly(ollama_embed.EmbedBody, {"input": ["x"]})),
    DIALECTS,
    st.tuples(st.sampled_from(["/v1/chat/completions", "/v1/completions", "/cache/purge", "/cache/pin"]), VALUES),
)


async def start(backend: ScriptedBackend) -> TestClient:
    backend.loaded = [msgspec.structs.replace(MODEL, namespace={"salt": ""})]
    backend.converted = Converted("", tokens=[1, 2, 3])
    client = TestClient(TestServer(create_app(backend, MemoryAdmin(), ServerConfig())))
    await client.start_server()
    return client


async def check_post(client: TestClient, backend: ScriptedBackend, path: str, data: bytes) -> int:
    backend.generations.clear()
    reply = await client.post(path, data=data)
    text = await reply.text()
    assert reply.status in (200, 400, 404), text
    if reply.status != 200:
        error = json.loads(text)["error"]
        if path.startswith("/api/"):
            error = {"message": error}
        assert isinstance(error["message"], str)
        assert len(error["message"]) > 10
        if not path.startswith(("/api/", "/v1/messages")):
            assert {"type", "param", "code"} <= set(error)
        assert not backend.generations
    for generation in backend.generations:
        frame = channel.encode(generation.request)
        assert msgspec.msgpack.decode(frame[4:], type=ToWorker) == generation.request
        assert generation.left.is_set()
    return reply.status


@pytest.fixture
def runner() -> Any:
    with asyncio.Runner() as runner:
        yield runner


def test_any_json(runner: asyncio.Runner, caplog: pytest.LogCaptureFixture) -> None:
    backend = ScriptedBackend()
    client = runner.run(start(backend))
    seen: dict[int, int] = {}

    @settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
    @given(BODIES)
    def check(request: tuple[str, Any]) -> None:
        path, body = request
        status = runner.run(check_post(client, backend, path, json.dumps(body).encode()))
        seen[status] = seen.get(status, 0) + 1

    try:
        check()
    finally:
        runner.run(client.close())
    assert seen[200] > 3  # else this checks nothing
    assert seen[400] > 3
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_any_bytes(runner: asyncio.Runner) -> None:
    backend = ScriptedBackend()
    client = runner.run(start(backend))
    valid = b'{"messages":[{"role":"user","content":"x\xc3\xa9"}],"stop":["a"],"temperature":0.5}'

    changed = st.builds(
        lambda at, new: valid[:at] + new + valid[at + len(new) :], st.integers(0, len(valid)), st.binary(max_size=3)
    )

    @settings(max_examples=200, deadline=None)
    @given(st.one_of(st.binary(max_size=50), changed))
    def check(data: bytes) -> None:
        runner.run(check_post(client, backend, "/v1/chat/completions", data))

    try:
        check()
    finally:
        runner.run(client.close())


def test_any_query_and_path(runner: asyncio.Runner) -> None:
    backend = ScriptedBackend()
    client = runner.run(start(backend))

    async def get(path: str, query: dict[str, str]) -> None:
        reply = await client.get(path, params=query)
        assert reply.status in (200, 400, 404, 405), await reply.text()
        if reply.status != 200:
            assert "message" in (await reply.json())["error"]

    paths = st.one_of(
        st.sampled_from(["/cache/prefixes", "/v1/models", "/cache/purge"]),
        st.text("/ab.%é?", max_size=8).map("/v1/".__add__),
    )
    printable = st.text(max_size=8).filter(lambda text: text.isprintable())
    queries = st.dictionaries(st.sampled_from(["limit", "model", "x"]), printable)

    @settings(max_examples=100, deadline=None)
    @given(paths, queries)
    def check(path: str, query: dict[str, str]) -> None:
        runner.run(get(path, query))

    try:
        check()
    finally:
        runner.run(client.close())
