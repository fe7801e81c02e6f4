# ruff: noqa: E501 (templates read best on one line)
"""Prompts by templates: what they expect is there, what they may not do is refused, and none runs for ever."""

from __future__ import annotations

import ctypes
import json
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

import pytest

from homeprefixd.chat.layout import detect_layout
from homeprefixd.chat.prompt import PromptBuilder
from homeprefixd.chat.reply import ReplyParser
from homeprefixd.errors import ModelError, RequestError
from homeprefixd.frames.worker import Message

HELLO = [Message("user", "Hello")]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def builder(source: str, timeout: float = 5.0, **more: Any) -> PromptBuilder:
    return PromptBuilder(source, "<s>", "</s>", timeout, **more)


def render(source: str, messages: list[Message] | None = None, tools: Any = None, **kwargs: Any) -> str:
    return builder(source).render(HELLO if messages is None else messages, tools, kwargs)


def test_chatml() -> None:
    messages = [Message("system", "Be brief."), Message("user", "Hi <b> & 'é'")]
    assert render(CHATML, messages) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <b> & 'é'<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}|{{ eos_token }}", "<s>|</s>"),
        (
            "{%- for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}",
            "02",
        ),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),  # trim_blocks, lstrip_blocks
        ("{{ strftime_now('%d %b %Y') }}", "05 Nov 2026"),
        ("{{ tools is none }} {{ documents is none }}", "True True"),
        ("{{ messages[0].name is defined }}{{ messages[0].tool_calls is defined }}", "FalseFalse"),
        ("{% generation %}a{{ 1 + 1 }}{% endgeneration %}", "a2"),
        ("{{ {'b': '<é>&', 'a': 1} | tojson }}", '{"b": "<é>&", "a": 1}'),
        ("{{ {'b': 'é', 'a': [1]} | tojson(sort_keys=true, ensure_ascii=true) }}", '{"a": [1], "b": "\\u00e9"}'),
        ("{{ {'b': 1} | tojson(indent=2) }}", '{\n  "b": 1\n}'),
        ("{{ {'b': 1} | tojson(separators=(',', ':')) }}", '{"b":1}'),
        ("{{ 'a' ~ 1 ~ none }}{{ 'ab' * 2 }}{{ 'x' + 'y' }}{{ 7 % 4 }}{{ '%s-%02d' % ('a', 7) }}", "a1Noneababxy3a-07"),
        ("{{ '{:02d}|{}'.format(7, 'b') }}{{ 'a,b'.split(',') | join('-') }}{{ 'aXb'.replace('X', '') }}", "07|ba-bab"),
        (
            "{{ 'a\nb' | indent(2) }}{{ 'x' | center(3) }}{{ 'ab' | replace('b', 'c') }}{{ '%s' | format(1) }}",
            "a\n  b x ac1",
        ),
        (
            "{% macro m(x) %}[{{ x }}{{ caller() }}]{% endmacro %}{% call m(1) %}!{% endcall %}{% set s %}z{% endset %}{{ s }}",
            "[1!]z",
        ),
        ("{% set ns = namespace(n=0) %}{% for i in [1, 2] %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "3"),
    ],
)
def test_what_templates_expect(source: str, expected: str) -> None:
    assert builder(source, now=lambda: datetime(2026, 11, 5)).render(HELLO, None, {}) == expected


def test_kwargs_and_tools_reach_the_template_in_order() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"z": 1, "a": 2}}}]
    source = "{{ tools | tojson }}{{ enable_thinking }}{{ add_generation_prompt }}"
    assert render(source, tools=tools, enable_thinking=False, add_generation_prompt=False) == (
        json.dumps(tools) + "FalseFalse"
    )
    with pytest.raises(RequestError, match="messages") as caught:
        builder(source).render(HELLO, None, {"messages": []})
    assert caught.value.param == "chat_template_kwargs"


def test_a_template_without_tools_gets_them_as_text() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": 2}}}]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        Message("system", "Be brief."),
        Message("user", "Go"),
        Message("assistant", None, tool_calls=[call]),
        Message("tool", "done", tool_call_id="c"),
    ]
    shown = render(CHATML, messages, tools)
    assert '{"name": "f", "parameters": {"b": 1, "a": 2}}' in shown
    assert shown.startswith("<|im_start|>system\nBe brief.\n\nYou can call these tools.")
    assert '<|im_start|>assistant\n{"name": "f", "arguments": {"x": 1}}<|im_end|>' in shown
    assert "<|im_start|>user\nResult of the tool: done<|im_end|>" in shown
    assert render(CHATML, HELLO, tools).startswith("<|im_start|>system\nYou can call these tools.")
    assert "You can call" not in render(CHATML, HELLO)
    assert "You can call" not in render("{{ tools | tojson }}", HELLO, tools)


