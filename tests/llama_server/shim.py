"""Takes llama-server's flags and becomes `homeprefixd serve` with what they mean here.

    python -m tests.llama_server.shim --port 8080 --hf-repo ggml-org/test-model-stories260K --ctx-size 512 ...

Their models cannot be had here: tiny random ones stand in for those that write text ($LLAMA_TESTS_MODEL, a token for
each byte) and for those that embed ($LLAMA_TESTS_EMBEDDER). What a flag asks for and is not there ends it with exit
code 64 and a line that says so.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

EX_USAGE = 64
DEFAULT_CTX = 4096

_SWITCHES = (
    "--offline", "--cont-batching", "--embedding", "--metrics", "--kv-unified", "--swa-full", "--slots", "--no-slots",
    "--verbose", "--jinja", "--no-jinja", "--no-ui", "--no-cache-idle-slots", "--backend_sampling", "--no-mmproj",
)  # fmt: skip
"""What changes nothing here, or is always so."""

_VALUES = (
    "--temp", "--seed", "--n-predict", "--batch-size", "--ubatch-size", "--n-gpu-layers", "--hf-file", "--pooling",
    "--cache-ram", "--tags", "--reasoning-format", "-fa",
)  # fmt: skip
"""The same, with a value: samplers are set by requests, memory by the daemon."""


def main(argv: list[str]) -> NoReturn:
    parser = argparse.ArgumentParser(prog="llama-server", allow_abbrev=False)
    for name in _SWITCHES:
        parser.add_argument(name, action="store_true")
    for name in _VALUES:
        parser.add_argument(name)
    for name in (
        "--host",
        "--port",
        "--model",
        "--alias",
        "--api-key",
        "--hf-repo",
        "--chat-template",
        "-ctk",
        "--cors-origins",
    ):
        parser.add_argument(name)
    parser.add_argument("--chat-template-file", type=Path)
    for name in ("--ctx-size", "--parallel", "--threads"):
        parser.add_argument(name, type=int)
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        refuse(f"not there: {' '.join(unknown)}")
    directory = Path(tempfile.mkdtemp(prefix="llama-tests-", dir=os.environ.get("LLAMA_TESTS_WORK")))
    (directory / "cache").mkdir(mode=0o700)
    for known in sorted(directory.parent.glob("*/cache/probes.json"))[:1]:  # what a model was once found to be
        shutil.copy(known, directory / "cache")
    config = directory / "config.toml"
    config.write_text(settings(given, directory))
    serve = ["serve", "--config", str(config), "--host", given.host.split(",")[0], "--port", str(given.port)]
    os.execv(sys.executable, [sys.executable, "-m", "homeprefixd", *serve])


def refuse(why: str) -> NoReturn:
    print(f"llama-server's shim: {why}", file=sys.stderr)
    raise SystemExit(EX_USAGE)


def settings(given: argparse.Namespace, directory: Path) -> str:
    """The configuration, as TOML."""
    slots = given.parallel or 4
    context = given.ctx_size or DEFAULT_CTX
    model: dict[str, Any] = {
        "path": str(model_path(given)),
        "parallel": slots,
        "ctx": context if given.kv_unified else max(context // slots, 64),
        "threads": given.threads or 2,
    }
    if given.alias:
        model["alias"] = sorted(given.alias.split(","))[0]
    if given.ctk:
        model["kv_type"] = given.ctk
    if given.chat_template_file is not None:
        if not given.chat_template_file.exists():
            refuse(f"no such file: {given.chat_template_file}")
        model["chat_template"] = str(given.chat_template_file.resolve())
    elif given.chat_template and "{" not in given.chat_template:
        refuse(f"llama.cpp's built-in templates are not there: {given.chat_template[:40]}")
    elif given.chat_template:
        model["chat_template"] = given.chat_template
    tables: dict[str, dict[str, Any]] = {
        "model": model,
        "cache": {"dir": str(directory / "cache"), "hot": "64MiB", "warm": "256MiB"},
        # Pages of any site may call llama-server unless it is told otherwise; here only local ones.
        "server": {"cors_origins": "" if given.cors_origins == "localhost" else given.cors_origins or "*"},
    }
    if given.api_key:
        keys = directory / "keys.toml"
        keys.write_text(f'[[key]]\nname = "tests"\nkey = "{given.api_key}"\nadmin = true\n')
        tables["server"]["keys_file"] = str(keys)
    return "\n".join(
        line
        for name, table in tables.items()
        for line in [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    )


def model_path(given: argparse.Namespace) -> Path:
    """What stands in for the model that they name."""
    name = f"{given.hf_repo or ''} {given.hf_file or ''}"
    for word, variable in (("bert", "LLAMA_TESTS_EMBEDDER"), ("stories", "LLAMA_TESTS_MODEL")):
        if word in name:
            return Path(os.environ[variable])
    refuse(f"no model stands in for {name.strip()}")


if __name__ == "__main__":
    main(sys.argv[1:])
