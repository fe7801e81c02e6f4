"""Readers with the rules of clients that cannot be run here: Home Assistant's integrations, and Continue.

Each reads only what that client reads (`clients.md` of the working agreement says it), so that whatever else is in a
reply cannot save it.
"""

from __future__ import annotations

import json
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.serving import OPENER, Served, serve, small_config
from tests.tiny_model import make

KEY = "home-0123456789abcdef"
TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>\n{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Of a model that writes calls as Qwen and Hermes do."""

LIGHT = {
    "type": "function",
    "function": {
        "name": "HassTurnOn",
        "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
}
WRITTEN = (
    'I do. <tool_call>\n{"name": "HassTurnOn", "arguments": {"name": "lamp"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "HassTurnOn", "arguments": {"name": "fan"}}\n</tool_call>'
)
SAYS_IT = f"root ::= {json.dumps(WRITTEN)}"
"""A grammar with which any model says that, as if it had thought of it."""


@pytest.fixture(scope="module")
def house(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    base = tmp_path_factory.mktemp("readers")
    (base / "template.jinja").write_text(TEMPLATE)
    embedder = make("llama-embed", None, base / "embedder.gguf")
    config = small_config(demo_model, embedder, template=base / "template.jinja")
    with serve(base, config, KEY) as served:
        yield served


# ---------------------------------------------------------------------------------------------------- OpenAI's way


class HomeAssistant:
    """Home Assistant's `llama_cpp` integration, as a reader."""

    def __init__(self, house: Served) -> None:
        self._house = house

    def models(self) -> list[str]:
        status, said = self._house.ask("/v1/models")
        assert status == 200
        return [model["id"] for model in said["data"]]

    def check(self, model: str, stream: bool) -> None:
        """What is tried when the integration is set up."""
        body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "tools": [LIGHT]}
        if stream:
            self.converse(body)
        else:
            status, said = self._house.ask("/v1/chat/completions", body)
            assert status == 200
            assert said["choices"][0]["message"]["role"] == "assistant"

    def converse(self, body: dict[str, Any]) -> tuple[str, list[tuple[str, str, Any]]]:
        """Text and calls (id, name, arguments) of a streamed reply; leaves where it says that it is finished."""
        asked = {"user": "01JCONVERSATION", "temperature": 0, **body, "stream": True}
        text, calls, call = "", [], None
        with OPENER.open(self._house.request("/v1/chat/completions", asked), timeout=60) as reply:
            assert reply.headers["Content-Type"].startswith("text/event-stream")
            for line in reply:
                if not line.startswith(b"data: "):
                    continue
                choice = json.loads(line[6:])["choices"][0]
                if choice["finish_reason"] is not None:
                    break  # whatever its delta says is not looked at
                delta = choice["delta"]
                text += delta.get("content") or ""
                if not delta.get("tool_calls"):
                    continue
                piece = delta["tool_calls"][0]  # a second one in the same chunk would be lost
                if call is not None and piece["index"] == call["index"]:
                    call["function"]["arguments"] += piece["function"]["arguments"]
                else:
                    call = piece
                    calls.append(call)
        return text, [(one["id"], one["function"]["name"], json.loads(one["function"]["arguments"])) for one in calls]


@pytest.mark.parametrize("stream", [False, True])
def test_home_assistant_can_be_set_up(house: Served, stream: bool) -> None:
    reader = HomeAssistant(house)
    assert reader.models() == ["demo", "embedder"]
    reader.check("demo", stream)


def _begins(house: Served, word: str) -> dict[str, float]:
    """So that the reply is the one of the grammar, not a call, which the tools allow as well."""
    return {str(token): 100.0 for token in house.ask("/tokenize", {"content": word})[1]["tokens"]}


def test_home_assistant_gets_each_call_and_sends_the_results(house: Served) -> None:
    reader = HomeAssistant(house)
    said: list[dict[str, Any]] = [{"role": "user", "content": "Lamp and fan on."}]
    text, calls = reader.converse(
        {"messages": said, "tools": [LIGHT], "grammar": SAYS_IT, "logit_bias": _begins(house, "I"), "max_tokens": 80}
    )
    assert text == "I do."
    assert [(name, arguments) for _, name, arguments in calls] == [
        ("HassTurnOn", {"name": "lamp"}),
        ("HassTurnOn", {"name": "fan"}),
    ]
    made = [
        {"id": ident, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for ident, name, arguments in calls
    ]
    said.append({"role": "assistant", "content": text, "tool_calls": made})
    said += [{"role": "tool", "tool_call_id": ident, "content": '{"success": true}'} for ident, _, _ in calls]
    text, calls = reader.converse(
        {
            "messages": said,
            "tools": [LIGHT],
            "grammar": 'root ::= "Both are on."',
            "logit_bias": _begins(house, "Both"),
            "max_tokens": 20,
        }
    )
    assert (text, calls) == ("Both are on.", [])


def test_home_assistant_gets_data_of_a_form(house: Served) -> None:
    schema = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "task", "strict": True, "schema": schema}}
    body = {"messages": [{"role": "user", "content": "Is it on?"}], "response_format": form, "max_tokens": 60}
    text, _ = HomeAssistant(house).converse(body)
    assert isinstance(json.loads(text)["on"], bool)


