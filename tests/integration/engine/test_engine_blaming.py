"""Schemas that cannot be enforced: a refusal names the keyword; of a tool that is not strict it is left out."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from homeprefixd.chat.layout import Calls, Layout
from homeprefixd.chat.reply import ReplyParser
from homeprefixd.engine.blaming import Blame
from homeprefixd.engine.shaping import Shaper
from homeprefixd.errors import RequestError
from homeprefixd.frames.worker import Constraint, Generate, Message, Sampling
from tests.integration.engine.form_cases import S, obj
from tests.integration.engine.test_engine_forms import Forms

HERMES = Layout("hermes")


@pytest.fixture(scope="module")
def forms(demo_model: Path) -> Iterator[Forms]:
    made = Forms(demo_model)
    yield made
    made.probe.close()
    made.model.close()


def shape(forms: Forms, layout: Layout = HERMES, **more: Any) -> Any:
    """The mask of a request."""
    generate = Generate(
        rid="r", messages=[Message("user", "x")], prompt=None, tools=more.pop("tools", None), template_kwargs={},
        max_tokens=9, stop=[], sampling=Sampling(), stream=False, **more,
    )  # fmt: skip
    reply = Shaper(forms.model, layout, forms.constraints).reply(generate, "prompt")
    assert reply is not None
    return reply._mask


def tool(parameters: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


def calls(forms: Forms, parameters: Any, *, strict: bool, seeds: int = 4) -> list[Any]:
    """Arguments of calls that must be made, drawn at random."""
    kept = forms.constraints.compile
    found = []

    def again(*_: Any) -> Any:
        return shape(forms, tools=tool(parameters), tool_choice="required", parallel_tool_calls=False,
                     strict_tools=["f"] if strict else [])  # fmt: skip

    for seed in range(seeds):
        mask = again()
        forms.constraints.compile = lambda *_, mask=mask: mask  # type: ignore[method-assign]
        try:
            text = forms.write("", seed)
        finally:
            forms.constraints.compile = kept  # type: ignore[method-assign]
        if text is None:
            continue
        parser = ReplyParser(HERMES, tools={"f": {}}, opened=False, calls=True, parallel=False, new_id=lambda: "id")
        parts = [parser.feed(text), parser.finish()]
        found.append(json.loads("".join(piece.arguments for part in parts for piece in part.calls)))
    assert found
    return found


NAMED: list[tuple[dict[str, Any], str]] = [
    ({"enum": []}, "`enum`, at #/enum"),
    (obj({"a": {"type": []}}), "`type`, at #/properties/a/type"),
    (obj({"a": {"type": "strin"}}), "`type`, at #/properties/a/type"),
    ({"type": "array", "items": 5}, "`items`, at #/items"),
    ({"type": "object", "additionalProperties": 5}, "`additionalProperties`"),
    (obj({"a": 5, "b": S}), "`properties`, at #/properties/a"),
    ({"$schema": "http://x/y", "type": "null"}, "`$schema`"),
    (obj({"a": {"type": "string", "enum": [1]}}), "`enum`, at #/properties/a/enum"),
    ({"type": "string", "const": 1}, "`const`"),
    ({"type": "string", "allOf": [{"type": "integer"}]}, "`allOf`"),
    (obj({"a": {"type": "string", "pattern": "["}}), "`pattern`"),
    ({"type": "string", "pattern": r"^\a$"}, "`pattern`"),
    ({"type": "string", "pattern": "a)"}, "`pattern`, at #/pattern"),
    ({"type": "integer", "multipleOf": 12345678901}, "`multipleOf`"),
    ({"type": "string", "minLength": 2.5}, "`minLength`"),
    ({"type": "object", "patternProperties": {"^[a-c]$": S, "^[b-d]$": S}}, "`patternProperties`"),
    (obj({"a": {"$ref": "https://example.com/x.json"}}), "`$ref`, at #/properties/a/$ref"),
    ({"type": "object", "patternProperties": {"^k$": S}, "minProperties": 2}, "`minProperties`"),
]


@pytest.mark.parametrize(("schema", "word"), NAMED, ids=lambda value: str(value)[:50])
def test_a_refusal_names_the_keyword_and_its_place(forms: Forms, schema: dict[str, Any], word: str) -> None:
    with pytest.raises(RequestError) as caught:
        shape(forms, constraint=Constraint("json_schema", json.dumps(schema), "response_format"))
    assert word in caught.value.message
    assert (caught.value.param, caught.value.code) == ("response_format", "unsupported_schema")
    with pytest.raises(RequestError) as caught:
        shape(forms, tools=tool(obj({"in": schema})), tool_choice="required", strict_tools=["f"])
    assert word.partition(",")[0] in caught.value.message
    assert "'f'" in caught.value.message
    assert caught.value.param == "tools"


@pytest.mark.parametrize("schema", [schema for schema, _ in NAMED], ids=lambda value: str(value)[:50])
def test_a_tool_that_is_not_strict_is_called_without_that_keyword(forms: Forms, schema: dict[str, Any]) -> None:
    whole = obj({"odd": schema, "kept": {"enum": ["x"]}})
    assert all(arguments["kept"] == "x" for arguments in calls(forms, whole, strict=False, seeds=2))


@pytest.mark.parametrize("kind", ["gemma_call", "dsml_tools", "mistral"])
def test_in_every_form_of_a_call(forms: Forms, kind: Calls) -> None:
    whole = obj({"a": {"type": "integer", "multipleOf": 12345678901}, "b": {"type": "string", "pattern": "(?=a)"}})
    assert shape(forms, Layout(kind), tools=tool(whole), tool_choice="required") is not None


def test_an_answer_of_a_form_or_a_call_without_the_keyword(forms: Forms) -> None:
    schema = Constraint("json_schema", json.dumps(obj({"a": {"enum": [1]}})), "response_format")
    whole = obj({"odd": {"type": "string", "enum": [1]}})
    mask = shape(forms, tools=tool(whole), constraint=schema)
    assert mask._matcher.validate_tokens(forms.model.tokenize("<tool_call>", add_bos=False, parse_special=True))


def test_arguments_are_an_object_that_has_what_is_required(forms: Forms) -> None:
    for arguments in calls(forms, {"type": "object", "required": ["k"]}, strict=True):
        assert "k" in arguments
    for kinds in ({"type": ["null", "object"], "maxProperties": 1}, {"maxProperties": 1}):
        assert all(isinstance(arguments, dict) for arguments in calls(forms, kinds, strict=True))


def test_a_search_has_an_end(forms: Forms) -> None:
    blame = Blame(forms.constraints, patience=0.0)
    refusal = RequestError("no.", param="tools", code="unsupported_schema")
    assert blame.named(refusal, {"enum": []}) is refusal
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"enum": []}}}}
    assert blame.loosened({"f": function})["f"]["parameters"] == {"type": "object"}


def test_what_is_too_large_is_refused_before_it_is_read(forms: Forms) -> None:
    huge = {"type": "string", "pattern": "{" * 3_000_000}
    began = time.process_time()
    for asked in (
        {"constraint": Constraint("json_schema", json.dumps(huge), "response_format")},
        {"tools": tool(obj({"a": huge})), "tool_choice": "required"},
    ):
        with pytest.raises(RequestError, match="too large"):
            shape(forms, **asked)
    schema = Constraint("json_schema", json.dumps(obj({"a": {"enum": [1]}})), "response_format")
    assert shape(forms, tools=tool(obj({"a": huge})), constraint=schema) is not None
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("^[[:alpha:]]$", r"[\[:alph]\]"),
        ("^[a-z&&[^b]]$", r"[a-z&\[^b]\]"),
        (r"^\d\w\s.$", r"[0-9][0-9A-Za-z_]\s."),
    ],
)
def test_an_expression_is_read_as_in_ecma(forms: Forms, pattern: str, expected: str) -> None:
    grammar = forms.grammar(Constraint("json_schema", json.dumps({"type": "string", "pattern": pattern})))
    texts = [text for seed in range(12) if (text := forms.write(grammar, seed)) is not None]
    assert texts
    for text in texts:
        assert re.fullmatch(expected, json.loads(text))


def test_whole_numbers_with_a_point_count(forms: Forms) -> None:
    schema = {"type": "string", "minLength": 2.0, "maxLength": 3.0}
    text = forms.write(forms.grammar(Constraint("json_schema", json.dumps(schema))), 1)
    assert text is not None
    jsonschema.validate(json.loads(text), schema)
