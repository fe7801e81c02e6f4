"""A chat's next turn reuses the reply to its last token, whatever the tokenizer makes of its text, over a restart."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from homeprefixd.bench.server import Server, homeprefixd

FLAGS = ["--ctx", "8192", "--threads", "2"]
KEPT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if loop.first and tools %}{{ tools | tojson }}\n{% endif %}"
    "{% if m.role == 'assistant' %}<think>\n{{ m.reasoning_content }}"
    "</think>{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments }}}\n</tool_call>{% endfor %}<|im_end|>\n'
    "{% endfor %}{{ '<|im_start|>assistant\n<think>\n' }}"
)
"""Keeps thoughts, and writes calls as the model did."""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_state",
            "description": "The state of a device.",
            "parameters": {
                "type": "object",
                "properties": {"device": {"type": "string", "maxLength": 12}},
                "required": ["device"],
                "additionalProperties": False,
            },
            "strict": True,
        },
    }
]
ANSWER = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "schema": {
            "type": "object",
            "properties": {"say": {"type": "string", "maxLength": 16}, "sure": {"type": "boolean"}},
            "required": ["say", "sure"],
            "additionalProperties": False,
        },
    },
}

CALL = {"tool_choice": "required", "parallel_tool_calls": False}
SAY = {"response_format": ANSWER, "tool_choice": "none"}


def serve(folder: Path, model: Path, **env: str) -> Server:
    file = folder / "template.jinja"
    file.write_text(KEPT)
    environment = {"HOMEPREFIXD_MODEL_CHAT_TEMPLATE": str(file), "HOMEPREFIXD_CACHE_PRELOAD": "0", **env}
    return homeprefixd(folder / "cache", "--model", str(model), *FLAGS, env=environment)


HOUSE = [
    {"role": "system", "content": "You answer questions about a house. Think first, then answer or call the tool."},
    {"role": "user", "content": "Is the lamp on?"},
    {"role": "assistant", "content": "The lamp is on.", "reasoning_content": "They ask about the lamp."},
    {"role": "user", "content": "Is the door open?"},
    {"role": "assistant", "content": "The door is shut.", "reasoning_content": "They ask about the door."},
    {"role": "user", "content": "Is the gate open?"},
]
"""A small model thinks in the way that it is shown."""


class Chat:
    """A client that sends back all that it got."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.messages: list[dict[str, Any]] = list(HOUSE)
        self.known = 0  # tokens of prompt and reply until now
        self.text = ""  # of these, as the template writes them
        self.skipped = 0.0
        words = {"thought": -100.0, "think": 4.0}  # so that a small model ends its thoughts
        words |= dict.fromkeys((" ", "\n", "\n\n", "  ", "   ", "    ", " \n", "\n "), -100.0)  # and goes on at once
        tokens = {word: server.post("/tokenize", {"content": word})["tokens"] for word in words}
        self.bias = {str(found[0]): words[word] for word, found in tokens.items() if len(found) == 1}

    def prompt(self, *more: dict[str, Any]) -> str:
        body = {"messages": [*self.messages, *more], "tools": TOOLS}
        text: str = self.server.post("/apply-template", body)["prompt"]
        return text

    def turn(self, **more: Any) -> dict[str, Any]:
        """Ask; the reply's figures, and `new`: the tokens of what the prompt has behind the last reply."""
        prompt = self.prompt()
        assert prompt.startswith(self.text)
        new = self.server.post("/tokenize", {"content": prompt[len(self.text) :]})["tokens"]
        body = {"messages": self.messages, "tools": TOOLS, "temperature": 0, "max_tokens": 120, "logit_bias": self.bias}
        reply = self.server.post("/v1/chat/completions", {**body, **more})
        [choice] = reply["choices"]
        said = choice["message"]
        assert choice["finish_reason"] in ("stop", "tool_calls"), said
        self.messages.append({**said, "content": said.get("content") or ""})
        self.known = reply["usage"]["total_tokens"]
        self.text = prompt
        return {**reply["timings"], "new": len(new), "said": said, "id": reply["id"]}

    def answered(self) -> None:
        """The client has seen the reply: a template that keeps all of it writes it as the model did.

        One call was wanted, so the reply ended with it: the tag behind it was not generated.
        """
        rendered = self.prompt({"role": "user", "content": "And?"})
        end = "\n</tool_call>" if self.messages[-1].get("tool_calls") else "<|im_end|>\n<|im_start|>user\nAnd?"
        self.text = rendered[: rendered.rindex(end)]

    def say(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def result(self, said: dict[str, Any], text: str) -> None:
        self.messages.append({"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": text})

    def was_spared(self) -> bool:
        """Was something not saved since this was asked last, as the machine was too busy to wait for it?"""
        steps = self.worker()["steps"]
        until = time.monotonic() + 10
        while self.worker()["steps"] == steps and time.monotonic() < until:  # it tells its figures once a second
            time.sleep(0.1)
        before, self.skipped = self.skipped, self.worker()["counters"].get("save_skipped", 0.0)
        return self.skipped > before

    def worker(self) -> dict[str, Any]:
        [found] = self.server.get("/cache/stats")["daemon"]["workers"]
        return dict(found)


@pytest.fixture(scope="module")
def server(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(tmp_path_factory.mktemp("replay"), demo_model) as one:
        yield one


THINGS = ("window", "lamp", "door", "gate", "oven")


def test_ten_turns_with_thoughts_and_tool_calls_compute_each_new_message_only(server: Server) -> None:
    """Every second turn is a call. After the fifth the daemon is started again."""
    chat = Chat(server)
    differed = compared = 0
    for number in range(10):
        if number == 5:
            assert server.stop() == 0
            server.start()
        calls = number % 2 == 0
        before = chat.known
        got = chat.turn(**(CALL if calls else SAY))
        said = got["said"]
        assert said["reasoning_content"]
        assert bool(said.get("tool_calls")) == calls
        record = server.get(f"/cache/explain/{got['id']}")["record"]
        assert (record.get("replayed", 0) > 0) == (number > 0)
        assert number == 0 or record["prompt"] == before + got["new"]  # token for token what was generated
        if number and got["prompt_n"] <= got["new"] + 1:  # a reply's last token need not have been computed
            assert got["cache_n"] >= before - 1
            compared += 1
        elif number:
            assert chat.was_spared(), f"turn {number}: {got}"
        chat.answered()
        plain = server.post("/tokenize", {"content": chat.text})["tokens"]
        differed += len(plain) != chat.known
        if calls:
            chat.result(said, "It is open.")
        else:
            chat.say(f"Is the {THINGS[number // 2]} open?")
    assert compared >= 5, "this machine was too busy to say anything"
    assert differed, "the tokenizer makes of every reply what was generated: this says nothing"


def test_where_a_reply_comes_back_changed_it_is_reused_up_to_there(server: Server) -> None:
    """Templates and clients strip thoughts, or write calls anew."""
    chat = Chat(server)
    before = len(server.post("/tokenize", {"content": chat.prompt()})["tokens"])
    said = chat.turn(**CALL)["said"]
    [call] = said["tool_calls"]
    arguments = call["function"]["arguments"]
    others: list[tuple[dict[str, Any], str]] = [
        ({"reasoning_content": "Hm."}, ""),
        (
            {"tool_calls": [{**call, "function": {**call["function"], "arguments": f" {arguments}"}}]},
            said["reasoning_content"] + "</think><tool_call>\n{",
        ),
    ]
    for change, kept in others:
        asked = [*HOUSE, {**said, "content": "", **change}, {"role": "user", "content": "Is it?"}]
        body = {"messages": asked, "tools": TOOLS, "max_tokens": 1}
        least = before + len(server.post("/tokenize", {"content": kept})["tokens"])
        got = server.post("/v1/chat/completions", body)["timings"]
        assert got["cache_n"] >= least - 3, change  # tokens that end elsewhere once the text goes on otherwise


def test_it_can_be_turned_off(demo_model: Path, tmp_path: Path) -> None:
    with serve(tmp_path, demo_model, HOMEPREFIXD_CACHE_REPLAY="off") as server:
        asked = [*HOUSE[:3], HOUSE[3]]
        first = server.post("/v1/chat/completions", {"messages": asked, "max_tokens": 4, "temperature": 0})
        said = first["choices"][0]["message"]
        again = [*asked, {**said, "content": said.get("content") or ""}, {"role": "user", "content": "Why?"}]
        got = server.post("/v1/chat/completions", {"messages": again, "max_tokens": 1})
        assert "replayed" not in server.get(f"/cache/explain/{got['id']}")["record"]
        assert server.get("/cache/stats")["replies"]["rows"] == 0
