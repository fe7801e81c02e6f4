"""Run a command under the system-call rules of the systemd unit: `sandbox.py UNIT COMMAND...`.

What a service manager would do, in little: the unit's SystemCallFilter= (sets as systemd-analyze knows them) by
libseccomp, MemoryDenyWriteExecute= by prctl (Linux 6.3), NoNewPrivileges=. Status 77: not possible here.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import errno
import os
import subprocess
import sys
from pathlib import Path

NOT_POSSIBLE = 77
SCMP_ACT_ALLOW = 0x7FFF0000
SCMP_ACT_ERRNO = 0x00050000
PR_SET_NO_NEW_PRIVS = 38
PR_SET_MDWE = 65
PR_MDWE_REFUSE_EXEC_GAIN = 1


def settings(unit: Path, name: str) -> list[str]:
    lines = unit.read_text().splitlines()
    return [line.partition("=")[2].strip() for line in lines if line.startswith(f"{name}=")]


def system_calls(group: str) -> set[str]:
    """The calls of a set such as @system-service, sets within it included."""
    shown = subprocess.run(
        ["systemd-analyze", "--no-pager", "syscall-filter", group], capture_output=True, text=True, check=True
    )
    found: set[str] = set()
    for line in shown.stdout.splitlines():
        word = line.strip()
        if not word or word.startswith("#") or word == group:
            continue
        found |= system_calls(word) if word.startswith("@") else {word}
    return found


def allowed(unit: Path) -> set[str]:
    calls: set[str] = set()
    for value in settings(unit, "SystemCallFilter"):
        for group in value.removeprefix("~").split():
            if value.startswith("~"):
                calls -= system_calls(group)
            else:
                calls |= system_calls(group)
    # what systemd always adds, so that the program can be started at all
    return calls | system_calls("@default") | {"execve"}


def main() -> None:
    unit, command = Path(sys.argv[1]), sys.argv[2:]
    name = ctypes.util.find_library("seccomp")
    if name is None:
        sys.exit(NOT_POSSIBLE)
    seccomp = ctypes.CDLL(name)
    seccomp.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(seccomp.seccomp_init(ctypes.c_uint32(SCMP_ACT_ERRNO | errno.EPERM)))
    for call in sorted(allowed(unit)):
        number = seccomp.seccomp_syscall_resolve_name(call.encode())
        if number >= 0:
            seccomp.seccomp_rule_add(context, ctypes.c_uint32(SCMP_ACT_ALLOW), number, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    if settings(unit, "MemoryDenyWriteExecute") == ["yes"] and libc.prctl(
        PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN, 0, 0, 0
    ):
        sys.exit(NOT_POSSIBLE)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or seccomp.seccomp_load(context):
        sys.exit(NOT_POSSIBLE)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
