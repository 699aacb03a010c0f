"""The tiny policy that the learner's tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_policy import save_tiny_policy


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="session")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model of that shape, to which a policy has moved, so that no log-ratio is 0."""
    return save_tiny_policy(tmp_path_factory.mktemp("moved"), seed=1)
