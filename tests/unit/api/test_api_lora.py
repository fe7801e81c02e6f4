"""The field `lora` and the models with adapters, over a scripted backend; what they do is tested with real workers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from aiohttp.test_utils import TestClient
from scripted_backend import MODEL, ScriptedBackend

from homeprefixd.api.warming import description_of
from homeprefixd.errors import RequestError, UnavailableError
from homeprefixd.frames.worker import AdapterInfo, LoraChoice
from homeprefixd.lora import choose, described
from homeprefixd.prefix.blocks import namespace_of

ROUTES = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
    ("/v1/completions", {"prompt": "Hi"}),
    ("/completion", {"prompt": "Hi"}),
    ("/cache/warm", {"prompt": "Hi"}),
]
ADAPTERS = [
    AdapterInfo("a", "/a.gguf", 1.0, False, sha256="aa" * 32),
    AdapterInfo("b", "/b.gguf", 0.3, True, sha256="bb" * 32),
    AdapterInfo("bad", "/bad.gguf", 1.0, False, problem="it is damaged"),
]


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_it_reaches_the_worker(
    client: TestClient, backend: ScriptedBackend, path: str, body: dict[str, Any]
) -> None:
    backend.loaded = [msgspec.structs.replace(MODEL, namespace={"arch": "llama"})]
    for given, wanted in (
        ({}, None),
        ({"lora": []}, []),
        ({"lora": [{"id": "a", "scale": 0.5}, {"id": 1}]}, [LoraChoice("a", 0.5), LoraChoice(1)]),
    ):
        assert (await client.post(path, json={**body, **given})).status == 200
        assert backend.asked.lora == wanted


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize(
    "lora",
    [
        3,
        {},
        ["a"],
        [{}],
        [{"id": 1.5}],
        [{"id": -1}],
        [{"id": None}],
        [{"id": "a", "scale": "x"}],
        [{"id": "a", "scale": 101}],
        [{"id": "a"}] * 65,
    ],
)
async def test_nonsense_is_refused_by_name(client: TestClient, path: str, body: dict[str, Any], lora: Any) -> None:
    reply = await client.post(path, json={**body, "lora": lora})
    assert reply.status == 400
    assert "lora" in (await reply.json())["error"]["message"]


async def test_what_there_is_is_listed(client: TestClient, backend: ScriptedBackend) -> None:
    backend.loaded = [msgspec.structs.replace(MODEL, adapters=ADAPTERS)]
    for path in ("/lora-adapters", "/v1/lora-adapters"):
        assert await (await client.get(path)).json() == [
            {"id": 0, "name": "a", "path": "/a.gguf", "scale": 0.0},
            {"id": 1, "name": "b", "path": "/b.gguf", "scale": 0.3},
            {"id": 2, "name": "bad", "path": "/bad.gguf", "scale": 0.0},
        ]


def test_what_a_request_means() -> None:
    third = 0.30000001192092896  # as llama.cpp computes with it
    assert choose(ADAPTERS, None) == ((1, third),)
    assert choose(ADAPTERS, []) == ()
    assert choose(ADAPTERS, [LoraChoice("b"), LoraChoice("a", 2)]) == ((0, 2.0), (1, third))
    assert choose(ADAPTERS, [LoraChoice(1, 0.0)]) == ()
    named = [AdapterInfo("1", "", 1.0, False), AdapterInfo("0", "", 1.0, False)]
    assert choose(named, [LoraChoice(0)]) == ((1, 1.0),)  # an id before a place
    for asked in (
        [LoraChoice("c")],
        [LoraChoice(3)],
        [LoraChoice("a", float("nan"))],
        [LoraChoice("a"), LoraChoice(0)],
    ):
        with pytest.raises(RequestError):
            choose(ADAPTERS, asked)
    with pytest.raises(UnavailableError, match="damaged"):
        choose(ADAPTERS, [LoraChoice("bad")])
    with pytest.raises(RequestError, match="it has none"):
        choose([], [LoraChoice("a")])


def test_names_and_order_do_not_change_the_namespace_content_and_scale_do() -> None:
    def key(adapters: list[AdapterInfo], *asked: LoraChoice) -> bytes:
        found = described(adapters, choose(adapters, asked))
        assert found is not None
        return namespace_of({"arch": "llama", **found})

    both = key(ADAPTERS, LoraChoice("a"), LoraChoice("b"))
    renamed = [msgspec.structs.replace(ADAPTERS[1], id="y"), msgspec.structs.replace(ADAPTERS[0], id="x")]
    assert key(renamed, LoraChoice("x"), LoraChoice("y")) == both
    assert key(ADAPTERS, LoraChoice("a"), LoraChoice("b", 0.31)) != both
    trained = [msgspec.structs.replace(ADAPTERS[0], sha256="cc" * 32), *ADAPTERS[1:]]
    assert key(trained, LoraChoice("a"), LoraChoice("b")) != both
    assert key(ADAPTERS) == namespace_of({"arch": "llama", "adapters": []})
    unknown = [msgspec.structs.replace(ADAPTERS[0], sha256="")]
    assert described(unknown, choose(unknown, [LoraChoice("a")])) is None


def test_descriptions_are_those_of_the_worker() -> None:
    usual = described(ADAPTERS, choose(ADAPTERS, None)) or {}
    info = msgspec.structs.replace(MODEL, namespace={"arch": "llama", **usual}, adapters=ADAPTERS)
    assert description_of(info, "") == info.namespace
    assert description_of(info, "", [LoraChoice("b")]) == info.namespace
    assert description_of(info, "", []) == {"arch": "llama", "adapters": []}
    unread = msgspec.structs.replace(info, adapters=[msgspec.structs.replace(ADAPTERS[0], sha256="")])
    with pytest.raises(UnavailableError, match="still being read"):
        description_of(unread, "", [LoraChoice("a")])
