"""Programs that nobody here wrote, one for each dialect, against one daemon with the demo model and API keys."""

from __future__ import annotations

import json
import os
import shutil
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anthropic
import ollama
import openai
import pytest

from homeprefixd.bench.household import household_messages
from homeprefixd.bench.server import Server, free_port, homeprefixd

MAIN, GUEST = "main-0123456789abcdef", "guest-0123456789abcde"
KEYS = f"""
[[key]]
name = "main"
key = "{MAIN}"
admin = true

[[key]]
name = "guest"
key = "{GUEST}"
namespace = "own"
"""
MODEL = "smollm2-135m-instruct"
LIGHT = {"type": "object", "properties": {"room": {"enum": ["attic", "cellar"]}}, "required": ["room"]}


class House:
    """The daemon, and a client of each kind with a key."""

    def __init__(self, server: Server, ollama_port: int) -> None:
        self.server = server
        self.ollama_url = f"http://127.0.0.1:{ollama_port}"

    def anthropic(self, key: str = MAIN) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.server.url, api_key=key, max_retries=0, timeout=120)

    def openai(self, key: str = MAIN) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.server.url}/v1", api_key=key, max_retries=0, timeout=120)

    def ollama(self, key: str = MAIN) -> ollama.Client:
        return ollama.Client(self.ollama_url, headers={"Authorization": f"Bearer {key}"}, timeout=120)


