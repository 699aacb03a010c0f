"""The tiny policy that is published."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_policy import save_tiny_policy


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("policy"))
