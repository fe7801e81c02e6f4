"""The `openai` package, which nobody here wrote, against the real daemon with the demo model."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

ROOT = Path(__file__).parent.parent.parent
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}  # fmt: skip
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "set_light",
        "description": "Switch a light.",
        "parameters": {
            "type": "object",
            "properties": {"room": {"enum": ["kitchen", "hall"]}, "on": {"type": "boolean"}},
            "required": ["room", "on"],
            "additionalProperties": False,
        },
    },
}
ASK: Any = [{"role": "user", "content": "Switch on the light in the kitchen, please."}]


@contextlib.contextmanager
def serve(directory: Path, model: Path) -> Iterator[str]:
    """`homeprefixd serve` until the block ends; its URL."""
    command = [sys.executable, "-m", "homeprefixd", "serve", "--json", "--port", "0", "--model", str(model)]
    with (
        (directory / "log").open("w") as log,
        subprocess.Popen(
            [*command, "--cache-dir", str(directory / "cache"), "--ctx", "2048", "--parallel", "3"],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        ) as process,
    ):
        try:
            assert process.stdout is not None
            state = next((s for s in map(json.loads, process.stdout) if s["phase"] == "ready"), None)
            assert state is not None, (directory / "log").read_text()
            yield state["url"]
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()
    assert "Traceback" not in (directory / "log").read_text()


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Iterator[openai.OpenAI]:
    with (
        serve(tmp_path_factory.mktemp("openai"), demo_model) as url,
        httpx.Client(trust_env=False) as http,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", http_client=http, timeout=60, max_retries=3) as made,
    ):
        yield made


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def test_a_chat_and_a_stream_say_the_same(client: openai.OpenAI, model: str) -> None:
    whole = client.chat.completions.create(model=model, messages=ASK, max_tokens=12, temperature=0)
    text = whole.choices[0].message.content
    assert text
    assert whole.usage is not None
    chunks = list(
        client.chat.completions.create(
            model=model, messages=ASK, max_tokens=12, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    details = chunks[-1].usage.prompt_tokens_details
    assert details is not None
    assert details.cached_tokens is not None


def test_json_by_a_schema(client: openai.OpenAI, model: str) -> None:
    reply = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Invent a person."}],
        max_tokens=80,
        seed=1,
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}},
    )
    person = json.loads(reply.choices[0].message.content or "")
    assert set(person) == {"name", "age"}
    assert 1 <= person["age"] <= 99


def test_a_call_that_must_be_made(client: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = {
        "model": model,
        "messages": ASK,
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 80,
        "seed": 1,
    }
    (choice,) = client.chat.completions.create(**asked).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "set_light"
    assert json.loads(call.function.arguments)["room"] in ("kitchen", "hall")
    # The result goes back, and an answer comes.
    history = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "done"},
    ]
    answer = client.chat.completions.create(model=model, messages=history, tools=[TOOL], max_tokens=2)
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")


def test_a_named_call_in_a_stream(client: openai.OpenAI, model: str) -> None:
    with client.chat.completions.stream(  # the package's own way to put a stream together
        model=model,
        messages=ASK,
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "set_light"}},
        max_tokens=80,
        seed=1,
    ) as stream:
        (choice,) = stream.get_final_completion().choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or []
    assert call.id
    assert set(json.loads(call.function.arguments)) == {"room", "on"}


def test_several_choices_with_logprobs(client: openai.OpenAI, model: str) -> None:
    reply = client.chat.completions.create(
        model=model, messages=ASK, max_tokens=4, n=3, seed=5, logprobs=True, top_logprobs=2
    )
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    for choice in reply.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content
        assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)
        assert b"".join(bytes(token.bytes or []) for token in choice.logprobs.content).decode(errors="replace") == (
            choice.message.content
        )


def test_completions(client: openai.OpenAI, model: str) -> None:
    reply = client.completions.create(
        model=model, prompt=["One, two,", "Red, green,"], max_tokens=4, temperature=0, echo=True
    )
    assert [choice.text.split(",")[0] for choice in reply.choices] == ["One", "Red"]
    scored = client.completions.create(model=model, prompt="One, two,", max_tokens=3, temperature=0, logprobs=2)
    logprobs = scored.choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == scored.choices[0].text
    assert reply.choices[0].text.startswith(f"One, two,{scored.choices[0].text}")
    stream = client.completions.create(model=model, prompt="One, two,", max_tokens=3, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == scored.choices[0].text


@pytest.mark.parametrize(
    ("asked", "word"),
    [
        ({"extra_body": {"grammar": "root ::= " + "(" * 20_000}}, "nested"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}}, "`not`"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "other"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_what_cannot_be_done_is_a_clear_400(
    client: openai.OpenAI, model: str, asked: dict[str, Any], word: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError, match=word):
        client.chat.completions.create(model=model, messages=ASK, max_tokens=4, stream=stream, **asked)
    assert client.completions.create(model=model, prompt="x", max_tokens=1).choices  # the worker lives
