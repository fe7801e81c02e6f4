"""The store's figures for those who look at them often: a scrape, the page."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from ..errors import UnavailableError
from .keys import ADMIN

PATIENCE = 3.0
"""Seconds: less than a scrape may take, as Prometheus is usually set (10)."""


async def store_figures(app: web.Application) -> dict[str, Any] | None:
    """None while the store is away, or does not answer."""
    try:
        async with asyncio.timeout(PATIENCE):
            return await app[ADMIN].stats()
    except (UnavailableError, TimeoutError):
        return None
