"""What hints call the command: as it can be typed again."""

from __future__ import annotations

import os

VARIABLE = "HOMEPREFIXD_PROGRAM"

NAME = "homeprefixd"


def program() -> str:
    """The command as it was typed to come here: `scripts/run` tells it, as `homeprefixd` is on no PATH there."""
    return os.environ.get(VARIABLE) or NAME


def typed(arguments: str) -> str:
    """A command for a message, in backquotes: `homeprefixd ls`."""
    return f"`{program()} {arguments}`"
