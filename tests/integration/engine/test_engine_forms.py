"""Replies of a form: JSON by schemas, grammars, calls that must be made; hostile ones; what a cut leaves."""

from __future__ import annotations

import contextlib
import json
import random
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from homeprefixd.chat.forcing import answer_grammar, calls_grammar
from homeprefixd.chat.layout import Calls, Layout
from homeprefixd.chat.reply import ReplyParser
from homeprefixd.engine.bindings import FillTokens, Model
from homeprefixd.engine.compiling import Probe
from homeprefixd.engine.constraint import Constraints
from homeprefixd.engine.gbnf import translate
from homeprefixd.engine.infill import fill_prompt
from homeprefixd.engine.llama_log import LlamaLog
from homeprefixd.errors import RequestError
from homeprefixd.frames.worker import Constraint
from tests.integration.engine.form_cases import (
    AMBIGUOUS,
    FUNCTIONS,
    GRAMMARS,
    HOSTILE,
    JSON_GBNF,
    SCHEMAS,
    UNSUPPORTED,
    I,
    S,
    obj,
)


class Forms:
    """The demo model's vocabulary and its compiled grammars; tokens are drawn at random, not by the model."""

    def __init__(self, path: Path) -> None:
        self.model = Model.load(path, LlamaLog())
        self.probe = Probe()
        self.constraints = Constraints(self.model, self.probe)

    def grammar(self, constraint: Constraint, layout: Layout | None = None, opened: bool = False) -> str:
        c = self.constraints
        return answer_grammar(constraint, layout, opened, c.mark, lambda text: translate(text, c.token), {})

    def write(
        self, grammar: str, seed: int, most: int = 400, begin: str = "", closing: Sequence[int] = (), end: str = ""
    ) -> str | None:
        """A random reply that begins with `begin`; None if it did not end in `most` tokens.

        Closing characters are liked, tokens of `closing`, and `end` as a whole, so that it ends.
        """
        mask = self.constraints.compile(grammar, "x")
        chance = random.Random(seed)
        liked = [self.model.tokenize(text, add_bos=False)[0] for text in '"}],01@.a'] + list(closing)
        ending = self.model.tokenize(end, add_bos=False) if end else []
        data = begin.encode()
        assert mask._matcher.consume_tokens(self.model.tokenize(begin, add_bos=False)) or not begin
        for count in range(most):
            allowed = mask._allowed()
            ends = [token for token in self.model.eog if allowed[token]]
            if ends and (count > 20 or chance.random() < 0.3):
                return data.decode()
            if ending and chance.random() < 0.1 and mask._matcher.validate_tokens(ending) == len(ending):
                assert mask._matcher.consume_tokens(ending)
                data += end.encode()
                continue
            short = [token for token in liked if allowed[token]]
            if short and chance.random() < 0.2 + count / 100:
                token = chance.choice(short)
            else:
                options = [token for token in np.flatnonzero(allowed) if int(token) not in self.model.eog]
                if not options:
                    return data.decode()
                token = int(chance.choice(options))
            assert mask._matcher.consume_token(token)
            data += self.model.piece(token, special=True)
            if mask._matcher.is_stopped():
                return data.decode()
        return None


@pytest.fixture(scope="module")
def forms(demo_model: Path) -> Iterator[Forms]:
    made = Forms(demo_model)
    yield made
    made.probe.close()
    made.model.close()


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:60])
def test_json_fits_its_schema(forms: Forms, schema: dict[str, Any]) -> None:
    grammar = forms.grammar(Constraint("json_schema", json.dumps(schema)))
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    ended = 0
    for seed in range(3):
        text = forms.write(grammar, seed)
        if text is not None:
            ended += 1
            validator.validate(json.loads(text))
            assert not re.search(r"\s{18}", re.sub(r'"(\\.|[^"\\])*"', "_", text)), "white space has a bound"
    assert ended