def test_no_content_is_empty_text() -> None:
    assert render("[{{ messages[0].content }}]", [Message("assistant", None)]) == "[]"


def test_reasoning_and_tool_results() -> None:
    messages = [Message("assistant", "x", reasoning_content="because"), Message("tool", "3", "f", tool_call_id="c1")]
    source = "{% for m in messages %}{{ m | tojson }}{% endfor %}"
    assert render(source, messages) == (
        '{"role": "assistant", "content": "x", "reasoning_content": "because"}'
        '{"role": "tool", "content": "3", "name": "f", "tool_call_id": "c1"}'
    )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ a | tojson }}", '{"z": "é", "a": [1]}'),
        ("{% if a is string %}text{% else %}{{ a.z }}{% endif %}", "é"),
        ("{{ a is mapping }}{% for k, v in a.items() %}{{ k }}={{ v }};{% endfor %}", "Truez=é;a=[1];"),
        ("{{ '<' + a + '>' }}", '<{"z":"é","a":[1]}>'),
        ("{{ '<' ~ a ~ '>' }}{{ a }}", '<{"z":"é","a":[1]}>{"z":"é","a":[1]}'),
        ("{{ a | string | length }}", "17"),
    ],
)
def test_arguments_of_tool_calls_are_objects_that_also_print_as_sent(source: str, expected: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"z":"é","a":[1]}'}}
    get = "{% set a = messages[0].tool_calls[0].function.arguments %}"
    assert render(get + source, [Message("assistant", None, tool_calls=[call])]) == expected
    assert call["function"]["arguments"] == '{"z":"é","a":[1]}'  # type: ignore[index]


@pytest.mark.parametrize(
    ("sent", "expected"), [("not json", "not json"), ("[1]", "[1]"), ("", ""), ({"a": 1}, '{"a": 1}')]
)
def test_odd_arguments(sent: Any, expected: str) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": sent}}
    assert (
        render("{{ messages[0].tool_calls[0].function.arguments }}", [Message("assistant", tool_calls=[call])])
        == expected
    )


def test_a_template_that_asks_for_tools_unasked_gets_an_empty_list() -> None:
    assert render("{% for tool in tools %}{{ tool }}{% endfor %}x") == "x"
    assert render("{{ tools is none }}") == "True"
    with pytest.raises(RequestError, match="NoneType"):  # what it complained of first
        render("{% for tool in tools %}{% endfor %}{{ nothing.x }}")


def test_calls_that_a_template_does_not_show_are_text() -> None:
    messages = [Message("user", "hi"), Message("assistant", "So:", tool_calls=[CALL]), Message("tool", "5", "f")]
    source = "{{ tools | length }}{% for m in messages %}[{{ m.role }} {{ m.content }}]{% endfor %}"
    shown = '[user hi][assistant So:\n{"name": "f", "arguments": {"x": 1}}][tool 5]'
    assert render(source, messages, [{"type": "function", "function": {"name": "f"}}]) == f"1{shown}"


@pytest.mark.parametrize(
    ("mark", "shown"),
    [
        ("<|tool_call|>", '<|tool_call|>[{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]'),
        ("<TOOLCALL>", '<TOOLCALL>[{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]</TOOLCALL>'),
        ("<|tool_call_start|>", "<|tool_call_start|>[f(x=1), g()]<|tool_call_end|>"),
    ],
)
def test_they_are_as_the_model_writes_them(mark: str, shown: str) -> None:
    messages = [Message("assistant", tool_calls=[CALL, OTHER]), Message("user", "x")]
    assert render("{# tools " + mark + " #}{{ messages[0].content }}", messages) == shown
    parser = ReplyParser(detect_layout(mark), tools={}, opened=False, calls=True, parallel=True, new_id=lambda: "id")
    pieces = [*parser.feed(shown).calls, *parser.finish().calls]
    assert [json.loads(piece.arguments) for piece in pieces] == [{"x": 1}, {}]


def test_generators_become_json() -> None:
    assert render("{{ messages | map(attribute='role') | tojson }}") == '["user"]'


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
OTHER = {"id": "b", "type": "function", "function": {"name": "g", "arguments": {}}}
BROKEN = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": '}}
_SHOWN = (
    "[{{ m.role }} {{ m.content }}"
    "{% for c in m.tool_calls or [] %} {{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}]"
)


