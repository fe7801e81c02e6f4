"""The systemd unit: systemd's own checks, and the daemon under the unit's system-call rules."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
UNIT = HERE.parent.parent.parent / "systemd" / "homeprefixd.service"

pytestmark = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The unit with a program that exists here in place of /opt/homeprefixd's."""
    unit = tmp_path / UNIT.name
    text, count = re.subn(
        r"(?m)^ExecStart=/opt/homeprefixd/bin/homeprefixd serve$", "ExecStart=/bin/true", UNIT.read_text()
    )
    assert count == 1
    unit.write_text(text)
    return unit


def test_it_is_valid(installed: Path) -> None:
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", installed], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_its_exposure_is_low(installed: Path) -> None:
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", "--threshold=20", str(installed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    overall = done.stdout.strip().splitlines()[-1]
    print(overall)
    assert done.returncode == 0, overall
    level = re.search(r"(\d+\.\d+)", overall)
    assert level is not None
    assert float(level[1]) < 2.0


def test_what_it_promises_to_the_daemon() -> None:
    lines = UNIT.read_text().splitlines()
    for line in (
        "Type=notify",
        "NotifyAccess=main",
        "Restart=on-failure",
        "RestartPreventExitStatus=2 3 6",
        "CacheDirectory=homeprefixd",
        "CacheDirectoryMode=0700",
        "OOMPolicy=continue",
        "KillMode=mixed",
    ):
        assert line in lines


SANDBOX = [sys.executable, str(HERE / "sandbox.py"), str(UNIT)]


def test_the_rules_are_in_force() -> None:
    code = "import mmap, os\ntry: mmap.mmap(-1, 4096, prot=7)\nexcept OSError: os.chown('.', 0, 0)"
    done = subprocess.run([*SANDBOX, sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode == 77:
        pytest.skip("this kernel or container does not let a process be restricted so")
    assert "PermissionError: [Errno 1]" in done.stderr


def test_callbacks_from_c_work_under_them() -> None:
    """llama.cpp calls back through libffi, which must not need memory that is writable and executable."""
    code = (
        "import ctypes\nP = ctypes.POINTER(ctypes.c_int)\nF = ctypes.CFUNCTYPE(ctypes.c_int, P, P)\n"
        "a = (ctypes.c_int * 3)(3, 1, 2)\n"
        "ctypes.CDLL(None).qsort(a, 3, 4, F(lambda x, y: x[0] - y[0]))\nprint(list(a))"
    )
    done = subprocess.run([*SANDBOX, sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode == 77:
        pytest.skip("this kernel or container does not let a process be restricted so")
    assert done.stdout == "[1, 2, 3]\n", done.stderr


def test_the_daemon_runs_under_them(tmp_path: Path) -> None:
    gguf = tmp_path / "tiny.gguf"
    gguf.write_bytes(b"GGUF")
    settings = {"server": {"port": 0}, "model": {"path": str(gguf)}, "cache": {"dir": str(tmp_path / "cache")}}
    command = [sys.executable, str(HERE / "serve.py"), json.dumps(settings), "[]", "[]"]
    with subprocess.Popen(
        [*SANDBOX, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(UNIT.parent.parent)},
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if json.loads(line)["phase"] == "ready":
                process.terminate()
        _, said = process.communicate(timeout=20)
    if process.returncode == 77:
        pytest.skip("this kernel or container does not let a process be restricted so")
    assert process.returncode == 0, said
    assert "flushed" in said
