"""Links to real child processes that speak the frames but compute nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.integration.daemon.house import House


@pytest.fixture
async def house() -> AsyncIterator[House]:
    house = House()
    yield house
    await house.end()