@pytest.mark.parametrize(("schema", "word"), UNSUPPORTED, ids=lambda value: str(value)[:40])
def test_what_a_schema_cannot_express_is_named(forms: Forms, schema: dict[str, Any], word: str) -> None:
    with pytest.raises(RequestError) as caught:
        forms.constraints.compile(forms.grammar(Constraint("json_schema", json.dumps(schema))), "response_format")
    assert word in caught.value.message
    assert caught.value.code == "unsupported_schema"
    assert caught.value.param in ("response_format", None)  # None: whoever asked knows the field


# ---------------------------------------------------------------------------------------------------- grammars


@pytest.mark.parametrize(("grammar", "pattern"), GRAMMARS)
def test_text_fits_its_grammar(forms: Forms, grammar: str, pattern: str | None) -> None:
    ended = 0
    for seed in range(6):
        text = forms.write(forms.grammar(Constraint("grammar", grammar)), seed)
        if text is not None:
            ended += 1
            if pattern is not None:
                assert re.fullmatch(pattern, text), text
            else:
                assert text.count("(") == text.count(")")
                assert re.fullmatch(r"[-+*/()0-9x]+", text)
    assert ended


def test_llama_cpps_grammar_of_json(forms: Forms) -> None:
    texts = [forms.write(forms.grammar(Constraint("grammar", JSON_GBNF)), seed) for seed in range(6)]
    parsed = [json.loads(text) for text in texts if text is not None]
    assert parsed
    assert all(isinstance(value, dict) for value in parsed)


@pytest.mark.parametrize(("grammar", "word"), HOSTILE, ids=lambda value: str(value)[:30])
def test_hostile_grammars_are_refused(forms: Forms, grammar: str, word: str) -> None:
    begun = time.monotonic()
    with pytest.raises(RequestError) as caught:
        forms.constraints.compile(forms.grammar(Constraint("grammar", grammar)), "grammar")
    assert word in caught.value.message
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize("grammar", AMBIGUOUS)
def test_ambiguous_grammars_neither_hang_nor_crash(forms: Forms, grammar: str) -> None:
    begun = time.monotonic()
    with contextlib.suppress(RequestError):
        forms.write(forms.grammar(Constraint("grammar", grammar)), 1, most=40)
    assert time.monotonic() - begun < 20


def test_a_long_text_that_is_forced_costs_little(forms: Forms) -> None:
    schema = {"type": "array", "items": {"const": "x" * 100_000}}
    mask = forms.constraints.compile(forms.grammar(Constraint("json_schema", json.dumps(schema))), "x")
    begun = time.process_time()
    for _ in range(50):
        allowed = mask._allowed()
        assert mask._matcher.consume_token(int(np.flatnonzero(allowed)[-1]))
    assert time.process_time() - begun < 10


def test_the_process_that_tries_grammars_may_die(forms: Forms) -> None:
    assert forms.probe.check('start: "a"') == ""
    process = forms.probe._process
    assert process is not None
    process.kill()
    process.wait()
    assert forms.probe.check('start: "b"') == ""
    impatient = Probe(patience=0.0)
    with pytest.raises(RequestError, match="takes more than 0 s"):
        impatient.check('start: "a"')
    assert impatient._process is None


# ---------------------------------------------------------------------------------------------------- forced calls

DSML_END = "</｜DSML｜parameter>"

FORCED = [
    Layout("hermes"),
    Layout("hermes", ("<think>", "</think>")),
    Layout("llama3"),
    Layout("mistral"),
    Layout("mistral_args"),
    Layout("deepseek"),
    Layout("deepseek_plain"),
    Layout("dsml_functions"),
    Layout("dsml_tools", ("<think>", "</think>")),
    Layout("granite"),
    Layout("nemotron", ("<think>", "</think>")),
    Layout("command"),
    Layout("harmony"),
    Layout("generic"),
    Layout("gemma_call"),
    Layout("gemma_pipe"),
    Layout("gemma_pipe", ("<|channel>thought\n", "<channel|>")),
]


