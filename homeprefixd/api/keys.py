"""Where handlers find what the daemon passed to `create_app`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

from ..config import ServerConfig
from ..config_file import Applied
from ..last_loads import LastLoads
from ..models.backend import Backend, CacheAdmin
from .observed import Observations
from .records import Records

BACKEND: web.AppKey[Backend] = web.AppKey("backend")
OBSERVATIONS: web.AppKey[Observations] = web.AppKey("observations")
RECORDS: web.AppKey[Records] = web.AppKey("records")
APPLY_RULE: web.AppKey[Callable[[str, str, str], Awaitable[Applied]]] = web.AppKey("apply_rule")
"""Takes a rule of `[stable]`, what it is set to, and the app that it is for ("": all); not there where the daemon
cannot read its settings again."""

LAST_LOADS: web.AppKey[LastLoads] = web.AppKey("last_loads")
"""What models were when they were loaded last; not there without a cache directory."""

ADMIN: web.AppKey[CacheAdmin] = web.AppKey("admin")
CONFIG: web.AppKey[ServerConfig] = web.AppKey("config")


@dataclass(frozen=True)
class Identity:
    """What makes replies differ from run to run, so that tests can hold it still."""

    clock: Callable[[], float]  # Unix time, s
    token: Callable[[], str]  # unique; follows "chatcmpl-"


IDENTITY: web.AppKey[Identity] = web.AppKey("identity")
