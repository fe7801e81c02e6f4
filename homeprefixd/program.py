"""What hints call the commands that they name: as they can be typed."""

from __future__ import annotations

import os
import shlex
import sys

VARIABLE = "HOMEPREFIXD_PROGRAM"

NAME = "homeprefixd"


def program() -> str:
    """The command as it was typed to come here: `scripts/run` tells it, as `homeprefixd` is on no PATH there."""
    return os.environ.get(VARIABLE) or NAME


def typed(arguments: str) -> str:
    """A command for a message, in backquotes: `homeprefixd ls`."""
    return f"`{program()} {arguments}`"


def pip_install(arguments: str) -> str:
    """How to add a package to the environment that this runs in, whose pip is on no PATH."""
    return f"{shlex.quote(sys.executable)} -m pip install {arguments}"
