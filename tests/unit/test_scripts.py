"""`scripts/`: who waits for whom while `.venv` is set up."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose `.venv` says that it is complete, with a `homeprefixd` that says what it was given."""
    (tmp_path / "scripts").mkdir()
    for name in ("environment.sh", "run"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts" / name)
    for name in ("setup.cfg", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    program = tmp_path / ".venv" / "bin" / "homeprefixd"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\necho "$HOMEPREFIXD_PROGRAM $*"\n')
    program.chmod(0o755)
    shell(tmp_path, '. scripts/environment.sh; wanted >"$venv/.made-for-run"')
    return tmp_path


def shell(checkout: Path, text: str) -> str:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=checkout,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return done.stdout


def test_what_is_complete_waits_for_no_other_setup(checkout: Path) -> None:
    with (checkout / "setup.cfg").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as `scripts/test` has it for minutes
        assert shell(checkout, "scripts/run stats --json") == "scripts/run stats --json\n"


def test_what_is_not_complete_waits(checkout: Path) -> None:
    (checkout / ".venv" / ".made-for-run").write_text("an older one\n")
    with (checkout / "setup.cfg").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with subprocess.Popen([checkout / "scripts" / "run"], stderr=subprocess.PIPE, text=True) as process:
            try:
                assert process.stderr is not None
                assert "another setup of" in process.stderr.readline()
                assert process.poll() is None
            finally:
                process.kill()
                fcntl.flock(file, fcntl.LOCK_UN)  # else the process that waits for it for the script stays
