"""The dashboard and the alert rules speak of metrics that there are; `promtool` takes both and the metrics page."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from homeprefixd import monitoring
from homeprefixd.api.metrics import STORE, WORKER, Figure, Scrape, exposition
from homeprefixd.api.observed import FIRST_TOKEN_BOUNDS, Histogram, Observations

FOLDER = Path(monitoring.__file__).parent
NAME = re.compile(r"\bhomeprefixd_[a-z0-9_]+")
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian's package prometheus)"
)


def filled(figures: tuple[Figure, ...], source: dict[str, Any]) -> dict[str, Any]:
    """A source that gives all of `figures`."""
    for number, figure in enumerate(figures):
        at = source
        *above, last = figure.path.split(".")
        for step in above:
            at = at.setdefault(step, {})
        at[last] = number + 1
    return source


@pytest.fixture(scope="module")
def page() -> str:
    """`/metrics` of a daemon that has seen everything."""
    seen = Observations()
    seen.requests["demo", "finished"] = 1
    seen.prefix_tokens["demo", "reused", "hot"] = 2
    seen.lost_tokens["demo", "clock"] = 3
    seen.rules["demo", "freeze_clock"] = 4
    for family in (seen.first_token, seen.inter_token):
        family["demo", True] = Histogram(FIRST_TOKEN_BOUNDS)
        family["demo", True].observe(0.1)
    worker = filled(WORKER, {"alias": "demo", "state": "ok"})
    stats = filled(STORE, {"counters": {"lookups": 3, "hits": 2}})
    return exposition(Scrape(seen, {"workers": [worker]}, stats)).decode()


def expressions() -> list[str]:
    """All that the dashboard and the rules ask of Prometheus."""
    board = json.loads((FOLDER / "grafana.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked += [variable["query"]["query"] for variable in board["templating"]["list"] if variable["type"] == "query"]
    rules = (FOLDER / "alerts.yml").read_text()
    found = re.findall(r"^ +expr: (?:>-\n((?: {10}.*\n)+)|(.+)\n)", rules, re.MULTILINE)
    assert len(found) == rules.count("- alert: ") > 8
    return asked + [long or short for long, short in found]


def test_every_metric_that_is_asked_for_is_there(page: str) -> None:
    samples = {sample.name for family in text_string_to_metric_families(page) for sample in family.samples}
    asked = {name for expression in expressions() for name in NAME.findall(expression)}
    assert len(asked) > 30
    assert asked - samples == set()


def test_every_label_that_is_asked_for_is_there(page: str) -> None:
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    for expression in expressions():
        for name, chosen in re.findall(r"\b(homeprefixd_[a-z0-9_]+)\{([^}]*)\}", expression):
            wanted = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", chosen)) - {"instance", "job"}
            assert wanted <= labels[name], (name, wanted)


def test_the_dashboard_is_whole() -> None:
    board = json.loads((FOLDER / "grafana.json").read_text())
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"]) > 15
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["title"]


def promtool(*arguments: str, text: str = "") -> None:
    done = subprocess.run(["promtool", *arguments], input=text, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_promtool_takes_the_metrics(page: str) -> None:
    promtool("check", "metrics", text=page)


@needs_promtool
def test_promtool_takes_the_rules() -> None:
    promtool("check", "rules", str(FOLDER / "alerts.yml"))


@needs_promtool
def test_promtool_refuses_what_is_wrong(tmp_path: Path) -> None:
    """Were it to take anything, the tests above would say nothing."""
    wrong = tmp_path / "alerts.yml"
    wrong.write_text((FOLDER / "alerts.yml").read_text().replace("== 0", "=== 0"))
    done = subprocess.run(["promtool", "check", "rules", str(wrong)], capture_output=True, timeout=60)
    assert done.returncode != 0
