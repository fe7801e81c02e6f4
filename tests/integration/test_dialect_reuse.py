"""Reuse is told in every dialect, is what was skipped, and what one dialect has computed serves all others.

What was skipped is known without asking for it: prompts are reused down to the token, so it is as many tokens as the
prompt shares with the one before. Those are counted by /tokenize.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from homeprefixd.bench.household import household_messages
from tests.integration.serving import OPENER, Served, serve, small_config

Told = tuple[int, int]
"""Tokens of the prompt, and how many of them were reused, as a reply tells it."""


@pytest.fixture(scope="module")
def house(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    config = small_config(demo_model)
    with serve(tmp_path_factory.mktemp("reuse"), config) as served:
        yield served


class Prompt:
    """One conversation: the house's rules, and a question."""

    def __init__(self, house: Served, topic: str, question: str) -> None:
        system, user = household_messages(question, size=200)
        self.system, self.question = f"{topic}: {system['content']}", str(user["content"])
        self.messages = [{"role": "system", "content": self.system}, {"role": "user", "content": self.question}]
        self._house = house

    def text(self) -> str:
        """As the template renders it."""
        return str(self._house.ask("/apply-template", {"messages": self.messages})[1]["prompt"])

    def tokens(self) -> list[int]:
        asked = {"content": self.text(), "parse_special": True}
        return list(self._house.ask("/tokenize", asked)[1]["tokens"])


def whole(house: Served, path: str, body: dict[str, Any]) -> Any:
    status, said = house.ask(path, body)
    assert status == 200, said
    return said


def events(house: Served, path: str, body: dict[str, Any]) -> list[Any]:
    """Of a stream: the data of its events, or its lines."""
    with OPENER.open(house.request(path, body), timeout=60) as reply:
        lines = [line.removeprefix(b"data: ") for line in reply if line.startswith((b"data: {", b"{"))]
    return [json.loads(line) for line in lines]


def of_usage(usage: dict[str, Any]) -> Told:
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def of_timings(said: dict[str, Any]) -> Told:
    timings = said["timings"]
    return timings["prompt_n"] + timings["cache_n"], timings["cache_n"]


def of_input(usage: dict[str, Any]) -> Told:
    return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]


def of_anthropic(usage: dict[str, Any]) -> Told:
    read = usage["cache_read_input_tokens"]
    return usage["input_tokens"] + read + usage["cache_creation_input_tokens"], read


def of_ollama(line: dict[str, Any]) -> Told:
    return line["prompt_eval_count"], line["prompt_cached_count"]


FEW: dict[str, Any] = {"max_tokens": 2, "temperature": 0}
FEW_OLLAMA: dict[str, Any] = {"options": {"num_predict": 2, "temperature": 0}}


def chat(house: Served, prompt: Prompt) -> Told:
    return of_usage(whole(house, "/v1/chat/completions", {"messages": prompt.messages, **FEW})["usage"])


def chat_stream(house: Served, prompt: Prompt) -> Told:
    body = {"messages": prompt.messages, **FEW, "stream": True, "stream_options": {"include_usage": True}}
    told = [event for event in events(house, "/v1/chat/completions", body) if event.get("usage")]
    assert of_timings(told[0]) == of_usage(told[0]["usage"])
    return of_usage(told[0]["usage"])


def chat_of_llama_server(house: Served, prompt: Prompt) -> Told:
    return of_timings(whole(house, "/chat/completions", {"messages": prompt.messages, **FEW}))


def responses(house: Served, prompt: Prompt) -> Told:
    body = {"instructions": prompt.system, "input": prompt.question, "max_output_tokens": 2, "temperature": 0}
    return of_input(whole(house, "/v1/responses", body)["usage"])


def responses_stream(house: Served, prompt: Prompt) -> Told:
    body = {"instructions": prompt.system, "input": prompt.question, "max_output_tokens": 2, "stream": True}
    return of_input(events(house, "/v1/responses", body)[-1]["response"]["usage"])


def anthropic_body(prompt: Prompt) -> dict[str, Any]:
    return {"model": "demo", "system": prompt.system, "messages": prompt.messages[1:], **FEW}


def anthropic(house: Served, prompt: Prompt) -> Told:
    return of_anthropic(whole(house, "/v1/messages", anthropic_body(prompt))["usage"])


def anthropic_stream(house: Served, prompt: Prompt) -> Told:
    found = events(house, "/v1/messages", {**anthropic_body(prompt), "stream": True})
    return of_anthropic(next(event["usage"] for event in found if event["type"] == "message_delta"))


def ollama_chat(house: Served, prompt: Prompt) -> Told:
    return of_ollama(whole(house, "/api/chat", {"messages": prompt.messages, "stream": False, **FEW_OLLAMA}))


def ollama_chat_lines(house: Served, prompt: Prompt) -> Told:
    return of_ollama(events(house, "/api/chat", {"messages": prompt.messages, **FEW_OLLAMA})[-1])


def ollama_generate(house: Served, prompt: Prompt) -> Told:
    body = {"system": prompt.system, "prompt": prompt.question, "stream": False, **FEW_OLLAMA}
    return of_ollama(whole(house, "/api/generate", body))


def completions(house: Served, prompt: Prompt) -> Told:
    return of_usage(whole(house, "/v1/completions", {"prompt": prompt.text(), **FEW})["usage"])


def completions_of_tokens(house: Served, prompt: Prompt) -> Told:
    return of_usage(whole(house, "/v1/completions", {"prompt": prompt.tokens(), **FEW})["usage"])


def completion(house: Served, prompt: Prompt) -> Told:
    return of_timings(whole(house, "/completion", {"prompt": prompt.text(), **FEW}))


def completion_stream(house: Served, prompt: Prompt) -> Told:
    return of_timings(events(house, "/completion", {"prompt": prompt.text(), **FEW, "stream": True})[-1])


DIALECTS: list[Callable[[Served, Prompt], Told]] = [
    chat,
    chat_stream,
    chat_of_llama_server,
    responses,
    responses_stream,
    anthropic,
    anthropic_stream,
    ollama_chat,
    ollama_chat_lines,
    ollama_generate,
    completions,
    completions_of_tokens,
    completion,
    completion_stream,
]


def shared(a: list[int], b: list[int]) -> int:
    """How many tokens both begin with."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


@pytest.mark.parametrize("number", range(len(DIALECTS)), ids=[dialect.__name__ for dialect in DIALECTS])
def test_rule_10_reuse_is_told_and_is_what_was_skipped(house: Served, number: int) -> None:
    before, dialect = DIALECTS[number - 1], DIALECTS[number]
    first = Prompt(house, f"House {number}", "How warm is it in the attic?")
    other = Prompt(house, f"House {number}", "Which windows are open?")
    tokens, others = first.tokens(), other.tokens()
    common = shared(tokens, others)
    assert len(tokens) > 200
    assert 0 < common < len(others) - 1
    length, cold = before(house, first)
    assert length == len(tokens)
    assert cold < 20, "each topic is a new prompt"  # but for what all of the template's prompts begin with
    assert dialect(house, other) == (len(others), common)
    assert dialect(house, first) == (len(tokens), len(tokens) - 1)  # the last token is always computed
