"""The pytest plugin that goes with llama.cpp's server tests: `pytest -p tests.llama_server.plugin`.

It keeps their session from downloading models, calls the model by no name where they make one up (an unknown name is a
404 here), and marks what `differences.toml` expects to differ: a test that is listed and passes all the same fails.
"""

from __future__ import annotations

import functools
import sys
import tomllib
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

DIFFERENCES = Path(__file__).with_name("differences.toml")
_MISSING = "llama-server's shim: "


def expected() -> list[tuple[str, str, bool]]:
    """The beginning of a test's id, the reason, and whether the test is run at all."""
    document = tomllib.loads(DIFFERENCES.read_text())
    return [
        (beginning, entry["reason"], entry.get("run", True))
        for entry in document["difference"]
        for beginning in entry["tests"]
    ]


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Stand-ins for what their modules import at once: nothing is downloaded here."""

    def download(url: str, **_: Any) -> None:
        pytest.skip(f"would download {url}")

    sys.modules.setdefault("wget", types.ModuleType("wget")).download = download  # type: ignore[attr-defined]


def _without_name(body: Any) -> Any:
    return {**body, "model": None} if isinstance(body, dict) and isinstance(body.get("model"), str) else body


def _with_defaults(server: Any, path: str, body: Any) -> Any:
    """Their server takes samplers' defaults as flags; here they are each request's, so they are put there."""
    if not isinstance(body, dict) or not path.endswith(("completion", "completions", "messages", "infill")):
        return body
    defaults: dict[str, Any] = {"temperature": server.temperature, "seed": server.seed}
    if server.n_predict and not body.keys() & {"n_predict", "max_tokens", "max_completion_tokens"}:
        defaults["n_predict"] = server.n_predict
    return {**defaults, **body}


def _adapted(send: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(send)
    def call(self: Any, method: str, path: str, data: Any = None, *args: Any, **more: Any) -> Any:
        return send(self, method, path, _with_defaults(self, path, _without_name(data)), *args, **more)

    return call


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    utils: Any = sys.modules["utils"]
    utils.ServerPreset.load_all = staticmethod(lambda: None)
    utils.ServerPreset.router = utils.ServerPreset.tinyllama2  # with a model, for tests that are not about routing
    for name in ("make_request", "make_stream_request"):
        setattr(utils.ServerProcess, name, _adapted(getattr(utils.ServerProcess, name)))
    _unname_openai()
    listed, used = expected(), set()
    for item in items:
        found = [one for one in listed if item.nodeid.startswith(one[0])]
        if not found:
            continue
        beginning, reason, run = max(found, key=lambda one: len(one[0]))
        used.add(beginning)
        item.add_marker(pytest.mark.xfail(reason=reason, strict=True) if run else pytest.mark.skip(reason=reason))
    config.stash[_UNUSED] = sorted({one[0] for one in listed} - used)


_UNUSED = pytest.StashKey[list[str]]()


def _unname_openai() -> None:
    from openai._base_client import SyncAPIClient

    send = SyncAPIClient.request

    @functools.wraps(send)
    def request(self: Any, cast_to: Any, options: Any, **more: Any) -> Any:
        options.json_data = _without_name(options.json_data)
        return send(self, cast_to, options, **more)

    SyncAPIClient.request = request  # type: ignore[method-assign,assignment]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[Any]:
    """What the shim says it has not is a skip with its words, not a failure of a server that did not start."""
    report = yield
    said = next((text for _, text in report.sections if _MISSING in text), "")
    if report.failed and said and "Server process died" in str(report.longrepr):
        line = next(line for line in said.splitlines() if line.startswith(_MISSING))
        report.outcome = "skipped"
        report.longrepr = (str(item.path), item.location[1] or 0, f"Skipped: {line.removeprefix(_MISSING)}")
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if unused := config.stash.get(_UNUSED, []):
        terminalreporter.section("listed in differences.toml, and not collected")
        for beginning in unused:
            terminalreporter.line(beginning)
