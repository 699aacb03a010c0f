"""Recorded paths are relative to the ledger, and found after the whole folder was moved."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.ledger.tables.checkpoints import resolved, stored
from paceline.v1.worker_pb2 import CheckpointReport


@pytest.mark.parametrize(
    ("path", "kept"),
    [
        ("/runs/a-1", "a-1"),
        ("/runs/a-1/checkpoints/1-4", "a-1/checkpoints/1-4"),
        ("/runs-of-others/a-1", "file:///runs-of-others/a-1"),
        ("/elsewhere/a-1/1-4", "file:///elsewhere/a-1/1-4"),
        ("s3://bucket/a-1/1-4", "s3://bucket/a-1/1-4"),
        ("/runs/..a", "..a"),
        ("/store/a-1/checkpoints/1-4", "file:///store/a-1/checkpoints/1-4"),
        ("/store/a-1/export", "file:///store/a-1/export"),
        ("", ""),
    ],
)
def test_what_lies_below_the_ledger_is_kept_relative(path: str, kept: str) -> None:
    base = Path("/runs")
    assert stored(base, path) == kept
    assert resolved(base, kept) == path


def test_a_ledger_whose_folder_was_moved_knows_where_its_runs_are(tmp_path: Path) -> None:
    before = tmp_path / "before"
    ledger = Ledger(before / "ledger.sqlite")
    ledger.add_run("a-1", "{}", str(before / "a-1"))
    path = str(before / "a-1" / "checkpoints" / "1-0")
    ledger.checkpoints.add(CheckpointReport(run_id="a-1", session=1, path=path, sha256="0"))
    ledger.update_run("a-1", export_path=stored(before, str(before / "a-1" / "export")))
    ledger.close()
    after = before.rename(tmp_path / "after")
    ledger = Ledger(after / "ledger.sqlite", read_only=True)
    assert ledger.run_directory("a-1") == after / "a-1"
    assert ledger.export_path("a-1") == str(after / "a-1" / "export")
    newest = ledger.checkpoints.newest("a-1")
    assert newest is not None
    assert newest.path == str(after / "a-1" / "checkpoints" / "1-0")
    ledger.close()
