"""A run that has started."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio
from control_plane import Plane
from paused_runs import impatient


@pytest_asyncio.fixture
async def running(tmp_path: Path) -> AsyncIterator[tuple[Plane, str]]:
    """A coordinator that tries again at once, with a run that has started."""
    plane = impatient(Plane(tmp_path))
    await plane.start()
    run = await plane.run_one()
    yield plane, run.run_id
    await plane.stop()