@pytest.mark.parametrize(
    ("refusal", "messages", "expected"),
    [
        (
            "m.role == 'system'",
            [Message("system", "Be brief."), Message("user", "hi"), Message("assistant", "yo"), Message("user", "x")],
            "[user Be brief.\n\nhi][assistant yo][user x]",
        ),
        ("m.role == 'system'", [Message("system", "Be brief.")], "[user Be brief.]"),
        (
            "m.tool_calls | length > 1",
            [
                Message("user", "hi"), Message("assistant", "So:", tool_calls=[CALL, OTHER]),
                Message("tool", "of g", tool_call_id="b"), Message("tool", "of f", tool_call_id="a"),
                Message("user", "and?"),
            ],
            '[user hi][assistant So: f{"x": 1}][tool of f][assistant  g{}][tool of g][user and?]',
        ),
        (
            "loop.previtem is defined and loop.previtem.role == m.role",
            [Message("user", "a"), Message("user", "b"), Message("assistant", "c"), Message("assistant", "d"), Message("user", "e")],
            "[user a\n\nb][assistant c\n\nd][user e]",
        ),
        (
            "(m.tool_calls or [{'function': {'arguments': {}}}])[0].function.arguments is string",
            [Message("user", "hi"), Message("assistant", tool_calls=[BROKEN])],
            '[user hi][assistant  f{"arguments": "{\\"x\\": "}]',
        ),
        (
            "m.role == 'system' or (loop.previtem is defined and loop.previtem.role == m.role)",
            [Message("system", "S"), Message("user", "a"), Message("user", "b")],
            "[user S\n\na\n\nb]",
        ),
        (
            "m.role == 'system' and not loop.first",
            [Message("system", "S"), Message("system", "T"), Message("user", "a"), Message("system", "U"), Message("user", "b")],
            "[system S\n\nT][user a][user U][user b]",
        ),
        (
            "m.role == 'system' and not loop.first",
            [Message("user", "a"), Message("assistant", "b"), Message("system", "U"), Message("user", "c")],
            "[user a][assistant b][user U][user c]",
        ),
        (
            "m.role == 'system'",
            [Message("system", "S"), Message("system", "T"), Message("user", "a"), Message("system", "U"), Message("user", "b")],
            "[user S\n\nT\n\na][user U][user b]",
        ),
        (
            "(m.role == 'system' and not loop.first) or (loop.previtem is defined and loop.previtem.role == m.role)",
            [Message("system", "S"), Message("user", "a"), Message("system", "U"), Message("user", "b")],
            "[system S][user a\n\nU\n\nb]",
        ),
    ],
)  # fmt: skip
def test_messages_are_adapted_to_what_a_template_takes(refusal: str, messages: list[Message], expected: str) -> None:
    plain = "{% for m in messages %}" + _SHOWN + "{% endfor %}"
    choosy = (
        "{% for m in messages %}{% if " + refusal + " %}{{ raise_exception('no: ' ~ m.role) }}{% endif %}{% endfor %}"
    )
    assert render(choosy + plain, messages) == expected
    assert render(plain, messages) != expected, "a template that takes them gets them as they are"


def test_only_what_is_in_the_way_is_changed() -> None:
    """A system message stays one where only the roles after it do not alternate."""
    messages = [
        Message("system", "S"),
        Message("user", "a"),
        Message("user", "b"),
        Message("assistant", "c"),
        Message("user", "d"),
    ]
    source = (
        "{% for m in messages %}{% if loop.previtem is defined and loop.previtem.role == m.role %}"
        "{{ raise_exception('Roles must alternate!') }}{% endif %}" + _SHOWN + "{% endfor %}"
    )
    assert render(source, messages) == "[system S][user a\n\nb][assistant c][user d]"


