"""A rollout run at work with a fake engine and a fake exchange."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio
from rollout_bench import Bench


@pytest_asyncio.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.working.cancel()
    await asyncio.wait((bench.working,))
    bench.run.weights.close()