@pytest.fixture(scope="module")
def house(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    base = tmp_path_factory.mktemp("dialects")
    keys = base / "keys.toml"
    keys.write_text(KEYS)
    port = free_port()
    env = {
        "HOMEPREFIXD_SERVER_KEYS_FILE": str(keys),
        "HOMEPREFIXD_SERVER_OLLAMA_PORT": str(port),
        "HOMEPREFIXD_CACHE_WARM": "1GiB",
    }
    flags = ["--model", str(demo_model), "--alias", MODEL, "--ctx", "4096", "--threads", "2", "--hot", "256MiB"]
    with homeprefixd(base / "cache", *flags, env=env) as server:
        yield House(server, port)


def household(question: str) -> tuple[str, str]:
    """A system prompt of some hundred tokens, and the question."""
    system, user = household_messages(question, size=250)
    return str(system["content"]), str(user["content"])


# ---------------------------------------------------------------------------------------------------- anthropic


def test_anthropic_streams_what_it_would_say_at_once(house: House) -> None:
    system, question = household("Is the garden gate shut?")
    with house.anthropic() as client:
        request: dict[str, Any] = {
            "model": MODEL,
            "max_tokens": 16,
            "system": [{"type": "text", "text": system, "cache_control": {"type": "ephemeral"}}],
            "messages": [{"role": "user", "content": question}],
        }
        counted = client.messages.count_tokens(**{k: request[k] for k in ("model", "system", "messages")})
        request["extra_body"] = {"temperature": 0}  # the newest models of Anthropic's own take none
        first = client.messages.create(**request)
        with client.messages.stream(**request) as stream:
            pieces = list(stream.text_stream)
            last = stream.get_final_message()
    assert "".join(pieces) == last.content[0].text == first.content[0].text != ""
    assert (last.role, last.model, last.stop_reason) == ("assistant", MODEL, first.stop_reason)
    for message in (first, last):
        usage = message.usage
        assert usage.cache_read_input_tokens is not None
        assert usage.input_tokens + usage.cache_read_input_tokens == counted.input_tokens > 200
        assert 0 < usage.output_tokens <= 16
    assert (last.usage.cache_read_input_tokens, last.usage.input_tokens) == (counted.input_tokens - 1, 1)


def test_claude_codes_nonce_loses_nothing(house: House) -> None:
    system, question = household("Which windows are open?")
    seen = []
    with house.anthropic() as client:
        for nonce in ("00f3a", "7b21c"):
            line = f"x-anthropic-billing-header: cc_version=2.1; cch={nonce};"
            message = client.messages.create(
                model=MODEL,
                max_tokens=4,
                system=[{"type": "text", "text": line}, {"type": "text", "text": system}],
                messages=[{"role": "user", "content": question}],
                extra_headers={"anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14"},
                extra_query={"beta": "true"},
                extra_body={"temperature": 0},
            )
            seen.append(message.usage)
    assert seen[1].input_tokens == 1
    assert seen[1].cache_read_input_tokens == seen[0].input_tokens + (seen[0].cache_read_input_tokens or 0) - 1


def test_anthropic_reads_our_errors(house: House) -> None:
    hello: Any = [{"role": "user", "content": "Hello"}]
    with house.anthropic() as client:
        with pytest.raises(anthropic.NotFoundError, match="no model 'claude'"):
            client.messages.create(model="claude", max_tokens=4, messages=hello)
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 4096 maximum"):
            client.messages.create(model=MODEL, max_tokens=4, messages=[{"role": "user", "content": "lamp " * 6000}])
    with house.anthropic("wrong") as client, pytest.raises(anthropic.AuthenticationError, match="API key"):
        client.messages.create(model=MODEL, max_tokens=4, messages=hello)


# ---------------------------------------------------------------------------------------------------- ollama


def test_ollama_lists_shows_loads_and_answers(house: House) -> None:
    with house.ollama() as client:
        [model] = client.list().models
        assert model.model == MODEL
        assert model.details is not None
        assert model.details.family == "llama"
        shown = client.show(MODEL)
        assert shown.capabilities == ["completion"]
        assert shown.modelinfo is not None
        assert shown.modelinfo["llama.context_length"] == 4096
        assert [one.model for one in client.ps().models] == [MODEL]
        assert client.generate(MODEL, keep_alive="5m").done_reason == "load"
        assert client.chat(MODEL, messages=[], keep_alive=0).done_reason == "unload"
        options = {"temperature": 0, "num_predict": 8, "num_ctx": 2048}
        hello = [{"role": "user", "content": "Say hello."}]
        whole = client.chat(f"{MODEL}:latest", messages=hello, options=options, keep_alive=-1)
        parts = list(client.chat(MODEL, messages=hello, options=options, stream=True))
        assert "".join(part.message.content or "" for part in parts) == whole.message.content != ""
        assert parts[-1].done
        assert parts[-1].done_reason == whole.done_reason
        assert parts[-1].prompt_eval_count == whole.prompt_eval_count
        assert whole.eval_count is not None
        assert 0 < whole.eval_count <= 8
        assert parts[-1].total_duration is not None
        assert parts[-1].total_duration > 1000
        text = client.generate(MODEL, prompt="Say hello.", options=options)
        assert text.response == whole.message.content


def test_ollama_embeds(house: House) -> None:
    with house.ollama() as client:
        found = client.embed(MODEL, ["a lamp", "a garden"], dimensions=64)
        assert [len(vector) for vector in found.embeddings] == [64, 64]
        assert all(abs(sum(x * x for x in vector) - 1) < 1e-3 for vector in found.embeddings)
        assert found.prompt_eval_count == 4
        older = client.embeddings(MODEL, "a lamp").embedding
        assert older[0] / older[1] == pytest.approx(found.embeddings[0][0] / found.embeddings[0][1], rel=1e-3)


def test_a_changed_num_ctx_loses_nothing(house: House) -> None:
    system, question = household("Who is at home?")
    seen = []
    for size in (2048, 4096):
        body = {
            "model": MODEL,
            "messages": [{"role": "system", "content": system}, {"role": "user", "content": question}],
            "options": {"temperature": 0, "num_predict": 2, "num_ctx": size},
            "stream": False,
        }
        seen.append(post(house.ollama_url, "/api/chat", body))
    assert seen[1]["prompt_cached_count"] == seen[1]["prompt_eval_count"] - 1


def test_ollama_reads_our_errors(house: House) -> None:
    with house.ollama() as client:
        with pytest.raises(ollama.ResponseError, match="no model 'llama3'") as caught:
            client.chat("llama3", messages=[{"role": "user", "content": "x"}])
        assert caught.value.status_code == 404
        for call in (lambda: client.pull("x"), lambda: client.delete("x")):
            with pytest.raises(ollama.ResponseError, match="not supported"):
                call()
    with house.ollama("wrong") as client, pytest.raises(ollama.ResponseError, match="API key"):
        client.list()


# ---------------------------------------------------------------------------------------------------- responses


def test_responses_stream_and_go_on_from_earlier_items(house: House) -> None:
    system, question = household("Is the oven on?")
    with house.openai() as client:
        request: dict[str, Any] = {"model": MODEL, "instructions": system, "temperature": 0, "max_output_tokens": 12}
        first = client.responses.create(input=question, **request)
        assert first.status in ("completed", "incomplete")
        with client.responses.stream(input=question, **request) as stream:
            kinds = [event.type for event in stream]
            last = stream.get_final_response() if "response.completed" in kinds else None
        assert kinds[:4] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
        ]
        assert kinds[-4:-1] == ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
        if last is not None:
            assert last.output_text == first.output_text
        items: Any = [{"role": "user", "content": question}, *(item.to_dict() for item in first.output)]
        items.append({"role": "user", "content": "And the lamp?"})
        second = client.responses.create(input=items, **request)
        assert first.usage is not None
        assert second.usage is not None
        assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens - 1
        assert second.output_text
        with pytest.raises(openai.BadRequestError, match="earlier items"):
            client.responses.create(input="x", previous_response_id=first.id, **request)


