"""A rule that an explanation proposes, put in force while the daemon runs: from no reuse to full reuse, and back."""

from __future__ import annotations

import os
import signal
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from homeprefixd.bench.household import household_messages
from tests.integration.serving import Served, serve, small_config

DAYS = [
    f"Nous sommes le {day} et il est {hour} h 05."
    for day, hour in (
        ("lundi 30 novembre", 8),
        ("mardi 1er décembre", 9),
        ("jeudi 3 décembre", 14),
        ("samedi 5 décembre", 19),
        ("dimanche 6 décembre", 7),
    )
]
"""A line that no list of words knows whole."""

LITTLE = 48  # tokens of a moved line and a question


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rules")


@pytest.fixture(scope="module")
def house(demo_model: Path, folder: Path) -> Iterator[Served]:
    with serve(folder, small_config(demo_model)) as served:
        yield served


def computed(house: Served, line: str) -> tuple[int, Any]:
    """Of the prompt: how many tokens were computed; and its record."""
    system, user = household_messages("Is the gate shut?", size=250)
    messages = [{**system, "content": f"{line}\n{system['content']}"}, user]
    body = {"messages": messages, "max_tokens": 1, "temperature": 0}
    status, reply = house.ask("/v1/chat/completions", body)
    assert status == 200, reply
    return reply["timings"]["prompt_n"], house.ask(f"/cache/explain/{reply['id']}")[1]


def test_by_one_request_and_back_by_a_reload(house: Served, folder: Path) -> None:
    file = folder / "config.toml"
    own = file.read_text()
    computed(house, DAYS[0])
    _computed, told = computed(house, DAYS[1])
    assert (told["explanation"]["cause"], told["explanation"]["rule"]) == ("clock", "")  # it may be an edit
    without, told = computed(house, DAYS[2])
    assert without > 200
    assert (told["explanation"]["cause"], told["explanation"]["rule"]) == ("clock", "move")

    status, done = house.ask(f"/cache/explain/{told['record']['id']}/apply", {})
    assert (status, done["rule"], done["file"], done["reason"]) == (200, "move", str(file), "")
    assert tomllib.loads(file.read_text())["stable"] == {"per_app": [{"app": done["app"], "move": done["setting"]}]}
    assert file.read_text().startswith(own)
    computed(house, DAYS[3])
    with_rule, told = computed(house, DAYS[4])
    assert with_rule <= LITTLE
    assert told["record"]["rules"]["move"] == 1

    file.write_text(own)
    os.kill(house.process.pid, signal.SIGHUP)
    deadline = time.monotonic() + 20
    while "stable.per_app is [] now" not in house.log.read_text():
        assert time.monotonic() < deadline, house.log.read_text()
        time.sleep(0.05)
    _computed, told = computed(house, DAYS[4])
    assert "move" not in told["record"].get("rules", {})
