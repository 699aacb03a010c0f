"""The spool's folder and size from the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import InvalidInput
from paceline.files.bounded_cache import quota_bytes, spool_folder


def test_the_environment_says_where_and_how_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("PACELINE_SPOOL", raising=False)
    monkeypatch.delenv("PACELINE_SPOOL_MB", raising=False)
    assert spool_folder() == tmp_path / "paceline" / "spool"
    assert quota_bytes() == 64 << 30
    monkeypatch.setenv("PACELINE_SPOOL", str(tmp_path / "here"))
    monkeypatch.setenv("PACELINE_SPOOL_MB", "3")
    assert (spool_folder(), quota_bytes()) == (tmp_path / "here", 3 << 20)
    monkeypatch.setenv("PACELINE_SPOOL_MB", "much")
    with pytest.raises(InvalidInput, match="PACELINE_SPOOL_MB is 'much'; set it to a number of MB"):
        quota_bytes()
    for number in ("9" * 13, "9" * 5000, "nan", "inf", "-1", "0", "1e3"):
        monkeypatch.setenv("PACELINE_SPOOL_MB", number)
        with pytest.raises(InvalidInput, match="set it to a number of MB"):
            quota_bytes()
