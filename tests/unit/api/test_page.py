"""The page in a real browser, where this machine has one: what it shows, by keyboard, on a phone, light and dark.

PICTURES_OF_THE_PAGE=DIR keeps pictures of it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import browser
import msgspec
import pytest
from aiohttp.test_utils import TestServer
from scripted_backend import MODEL, MemoryAdmin, ScriptedBackend
from test_api_records import script

from homeprefixd.api.app import create_app
from homeprefixd.api.keys import APPLY_RULE
from homeprefixd.config import ServerConfig
from homeprefixd.config_file import Applied
from homeprefixd.frames.worker import Accepted, Message, Progress

CHROMIUM = browser.find()

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=f"none of {browser.NAMES} is in PATH")

STATS: dict[str, Any] = {
    "hot": {"bytes": 700 << 20, "limit": 2 << 30, "nodes": 310, "leased": 0},
    "warm": {"bytes": 6 << 30, "limit": 20 << 30, "nodes": 2411, "state": "ok", "reason": ""},
    "queue": {"nodes": 3, "bytes": 1000, "limit": 2000},
    "writes": {"today": 900 << 20},
}
WORKER = {"alias": "demo", "state": "ok", "progress": 1.0, "reason": "", "cells": 4096, "cells_used": 512}


@pytest.fixture
async def shown(tmp_path: Path) -> AsyncIterator[tuple[browser.Tab, ScriptedBackend, TestServer]]:
    """The page of a daemon that has answered two requests."""
    backend, admin = ScriptedBackend(), MemoryAdmin()
    backend.state["workers"] = [WORKER]
    admin.figures = STATS
    backend.script = script()
    server = TestServer(create_app(backend, admin, ServerConfig(keep_alive=0.5)))
    async with server:
        await ask(server, "HomeApp/1.0")
        await ask(server, "<b>Evil</b>/1.0")
        assert CHROMIUM is not None
        async with browser.open_page(CHROMIUM, str(server.make_url("/")), tmp_path / "profile") as tab:
            await tab.until("document.getElementById('state')?.textContent === 'demo is ready'")
            yield tab, backend, server
            assert tab.problems == []


async def ask(server: TestServer, agent: str) -> None:
    import aiohttp

    body = {"messages": [{"role": "user", "content": "x"}]}
    async with (
        aiohttp.ClientSession() as session,
        session.post(server.make_url("/v1/chat/completions"), json=body, headers={"User-Agent": agent}) as reply,
    ):
        assert reply.status == 200


async def text(tab: browser.Tab, name: str) -> str:
    return str(await tab.value(f"document.getElementById('{name}').innerText"))


async def test_what_it_shows(shown: tuple[browser.Tab, ScriptedBackend, TestServer]) -> None:
    tab, _backend, server = shown
    assert await text(tab, "rate") == "64 %"
    assert "HomeApp" in await text(tab, "apps")
    assert "<b>Evil<" in await text(tab, "recent")  # text, not markup
    assert "700 MiB of 2.0 GiB" in await text(tab, "tiers")
    assert "512 of 4,096 cells" in await text(tab, "models")
    await tab.until("document.getElementById('prefixes').innerText.includes('128 tokens')")
    await ask(server, "Later/1")
    await tab.until("document.getElementById('recent').innerText.includes('Later')")  # live
    assert await text(tab, "count") == "3"


async def test_why_by_keyboard(shown: tuple[browser.Tab, ScriptedBackend, TestServer]) -> None:
    tab, _backend, _server = shown
    for _ in range(40):
        await tab.key("Tab")
        if await tab.value("document.activeElement.closest('#recent') !== null"):
            break
    assert await tab.value("document.activeElement.getAttribute('aria-expanded')") == "false"
    await tab.key("Enter")
    await tab.until("document.querySelector('#recent pre del')?.textContent === '21:15'")
    assert await tab.value("document.querySelector('#recent pre ins').textContent") == "21:16"
    assert "move_volatile_line" in await text(tab, "recent")
    assert await tab.value("document.activeElement.getAttribute('aria-expanded')") == "true"  # focus stays
    await tab.key("Enter")
    await tab.until("document.querySelector('#recent pre') === null")


async def test_the_rule_by_one_click(shown: tuple[browser.Tab, ScriptedBackend, TestServer]) -> None:
    tab, _backend, server = shown
    used: list[tuple[str, str, str]] = []

    async def use(rule: str, setting: str, app: str) -> Applied:
        used.append((rule, setting, app))
        return Applied("", "the file is read-only")

    with pytest.warns(DeprecationWarning, match="started"):  # a daemon sets it before
        server.app[APPLY_RULE] = use
    await tab.until("latest.can.includes('rules')")
    await tab.value("document.querySelector('#recent button').click()")
    await tab.until("document.querySelector('#recent button.main') !== null")
    await tab.value("document.querySelector('#recent button.main').click()")
    await tab.until("document.getElementById('note').textContent.includes('read-only')")
    ((rule, setting, app),) = used
    assert (rule, setting) == ("move_volatile_line", "on")
    await tab.until("document.querySelector('#recent button.main') === null")  # nor is there one on older rows
    said = await text(tab, "recent")
    assert f"for {app}" in said
    assert "In force" in said


async def test_why_of_a_request_that_is_not_in_the_list_any_more(
    shown: tuple[browser.Tab, ScriptedBackend, TestServer],
) -> None:
    tab, backend, server = shown

    async def use(rule: str, setting: str, app: str) -> Applied:
        return Applied("/etc/c.toml", "")

    with pytest.warns(DeprecationWarning, match="started"):  # a daemon sets it before
        server.app[APPLY_RULE] = use
    for _ in range(5):
        await ask(server, "HomeApp/1.0")  # what it lost is worth a word
    backend.script = script(None)
    for _ in range(55):
        await ask(server, "Newer/1")
    await tab.until("latest.apps.some((app) => app.requests === 55)")
    assert "HomeApp" not in await text(tab, "recent")
    await tab.value("document.querySelector('[data-key=appHomeApp]').click()")
    await tab.until("document.querySelector('#recent pre del')?.textContent === '21:15'")
    row = "document.querySelector('#recent li:last-child')"
    assert await tab.value(f"{row}.contains(document.activeElement)")  # it is what the keyboard is at
    await tab.until("document.querySelector('#recent button.main') !== null")
    await ask(server, "Newest/1")
    await tab.until("document.getElementById('recent').innerText.includes('Newest')")
    assert "HomeApp" in await text(tab, "recent")  # newer ones do not push out what is read
    await tab.value("document.querySelector('#recent button.main').click()")
    await tab.until("document.getElementById('recent').innerText.includes('In force')")
    await tab.value(f"{row}.querySelector('button').click()")
    await tab.until("!document.getElementById('recent').innerText.includes('HomeApp')")
    assert await tab.value("document.querySelectorAll('#recent > li').length") == 50


async def test_warming(shown: tuple[browser.Tab, ScriptedBackend, TestServer]) -> None:
    tab, backend, _server = shown
    backend.loaded = [msgspec.structs.replace(MODEL, namespace={"salt": ""}, least=16)]
    await tab.value("document.getElementById('warmtext').value = 'You are kind.'")
    await tab.value("document.getElementById('warmnow').click()")
    await tab.until("document.getElementById('warmed').textContent.includes('computed')")
    assert backend.asked.messages == [Message("system", "You are kind.")]
    assert backend.asked.max_tokens == 0


async def test_the_chat(shown: tuple[browser.Tab, ScriptedBackend, TestServer]) -> None:
    tab, backend, _server = shown
    await tab.value("document.getElementById('question').focus()")
    await tab.type("How are you?")
    await tab.key("Enter")
    await tab.until("document.querySelector('.said.assistant')?.textContent === 'Hello'")
    assert backend.asked.messages is not None
    assert backend.asked.messages[-1].content == "How are you?"
    await tab.until("document.getElementById('cost').textContent.startsWith('64 tokens reused')")
    await tab.until("document.getElementById('send').textContent === 'Send'")


async def test_what_is_answered_now(shown: tuple[browser.Tab, ScriptedBackend, TestServer]) -> None:
    tab, backend, server = shown
    backend.script = [Accepted("", 100), Progress("", 20, 60, 100), asyncio.Event().wait]
    asking = asyncio.create_task(ask(server, "Slow/1"))
    await tab.until("document.getElementById('running').innerText.includes('reading the prompt')")
    assert (
        await tab.value("document.querySelector('#running [role=progressbar]').getAttribute('aria-valuenow')") == "60"
    )
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await tab.until("document.getElementById('running').innerText === 'Nothing.'")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
async def test_every_size_and_both_colours(
    shown: tuple[browser.Tab, ScriptedBackend, TestServer], tmp_path: Path, width: int, dark: bool
) -> None:
    tab, _backend, server = shown
    name = "A" * 190
    await ask(server, f"{name}/1.0")
    await tab.until(f"document.getElementById('recent').innerText.includes('{name}')")
    await tab.value("loadPrefixes()")
    await tab.screen(width, 800, dark=dark, phone=width < 600)
    await tab.value("document.querySelector('#recent button').click()")
    await tab.until("document.querySelector('#recent pre') !== null")
    wide = await tab.value("document.documentElement.scrollWidth")
    assert wide <= width  # nothing hangs over
    assert await tab.value(f"[...document.querySelectorAll('[title={name}]')].every((n) => n.offsetHeight < 80)")
    assert await tab.value(f"document.querySelectorAll('[title={name}]').length") >= 3
    for part in ("body", ".small", "button.main", "pre del"):
        ratio = await tab.value(f"({CONTRAST})(document.querySelector({part!r}))")
        assert ratio >= 4.5, (part, ratio)  # as WCAG AA asks for
    where = Path(os.environ.get("PICTURES_OF_THE_PAGE") or tmp_path)
    await tab.picture(where / f"page-{width}-{'dark' if dark else 'light'}.png")


CONTRAST = """(node) => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const linear = (v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = (rgb) => rgb.slice(0, 3).map((v) => linear(v / 255))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  let ground = node;
  while (ground && (parse(getComputedStyle(ground).backgroundColor)[3] === 0)) ground = ground.parentElement;
  const pair = [[node, "color"], [ground, "backgroundColor"]]
    .map(([one, name]) => light(parse(getComputedStyle(one)[name])));
  pair.sort((a, b) => b - a);
  return (pair[0] + 0.05) / (pair[1] + 0.05);
}"""