def test_functions_in_namespaces(house: House) -> None:
    """As Codex has them: one for each MCP server."""
    parameters = {"type": "object", "properties": {"path": {"type": "string", "maxLength": 8}}, "required": ["path"]}
    inner: Any = {"type": "function", "name": "read", "parameters": parameters, "strict": True}
    tools: Any = [{"type": "namespace", "name": "mcp__files__", "description": "Files", "tools": [inner]}]
    request: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 200, "tools": tools}
    with house.openai() as client:
        choice: Any = {"type": "function", "namespace": "mcp__files__", "name": "read"}
        request["parallel_tool_calls"] = False
        first = client.responses.create(input="Read a.txt", tool_choice=choice, **request)
        call = first.output[-1]
        assert call.type == "function_call", first.output
        assert (call.namespace, call.name) == ("mcp__files__", "read")
        items: Any = [{"role": "user", "content": "Read a.txt"}, *(item.to_dict() for item in first.output)]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "empty"})
        with client.responses.stream(input=items, **request) as stream:
            last = list(stream)[-1]
        assert last.type in ("response.completed", "response.incomplete")
        assert last.response.usage is not None
        assert first.usage is not None
        assert last.response.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens - 1


# ---------------------------------------------------------------------------------------------------- forms

ASK: Any = [{"role": "user", "content": "Switch on the light in the attic."}]
VERDICT = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
constrained = pytest.mark.skipif(
    find_spec("homeprefixd.engine.constraint") is None, reason="this engine constrains no replies"
)


@constrained
def test_anthropics_tools_and_schemas(house: House) -> None:
    tools: Any = [{"name": "light", "description": "Switch a light", "input_schema": LIGHT}]
    with house.anthropic() as client:
        request: dict[str, Any] = {"model": MODEL, "max_tokens": 100, "messages": ASK, "tools": tools}
        request |= {"tool_choice": {"type": "tool", "name": "light"}, "extra_body": {"temperature": 0}}
        first = client.messages.create(**request)
        with client.messages.stream(**request) as stream:
            last = stream.get_final_message()
        for message in (first, last):
            assert message.stop_reason == "tool_use"
            [call] = [block for block in message.content if block.type == "tool_use"]
            assert (call.name, set(call.input)) == ("light", {"room"})
            assert call.id
        result = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": "done"}
        said = [*ASK, {"role": "assistant", "content": [block.to_dict() for block in first.content]}]
        after = client.messages.create(
            model=MODEL, max_tokens=4, messages=[*said, {"role": "user", "content": [result]}], tools=tools
        )
        assert (after.usage.cache_read_input_tokens or 0) > 20
        schema: Any = {"format": {"type": "json_schema", "schema": VERDICT}}
        told = client.messages.create(model=MODEL, max_tokens=60, messages=ASK, output_config=schema)
        assert set(json.loads(told.content[0].text)) == {"ok"}


