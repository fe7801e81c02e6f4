"""Forms, forced calls and log-probabilities through the engine, with the demo model."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest

from homeprefixd.engine import scheduler
from homeprefixd.errors import RequestError
from homeprefixd.frames.worker import Constraint, Delta, Failure, Finished, Message, Sampling
from tests.integration.engine.form_cases import AMBIGUOUS, FUNCTIONS, HOSTILE, obj
from tests.integration.engine.memory_store import MemoryStore
from tests.integration.engine.running import Running, load_frame

PERSON = obj({"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0, "maximum": 120}})
ASK = [Message("user", "Invent a person. Answer in JSON.")]
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS.values()]


@pytest.fixture(scope="module")
def served(demo_model: Path) -> Iterator[Running]:
    running = Running(load_frame(demo_model, parallel=3), MemoryStore())
    yield running
    running.close()


def options(**more: Any) -> dict[str, Any]:
    return {"sampling": Sampling(temperature=1.0, seed=more.pop("seed", 3)), **more}


@pytest.mark.parametrize("stream", [True, False])
def test_json_from_the_model(served: Running, stream: bool) -> None:
    constraint = Constraint("json_schema", json.dumps(PERSON))
    text, end = served.ask(ASK, 120, **options(constraint=constraint, stream=stream))
    jsonschema.validate(json.loads(text), PERSON)
    assert end.reason == "stop"


def test_an_object_from_a_prompt_and_a_grammar(served: Running) -> None:
    text, end = served.ask(
        "The colours are", 40, **options(constraint=Constraint("grammar", 'root ::= " red" [!?]{2}'))
    )
    assert re.fullmatch(r" red[!?]{2}", text)
    assert end.reason == "stop"


def test_a_form_that_is_cut_says_length(served: Running) -> None:
    text, end = served.ask(ASK, 5, **options(constraint=Constraint("json_schema", json.dumps(PERSON))))
    assert end.reason == "length"
    assert text.startswith("{")


def test_biases_cannot_break_a_form(served: Running) -> None:
    model = served.engine._model
    banned = {token: -float("inf") for text in ("y", "ye", "yes") for token in model.tokenize(text, add_bos=False)}
    sampling = Sampling(temperature=0.0, ignore_eos=True, min_tokens=50, logit_bias=banned)
    text, end = served.ask("x", 40, sampling=sampling, constraint=Constraint("grammar", 'root ::= "yes"'))
    assert (text, end.reason) == ("yes", "stop")


@pytest.mark.parametrize("stream", [True, False])
def test_a_call_that_must_be_made(served: Running, stream: bool) -> None:
    rid = served.start(ASK, 120, **options(tools=TOOLS, tool_choice="=get_weather", stream=stream))
    end = served.finish(rid)
    assert (end.reason, served.text(rid)) == ("tool_calls", "")
    pieces = [piece for delta in served.of(rid, Delta) for piece in delta.calls] + end.calls
    assert pieces[0].name == "get_weather"
    assert pieces[0].id.startswith("call_")
    jsonschema.validate(
        json.loads("".join(piece.arguments for piece in pieces)), FUNCTIONS["get_weather"]["parameters"]
    )


def test_a_call_that_is_cut_tells_all_that_was_written(served: Running) -> None:
    """Texts of all lengths begin alike, so the longest says what the others should be."""
    wanted = options(tools=TOOLS, tool_choice="=get_weather", stream=False)
    texts = []
    for count in (6, 12, 18):
        end = served.finish(served.start(ASK, count, **wanted))
        assert end.reason == "length"
        texts.append("".join([end.text, *(call.written for call in end.calls)]))
    assert end.calls
    assert texts[2].startswith(texts[1])
    assert texts[1].startswith(texts[0])
    assert '"get_weather", "arguments": ' in texts[2] or '"get_weather", "parameters": ' in texts[2]


def test_only_what_is_allowed_is_called_and_the_prompt_stays_the_same(served: Running) -> None:
    wanted = options(tools=TOOLS, stream=False, max_tokens=60, sampling=Sampling(temperature=2.0, seed=3))
    lengths = set()
    for name in list(FUNCTIONS)[:2]:
        rid = served.start(ASK, **wanted, tool_choice="required", allowed_tools=[name])
        end = served.finish(rid)
        assert {piece.name for piece in end.calls} == {name}
        lengths.add(end.timings.total_prompt_n)
    lengths.add(served.ask(ASK, **{**wanted, "max_tokens": 1})[1].timings.total_prompt_n)
    assert len(lengths) == 1
    with pytest.raises(RequestError, match="no function"):
        served.ask(ASK, 5, tools=TOOLS, tool_choice="required", allowed_tools=[])


def test_a_tool_that_cannot_be_expressed_does_not_spoil_a_form(served: Running) -> None:
    odd = [{"type": "function", "function": {"name": "odd", "parameters": {"not": {}}}}]
    constraint = Constraint("json_schema", json.dumps({"enum": ["a", "b"]}))
    text, end = served.ask(ASK, 20, **options(constraint=constraint, tools=odd, strict_tools=["odd"]))
    assert json.loads(text) in ("a", "b")
    assert end.reason == "stop"
    with pytest.raises(RequestError, match="JSON schema cannot be used"):
        served.ask(ASK, 20, tool_choice="required", tools=odd, strict_tools=["odd"])


UNIQUE = [{"type": "function", "function": {"name": "f", "parameters": {"uniqueItems": True}}}]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"tool_choice": "required"}, "no function"),
        ({"tool_choice": "=x", "tools": TOOLS}, "not among `tools`"),
        ({"constraint": Constraint("json_schema", '{"not": {}}')}, "`not`"),
        ({"tool_choice": "required", "tools": UNIQUE, "strict_tools": ["f"]}, "`uniqueItems`"),
        ({"constraint": Constraint("grammar", "root ::= " + "(" * 20_000)}, "nested"),
    ],
)
def test_what_cannot_be_forced_is_refused(served: Running, changes: dict[str, Any], word: str) -> None:
    with pytest.raises(RequestError, match=word):
        served.ask(ASK, 5, **changes)


def test_hostile_grammars_do_not_stall_others(served: Running) -> None:
    stream = served.start(ASK, 60)
    served.wait(lambda: served.of(stream, Delta))
    others = [
        served.start("x", 4, constraint=Constraint("grammar", grammar)) for grammar in [*AMBIGUOUS, HOSTILE[0][0]]
    ]
    served.finish(stream)
    times = [at for at, frame in served.frames if isinstance(frame, Delta) and frame.rid == stream]
    assert max(later - earlier for earlier, later in itertools.pairwise(times)) < 2
    for rid in others:
        served.wait(lambda rid=rid: served.of(rid, (Failure, Finished)))  # type: ignore[misc]


def test_logprobs(served: Running) -> None:
    whole = served.ask("Once upon a", 4, stream=False, logprobs=3)[1]
    assert [len(token.top) for token in whole.logprobs] == [3] * 4
    assert b"".join(token.piece for token in whole.logprobs).decode() == whole.text
    for token in whole.logprobs:
        assert token.top[0].token == token.token  # greedy
        assert token.logprob == token.top[0].logprob
        assert -20 < token.logprob <= 0
        assert sum(np.exp(other.logprob) for other in token.top) <= 1.0001
    rid = served.start("Once upon a", 4, logprobs=3)
    served.finish(rid)
    told = [token for delta in served.of(rid, Delta) for token in delta.logprobs]
    assert [token.token for token in told] == [token.token for token in whole.logprobs]


def test_logprobs_of_a_stop_string_are_not_told(served: Running) -> None:
    free = served.ask("1, 2, 3, 4,", 8, stream=False, logprobs=0)[1]
    stop = b"".join(token.piece for token in free.logprobs[4:6]).decode()
    cut = served.ask("1, 2, 3, 4,", 8, stream=False, logprobs=0, stop=[stop])[1]
    assert cut.text == free.text[: free.text.index(stop)]
    assert b"".join(token.piece for token in cut.logprobs).decode() == cut.text


def test_a_model_without_fill_tokens_says_so(served: Running) -> None:
    assert served.engine._model.fill_tokens() is None
    with pytest.raises(RequestError, match="no tokens for filling gaps"):
        served.ask("def f():", 4, suffix="return x")


def test_thoughts_are_told_apart_and_free_of_the_form(demo_model: Path) -> None:
    template = "{% for message in messages %}{{ message.content }}\n{% endfor %}<think>\n"
    running = Running(load_frame(demo_model, chat_template=template), MemoryStore())
    try:
        for changes in ({}, {"constraint": Constraint("json_schema", json.dumps(PERSON))}):
            rid = running.start(ASK, 6, **changes)
            end = running.finish(rid)
            assert (end.reason, running.text(rid)) == ("length", "")
            assert "".join(delta.reasoning for delta in running.of(rid, Delta))
            assert end.timings.thought_n == end.timings.predicted_n == 6
            _, whole = running.ask(ASK, 6, stream=False, **changes)
            assert whole.reasoning
            assert not whole.text
    finally:
        running.close()


def test_calls_that_the_model_writes_by_itself(demo_model: Path) -> None:
    template = "{# <tool_call> #}{% for message in messages %}{{ message.content }}\n{% endfor %}{{ tools | tojson }}"
    written = 'I do. <tool_call>\n{"name": "turn_on", "arguments": {"id": 7}}\n</tool_call>'
    grammar = Constraint("grammar", f"root ::= {json.dumps(written)}")  # as if the model had thought of it
    running = Running(load_frame(demo_model, chat_template=template), MemoryStore())
    try:
        for stream in (True, False):
            rid = running.start(ASK, 60, tools=TOOLS, constraint=grammar, stream=stream)
            end = running.finish(rid)
            assert (end.reason, running.text(rid)) == ("tool_calls", "I do.")
            pieces = [piece for delta in running.of(rid, Delta) for piece in delta.calls] + end.calls
            assert [piece.name for piece in pieces if piece.name] == ["turn_on"]
            assert "".join(piece.arguments for piece in pieces) == '{"id": 7}'
            for good in (0, 1):
                begun = '<tool_call>\n{"name": "turn_on", "arguments": {"id": 7'
                broken = "I do. " + "}}\n</tool_call>".join([begun] * (good + 1))
                form = Constraint("grammar", f"root ::= {json.dumps(broken)}")
                rid = running.start(ASK, 90, tools=TOOLS, constraint=form, stream=stream)
                end = running.finish(rid)
                assert (end.reason, end.broken) == ("tool_calls" if good else "stop", 1)
        _, free = running.ask(ASK, 60, tools=TOOLS, tool_choice="none", constraint=grammar, stream=False)
        assert (free.reason, free.text, free.calls) == ("stop", written, [])
    finally:
        running.close()


def ends_of(served: Running, rid: str) -> list[Any]:
    return served.of(rid, (Finished, Failure))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("part", ["frames", "sending", "telling", "remembering", "shares"])
def test_whatever_fails_at_its_end_the_client_is_told_once(
    served: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, part: str, stream: bool
) -> None:
    engine, emit = served.engine, served.engine._emit
    refused: list[type] = []

    def broken(*_: Any, **__: Any) -> Any:
        raise ValueError("broken on purpose")

    def choosy(frame: Any) -> None:
        kinds = (Finished, Failure) if part == "telling" else (Finished,)
        if isinstance(frame, kinds) and type(frame) not in refused:
            refused.append(type(frame))
            "\ud800".encode()
        emit(frame)

    if part == "frames":
        monkeypatch.setattr(scheduler, "last_frames", broken)
    elif part == "remembering":
        assert engine._replay is not None
        monkeypatch.setattr(engine._replay, "remember", broken)
    elif part == "shares":
        monkeypatch.setattr(engine._shares, "served", broken)
    else:
        monkeypatch.setattr(engine, "_emit", choosy)
    rid = served.start(ASK, 3, stream=stream)
    end = served.wait(lambda: ends_of(served, rid), 20)[0]
    assert isinstance(end, Failure)
    assert end.code == "engine_error"
    assert f"request {rid} failed" in caplog.text
    monkeypatch.undo()
    assert served.ask(ASK, 3)[1].reason == "length"  # others are served, and nothing came after it
    assert ends_of(served, rid) == [end]


SPOKEN = "{# <|tool_call_start|> #}{% for message in messages %}{{ message.content }}\n{% endfor %}"


def test_a_call_with_half_a_character_ends(demo_model: Path) -> None:
    running = Running(load_frame(demo_model, chat_template=SPOKEN, reuse="off"), MemoryStore())
    try:
        written = json.dumps('<|tool_call_start|>[get_weather(a="\\ud800", b="\\ud83d\\ude00", c=1)]<|tool_call_end|>')
        constraint = Constraint("grammar", f"root ::= {written}")
        for stream in (True, False):
            rid = running.start(ASK, 120, tools=TOOLS, constraint=constraint, stream=stream)
            end = running.finish(rid, 30)
            pieces = [piece for delta in running.of(rid, Delta) for piece in delta.calls] + end.calls
            assert json.loads("".join(piece.arguments for piece in pieces)) == {"a": "�", "b": "😀", "c": 1}
            for frame in running.of(rid):
                msgspec.msgpack.encode(frame)
    finally:
        running.close()
