"""The demo's model, as files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.services.demo.task import make_model


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_its_files_may_be_read_by_whom_the_umask_allows(tmp_path: Path, mask: int) -> None:
    """A container reads the folder as another user."""
    before = os.umask(mask)
    try:
        make_model(tmp_path / "model", seed=0, hidden=32, layers=1, heads=2)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()}
    assert "model.safetensors" in modes
    assert set(modes.values()) == {0o666 & ~mask}, modes