@pytest.mark.parametrize("roles", ["su", "suasu", "uasu", "sus", "us", "usu", "suas", "ssuauu", "uu", "ssuuaas"])
@pytest.mark.parametrize("takes_system", [False, True])
def test_one_complaint_of_several_causes(roles: str, takes_system: bool) -> None:
    """As Gemma's and Mistral's templates have it: all that is amiss is that roles do not alternate."""
    names = {"s": "system", "u": "user", "a": "assistant"}
    skipped = "{% set ns = namespace(at=0) %}{% if messages[0].role == 'system' %}"
    skipped += "{% set ns.at = 1 %}{% endif %}" if takes_system else "{{ raise_exception('No!') }}{% endif %}"
    source = skipped + (
        "{% for m in messages[ns.at:] %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('No!') }}"
        "{% endif %}[{{ m.content }}]{% endfor %}"
    )
    found = render(source, [Message(names[role], str(at)) for at, role in enumerate(roles)])
    skipped_too = (len(roles) - len(roles.lstrip("s"))) if takes_system else 0  # its system message, joined
    assert [int(text) for text in re.findall(r"\d+", found)] == list(range(skipped_too, len(roles)))


def test_what_no_change_helps_is_told_in_the_first_words() -> None:
    source = "{{ raise_exception('no: ' ~ messages | length ~ messages[0].role) }}"
    with pytest.raises(RequestError, match=r"^no: 3system$"):
        render(source, [Message("system", "S"), Message("user", "a"), Message("user", "b")])


def test_raise_exception_is_the_users_message() -> None:
    with pytest.raises(RequestError, match=r"^Roles must alternate!$") as caught:
        render("a{{ raise_exception('Roles must alternate!') }}")
    assert caught.value.code == "template_refused"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 1 / 0 }}",
        "{{ messages[7].content.x }}",
        "{{ 'a' + 1 }}",
        "{{ {}.x | tojson }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_other_failures_name_the_setting(source: str) -> None:
    with pytest.raises(RequestError, match=r"model\.chat_template"):
        render(source)


@pytest.mark.parametrize("source", ["{% if %}", "{{ x", "{% nosuch %}", "{{ x | nosuch }}"])
def test_a_template_that_does_not_compile(source: str) -> None:
    with pytest.raises(ModelError, match=r"does not compile.*model\.chat_template"):
        builder(source)


@pytest.mark.parametrize("source", ["", " \n"])
def test_a_model_without_a_template_names_the_setting(source: str) -> None:
    without = builder(source)
    assert not without.has_template
    with pytest.raises(RequestError, match=r"model\.chat_template.*--config"):
        without.render(HELLO, None, {})


ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({}) }}",
    "{{ raise_exception.__globals__.x }}",
    "{{ '{0.__class__.__mro__}'.format(1) }}",
    "{{ self.__init__.__globals__ }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(RequestError):
        render(source)


BOMBS = [
    "{{ 'x' * 10000000000 }}",
    "{{ ['x'] * 10000000000 }}",
    "{{ 10000000000 * 'x' }}",
    "{{ (2 ** 10000000000) % 2 }}",
    "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}{% endfor %}",
    "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = m(ns.s) %}{% endfor %}",
    "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s.replace('x', 'xx') %}{% endfor %}",
    "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s | replace('x', 'xx') %}{% endfor %}",
    "{% for i in range(99999) %}{{ 'x' * 100000 }}{% endfor %}",
    "{{ range(1000000000) | list }}",
    "{{ 'x' | center(10000000000) }}",
    "{{ 'x'.ljust(10000000000) }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '%*d' % (10000000000, 1) }}",
    "{{ '{:>10000000000}'.format(1) }}",
    "{{ '{:>{}}'.format(1, 10000000000) }}",
    "{{ ('x\n' * 10000) | indent(999999) }}",
    "{{ '%0100000d' | format(1) }}",
    "{{ [1] | tojson(indent=10000000000) }}",
    "{{ (1).to_bytes(10000000000, 'big') }}",
    "{% set big = 'x' * 60000000 %}{{ '%s%s%s' % (big, big, big) }}",
]


@pytest.mark.parametrize("source", BOMBS)
def test_memory_is_bounded(source: str) -> None:
    """In a process that may not take more than 1 GiB: it would fail with MemoryError, which is not said so."""
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "from homeprefixd.chat.prompt import PromptBuilder\nfrom homeprefixd.frames.worker import Message\n"
        "from homeprefixd.errors import RequestError\n"
        "try: PromptBuilder(sys.argv[1], '', '', 5.0).render([Message('user', 'x')], None, {})\n"
        "except RequestError as error: print(error.code, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, source], capture_output=True, text=True, timeout=60, check=True)
    assert any(word in done.stdout for word in ("more than", "huge", "too big", "Range")), done.stdout


