"""A sandbox of each kind that holds on this machine."""

from __future__ import annotations

from functools import cache

import pytest

from paceline.reward.sandbox.choosing import AUTO, NoSandbox, probe
from paceline.reward.sandbox.protocol import Sandbox
from paceline.reward.sandbox.readable import Readable


@cache
def backend(name: str) -> Sandbox | str:
    """The sandbox, or why it does not hold here; probed once."""
    return NoSandbox() if name == "none" else probe(name, Readable.of_interpreter())


def held(name: str) -> Sandbox:
    made = backend(name)
    if isinstance(made, str):
        pytest.skip(f"{name} does not hold on this machine: {made}")
    return made


@pytest.fixture(params=AUTO)
def isolating(request: pytest.FixtureRequest) -> Sandbox:
    """A sandbox that isolates."""
    return held(request.param)


@pytest.fixture(params=(*AUTO, "none"))
def any_sandbox(request: pytest.FixtureRequest) -> Sandbox:
    """A sandbox that runs programs here."""
    return held(request.param)
