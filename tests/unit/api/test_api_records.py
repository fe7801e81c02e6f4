"""Records of requests and what shows them: `/cache/records`, `explain`, `overview`, `events`, and the page at `/`."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer
from scripted_backend import MODEL, TIMINGS, MemoryAdmin, ScriptedBackend

from homeprefixd.api.app import create_app
from homeprefixd.api.keys import APPLY_RULE
from homeprefixd.api.record_file import RecordFile, recorded
from homeprefixd.api.records import Record, Records
from homeprefixd.clients import app_name
from homeprefixd.config import RecordsConfig, ServerConfig
from homeprefixd.config_file import Applied
from homeprefixd.errors import UnavailableError, WorkerDiedError
from homeprefixd.explain.causes import title
from homeprefixd.explain.conclude import Explanation
from homeprefixd.frames.worker import (
    TOO_SLOW,
    Accepted,
    Account,
    Delta,
    Finding,
    Finished,
    GateDecision,
    Judged,
    Progress,
    SectionTokens,
)

CHAT = {"messages": [{"role": "user", "content": "a secret question"}]}
SECTIONS = [SectionTokens("system message", 60), SectionTokens("message 1 (user)", 30), SectionTokens("template", 10)]
CLOCK = Finding("clock", "the system message", 64, "It is ", "21:15", "21:16", 30, "move_volatile_line")
GATE = GateDecision(64, 64, "faster", {"hot": 64}, 0.01, 0.5, 2e8, 128.0)
BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


def script(finding: Finding | None = CLOCK, known: int = 64) -> list[Any]:
    return [
        Accepted("", 100),
        Account("", SECTIONS, True, known, known, finding, {"drop_billing_line": 1}),
        Progress("", 64, 100, 100),
        Delta("", "Hello", 3),
        Finished("", "stop", "", None, TIMINGS, stored=64, gate=GATE),
    ]


async def ask(client: TestClient, **more: Any) -> str:
    reply = await client.post("/v1/chat/completions", json={**CHAT, **more}, headers={"User-Agent": "HomeApp/1.2 x"})
    assert reply.status == 200, await reply.text()
    return str((await reply.json())["id"])


async def records(client: TestClient) -> dict[str, Any]:
    found: dict[str, Any] = await (await client.get("/cache/records")).json()
    return found


async def test_a_record_of_each_request(client: TestClient, backend: ScriptedBackend) -> None:
    backend.script = script(None)
    rid = await ask(client)
    found = await records(client)
    assert found["running"] == []
    [record] = found["records"]
    expected = {
        "id": rid,
        "app": "HomeApp",
        "model": "demo",
        "state": "finished",
        "prompt": 100,
        "reused": 64,
        "computed": 36,
        "tiers": {"hot": 64},
        "generated": 3,
        "restore_ms": 1.5,
        "prefill_ms": 18.0,
        "decode_ms": 60.0,
        "stored": 64,
        "rules": {"drop_billing_line": 1},
        "gate": msgspec.to_builtins(GATE),
        "sections": [msgspec.to_builtins(section) for section in SECTIONS],
    }
    assert {key: record.get(key) for key in expected} == expected
    assert record["saved_s"] == pytest.approx(64 * 0.018 / 36 - 0.0015)
    assert record["first_ms"] >= 0
    assert "cause" not in record
    assert "secret" not in json.dumps(found)


async def test_rules_that_were_too_slow(client: TestClient, backend: ScriptedBackend) -> None:
    backend.script = script()
    for event in backend.script:
        if isinstance(event, Account):
            event.rules = {"drop_billing_line": 1, f"custom{TOO_SLOW}": 1}
    await ask(client)
    [record] = (await records(client))["records"]
    assert (record["rules"], record["slow_rules"]) == ({"drop_billing_line": 1}, ["custom"])
    metrics = await (await client.get("/metrics")).text()
    assert 'homeprefixd_stable_rules_too_slow_total{model="demo",rule="custom"} 1.0' in metrics
    assert 'rule="custom (too slow)"' not in metrics


async def test_an_explanation(client: TestClient, backend: ScriptedBackend) -> None:
    backend.script = script()
    rid = await ask(client)
    listed = json.dumps(await records(client))
    assert '"cause": "clock"' in listed
    assert "21:15" not in listed  # no text of prompts in lists
    for name in (rid, "last"):
        found = await (await client.get(f"/cache/explain/{name}")).json()
        told = found["explanation"]
        assert found["record"]["id"] == rid
        assert (told["cause"], told["before"], told["after"], told["token"]) == ("clock", "21:15", "21:16", 64)
        assert told["tokens_lost"] == 30
        assert told["seconds_lost"] == pytest.approx(30 * 0.018 / 36)
        assert told["rule"] == "move_volatile_line"
        assert "a clock or date in the system message" in told["text"]
        assert found["lines"] == ["[[stable.per_app]]", 'app = "HomeApp"', 'move_volatile_line = "on"']
    metrics = await (await client.get("/metrics")).text()
    assert 'homeprefixd_lost_tokens_total{cause="clock",model="demo"} 30.0' in metrics
    assert 'homeprefixd_stable_rules_total{model="demo",rule="drop_billing_line"} 1.0' in metrics
    [app] = (await (await client.get("/cache/overview")).json())["apps"]
    assert app["causes"] == {"clock": pytest.approx(0.015)}
    assert "clock" in app["text"]


async def test_what_was_known_and_is_gone(client: TestClient, backend: ScriptedBackend) -> None:
    backend.script = script(None, known=99)
    await ask(client)
    told = (await (await client.get("/cache/explain/last")).json())["explanation"]
    assert (told["cause"], told["tokens_lost"], told["token"]) == ("not_kept", 35, 64)


async def test_records_that_there_are_not(client: TestClient) -> None:
    for name in ("last", "chatcmpl-x"):
        reply = await client.get(f"/cache/explain/{name}")
        assert reply.status == 404
        assert "no record" in (await reply.json())["error"]["message"]
    assert (await client.get("/cache/records?limit=0")).status == 400


async def test_requests_that_fail_or_are_left(client: TestClient, backend: ScriptedBackend) -> None:
    backend.script = [Accepted("", 100), WorkerDiedError("it died")]
    assert (await client.post("/v1/chat/completions", json=CHAT)).status == 503
    backend.script = [Accepted("", 100), asyncio.Event().wait]
    reply = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
    [running] = (await records(client))["running"]
    assert "state" not in running  # still queued, which is the default
    reply.close()
    async with asyncio.timeout(5):
        while (await records(client))["running"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    left, failed = (await records(client))["records"]
    assert (left["state"], failed["state"], failed["error"]) == ("left", "failed", "it died")


async def test_events(client: TestClient, backend: ScriptedBackend, admin: MemoryAdmin) -> None:
    backend.script = script()
    first = await ask(client)
    reply = await client.get("/cache/events")
    assert reply.headers["Content-Type"] == "text/event-stream"

    async def event() -> dict[str, Any]:
        async with asyncio.timeout(5):
            while not (line := await reply.content.readline()).startswith(b"data: "):
                assert line
        told: dict[str, Any] = json.loads(line[6:])
        return told

    state = await event()
    assert [record["id"] for record in state["recent"]] == [first]
    assert state["store"]["warm"] == {"bytes": 1000}
    assert state["today"]["requests"] == 1
    second = await ask(client)
    while not (state := await event())["recent"]:
        pass
    assert [record["id"] for record in state["recent"]] == [second]  # only what is new
    backend.state["state"] = "stopping"
    await ask(client)
    async with asyncio.timeout(10):
        await reply.read()  # it ends with the daemon


async def test_the_overview_without_a_store(client: TestClient, admin: MemoryAdmin) -> None:
    admin.refusal = UnavailableError("away")
    state = await (await client.get("/cache/overview")).json()
    assert state["store"] is None
    assert state["first_ms"] == {"cold": None, "warm": None}


async def test_the_page_is_for_browsers(client: TestClient) -> None:
    reply = await client.get("/", headers=BROWSER)
    assert reply.status == 200
    assert reply.content_type == "text/html"
    policy = reply.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'sha256-" in policy
    page = await reply.text()
    assert page.count("<script>") == 1
    for outside in ("http://", "https://"):
        assert outside not in page.replace("http://www.w3.org/2000/svg", "")
    assert (await client.get("/")).content_type == "text/plain"
    assert (await client.get("/", headers={"Accept": "application/json"})).content_type == "application/json"


async def test_the_page_is_guarded(client: TestClient) -> None:
    for path in ("/", "/cache/events", "/cache/records", "/cache/overview", "/cache/explain/last"):
        headers = {**BROWSER, "Host": "evil.example"}
        assert (await client.get(path, headers=headers)).status == 403
        assert (await client.get(path, headers={**BROWSER, "Origin": "http://evil.example"})).status == 403
    link = {**BROWSER, "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert (await client.get("/", headers=link)).status == 200
    assert (await client.get("/cache/records", headers=link)).status == 403


def record_of(text: str) -> Record:
    return Record(text, app="a", client="a", model="m", began=1.0)


def test_the_file(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    size = len(msgspec.json.encode(record_of("r0"))) + 1
    file = RecordFile(path, 2 * size, 2)
    for number in range(7):
        file.put(record_of(f"r{number}"))
    file.close()
    found = {
        place.name: [json.loads(line)["id"] for line in place.read_text().splitlines()] for place in tmp_path.iterdir()
    }
    assert found == {"records.jsonl": ["r6"], "records.jsonl.1": ["r4", "r5"], "records.jsonl.2": ["r2", "r3"]}
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = RecordFile(tmp_path / "none" / "records", 1000, 1)
    for _ in range(3):
        file.put(record_of("r"))
    file.close()
    assert file.dropped == 3
    assert len(caplog.records) == 1  # told once


@pytest.mark.parametrize("text", ["on", "off"])
async def test_the_file_has_text_only_where_it_is_wanted(tmp_path: Path, text: str) -> None:
    backend = ScriptedBackend()
    backend.script = script()
    path = tmp_path / "r"
    config = msgspec.convert({"file": str(path), "text": text, "keep": 2}, RecordsConfig)
    kept = recorded(config)
    app = create_app(backend, MemoryAdmin(), ServerConfig(), records=kept)
    async with TestClient(TestServer(app)) as client:
        for _ in range(3):
            await ask(client)
        assert len((await records(client))["records"]) == 2  # `keep`
    assert len(path.read_text().splitlines()) == 3  # all is written when the application has ended
    assert ("21:15" in path.read_text()) == (text == "on")


@pytest.mark.parametrize(
    ("client", "app"),
    [
        ("127.0.0.1 HomeApp/2.1", "HomeApp"),
        ("::1 curl/8", "curl"),
        ("192.168.1.7 ", "192.168.1.7"),
        ("kitchen tablet", "kitchen tablet"),
        ("key kitchen", "kitchen"),
        ("127.0.0.1 tab\t/1", "tab"),  # as a table of the configuration has it
        ("", "unknown"),
    ],
)
def test_names_of_apps(client: str, app: str) -> None:
    assert app_name(client) == app


def lose(
    kept: Records, rid: str, cause: str, seconds: float, place: str = "", rule: str = "", app: str = "Home"
) -> None:
    """A request that ended, and lost something."""
    told = Explanation(
        id=rid, cause=cause, title=title(cause, place), text="", place=place, token=0, lead="", before="", after="",
        prompt=99, reused=0, tokens_lost=50, seconds_lost=seconds, advice="", rule=rule,
    )  # fmt: skip
    record = Record(rid, app, app, "demo", began=1.0, cause=cause, place=place, lost=50, lost_s=seconds)
    record.explanation = told
    kept.begin(record)
    kept.end(record, "finished")


def test_the_cause_that_costs_an_app_most() -> None:
    """By the sum of its requests, not by the dearest one; shown by the newest with a rule, if there is one."""
    kept = Records()
    lose(kept, "dear", "changed_text", 30.0, "the system message")
    for number in range(5):
        rule = "move_volatile_line" if number == 3 else ""
        lose(kept, f"clock{number}", "clock", 8.0, "the system message", rule)
    lose(kept, "other", "clock", 99.0, "the system message", "move_volatile_line", app="Other")
    home, other = kept.apps()
    assert (home.cause, home.worst) == ("clock", "clock3")
    assert home.causes == {"changed_text": 30.0, "clock": 40.0}
    assert home.text.startswith("lost 70 s since ")
    assert home.text.endswith(", 40 s of it to a clock or date in the system message")
    assert other.text.endswith(", all of it to a clock or date in the system message")
    lose(kept, "elsewhere", "clock", 8.0, "message 1 (user)")
    assert kept.apps()[0].text.endswith(", 48 s of it to a clock or date in the prompt")  # places do not agree


def propose(kept: Records, rid: str, finding: Finding | None, judged: Sequence[Judged] = ()) -> Record:
    """A request of an app that lost something, and what the worker says of earlier proposals."""
    record = Record(rid, "Home", "Home", "demo", began=1.0)
    kept.begin(record)
    account = Account(rid, SECTIONS, True, 64, 64, finding, judged=list(judged))
    kept.finish(record, Finished(rid, "stop", "", None, TIMINGS, stored=64), account)
    kept.end(record, "finished")
    return record


def test_two_lines_have_a_rule_each() -> None:
    """A newer proposal speaks against an older one of the same line only."""
    kept = Records()
    bell = msgspec.structs.replace(CLOCK, lead="loves.\nDoor bell rang at ", rule="move", setting="^Door bell .*$")
    wash = msgspec.structs.replace(CLOCK, lead="Al.\nLast wash finished ", rule="move", setting="^Last wash .*$")
    old = propose(kept, "bell", bell)
    propose(kept, "wash", wash)
    assert kept.corrected(old) is None
    better = propose(kept, "better", msgspec.structs.replace(bell, setting="^Door bell rang at .{5}$"))
    assert kept.corrected(old) is better
    assert kept.corrected(better) is None
    rooms = [
        msgspec.structs.replace(CLOCK, cause="changing_value", lead="Al.\n", before=old, after=new, rule=rule)
        for old, new, rule in (
            ("Room: bath", "Room: hall", "move_volatile_line"),
            ("Mood: sad", "Mood: merry", "move"),
            ("Room: hall", "Room: house", "move"),
        )
    ]
    room, mood, again = (propose(kept, str(number), finding) for number, finding in enumerate(rooms))
    assert kept.corrected(mood) is None
    assert kept.corrected(room) is again


def test_a_rule_that_fits_no_more() -> None:
    """Newer prompts speak against it, though what they lost has no rule; the page does not lead there then."""
    kept = Records()
    old = propose(kept, "old", CLOCK)
    fits, not_now = (Judged("move_volatile_line", "on", fits) for fits in (True, False))
    nothing = msgspec.structs.replace(CLOCK, rule="")
    propose(kept, "still", nothing, [fits])
    assert kept.corrected(old) is None
    assert kept.apps()[0].worst == "old"
    propose(kept, "unknown", nothing)  # as after a start of the worker: it does not know enough
    assert kept.corrected(old) is None
    newest = propose(kept, "against", nothing, [not_now])
    assert kept.corrected(old) is newest
    assert kept.apps()[0].worst == "against"
    propose(kept, "started", nothing)
    assert kept.corrected(old) is newest
    propose(kept, "again", nothing, [fits])
    assert kept.corrected(old) is None


def test_most_is_not_all() -> None:
    kept = Records()
    lose(kept, "clock", "clock", 0.26, "the system message")
    lose(kept, "text", "changed_text", 0.08, "the system message")
    assert ", most of it to a clock" in kept.apps()[0].text


def test_what_an_app_lost_in_several_places_or_without_a_rule() -> None:
    kept = Records()
    for number in range(3):
        lose(kept, f"r{number}", "tools_changed", 1.0, f"tool{number} is new")
    [app] = kept.apps()
    assert app.worst == "r2"
    assert app.text.endswith(", all of it to tools that have changed")


def test_days() -> None:
    now = [1_795_986_907.0]
    kept = Records(clock=lambda: now[0])
    kept.today().requests = 5
    assert kept.today().requests == 5
    now[0] += 86_400
    assert kept.today().requests == 0


async def test_a_rule_is_applied(client: TestClient, backend: ScriptedBackend) -> None:
    used: list[tuple[str, str, str]] = []

    async def use(rule: str, setting: str, app: str) -> Applied:
        used.append((rule, setting, app))
        return Applied("/etc/c.toml", "")

    backend.script = script(msgspec.structs.replace(CLOCK, rule="move", setting="^Now [^\\n]*$"))
    rid = await ask(client)
    path = f"/cache/explain/{rid}/apply"
    refused = await client.post(path)
    assert refused.status == 400  # nobody can do it here
    assert "start it again" in (await refused.json())["error"]["message"]
    assert client.app is not None
    with pytest.warns(DeprecationWarning, match="started"):  # a daemon sets it before
        client.app[APPLY_RULE] = use
    done = await client.post(path)
    assert (done.status, used) == (
        200,
        [("move", "^Now [^\\n]*$", "HomeApp")],
    )  # for the app that asked, not for everybody
    told = {"rule": "move", "setting": "^Now [^\\n]*$", "app": "HomeApp", "file": "/etc/c.toml", "reason": ""}
    assert await done.json() == told
    foreign = await client.post(path, headers={"Origin": "https://evil.example"})
    assert foreign.status == 403
    assert (await client.post("/cache/explain/nobody/apply")).status == 404
    backend.script = script(msgspec.structs.replace(CLOCK, rule="move", setting="^It is now [^\\n]*$"))
    newer = await ask(client)
    assert newer in (await (await client.get(f"/cache/explain/{rid}")).json())["outdated"]
    assert (await (await client.get(f"/cache/explain/{newer}")).json())["outdated"] == ""
    outdated = await client.post(path)  # more is known of this app than when that was proposed
    assert outdated.status == 400
    assert newer in (await outdated.json())["error"]["message"]
    assert (await client.post(f"/cache/explain/{newer}/apply")).status == 200
    assert len(used) == 2
    backend.script = script(None)
    assert (await client.post(f"/cache/explain/{await ask(client)}/apply")).status == 400
    assert len(used) == 2


async def test_what_was_warmed_is_no_apps_and_no_savings(client: TestClient, backend: ScriptedBackend) -> None:
    backend.loaded = [msgspec.structs.replace(MODEL, namespace={"model_sha256": "ab"})]
    backend.script = script()
    await ask(client)
    before = await (await client.get("/cache/overview")).json()
    metrics = await (await client.get("/metrics")).text()
    assert (await client.post("/cache/warm", json=CHAT, headers={"User-Agent": "homeprefixd/0.1.0"})).status == 200
    after = await (await client.get("/cache/overview")).json()
    assert (after["today"], after["apps"]) == (before["today"], before["apps"])
    lost = [line for line in metrics.splitlines() if line.startswith("homeprefixd_lost_tokens_total{")]
    assert lost
    assert lost[0] in (await (await client.get("/metrics")).text()).splitlines()
    warmed, asked = after["recent"]
    assert (warmed["app"], warmed["warming"], warmed["cause"]) == ("homeprefixd", True, "clock")  # it can be explained
    assert "warming" not in asked


async def test_whose_a_prefix_is(client: TestClient, backend: ScriptedBackend, admin: MemoryAdmin) -> None:
    backend.script = script()
    admin.request = await ask(client)
    [prefix] = (await (await client.get("/cache/prefixes")).json())["prefixes"]
    assert prefix["app"] == "HomeApp"
    admin.request = "forgotten"
    [prefix] = (await (await client.get("/cache/prefixes")).json())["prefixes"]
    assert prefix["app"] == ""


def test_a_full_disk_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.jsonl"
    record = Record("a", "app", "app", "demo", 0.0)
    file = RecordFile(path, 1 << 20, 1)
    written = os.write
    calls: list[int] = []

    def short(descriptor: int, data: bytes) -> int:
        """As a disk does that has ten bytes left, and then none."""
        calls.append(len(data))
        if len(calls) in (2, 3):
            if len(calls) == 3:
                raise OSError(errno.ENOSPC, "No space left on device")
            return written(descriptor, data[:10])
        return written(descriptor, data)

    monkeypatch.setattr(os, "write", short)
    for _ in range(3):
        file.put(record)
    file.close()
    assert [json.loads(line)["id"] for line in path.read_text().splitlines()] == ["a", "a"]
    assert file.dropped == 1


def test_a_half_line_of_a_process_that_was_killed_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('{"id": "ha')
    file = RecordFile(path, 1 << 20, 1)
    file.put(Record("b", "app", "app", "demo", 0.0))
    file.close()
    assert json.loads(path.read_text().splitlines()[1])["id"] == "b"