def test_home_assistant_asks_for_the_key_again_and_shows_errors(house: Served) -> None:
    stranger = Served(house.url, house.process, house.log, "wrong")
    assert stranger.ask("/v1/models")[0] == 401
    status, said = house.ask("/v1/chat/completions", {"messages": [{"role": "judge", "content": "x"}]})
    assert status == 400
    assert "judge" in said["error"]["message"]


# ---------------------------------------------------------------------------------------------------- Ollama's way


def ollama_lines(house: Served, body: dict[str, Any]) -> list[dict[str, Any]]:
    with OPENER.open(house.request("/api/chat", body), timeout=60) as reply:
        assert reply.headers["Content-Type"].startswith("application/x-ndjson")
        return [json.loads(line) for line in reply]


def test_home_assistants_ollama_gets_whole_calls_with_objects(house: Served) -> None:
    assert "demo" in [model["model"] for model in house.ask("/api/tags")[1]["models"]]
    schema = {
        "type": "object",
        "properties": {"ok": {"const": True}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    asked: dict[str, Any] = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Lamp and fan on."}],
        "tools": [LIGHT],
        "options": {"num_ctx": 8192, "num_predict": 30},
        "keep_alive": "300s",
        "think": False,
        "stream": True,
    }
    lines = ollama_lines(house, asked)
    assert lines[-1]["done"]
    assert lines[-1]["done_reason"] in ("stop", "length")
    assert not any(line["done"] for line in lines[:-1])
    for line in lines:
        for call in line["message"].get("tool_calls", []):
            assert isinstance(call["function"]["arguments"], dict)
    formed = ollama_lines(house, {**asked, "tools": [], "format": schema, "keep_alive": -1})
    assert json.loads("".join(line["message"]["content"] for line in formed)) == {"ok": True}
    history = [
        *asked["messages"],
        {"role": "assistant", "tool_calls": [{"function": {"name": "HassTurnOn", "arguments": {"name": "lamp"}}}]},
        {"role": "tool", "content": '{"success": true}'},
    ]
    assert ollama_lines(house, {**asked, "messages": history})[-1]["prompt_eval_count"] > 20


def test_what_is_too_long_to_embed_loses_its_end(house: Served) -> None:
    asked = {"model": "embedder", "input": ["a lamp", "lamp " * 9000]}
    status, said = house.ask("/api/embed", asked)
    assert status == 200, said
    assert [len(vector) for vector in said["embeddings"]] == [64, 64]
    assert 4000 < said["prompt_eval_count"] < 4200
    status, said = house.ask("/api/embed", {**asked, "truncate": False})
    assert status == 400
    assert "at most 4096" in said["error"]


# ---------------------------------------------------------------------------------------------------- Continue


def continue_reads(house: Served, body: dict[str, Any], most: int = 1_000_000) -> Iterator[str]:
    """Continue's `llama.cpp` provider: the contents of `POST /completion`; it leaves when it has `most` of them."""
    with OPENER.open(house.request("/completion", {**body, "stream": True}), timeout=60) as reply:
        for line in reply:
            if not line.startswith(b"data:") or line.strip() == b"data: [DONE]":
                continue
            event = json.loads(line[5:])
            assert "error" not in event, event
            if event.get("content"):
                yield event["content"]
                most -= 1
                if not most:
                    return


FILE = "".join(
    f"def area_{n}(width: int, height: int) -> int:\n    return width * height + {n}\n\n\n" for n in range(12)
)


def test_continue_reads_completions(house: Served) -> None:
    body = {"prompt": f"{FILE}def half(x: int) -> int:\n", "n_predict": 16, "temperature": 0, "stop": ["\n\n"]}
    text = "".join(continue_reads(house, body))
    status, whole = house.ask("/completion", body)
    assert status == 200
    assert text == whole["content"] != ""
    assert "\n\n" not in text


def test_continue_cancels_all_the_time_and_loses_nothing(house: Served) -> None:
    prompt = f"{FILE}def twice(x: int) -> int:\n"
    body = {"prompt": prompt, "n_predict": 400, "temperature": 0, "ignore_eos": True}
    for _ in range(6):  # each key that is pressed
        assert next(continue_reads(house, body, most=1))
    began = time.monotonic()
    while any(worker["requests"] for worker in house.ask("/health")[1]["workers"]):
        assert time.monotonic() - began < 20, "requests whose clients have left still run"
        time.sleep(0.02)
    status, whole = house.ask("/completion", {**body, "n_predict": 1})
    assert status == 200
    timings = whole["timings"]
    assert timings["prompt_n"] == 1
    assert timings["cache_n"] > 200
    assert "Traceback" not in house.log.read_text()


def test_a_refusal_before_the_stream_is_no_stream(house: Served) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        OPENER.open(house.request("/completion", {"prompt": "lamp " * 3000, "stream": True}), timeout=60)
    with caught.value as reply:
        assert reply.code == 400
        assert reply.headers["Content-Type"].startswith("application/json")
        error = json.load(reply)["error"]
    assert error["type"] == "exceed_context_size_error"
    assert error["n_prompt_tokens"] > error["n_ctx"] == 2048
