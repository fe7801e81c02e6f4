"""Who may call from a browser: CORS for local pages and those that the configuration names, and a guard against DNS
rebinding for what changes the cache or the models that are loaded, or tells of other people's requests.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Collection
from urllib.parse import urlsplit

from aiohttp import web

from ..errors import ForbiddenError
from . import page
from .errors import Handler

ADMIN = ("/cache", "/metrics", "/v1/metrics", "/models/details", "/models/load", "/models/unload")
TELLING = frozenset(f"{prefix}{path}" for prefix in ("", "/v1") for path in ("/props", "/slots", "/lora-adapters")) | {
    "/api/ps"
}
"""Routes of clients that tell of settings and of other people's requests."""

_OF_NO_STRANGER = (".localhost", ".local", ".internal", ".home.arpa")
"""Ends of names that nobody can have in the internet."""

_METHODS = "GET, HEAD, POST, DELETE, OPTIONS"


def _host_name(netloc: str) -> str | None:
    """The name in `name:port`, lower case, without brackets and a final dot; None if it is none."""
    try:
        name = urlsplit(f"//{netloc}").hostname
    except ValueError:
        return None
    return name.rstrip(".") if name else None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True


def is_local_origin(origin: str) -> bool:
    """Is it a page served by this machine to itself?"""
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    name = parts.hostname or ""
    if parts.scheme not in ("http", "https") or parts.username is not None or parts.path or parts.query:
        return False
    return name == "localhost" or (_is_address(name) and ipaddress.ip_address(name).is_loopback)


def _is_of(origin: str, host: str) -> bool:
    """Is it a page of the host that is called?"""
    try:
        return urlsplit(origin).netloc.lower() == host.lower() != ""
    except ValueError:
        return False


def is_admin(request: web.Request) -> bool:
    """Is it about what this daemon holds and does, rather than a request to a model?"""
    return request.path.startswith(ADMIN) or page.is_wanted(request)


class OriginGuard:
    """`hosts`: names beside loopback's under which this daemon may be called for administration. `origins`: pages
    beside local ones that may call the rest, as `https://chat.home.lan`; `*` is every page.

    A page of a stranger whose name was pointed at this machine sends its own name as `Host`; addresses cannot be
    pointed anywhere, so they are always fine.
    """

    def __init__(
        self, hosts: Collection[str], origins: Collection[str] = (), keyed: Callable[[], bool] = lambda: False
    ) -> None:
        """`keyed`: whether callers need a key, which a stranger's page has not, whatever name it calls by."""
        self._keyed = keyed
        self._hosts = {host.lower().rstrip(".") for host in hosts if host}
        self._origins = {origin.lower().rstrip("/") for origin in origins}

    def may_call(self, origin: str) -> bool:
        """May pages of `origin` read replies?"""
        return is_local_origin(origin) or "*" in self._origins or origin.lower() in self._origins

    def is_known_to_clients(self, request: web.Request) -> bool:
        """Is it called by a name that no stranger's page can have? A container's, `homeprefixd`, is fine."""
        host = request.headers.get("Host")
        name = None if host is None else _host_name(host)
        return host is None or (
            name is not None
            and (name in self._hosts or _is_address(name) or "." not in name or name.endswith(_OF_NO_STRANGER))
        )

    def check_client(self, request: web.Request) -> None:
        """For what may be asked by programs, by pages that may call, and by no other. Raises ForbiddenError.

        A browser says whose page a POST is of; one without is by a program, which may call the host as it likes.
        """
        origin, host = request.headers.get("Origin"), request.headers.get("Host", "")
        if origin is not None and self.may_call(origin):
            return
        if origin is not None and not _is_of(origin, host):
            raise ForbiddenError(f"Pages of {origin!r} may not do this; see server.cors_origins.", code="bad_origin")
        if request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            raise ForbiddenError("Pages of other sites may not do this; see server.cors_origins.", code="bad_origin")
        by_a_browser = origin is not None or request.method in ("GET", "HEAD")
        if by_a_browser and not self._keyed() and not self.is_known_to_clients(request):
            raise ForbiddenError(
                f"This is not told under the host name {host!r}; use localhost, an IP address or this machine's name.",
                code="bad_host",
            )

    def check_admin(self, request: web.Request) -> None:
        """Raises ForbiddenError."""
        host = request.headers.get("Host")
        if host is not None:
            name = _host_name(host)
            if name is None or not (
                name == "localhost" or name.endswith(".localhost") or name in self._hosts or _is_address(name)
            ):
                raise ForbiddenError(
                    f"Administration under the host name {host!r} is not allowed; use localhost or an IP address.",
                    code="bad_host",
                )
        origin = request.headers.get("Origin")
        if origin is not None:
            if not _is_of(origin, host or ""):
                raise ForbiddenError(f"Administration from pages of {origin!r} is not allowed.", code="bad_origin")
        elif page.is_wanted(request) and request.headers.get("Sec-Fetch-Mode") == "navigate":
            pass  # somebody follows a link to the page, which says nothing by itself
        elif request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            raise ForbiddenError("Administration from pages of other sites is not allowed.", code="bad_origin")

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Guard administration; answer preflights of pages that may call. A browser sends no key with them."""
        if is_admin(request):
            self.check_admin(request)
        elif request.method == "OPTIONS" and "Origin" in request.headers:
            origin = request.headers["Origin"]
            if not self.may_call(origin):
                raise ForbiddenError(
                    f"Pages of {origin!r} may not call this server; see server.cors_origins.", code="bad_origin"
                )
            headers = {
                "Access-Control-Allow-Methods": _METHODS,
                "Access-Control-Allow-Headers": request.headers.get("Access-Control-Request-Headers", "*"),
                "Access-Control-Max-Age": "86400",
            }
            if "Access-Control-Request-Private-Network" in request.headers:
                headers["Access-Control-Allow-Private-Network"] = "true"
            return web.Response(headers=headers)  # 200: a 204 is too much for the browsers of some television sets
        elif request.path in TELLING:
            self.check_client(request)
        return await handler(request)

    async def on_prepare(self, request: web.Request, response: web.StreamResponse) -> None:
        """Let pages read replies. Streams send their headers early, so this is a signal, not in `middleware`."""
        if is_admin(request):
            return
        response.headers["Vary"] = "Origin"
        origin = request.headers.get("Origin")
        if origin is not None and self.may_call(origin):
            response.headers["Access-Control-Allow-Origin"] = origin


GUARD: web.AppKey[OriginGuard] = web.AppKey("origin_guard")
"""For what only a request's body tells to need it."""
