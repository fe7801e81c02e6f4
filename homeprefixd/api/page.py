"""The page at `/`: one HTML file, its styles and its script inside. Everything on it comes from `/cache` and `/v1`.

It holds nothing secret by itself. It may load nothing from elsewhere, run no script but its own, and stand in no frame.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources

from aiohttp import web

_HTML = resources.files(__package__).joinpath("page.html").read_bytes()


def _script_hash(html: bytes) -> str:
    """Of the page's only script, as a Content-Security-Policy names it."""
    found = re.search(rb"<script>(.*?)</script>", html, re.DOTALL)
    return base64.b64encode(hashlib.sha256(found[1] if found else b"").digest()).decode()


_HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; script-src 'sha256-{_script_hash(_HTML)}'; style-src 'unsafe-inline'; connect-src 'self';"
        " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
    "Vary": "Accept",
}


def is_wanted(request: web.Request) -> bool:
    """Does a browser ask for `/`? Other clients get JSON there."""
    return (
        request.path == "/" and request.method in ("GET", "HEAD") and "text/html" in request.headers.get("Accept", "")
    )


def response() -> web.Response:
    """The page."""
    return web.Response(body=_HTML, content_type="text/html", charset="utf-8", headers=_HEADERS)
