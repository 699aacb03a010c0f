from __future__ import annotations

from pathlib import Path

import pytest
from registry_place import Workplace, make_place


@pytest.fixture
def place(tmp_path: Path) -> Workplace:
    """A ledger with a trained run, a model, and a key pair."""
    return make_place(tmp_path)
