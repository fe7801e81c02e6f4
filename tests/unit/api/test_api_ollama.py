"""Ollama's dialect: what Home Assistant, Open WebUI and the SDK send, and what they read."""

from __future__ import annotations

import asyncio
import json
import struct
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from scripted_backend import FACTS, MODEL, TIMINGS, MemoryAdmin, ScriptedBackend

from homeprefixd.api import ollama_models
from homeprefixd.api.app import create_app
from homeprefixd.api.keys import BACKEND, LAST_LOADS
from homeprefixd.api.ollama_models import capabilities
from homeprefixd.config import ServerConfig
from homeprefixd.errors import HomeprefixdError, ModelError
from homeprefixd.frames.worker import (
    Accepted,
    CallPiece,
    Converted,
    Delta,
    Embed,
    Finished,
    Message,
    ModelInfo,
    TokenLogprob,
)
from homeprefixd.last_loads import LastLoads
from homeprefixd.models.file_facts import FileFacts

TOOL = {"type": "function", "function": {"name": "light", "description": "Switch", "parameters": {"type": "object"}}}


def body(text: str = "Hello", **more: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [{"role": "user", "content": text}], **more}


async def lines(client: TestClient, path: str, request: dict[str, Any]) -> list[dict[str, Any]]:
    reply = await client.post(path, json=request)
    assert reply.status == 200
    assert reply.content_type == "application/x-ndjson"
    return [json.loads(line) for line in (await reply.text()).splitlines()]


FIGURES = {
    "total_duration": 80_000_000,
    "load_duration": 2_000_000,
    "prompt_eval_count": 100,
    "prompt_cached_count": 64,
    "prompt_eval_duration": 18_000_000,
    "eval_count": 3,
    "eval_duration": 60_000_000,
}


async def test_rule_13_lines_of_json_with_durations_in_ns(client: TestClient, backend: ScriptedBackend) -> None:
    found = await lines(client, "/api/chat", body())
    assert [line["message"]["content"] for line in found] == ["Hel", 'lo "wörld"\n', "!", ""]
    assert [line["done"] for line in found] == [False, False, False, True]
    assert all(line["model"] == "demo" and line["message"]["role"] == "assistant" for line in found)
    assert found[0]["created_at"] == "2027-01-15T08:00:00.500000Z"
    assert found[-1]["done_reason"] == "stop"
    assert {key: found[-1][key] for key in FIGURES} == FIGURES
    assert backend.asked.stream
    whole = await (await client.post("/api/chat", json=body(stream=False))).json()
    assert whole["message"] == {"role": "assistant", "content": 'Hello "wörld"\n!'}
    assert (whole["done"], whole["done_reason"], whole["eval_count"]) == (True, "stop", 3)


async def test_generate(client: TestClient, backend: ScriptedBackend) -> None:
    request = {"model": "demo:latest", "prompt": "Hi", "system": "Be brief."}
    found = await lines(client, "/api/generate", request)
    assert "".join(line["response"] for line in found) == 'Hello "wörld"\n!'
    assert {key: found[-1][key] for key in FIGURES} == FIGURES
    assert backend.asked.messages == [Message("system", "Be brief."), Message("user", "Hi")]
    await client.post("/api/generate", json={"model": "demo", "prompt": "Hi", "raw": True, "stream": False})
    assert (backend.asked.messages, backend.asked.prompt) == (None, "Hi")


@pytest.mark.parametrize(("path", "field"), [("/api/chat", "message"), ("/api/generate", "response")])
async def test_logprobs(client: TestClient, backend: ScriptedBackend, path: str, field: str) -> None:
    told = [TokenLogprob(5, b"He", -0.5, [TokenLogprob(5, b"He", -0.5)]), TokenLogprob(6, b"llo", -0.25)]
    backend.script = [
        Accepted("", 100),
        Delta("", "Hello", 2, logprobs=told),
        Finished("", "stop", "Hello", None, TIMINGS, logprobs=told),
    ]
    first = {"token": "He", "logprob": -0.5, "bytes": [72, 101]}
    shown = [
        {**first, "top_logprobs": [first]},
        {"token": "llo", "logprob": -0.25, "bytes": [108, 108, 111], "top_logprobs": []},
    ]
    asked = body() if field == "message" else {"prompt": "Hi"}
    request = {**asked, "logprobs": True, "top_logprobs": 1}
    text, last = await lines(client, path, request)
    assert backend.asked.logprobs == 1
    assert text["logprobs"] == shown
    assert "logprobs" not in last
    backend.whole = True
    assert (await (await client.post(path, json={**request, "stream": False})).json())["logprobs"] == shown


