"""Which keyword of a schema is to blame, and what is left without; and which schemas count names that may repeat."""

from __future__ import annotations

import time
from typing import Any

import pytest

from homeprefixd.chat.culprit import culprit, loosened, shown
from homeprefixd.chat.member_names import may_repeat_to_count, members, path_to


def wrong(schema: Any, defs: Any = None) -> str:
    """A compiler that takes no `bad`, wherever it looks, and no property that is no schema."""
    if isinstance(schema, bool):
        return ""
    if not isinstance(schema, dict) or "bad" in schema:
        return "it is bad"
    defs = schema.get("$defs", defs or {})
    if isinstance(reference := schema.get("$ref"), str):
        return wrong(defs.get(reference.rpartition("/")[2], {}), defs)
    below = [*schema.get("properties", {}).values(), *schema.get("anyOf", []), schema.get("items", True)]
    return next(filter(None, (wrong(one, defs) for one in below)), "")


@pytest.mark.parametrize(
    ("schema", "where", "left"),
    [
        ({"bad": 1, "type": "object"}, "`bad`, at #/bad", {"type": "object"}),
        ({"items": 5}, "`items`, at #/items", {}),
        (
            {"properties": {"a/b": {"items": {"bad": 1, "type": "x"}}, "c": {}}},
            "`bad`, at #/properties/a~1b/items/bad",
            {"properties": {"a/b": {"items": {"type": "x"}}, "c": {}}},
        ),
        ({"properties": {"a": 5, "b": True}}, "`properties`, at #/properties/a", {"properties": {"b": True}}),
        ({"anyOf": [{}, 7]}, "`anyOf`, at #/anyOf/1", {"anyOf": [{}, True]}),
        (
            {"properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"bad": 1}}},
            "`bad`, at #/$defs/n/bad",
            {"properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {}}},
        ),
    ],
)
def test_the_keyword_to_blame_is_found_and_left_out(schema: dict[str, Any], where: str, left: Any) -> None:
    path = culprit(schema, wrong)
    assert path is not None
    assert shown(path) == where
    assert loosened(schema, wrong) == left


def test_several_are_left_out_and_too_many_leave_any_object() -> None:
    two = {"type": "object", "properties": {"a": {"bad": 1, "type": "x"}, "b": {"bad": 2}}}
    assert loosened(two, wrong) == {"type": "object", "properties": {"a": {"type": "x"}, "b": {}}}
    assert loosened({"properties": {str(i): {"bad": 1} for i in range(99)}}, wrong) == {"type": "object"}
    assert culprit({"type": "object"}, wrong) is None


def count(least: int, **more: Any) -> dict[str, Any]:
    return {"type": "object", "minProperties": least, **more}


CLOSED = {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (count(2, patternProperties={"^k$": {}}, **CLOSED), True),
        (count(2, additionalProperties={"type": "null"}), True),
        (count(2), True),
        (count(1), False),
        (count(2, required=["a"]), False),
        (count(3, required=["a"], properties={"a": {}, "b": {}}), True),
        (count(2, properties={"a": {}, "b": {}}, **CLOSED), False),
        ({"allOf": [count(2), {"properties": {"a": {}, "b": {}}, **CLOSED}]}, False),
        ({"allOf": [count(2), {"patternProperties": {"a": {}}, **CLOSED}]}, True),
        ({"anyOf": [count(2), {"type": "null"}]}, True),
        ({"anyOf": [{"required": ["a"]}, {"type": "string"}], **count(2)}, False),
        ({"properties": {"x": {"items": count(2)}}}, True),
        ({"properties": {"minProperties": {"const": 2}}}, False),
        ({"$ref": "#/$defs/n", "$defs": {"n": count(2), "unused": count(3)}}, True),
        ({"$defs": {"unused": count(3)}}, False),
        ({"type": "string", "minProperties": 2}, False),
        (count(2, enum=[{"a": 1, "b": 2}]), False),
        ({"$ref": "#", "minProperties": 2, "type": ["object", "null"]}, True),
        # references that are written in another way, or lead where nobody looks
        ({"$ref": "#/$defs/x%20y~1", "$defs": {"x y/": count(2)}}, True),
        ({"properties": {"k": {"$ref": "#/allOf/0/$defs/x"}}, "allOf": [{"$defs": {"x": count(2)}}]}, True),
        ({"$ref": "#a", "$defs": {"x": count(2, **{"$anchor": "a"})}}, True),
        ({"$ref": "http://x/#/$defs/x", "$id": "http://x/", "$defs": {"x": count(2)}}, True),
        ({"$ref": "http://x/q", "$defs": {"x": count(2, **{"$id": "http://x/q"})}}, True),
        (
            {
                "$ref": "#/$defs/x",
                "$defs": {"x": {"$id": "http://x/", "allOf": [{"$ref": "#/$defs/y"}]}, "y": count(2)},
            },
            True,
        ),
        ({"$schema": "http://x/draft-04/", "definitions": {"x": {"id": "http://x/", "allOf": [count(2)]}}}, True),
        ({"$dynamicRef": "#a", "$defs": {"x": count(2, **{"$dynamicAnchor": "a"})}}, True),
        ({"$ref": "#a", "$defs": {"x": {"$anchor": "a"}}}, False),
        ({"$ref": "#/$defs/x%20y", "$defs": {"x y": {"type": "null"}, "unused": count(2)}}, False),
        (
            {
                "$id": "http://x/",
                "$ref": "#/$defs/x",
                "$defs": {"x": count(2, required=["id"], examples=[{"id": "a"}])},
            },
            False,
        ),
    ],
)
def test_a_count_that_names_which_repeat_could_meet(schema: dict[str, Any], expected: bool) -> None:
    assert may_repeat_to_count(schema) is expected


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("#", ()),
        ("#/a/1/b%20c~1", ("a", 1, "b c/")),
        ("#/a/2", None),
        ("#/a/01", None),
        ("#/a/-1", None),
        ("#a", None),
        ("http://x/#/a", None),
        (7, None),
    ],
)
def test_where_a_reference_leads(reference: Any, expected: Any) -> None:
    assert path_to({"a": [0, {"b c/": True}]}, reference) == expected


def test_many_references_to_the_same_take_no_time() -> None:
    defs = {str(i): {"properties": {key: {"$ref": f"#/$defs/{i + 1}"} for key in "ab"}} for i in range(60)}
    chain = {str(i): {"allOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(60)}
    began = time.process_time()
    long = {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(2000)}
    for each in (defs, chain, long):
        whole = {"$ref": "#/$defs/0", "$defs": {**each, str(len(each)): count(2)}}
        assert may_repeat_to_count(whole)
        whole["$defs"][str(len(each))] = count(2, required=["a"])
        assert not may_repeat_to_count(whole)
    assert time.process_time() - began < 1


def test_members_are_named_by_either() -> None:
    assert members({"properties": {"a": {"const": 1}}, "required": ["a", "b"]}) == {"a": {"const": 1}, "b": True}
    assert members({"required": ["a"], "additionalProperties": {"const": 1}}) == {"a": {"const": 1}}
    assert members({"required": ["a"], **CLOSED}) == {}
