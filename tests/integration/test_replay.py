"""A chat's next turn reuses the reply to its last token, whatever the tokenizer makes of its text, over a restart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from homeprefixd.bench.household import household_messages
from homeprefixd.bench.server import Server, homeprefixd

FLAGS = ["--ctx", "8192", "--threads", "2"]
KEPT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n{{ m.reasoning_content }}"
    "</think>{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments }}}\n</tool_call>{% endfor %}<|im_end|>\n'
    "{% endfor %}{{ '<|im_start|>assistant\n<think>\n' }}"
)
"""Keeps thoughts, and writes calls as the model did."""

STRIPPED = KEPT.replace("<think>\n{{ m.reasoning_content }}</think>", "")
NORMALISED = KEPT.replace(
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments }}}',
    "{{ c.function.arguments | tojson }} for {{ c.function.name }}",
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_state",
            "description": "The state of a device.",
            "parameters": {
                "type": "object",
                "properties": {"device": {"type": "string", "maxLength": 24}},
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
            "properties": {"say": {"type": "string", "maxLength": 40}, "sure": {"type": "boolean"}},
            "required": ["say", "sure"],
            "additionalProperties": False,
        },
    },
}

CALL = {"tool_choice": "required"}
SAY = {"response_format": ANSWER, "tool_choice": "none"}


def serve(folder: Path, model: Path, template: str, **env: str) -> Server:
    file = folder / "template.jinja"
    file.write_text(template)
    environment = {"HOMEPREFIXD_MODEL_CHAT_TEMPLATE": str(file), "HOMEPREFIXD_CACHE_PRELOAD": "0", **env}
    return homeprefixd(folder / "cache", "--model", str(model), *FLAGS, env=environment)


def bias(server: Server) -> dict[str, float]:
    """A small model ends its thoughts when it is made to like to, and puts no white space behind them."""

    def token(text: str) -> str:
        [one] = server.post("/tokenize", {"content": text})["tokens"]
        return str(one)

    return {token("</"): 12.0, **{token(text): -100.0 for text in (" ", "\n", "\n\n", "  ", "   ", "    ")}}


class Chat:
    """A client that sends back all that it got."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.bias = bias(server)
        self.messages: list[dict[str, Any]] = household_messages("Is the garden gate shut?", size=700)
        self.known = 0  # tokens of prompt and reply until now
        self.text = ""  # of these

    def prompt(self) -> str:
        body = {"messages": self.messages, "tools": TOOLS}
        text: str = self.server.post("/apply-template", body)["prompt"]
        return text

    def turn(self, **more: Any) -> dict[str, Any]:
        """Ask; the reply's figures, and `new`: the tokens of what the prompt has behind the last reply."""
        prompt = self.prompt()
        assert prompt.startswith(self.text)
        new = self.server.post("/tokenize", {"content": prompt[len(self.text) :]})["tokens"]
        body = {"messages": self.messages, "tools": TOOLS, "temperature": 0, "max_tokens": 160, "logit_bias": self.bias}
        reply = self.server.post("/v1/chat/completions", {**body, **more})
        [choice] = reply["choices"]
        said = choice["message"]
        assert choice["finish_reason"] in ("stop", "tool_calls"), said
        self.messages.append({**said, "content": said.get("content") or ""})
        self.known = reply["usage"]["total_tokens"]
        self.text = prompt
        return {**reply["timings"], "new": len(new), "said": said, "id": reply["id"]}

    def answered(self) -> None:
        """The client has seen the reply: a template that keeps all of it writes it as the model did."""
        rendered = self.prompt()
        self.text = rendered[: rendered.rindex("<|im_end|>")]

    def say(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def result(self, said: dict[str, Any], text: str) -> None:
        self.messages.append({"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": text})


def test_ten_turns_with_thoughts_and_tool_calls_compute_each_new_message_only(demo_model: Path, tmp_path: Path) -> None:
    """Every second turn is a call. After the fifth the daemon is started again."""
    with serve(tmp_path, demo_model, KEPT) as server:
        chat = Chat(server)
        differed = 0
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
            if number:
                # All but the new message: at most one more, as a reply's last token need not have been computed.
                assert got["new"] <= got["prompt_n"] <= got["new"] + 1, number
                assert got["cache_n"] >= before - 1
            chat.answered()
            plain = server.post("/tokenize", {"content": chat.text})["tokens"]
            differed += len(plain) != chat.known
            record = server.get(f"/cache/explain/{got['id']}")["record"]
            assert (record.get("replayed", 0) > 0) == (number > 0)
            if calls:
                chat.result(said, json.dumps({"state": f"closed since {number} o'clock"}))
            else:
                chat.say(f"And number {number}?")
        assert differed, "the tokenizer makes of every reply what was generated: this says nothing"


@pytest.mark.parametrize(
    ("template", "part"), [(STRIPPED, "thoughts"), (NORMALISED, "calls")], ids=["strips thoughts", "writes calls anew"]
)
def test_where_a_template_changes_a_reply_it_is_reused_up_to_there(
    demo_model: Path, tmp_path: Path, template: str, part: str
) -> None:
    with serve(tmp_path, demo_model, template) as server:
        chat = Chat(server)
        first = chat.turn(tool_choice="required")
        prompt, said = chat.text, first["said"]
        chat.result(said, "closed")
        rendered = chat.prompt()
        generated = f"{prompt}{said['reasoning_content']}</think><tool_call>\n"
        common = next(i for i in range(len(rendered)) if not generated.startswith(rendered[: i + 1]))
        assert (common < len(prompt)) == (part == "thoughts")  # with calls it is behind the prompt, in the reply
        known = len(server.post("/tokenize", {"content": rendered[:common]})["tokens"])
        second = server.post("/v1/chat/completions", {"messages": chat.messages, "tools": TOOLS, "max_tokens": 2})
        assert second["timings"]["cache_n"] >= known - 3  # tokens that end elsewhere once the text goes on otherwise


def test_it_can_be_turned_off(demo_model: Path, tmp_path: Path) -> None:
    with serve(tmp_path, demo_model, KEPT, HOMEPREFIXD_CACHE_REPLAY="off") as server:
        chat = Chat(server)
        chat.result(chat.turn(tool_choice="required")["said"], "closed")
        got = chat.turn(tool_choice="required")
        assert "replayed" not in server.get(f"/cache/explain/{got['id']}")["record"]
        assert server.get("/cache/stats")["replies"]["rows"] == 0