async def test_when_a_model_leaves(client: TestClient, backend: ScriptedBackend) -> None:
    for expires, told in ((None, "2318-01-01T00:00:00Z"), (300.0, "2027-01-15T08:05:00.500000Z")):
        backend.expires = expires
        [running] = (await (await client.get("/api/ps")).json())["models"]
        assert running["expires_at"] == told


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
@pytest.mark.parametrize(
    ("keep_alive", "reason"),
    [(None, "load"), (-1, "load"), ("300s", "load"), ("5m", "load"), (0, "unload"), ("0", "unload"), ("0s", "unload")],
)
async def test_rule_13_no_prompt_loads_or_unloads(
    client: TestClient, backend: ScriptedBackend, path: str, keep_alive: Any, reason: str
) -> None:
    reply = await client.post(path, json={"model": "demo", "keep_alive": keep_alive})
    said = await reply.json()
    assert (reply.status, said["done"], said["done_reason"]) == (200, True, reason)
    assert not backend.generations
    assert (len(backend.loads), len(backend.unloads)) == ((1, 0) if reason == "load" else (0, 1))


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate", "/api/embed", "/api/embeddings"])
@pytest.mark.parametrize("prompt", [{}, {"prompt": "x", "input": "x", "messages": [{"role": "user", "content": "x"}]}])
@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ({}, True),
        ({"Host": "ollama.home.example:11434"}, True),  # a program: a browser says whose page it is
        ({"Origin": "http://localhost:3000"}, True),
        ({"Origin": "https://chat.home.lan", "Host": "ai.example"}, True),
        ({"Origin": "http://127.0.0.1:11434", "Host": "127.0.0.1:11434"}, True),
        ({"Origin": "http://homeprefixd:11434", "Host": "homeprefixd:11434"}, True),
        ({"Origin": "http://evil.com"}, False),
        ({"Origin": "null"}, False),
        ({"Origin": "http://["}, False),
        ({"Sec-Fetch-Site": "cross-site"}, False),
        ({"Origin": "http://evil.com", "Host": "evil.com"}, False),
    ],
)
async def test_pages_of_strangers_unload_nothing(
    admin: MemoryAdmin, path: str, prompt: dict[str, Any], headers: dict[str, str], allowed: bool
) -> None:
    for keep_alive in (0, -1):
        backend = ScriptedBackend()
        backend.converted = Converted("", tokens=[1], vectors=[struct.pack("<f", 0.5)])
        app = create_app(backend, admin, ServerConfig(cors_origins="https://chat.home.lan"))
        asked = json.dumps({"model": "demo", "keep_alive": keep_alive, "stream": False, **prompt})
        async with TestClient(TestServer(app)) as client:
            reply = await client.post(path, data=asked, headers={"Content-Type": "text/plain", **headers})
            assert reply.status == (200 if allowed else 403)
            assert bool(backend.loads or backend.unloads) == allowed
            if not allowed:
                assert "may not" in (await reply.json())["error"] or "host name" in (await reply.json())["error"]