def test_an_endless_template_is_stopped_in_time() -> None:
    endless = builder(
        "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
        0.1,
    )
    began = time.monotonic()
    with pytest.raises(RequestError, match=r"model\.template_timeout") as caught:
        endless.render(HELLO, None, {})
    assert time.monotonic() - began < 20
    assert caught.value.code == "template_timeout"
    assert not [thread for thread in threading.enumerate() if thread.name == "render"]


def test_an_endless_template_that_prints_is_stopped_in_time() -> None:
    endless = builder(
        "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}", 0.1, max_text=1 << 60
    )
    with pytest.raises(RequestError, match=r"model\.template_timeout"):
        endless.render(HELLO, None, {})
    assert not [thread for thread in threading.enumerate() if thread.name == "render"]


def test_the_interrupt_never_hits_anybody_else() -> None:
    """Renders that end at about their time limit, many at once: each gives its text or the time-out, nothing else."""
    source = "{% for a in range(20000) %}{% endfor %}ok"
    patient = builder(source)
    began = time.perf_counter()
    patient.render(HELLO, None, {})
    usual = time.perf_counter() - began
    slow = [builder(source, usual * factor / 20) for factor in range(1, 80)]
    outcomes: dict[str, int] = {}

    def one(i: int) -> str:
        for _ in range(20):  # code for a stray exception to hit
            json.dumps({"a": 1})
        try:
            return slow[i % len(slow)].render(HELLO, None, {})
        except RequestError as error:
            return str(error.code)

    with ThreadPoolExecutor(4) as pool:
        for outcome in pool.map(one, range(1000)):
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
    assert set(outcomes) == {"ok", "template_timeout"}, outcomes
    # Nothing is pending here either.
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(threading.get_ident()), None) == 1


def test_many_threads_render_at_once() -> None:
    shared = builder(CHATML)
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda i: shared.render([Message("user", f"n{i}")], None, {}), range(200)))
    assert all(f"user\nn{i}<|im_end|>" in text for i, text in enumerate(texts))


def test_a_render_is_cheap() -> None:
    shared = builder(CHATML)
    shared.render(HELLO, None, {})
    began = time.perf_counter()
    for _ in range(100):
        shared.render(HELLO, None, {})
    assert (time.perf_counter() - began) / 100 < 0.1  # compiled once


# ---------------------------------------------------------------------------------------------------- continuing

BEGUN = [Message("user", "Hi"), Message("assistant", "The answer is ")]
CLOSED = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
STRIPPING = CHATML.replace("message['content']", "message['content'] | trim")


@pytest.mark.parametrize("source", [CHATML, STRIPPING])
@pytest.mark.parametrize("kwargs", [{}, {"continue_final_message": True}, {"add_generation_prompt": False}])
def test_a_reply_that_was_begun_goes_on(source: str, kwargs: dict[str, Any]) -> None:
    assert render(source, BEGUN, **kwargs) == f"{CLOSED}The answer is "


@pytest.mark.parametrize("kwargs", [{"continue_final_message": False}, {"add_generation_prompt": True}])
def test_a_reply_may_be_closed_all_the_same(kwargs: dict[str, Any]) -> None:
    assert render(CHATML, BEGUN, **kwargs) == f"{CLOSED}The answer is <|im_end|>\n<|im_start|>assistant\n"


def test_calls_and_nothing_are_no_beginning() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    for last in (Message("assistant", ""), Message("assistant", "x", tool_calls=[call])):
        assert render(CHATML, [HELLO[0], last]).endswith("<|im_end|>\n<|im_start|>assistant\n")
        with pytest.raises(RequestError, match="continue_final_message"):
            render(CHATML, [HELLO[0], last], continue_final_message=True)


def test_what_cannot_be_continued() -> None:
    with pytest.raises(RequestError, match="exclude each other"):
        render(CHATML, BEGUN, continue_final_message=True, add_generation_prompt=True)
    with pytest.raises(RequestError, match="does not show"):
        render("{{ messages | length }}", BEGUN, continue_final_message=True)
    assert render("{{ messages | length }}", BEGUN) == "2"


def test_a_template_for_chats_with_tools() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    source = "{{ tools[0].function.name }}<tool_call>{{ messages[0].content }}"
    both = builder(CHATML, tool_source=source)
    assert both.render(HELLO, tools, {}) == "f<tool_call>Hello"
    assert both.render(HELLO, None, {}) == both.render(HELLO, [], {}) == render(CHATML)
    assert both.layout.calls == "hermes"
    assert builder("", tool_source=source).has_template is False
    with pytest.raises(ModelError, match="does not compile"):
        builder(CHATML, tool_source="{% if %}")
