"""schemathesis, which nobody here wrote, over the description of a real daemon with a tiny model: whatever it sends, no
500 comes, replies are as described, and the daemon and its worker live on.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.serving import Served, serve
from tests.tiny_model import make

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
LONGEST = 60.0  # s
CONFIG = """
[model]
path = {path}
alias = "tiny"
ctx = 256
parallel = 2
threads = 1
keep_alive = -1
chat_template = {template}
[cache]
hot = "64MiB"
warm = "64MiB"
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    base = tmp_path_factory.mktemp("described")
    template = base / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}\n{% endfor %}")
    model = make("llama", None, base / "tiny.gguf", context_length=512)
    config = CONFIG.format(path=json.dumps(str(model)), template=json.dumps(str(template)))
    with serve(base, config) as served:
        yield served


@pytest.mark.timeout(200)
def test_every_reply_is_as_described(served: Served, tmp_path: Path) -> None:
    worker = served.worker("tiny")
    process = subprocess.run(
        [
            Path(sys.executable).with_name("schemathesis"),
            *("run", f"{served.url}/openapi.json", "--checks", CHECKS, "--phases", "fuzzing"),
            *("--max-examples", "2", "--seed", "2", "--suppress-health-check", "all", "--no-color"),
            *("--exclude-path-regex", "^(/v1)?/models/unload"),  # else the worker would not be the same one
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=LONGEST,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-5000:]
    records = served.ask("/cache/records")[1]["records"]
    assert any(record.get("ended") for record in records), "nothing got through"
    assert served.worker("tiny") == worker, "the worker died"
    assert served.ask("/cache/stats")[1]["daemon"]["state"] == "ok"
    assert served.chat("tiny", "Hello")["usage"]["completion_tokens"] == 4
    assert "Traceback" not in served.log.read_text()
