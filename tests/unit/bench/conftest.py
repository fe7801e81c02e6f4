"""A server that answers as a test wants."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.unit.bench.measured import FakeTarget, running


@pytest.fixture
async def fake() -> AsyncIterator[FakeTarget]:
    """On a free port."""
    async with running(FakeTarget()) as target:
        yield target
