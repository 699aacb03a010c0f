"""Worlds (a ledger with a run on it) and control planes, in temporary folders, closed at the end of the test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from control_plane import Plane
from exchange_drivers import MakeWorld, World, make_spec
from ledger_files import KEY_TEXT

from paceline.encryption.storage_key import KEY_VARIABLE
from paceline.services.coordinator.audit.verify import verify
from paceline.services.coordinator.ledger.ledger import Ledger


@pytest.fixture
def at_rest(request: pytest.FixtureRequest) -> Iterator[str]:
    """The form of the test's ledgers: `plain`, or `encrypted` (`ledger_files.both_forms`)."""
    form: str = getattr(request, "param", "plain")
    # A patch apart: those of a test are undone before its worlds are verified.
    with pytest.MonkeyPatch.context() as patch:
        if form == "encrypted":
            patch.setenv(KEY_VARIABLE, KEY_TEXT)
        yield form


@pytest.fixture
def make_world(tmp_path: Path, at_rest: str) -> Iterator[MakeWorld]:
    """Return a function that makes worlds; every world has to verify at the end."""
    worlds: list[World] = []

    def make(*, check: bool = True, **sections: Any) -> World:
        directory = tmp_path / f"world-{len(worlds)}"
        directory.mkdir()
        world = World(directory, make_spec(directory, **sections))
        worlds.append(world)
        world.check = check
        return world

    yield make
    for world in worlds:
        world.close()
        if world.check:
            ledger = Ledger(world.path, read_only=True)
            try:
                assert verify(ledger, world.run_id).problems == []
            finally:
                ledger.close()


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    """2 groups of 2 completions per step, 4 steps, η = 1, ready_first."""
    return make_world()


@pytest_asyncio.fixture
async def plane(tmp_path: Path) -> AsyncIterator[Plane]:
    """A coordinator that listens; its loops run when asked."""
    plane = await Plane.started(tmp_path)
    yield plane
    await plane.stop()