@constrained
def test_a_call_that_breaks_off_is_carried_out_by_nobody(house: House) -> None:
    """A stop string stands within the arguments: the SDKs make `{}` of what came of them."""
    note: Any = {"type": "object", "properties": {"room": {"type": "string", "minLength": 200}}, "required": ["room"]}
    asked: Any = [{"role": "user", "content": "Light the attic."}]
    tool: Any = {"name": "light", "description": "Switch a light.", "input_schema": note}
    choice: Any = {"type": "any"}
    request: Any = {"model": MODEL, "max_tokens": 80, "messages": asked, "tools": [tool], "tool_choice": choice}
    with house.anthropic() as client:
        for ending, more in (("stop_sequence", {"stop_sequences": ['room"']}), ("max_tokens", {"max_tokens": 24})):
            with client.messages.stream(**{**request, **more}) as stream:
                streamed = stream.get_final_message()
            for message in (client.messages.create(**{**request, **more}), streamed):
                assert message.stop_reason == ending
                assert {block.type for block in message.content} == {"text"}
    function: Any = {"type": "function", "function": {"name": "light", "parameters": note}}
    chat: Any = {"model": MODEL, "messages": asked, "tools": [function], "tool_choice": "required", "stop": 'room"'}
    with house.openai() as client:
        said = client.chat.completions.create(**chat).choices[0]
        assert (said.finish_reason, said.message.tool_calls) == ("stop", None)
        assert (said.message.content or "").startswith('{"name": "light", "arguments": {')
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**chat, stream=True)]
        assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["stop"]
        assert any(chunk.delta.tool_calls for chunk in chunks)
        with client.responses.stream(
            model=MODEL,
            input="Light the attic.",
            max_output_tokens=24,
            tools=[{"type": "function", "name": "light", "parameters": note, "strict": False}],
            tool_choice="required",
        ) as events:
            ends = [event.item for event in events if event.type == "response.output_item.done"]
        assert [item.to_dict()["status"] for item in ends] == ["incomplete"]


@constrained
def test_ollamas_format(house: House) -> None:
    with house.ollama() as client:
        options = {"temperature": 0, "num_predict": 60}
        whole = client.chat(MODEL, messages=ASK, format=VERDICT, options=options).message.content
        parts = client.chat(MODEL, messages=ASK, format=VERDICT, options=options, stream=True)
        for text in (whole, "".join(part.message.content or "" for part in parts)):
            assert set(json.loads(text or "")) == {"ok"}


@constrained
def test_responses_tools_and_schemas(house: House) -> None:
    tools: Any = [{"type": "function", "name": "light", "parameters": LIGHT, "strict": True}]
    with house.openai() as client:
        request: dict[str, Any] = {"model": MODEL, "input": ASK, "temperature": 0, "max_output_tokens": 100}
        with client.responses.stream(**request, tools=tools, tool_choice="required") as stream:
            [call] = [item for item in stream.get_final_response().output if item.type == "function_call"]
        assert (call.name, set(json.loads(call.arguments))) == ("light", {"room"})
        schema: Any = {"format": {"type": "json_schema", "name": "verdict", "schema": VERDICT, "strict": True}}
        assert set(json.loads(client.responses.create(**request, text=schema).output_text)) == {"ok"}


# ---------------------------------------------------------------------------------------------------- evaluation


