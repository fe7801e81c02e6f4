"""A child is tied to its parent from its first line on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from homeprefixd.child import ORPHANED, PARENT_PID

CHILD = """
import logging, os, signal, sys, time
from homeprefixd.child import become_child
become_child("test-of-a-long-name", "info")
logging.getLogger("x").debug("hidden")
logging.getLogger("x").warning("two\\nlines")
print(open("/proc/self/comm").read().strip(), file=sys.stderr)
print(oct(os.umask(0)), file=sys.stderr)
os.kill(os.getpid(), signal.SIGINT)
os.kill(os.getpid(), signal.SIGHUP)
print("survived", os.getpid(), file=sys.stderr, flush=True)
time.sleep(30 if "--sleep" in sys.argv else 0)
"""

PARENT = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], "--sleep"], stderr=subprocess.PIPE, text=True)
for line in child.stderr:
    if line.startswith("survived"):
        print(child.pid, flush=True)
        break
time.sleep(30)
"""


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0] != "Z"


def test_signals_name_umask_and_log_lines() -> None:
    done = subprocess.run([sys.executable, "-c", CHILD], stderr=subprocess.PIPE, text=True, timeout=30)
    assert done.returncode == 0
    lines = done.stderr.splitlines()
    assert lines[:4] == ["WARNING two", "WARNING lines", "hpd-test-of-a-l", "0o77"]
    assert lines[4].startswith("survived")


def test_killed_parent_takes_the_child_along() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        deadline = time.monotonic() + 1
        while alive(pid):
            assert time.monotonic() < deadline, "the child outlived its parent"
            time.sleep(0.01)


def test_an_orphan_leaves_at_once() -> None:
    environment = os.environ | {PARENT_PID: "1" if os.getpid() != 1 else "2"}
    done = subprocess.run([sys.executable, "-c", CHILD], env=environment, stderr=subprocess.PIPE, timeout=30)
    assert done.returncode == ORPHANED