@pytest.mark.parametrize("layout", FORCED, ids=lambda layout: f"{layout.calls} {layout.thoughts}")
@pytest.mark.parametrize("single", [True, False])
def test_calls_that_must_be_made_can_be_parsed(forms: Forms, layout: Layout, single: bool) -> None:
    grammar = calls_grammar(layout, FUNCTIONS, single, layout.thoughts is not None, forms.constraints.mark)
    seen = 0
    for seed in range(4):
        text = forms.write(
            grammar,
            seed,
            600,
            f"Hm.\n{layout.thoughts[1]}" if layout.thoughts is not None else "",
            end=DSML_END if layout.calls.startswith("dsml") else "",
        )
        if text is None:
            continue
        parser = ReplyParser(
            layout, tools=FUNCTIONS, opened=layout.thoughts is not None, calls=True, parallel=not single,
            new_id=lambda: "id",
        )  # fmt: skip
        parts = [parser.feed(text), parser.finish()]
        assert not "".join(part.text for part in parts)
        names = [piece.name for part in parts for piece in part.calls if piece.name]
        arguments = "".join(piece.arguments for part in parts for piece in part.calls)
        assert 1 <= len(names) <= (1 if single else 8)
        if len(names) == 1:
            schema = FUNCTIONS[names[0]].get("parameters", {"const": {}})
            jsonschema.validate(json.loads(arguments), schema)
        seen += 1
    assert seen


BRACES: list[dict[str, Any]] = [
    obj({"a": S, "b": {"type": "integer", "minimum": 3, "maximum": 9}, "c": {"type": "boolean"}}, ["b"]),
    obj({"a": {"type": "string", "minLength": 2, "maxLength": 5}, "b": {"enum": ["x, y", 7, None, ["z"]]}}),
    obj({"list": {"type": "array", "items": obj({"n": {"type": "number"}}, []), "minItems": 1, "maxItems": 3}}, []),
    obj({"either": {"anyOf": [{"type": "null"}, {"type": ["integer", "boolean"]}, obj({"k": {"const": True}})]}}),
    obj(
        {"node": {"$ref": "#/$defs/node"}},
        **{"$defs": {"node": obj({"v": I, "next": {"$ref": "#/$defs/node"}}, ["v"])}},
    ),
    obj({"sp ace": I, "any": {}}, ["sp ace"]),
    {"type": "object", "additionalProperties": True},
    {"type": "object", "additionalProperties": {"type": "integer", "maximum": 9}},
    obj({"some": {"type": "null"}, "none": False}, ["some"]),
    obj({"many": {"type": "array", "items": {"const": 0}, "minItems": 70}}),
    obj({"one": {"type": "integer", "enum": [1, 2, "x"]}, "other": {"type": "integer", "anyOf": [{"const": 7}]}}),
    {"$ref": "#/$defs/p", "type": "object", "$defs": {"p": {"properties": {"q": I}, "required": ["q"]}}},
    obj({"empty": {"type": "array", "items": False}, "blank": {"type": "string", "maxLength": 0}}),
    obj({"name": {"type": "boolean"}, "below": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}}, ["name"]),
    obj({"enum": obj({"x": I}, ["x"]), "to": {"$ref": "#/properties/enum"}}, ["enum", "to"]),
    obj(
        {"id": I, "sub": obj({"id": {"type": "null"}, "other": {"$ref": "#/properties/id"}}, ["id", "other"])}, ["sub"]
    ),
]