def test_an_evaluation_harness_reads_the_prompts_logprobs(house: House) -> None:
    """As lm-evaluation-harness' `local-completions` asks and reads: token ids of a context and of what goes on."""
    context = "These are facts about the capitals of countries. " * 12 + "The capital of France is"

    def tokens(text: str) -> list[int]:
        found: list[int] = post(house.server.url, "/tokenize", {"content": text})["tokens"]
        return found

    begin = tokens(context)
    assert 100 < len(begin) < 150
    answers = [tokens(text) for text in (" Paris", " cauliflower", " made")]
    request: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
    with house.openai() as client:
        reply = client.completions.create(**request, prompt=[begin + answer for answer in answers], echo=True)
        scores = []
        for answer, choice in zip(answers, sorted(reply.choices, key=lambda choice: choice.index), strict=True):
            logprobs: Any = choice.logprobs
            assert logprobs.token_logprobs[0] is None
            assert len(logprobs.token_logprobs) == len(logprobs.tokens) == len(begin + answer) + 1
            told = logprobs.token_logprobs[len(begin) : -1]
            greedy = all(
                max(top.values()) == one for one, top in zip(told, logprobs.top_logprobs[len(begin) : -1], strict=True)
            )
            assert len(told) == len(answer)
            assert max(logprobs.text_offset) <= len(choice.text)
            assert choice.text.startswith(context)
            scores.append((sum(told), greedy))
        assert max(scores)[0] == scores[0][0]  # it knows that much
        # What was generated, sent back as a prompt, is as probable as it was.
        plain = client.completions.create(**{**request, "max_tokens": 4}, prompt=begin)
        said: Any = plain.choices[0].logprobs
        again = client.completions.create(
            **{**request, "max_tokens": 0}, prompt=begin + tokens(plain.choices[0].text), echo=True
        )
        heard: Any = again.choices[0].logprobs
        assert heard.tokens[-4:] == said.tokens
        assert heard.token_logprobs[-4:] == pytest.approx(said.token_logprobs, abs=0.1)
        assert len(heard.tokens) == len(begin) + 4
        stream = client.completions.create(**request, prompt=begin + answers[0], echo=True, stream=True)
        chunks = [chunk.choices[0] for chunk in stream if chunk.choices]
    first: Any = chunks[0].logprobs
    assert first.token_logprobs[0] is None
    assert sum(first.token_logprobs[len(begin) :]) == pytest.approx(scores[0][0], abs=0.1)
    assert plain.usage is not None
    assert again.usage is not None
    assert plain.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details is not None
    assert (plain.usage.prompt_tokens_details.cached_tokens or 0) > 64
    assert again.usage.prompt_tokens_details.cached_tokens == 0
    assert get(house, f"/cache/explain/{again.id}")["explanation"]["cause"] == "prompt_logprobs"
    status, refusal = ask(house, {**request, "logprobs": 20, "echo": True, "prompt": [begin * 2] * 64})
    assert (status, refusal["error"]["param"]) == (400, "logprobs")
    assert "may be told for each reply" in refusal["error"]["message"]


def get(house: House, path: str) -> Any:
    request = urllib.request.Request(house.server.url + path, headers={"Authorization": f"Bearer {MAIN}"})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as reply:
        return json.load(reply)


def ask(house: House, body: dict[str, Any]) -> tuple[int, Any]:
    try:
        return 200, post(house.server.url, "/v1/completions", body)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


# ---------------------------------------------------------------------------------------------------- all


def post(url: str, path: str, body: Any, key: str = MAIN) -> Any:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{url}{path}", json.dumps(body).encode(), headers)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=120) as reply:
        return json.load(reply)


def replies(house: House, question: str) -> dict[str, tuple[str, int, int]]:
    """In each dialect: the text, the tokens of the prompt, and how many of them were reused."""
    system, user = household(question)
    url = house.server.url
    said = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    mine = {"model": MODEL, "temperature": 0}
    chat = post(url, "/v1/chat/completions", {**mine, "messages": said, "max_tokens": 6})
    message = post(url, "/v1/messages", {**mine, "system": system, "messages": said[1:], "max_tokens": 6})
    options = {"temperature": 0, "num_predict": 6}
    line = post(url, "/api/chat", {"messages": said, "options": options, "stream": False})
    items = {**mine, "instructions": system, "input": user, "max_output_tokens": 6}
    response = post(url, "/v1/responses", items)
    usage = message["usage"]
    read = usage["cache_read_input_tokens"]
    return {
        "openai": (
            chat["choices"][0]["message"]["content"],
            chat["usage"]["prompt_tokens"],
            chat["usage"]["prompt_tokens_details"]["cached_tokens"],
        ),
        "anthropic": (message["content"][0]["text"], usage["input_tokens"] + read, read),
        "ollama": (line["message"]["content"], line["prompt_eval_count"], line["prompt_cached_count"]),
        "responses": (
            response["output"][0]["content"][0]["text"],
            response["usage"]["input_tokens"],
            response["usage"]["input_tokens_details"]["cached_tokens"],
        ),
    }


