"""A control plane, closed at the end of the test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio
from control_plane import Plane


@pytest_asyncio.fixture
async def plane(tmp_path: Path) -> AsyncIterator[Plane]:
    """A coordinator that listens; its loops run when asked."""
    plane = await Plane.started(tmp_path)
    yield plane
    await plane.stop()