@pytest.mark.parametrize("schema", BRACES, ids=lambda schema: json.dumps(schema)[:60])
@pytest.mark.parametrize("tokens", [True, False], ids=["marks are tokens", "marks are text"])
@pytest.mark.parametrize("kind", ["gemma_pipe", "dsml_functions"])
def test_arguments_that_are_no_json_fit_their_schema(
    forms: Forms, schema: dict[str, Any], tokens: bool, kind: Calls
) -> None:
    layout = Layout(kind)
    control = [token for token in range(forms.model.n_vocab) if forms.model.is_control(token)]
    control = [token for token in control if token not in forms.model.eog]
    marks = dict(zip(layout.markers, control, strict=False))  # this model's control tokens stand in for Gemma's
    grammar = calls_grammar(
        layout,
        {"set": {"name": "set", "parameters": schema}},
        True,
        False,
        lambda marker: f"<[{marks[marker]}]>" if tokens else forms.constraints.mark(marker),
    )
    seen = 0
    for seed in range(6):
        text = forms.write(
            grammar,
            seed,
            600,
            closing=list(marks.values()) if tokens else (),
            end="" if tokens or kind != "dsml_functions" else DSML_END,
        )
        if text is None:
            continue
        for marker, token in marks.items():
            text = text.replace(forms.model.piece(token, special=True).decode(), marker)
        parser = ReplyParser(layout, tools={"set": {}}, opened=False, calls=True, parallel=False, new_id=lambda: "id")
        parts = [parser.feed(text), parser.finish()]
        assert not "".join(part.text for part in parts), text
        arguments = json.loads("".join(piece.arguments for part in parts for piece in part.calls))
        jsonschema.validate(arguments, schema)
        assert list(arguments) == [name for name in schema.get("properties", arguments) if name in arguments]
        seen += 1
    assert seen


def test_a_strict_function_in_braces_names_what_cannot_be_kept(forms: Forms) -> None:
    function = {"name": "set", "parameters": obj({"a": {"type": "string", "pattern": "x+"}}), "strict": True}
    with pytest.raises(RequestError, match="`pattern`"):
        calls_grammar(Layout("gemma_call"), {"set": function}, True, False, forms.constraints.mark)
    calls_grammar(Layout("gemma_call"), {"set": {**function, "strict": False}}, True, False, forms.constraints.mark)


@pytest.mark.parametrize(
    "layout", [Layout("hermes"), Layout("mistral"), Layout("generic")], ids=lambda layout: layout.calls
)
def test_with_tools_an_answer_of_a_form_or_a_call(forms: Forms, layout: Layout) -> None:
    schema = obj({"answer": {"type": "string", "maxLength": 8}})
    constraint = Constraint("json_schema", json.dumps(schema))
    mark = forms.constraints.mark
    grammar = answer_grammar(constraint, layout, False, mark, lambda text: text, FUNCTIONS)
    answered = called = 0
    for seed in range(12):
        text = forms.write(grammar, seed)
        if text is None:
            continue
        parser = ReplyParser(layout, tools=FUNCTIONS, opened=False, calls=True, parallel=True, new_id=lambda: "id")
        parts = [parser.feed(text), parser.finish()]
        if parser.count:
            called += 1
        else:
            jsonschema.validate(json.loads("".join(part.text for part in parts)), schema)
            answered += 1
    assert answered
    assert called


def test_prompts_for_filling_gaps(forms: Forms, monkeypatch: pytest.MonkeyPatch) -> None:
    model = forms.model
    monkeypatch.setattr(model, "fill_tokens", lambda: FillTokens(5, 6, 7, -1, 8))  # no model here has any

    def tokens(text: str) -> list[int]:
        return model.tokenize(text, add_bos=False)

    whole = fill_prompt(model, "def f(x):\n", "\n    return y", [("a.py", "y = 1\n")], 1000)
    files = [8, *tokens("a.py\n"), *tokens("y = 1\n"), 8, *tokens("filename\n")]
    assert whole == [*files, 5, *tokens("def f(x):\n"), 6, *tokens("\n    return y"), 7]
    long = "one two three four five six seven eight nine ten " * 20
    cut = fill_prompt(model, long, long, [("a.py", long)], 40)
    assert len(cut) == 40 + 3
    assert cut[0] == 5
    assert cut[1:31] == tokens(long)[-30:]
    assert cut[32:42] == tokens(long)[:10]