def test_rule_10_one_prompt_in_four_dialects_is_computed_once(house: House) -> None:
    found = replies(house, "How warm is it in the attic?")
    texts, lengths, _reused = zip(*found.values(), strict=True)
    assert len(set(lengths)) == 1
    assert len(set(texts)) == 1
    for dialect in ("anthropic", "ollama", "responses"):
        assert found[dialect][2] == lengths[0] - 1, found


def test_a_namespace_of_ones_own_shares_with_nobody_but_oneself(house: House) -> None:
    system, question = household("Is the cellar dry?")
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 6}
    said = [post(house.server.url, "/v1/chat/completions", body, key) for key in (MAIN, GUEST, GUEST, MAIN)]
    lengths = {one["usage"]["prompt_tokens"] for one in said}
    reused = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in said]
    assert len(lengths) == 1
    assert reused[1:] == [0, lengths.pop() - 1, reused[2]]
    assert len({one["choices"][0]["message"]["content"] for one in said}) == 1


def test_the_description_is_served(house: House) -> None:
    assert "/v1/messages" in house.server.get("/openapi.json")["paths"]


# ---------------------------------------------------------------------------------------------------- safety


def serve(tmp_path: Path, *flags: str, **settings: str) -> Server:
    """A daemon without a model, which starts at once."""
    env = {f"HOMEPREFIXD_SERVER_{name.upper()}": value for name, value in settings.items()}
    return homeprefixd(tmp_path / "cache", "--model", "none", *flags, env=env)


@pytest.mark.parametrize(
    ("settings", "status"),
    [({}, 2), ({"ALLOW_OPEN": "yes"}, None), ({"KEYS_FILE": "keys"}, None), ({"KEYS_FILE": "empty"}, 2)],
)
def test_beyond_this_machine_only_with_keys(tmp_path: Path, settings: dict[str, str], status: int | None) -> None:
    (tmp_path / "keys").write_text(KEYS)
    (tmp_path / "empty").write_text("")
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    for name, value in settings.items():
        env[f"HOMEPREFIXD_SERVER_{name}"] = str(tmp_path / value) if name == "KEYS_FILE" else value
    argv = [
        sys.executable,
        "-m",
        "homeprefixd",
        "serve",
        "--model",
        "none",
        "--host",
        "0.0.0.0",
        "--port",
        "0",
        "--json",
    ]
    with subprocess.Popen(
        [*argv, "--json"], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        phases = []
        for line in process.stdout:
            phases.append(json.loads(line)["phase"])
            if phases[-1] == "ready":
                process.terminate()
        words = process.stderr.read() if process.stderr is not None else ""
    if status is None:
        assert "ready" in phases
        assert process.returncode == 0
    else:
        assert process.returncode == status
        assert "keys_file" in words
        assert "Traceback" not in words


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_tls_and_keys_and_the_commands(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    subprocess.run([*command, "-subj", "/CN=nas", "-keyout", key, "-out", cert], check=True, capture_output=True)
    (tmp_path / "keys").write_text(KEYS)
    (tmp_path / "main.key").write_text(f"{MAIN}\n")
    server = serve(tmp_path, tls_cert=str(cert), tls_key=str(key), keys_file=str(tmp_path / "keys"))
    context = ssl.create_default_context(cafile=str(cert))
    context.check_hostname = False
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    server.url = server.url.replace("http:", "https:")
    server._open = opener.open

    def stats(*flags: str, **env: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "homeprefixd", "stats", "--cache-dir", str(tmp_path / "cache"), "--json", *flags]
        return subprocess.run(argv, capture_output=True, text=True, timeout=60, env={**os.environ, **env}, check=False)

    with server:
        assert server.get("/health")["status"] == "no model"
        entry = json.loads((tmp_path / "cache" / "daemon.json").read_text())
        assert entry["url"] == server.url
        without = stats()
        assert without.returncode == 1
        assert "HOMEPREFIXD_API_KEY" in without.stderr
        assert "Traceback" not in without.stderr
        assert "admin" in stats(HOMEPREFIXD_API_KEY=GUEST).stderr
        for done in (stats(HOMEPREFIXD_API_KEY=MAIN), stats("--api-key-file", str(tmp_path / "main.key"))):
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout)["daemon"]["state"] == "no model"