class Resident(ScriptedBackend):
    """A backend that loads and unloads, and has a model that is not loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[str, float | None]] = []

    async def load(self, alias: str, keep_alive: float | None = None) -> None:
        self.told.append((alias, keep_alive))

    async def unload(self, alias: str) -> bool:
        self.told.append((alias, 0))
        return True

    def known(self) -> list[Any]:
        def model(alias: str, info: ModelInfo | None) -> SimpleNamespace:
            return SimpleNamespace(
                alias=alias, path=f"/m/{alias}-Q8_0.gguf", size=5, created=0, info=info, expires=None
            )

        return [model("demo", MODEL), model("other", None)]


@pytest.mark.parametrize(
    ("keep_alive", "told"),
    [
        (None, []),
        (-1, [("demo", -1.0)]),
        ("-5m", [("demo", -1.0)]),
        ("300s", [("demo", 300.0)]),
        ("1h1.5m", [("demo", 3690.0)]),
        (0, [("demo", 0)]),
    ],
)
async def test_keep_alive_reaches_the_backend(admin: MemoryAdmin, keep_alive: Any, told: Any) -> None:
    backend = Resident()
    app = create_app(backend, admin, ServerConfig())
    app[BACKEND] = backend
    async with TestClient(TestServer(app)) as client:
        assert (await client.post("/api/chat", json=body(keep_alive=keep_alive, stream=False))).status == 200
        assert backend.told == told
        backend.told.clear()
        assert (await client.post("/api/generate", json={"keep_alive": keep_alive})).status == 200
        assert backend.told == (told or [("demo", None)])
        models = (await (await client.get("/api/tags")).json())["models"]
        assert [(model["model"], model["details"]["quantization_level"]) for model in models] == [
            ("demo", "Q4_K_M"),
            ("other", "Q4_K_M"),
        ]
        assert [model["model"] for model in (await (await client.get("/api/ps")).json())["models"]] == ["demo"]


async def test_a_list_of_many_models_does_not_wait_for_all_their_files(
    admin: MemoryAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = Resident()
    app = create_app(backend, admin, ServerConfig())
    app[BACKEND] = backend
    asked: list[str] = []

    async def file_facts(alias: str) -> FileFacts:
        asked.append(alias)
        await asyncio.sleep(0.05)
        return await Resident.file_facts(backend, alias)

    monkeypatch.setattr(backend, "file_facts", file_facts)
    monkeypatch.setattr(ollama_models, "_READING", 0.04)
    async with TestClient(TestServer(app)) as client:
        models = (await (await client.get("/api/tags")).json())["models"]
    assert asked == ["demo"]
    assert [model["details"]["quantization_level"] for model in models] == ["Q4_K_M", "Q8_0"]


async def test_options(client: TestClient, backend: ScriptedBackend) -> None:
    options = {
        "num_ctx": 8192,
        "num_predict": 7,
        "stop": ["END"],
        "seed": 5,
        "temperature": 0,
        "top_k": 3,
        "repeat_last_n": -1,
        "num_gpu": 1,
        "mirostat": 0,
    }
    await client.post("/api/chat", json=body(options=options, keep_alive="300s"))
    asked = backend.asked
    assert (asked.max_tokens, asked.stop) == (7, ["END"])
    assert (asked.sampling.seed, asked.sampling.temperature, asked.sampling.top_k) == (5, 0.0, 3)
    assert asked.sampling.repeat_last_n == -1
    for count in (-1, -2, 0, None):
        await client.post("/api/chat", json=body(options={"num_predict": count}))
        assert backend.asked.max_tokens == -1


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [("json", "json_object", ""), ({"type": "object"}, "json_schema", '{"type":"object"}'), ("", None, None)],
)
async def test_format(client: TestClient, backend: ScriptedBackend, given: Any, kind: str, text: str) -> None:
    await client.post("/api/chat", json=body(format=given))
    constraint = backend.asked.constraint
    assert (constraint and constraint.kind, constraint and constraint.text) == (kind, text)


@pytest.mark.parametrize(
    ("think", "kwargs"),
    [
        (None, {}),
        (True, {"enable_thinking": True}),
        (False, {"enable_thinking": False}),
        ("high", {"enable_thinking": True, "reasoning_effort": "high"}),
    ],
)
async def test_think(client: TestClient, backend: ScriptedBackend, think: Any, kwargs: Any) -> None:
    await client.post("/api/chat", json=body(think=think))
    assert backend.asked.template_kwargs == kwargs


async def test_one_whole_call_in_a_line_with_arguments_as_an_object(
    client: TestClient, backend: ScriptedBackend
) -> None:
    backend.script = [
        Accepted("", 100),
        Delta("", "", 1, reasoning="A lamp."),
        Delta("", "", 2, calls=[CallPiece(0, '{"on":', "c1", "light")]),
        Delta("", "", 3, calls=[CallPiece(0, " true}"), CallPiece(1, '{"on": false}', "c2", "light")]),
        Finished("", "tool_calls", "", None, TIMINGS),
    ]
    found = await lines(client, "/api/chat", body(tools=[TOOL]))
    assert [line["message"].get("thinking") for line in found] == ["A lamp.", None, None, None]
    calls = [line["message"]["tool_calls"] for line in found if "tool_calls" in line["message"]]
    first, second = (
        {"id": f"c{n}", "function": {"index": n - 1, "name": "light", "arguments": {"on": on}}}
        for n, on in ((1, True), (2, False))
    )
    assert calls == [[first], [second]]
    assert found[-1]["done_reason"] == "stop"
    whole = await (await client.post("/api/chat", json=body(tools=[TOOL], stream=False))).json()
    assert whole["message"]["tool_calls"] == [first, second]
    assert whole["message"]["thinking"] == "A lamp."
    assert backend.asked.tools == [TOOL]


async def test_a_call_that_was_cut_short_is_text(client: TestClient, backend: ScriptedBackend) -> None:
    backend.script = [
        Accepted("", 100),
        Delta("", "", 1, calls=[CallPiece(0, '{"on":', "c1", "light")]),
        Finished("", "length", "", None, TIMINGS),
    ]
    call, last = await lines(client, "/api/chat", body(tools=[TOOL]))
    assert call["message"] == {"role": "assistant", "content": 'light{"on":'}
    assert "tool_calls" not in last["message"]
    assert last["done_reason"] == "length"
    backend.script.insert(1, Delta("", "I look.", 1, calls=[CallPiece(1, "{}", "c2", "light")]))
    whole = await (await client.post("/api/chat", json=body(tools=[TOOL], stream=False))).json()
    assert whole["message"]["content"] == 'I look.\nlight{"on":'
    assert [one["id"] for one in whole["message"]["tool_calls"]] == ["c2"]


async def test_results_find_their_calls(client: TestClient, backend: ScriptedBackend) -> None:
    def call(name: str, **more: Any) -> dict[str, Any]:
        return {"function": {"name": name, "arguments": {"on": True}}, **more}

    messages = [
        {"role": "user", "content": "Light, oven"},
        {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": [call("light"), call("oven")]},
        {"role": "tool", "content": "hot", "tool_name": "oven"},
        {"role": "tool", "content": "on"},
        {"role": "assistant", "tool_calls": [call("oven", id="x1")]},
        {"role": "tool", "content": "cold", "tool_call_id": "x1"},
        {"role": "tool", "content": "?"},
    ]
    assert (await client.post("/api/chat", json={"messages": messages})).status == 200
    asked = backend.asked.messages
    assert asked is not None
    ids = [[one["id"] for one in message.tool_calls or []] for message in asked]
    assert ids == [[], ["call00001", "call00002"], [], [], ["x1"], [], []]
    assert [message.tool_call_id for message in asked] == [None, None, "call00002", "call00001", None, "x1", None]
    assert (asked[1].reasoning_content, asked[2].name) == ("Hm.", "oven")


async def test_what_there_is(client: TestClient, backend: ScriptedBackend) -> None:
    assert (await (await client.get("/api/version")).json())["version"].count(".") == 2
    assert (await client.head("/api/tags")).status == 200
    [model] = (await (await client.get("/api/tags")).json())["models"]
    assert (model["name"], model["model"], model["size"]) == ("demo", "demo", 98_000_000)
    assert model["modified_at"] == "2023-11-14T22:13:20.000000Z"
    assert model["details"]["parameter_size"] == "135M"
    [running] = (await (await client.get("/api/ps")).json())["models"]
    assert (running["model"], running["context_length"]) == ("demo", 2048)
    backend.facts = replace(FACTS, template="{% if tools %}{{ tools }}{% endif %}")
    for name in ("model", "name"):
        shown = await (await client.post("/api/show", json={name: "demo:latest"})).json()
        assert shown["capabilities"] == ["completion", "tools"]
        assert shown["model_info"]["general.architecture"] == "llama"
        assert shown["model_info"]["llama.context_length"] == 2048
        assert shown["template"] == "{% if tools %}{{ tools }}{% endif %}"
        assert shown["details"]["quantization_level"] == "Q4_K_M"


async def test_to_show_a_model_loads_none(backend: ScriptedBackend, admin: MemoryAdmin, tmp_path: Path) -> None:
    model = tmp_path / "demo.gguf"
    model.write_bytes(b"GGUF")
    app = create_app(backend, admin, ServerConfig())
    app[LAST_LOADS] = loads = LastLoads(tmp_path)
    backend.paths["demo"] = str(model)
    async with TestClient(TestServer(app)) as client:

        async def shown() -> dict[str, Any]:
            reply = await client.post("/api/show", json={"model": "demo"})
            assert reply.status == 200
            return dict(await reply.json())

        loaded = await shown()
        backend.loaded = []
        read = await shown()
        assert read["model_info"].pop("llama.context_length") == FACTS.n_ctx
        assert loaded["model_info"].pop("llama.context_length") == MODEL.n_ctx
        assert read == loaded
        loads.remember(model, MODEL)
        assert (await shown())["model_info"]["llama.context_length"] == MODEL.n_ctx
        backend.facts = replace(FACTS, ctx_is_set=True)  # since it was loaded
        assert (await shown())["model_info"]["llama.context_length"] == FACTS.n_ctx
        backend.facts = replace(FACTS, only_embeds=True)
        assert (await shown())["capabilities"] == ["embedding"]
    assert (backend.conversions, backend.loads, backend.usable) == ([], [], False)


async def test_of_what_cannot_be_read_is_told_that_nothing_is_known(
    client: TestClient, backend: ScriptedBackend
) -> None:
    """Some clients ask for all models to list them, and list none if one is an error."""
    backend.facts = ModelError("/models/demo.gguf is damaged")
    loaded = await (await client.post("/api/show", json={"model": "demo"})).json()
    assert loaded["model_info"]["general.architecture"] == MODEL.arch
    backend.loaded = []
    reply = await client.post("/api/show", json={"model": "demo"})
    shown = await reply.json()
    assert (reply.status, shown["capabilities"], set(shown)) == (200, ["completion"], set(loaded))
    assert shown["model_info"] == {"general.architecture": "unknown", "general.basename": "demo"}


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("{{ messages }}", []),
        ("{% for tool in tools %}", ["tools"]),
        ("{{ '<think>' }}", ["thinking"]),
        ("{{ enable_thinking }} {{ tools | tojson }}", ["tools", "thinking"]),
    ],
)
def test_capabilities(template: str, found: list[str]) -> None:
    assert capabilities(template) == ["completion", *found]


@pytest.mark.parametrize("accept", ["*/*", "application/json, text/plain, */*"])  # the second: axios's
@pytest.mark.parametrize("method", ["get", "head"])
async def test_rule_13_the_greeting(client: TestClient, method: str, accept: str) -> None:
    reply = await client.request(method, "/", headers={"Accept": accept})
    assert reply.status == 200
    assert reply.content_type == "text/plain"
    if method == "get":
        assert await reply.text() == "Ollama is running"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("post", "/api/pull"),
        ("post", "/api/push"),
        ("post", "/api/create"),
        ("post", "/api/copy"),
        ("delete", "/api/delete"),
    ],
)
async def test_rule_13_what_is_not_supported_says_so(client: TestClient, method: str, path: str) -> None:
    reply = await client.request(method, path, json={"model": "demo"})
    assert reply.status == 400
    said = await reply.json()
    assert set(said) == {"error"}
    assert "not supported" in said["error"]


@pytest.mark.parametrize(
    ("path", "request_", "status", "word"),
    [
        ("/api/chat", body(model="other"), 404, "other"),
        ("/api/chat", body(options={"temperature": "hot"}), 400, "temperature"),
        ("/api/chat", body(format="xml"), 400, "format"),
        ("/api/chat", body(think="hard"), 400, "think"),
        ("/api/chat", body(keep_alive="soon"), 400, "keep_alive"),
        ("/api/chat", body(tools=[{}]), 400, "tools[0].function.name"),
        ("/api/chat", body(top_logprobs=2), 400, "logprobs"),
        ("/api/chat", body(logprobs=True, top_logprobs=21), 400, "top_logprobs"),
        ("/api/chat", {"messages": [{"role": "judge"}]}, 400, "judge"),
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, 400, "images"),
        ("/api/chat", [], 400, "object"),
        ("/api/generate", {"prompt": "x", "images": ["aGk="]}, 400, "images"),
        ("/api/generate", {"prompt": "x", "context": [1]}, 400, "context"),
        ("/api/generate", {"prompt": "x", "template": "y"}, 400, "template"),
        ("/api/show", {}, 400, "model"),
        ("/api/nothing", {}, 404, "/api/nothing"),
    ],
)
async def test_rule_8_errors_are_ollamas(client: TestClient, path: str, request_: Any, status: int, word: str) -> None:
    reply = await client.post(path, json=request_)
    said = await reply.json()
    assert reply.status == status
    assert set(said) == {"error"}
    assert word in said["error"]


async def test_rule_6_a_failure_in_a_stream_is_its_last_line(client: TestClient, backend: ScriptedBackend) -> None:
    backend.script[3:] = [HomeprefixdError("the worker died")]
    assert (await lines(client, "/api/chat", body()))[-1] == {"error": "the worker died"}


VECTORS = [struct.pack("<2f", 0.5, -0.5), struct.pack("<2f", 1.0, 0.0)]


async def test_embed(client: TestClient, backend: ScriptedBackend) -> None:
    backend.converted = Converted("", tokens=[2, 3], vectors=VECTORS)
    request = {"model": "demo:latest", "input": ["a", "b"], "dimensions": 2, "options": {"num_ctx": 512}}
    said = await (await client.post("/api/embed", json=request)).json()
    assert (said["model"], said["embeddings"], said["prompt_eval_count"]) == ("demo", [[0.5, -0.5], [1.0, 0.0]], 5)
    assert said["total_duration"] >= 0
    [wanted] = backend.conversions
    assert isinstance(wanted, Embed)
    assert (wanted.inputs, wanted.dimensions) == (["a", "b"], 2)
    backend.converted = Converted("", tokens=[2], vectors=VECTORS[:1])
    older = await (await client.post("/api/embeddings", json={"model": "demo", "prompt": "a"})).json()
    assert older == {"embedding": [0.5, -0.5]}


@pytest.mark.parametrize("path", ["/api/embed", "/api/embeddings"])
async def test_embedding_nothing_loads_or_unloads(client: TestClient, backend: ScriptedBackend, path: str) -> None:
    for keep_alive in ("5m", 0):
        reply = await client.post(path, json={"model": "demo", "input": [], "keep_alive": keep_alive})
        assert reply.status == 200
    assert (backend.loads, backend.unloads) == ([("demo", 300.0)], ["demo"])
    assert not backend.conversions


@pytest.mark.parametrize(("truncate", "told"), [(None, True), (True, True), (False, False)])
async def test_what_is_too_long_to_embed_loses_its_end_unless_it_must_not(
    client: TestClient, backend: ScriptedBackend, truncate: bool | None, told: bool
) -> None:
    backend.converted = Converted("", tokens=[2], vectors=VECTORS[:1])
    assert (await client.post("/api/embed", json={"input": "long", "truncate": truncate})).status == 200
    [wanted] = backend.conversions
    assert isinstance(wanted, Embed)
    assert wanted.truncate is told


@pytest.mark.parametrize(
    ("request_", "word"),
    [({"input": 3}, "input"), ({"input": "x", "dimensions": 0}, "dimensions"), ({"keep_alive": "soon"}, "keep_alive")],
)
async def test_bad_embeddings_name_the_field(client: TestClient, request_: Any, word: str) -> None:
    reply = await client.post("/api/embed", json=request_)
    assert reply.status == 400
    assert word in (await reply.json())["error"]
