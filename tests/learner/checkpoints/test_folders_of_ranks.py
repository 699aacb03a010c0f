"""Two real ranks with different folders of checkpoints, which are detected before training and never called complete."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ranks import run_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ranks")
    taken = out / "taken" / "checkpoints" / "7-3"
    taken.mkdir(parents=True)
    (taken / "manifest.json").write_text("{}")
    run_ranks("folder_rank.py", 2, out)
    return out


def met(out: Path, what: str) -> list[str]:
    return [json.loads((out / f"rank.{rank}.json").read_text())[what] for rank in range(2)]


def test_a_folder_that_both_see_is_nothing_to_speak_of(out: Path) -> None:
    assert met(out, "shared") == ["", ""]
    assert list((out / "shared" / "checkpoints").iterdir()) == []


def test_a_rank_with_a_folder_of_its_own_is_named_on_all_ranks(out: Path) -> None:
    for said in met(out, "own"):
        assert said.startswith("NotShared: checkpoint_dir must be seen by all ranks: rank 1 of the learner")
    assert list((out / "host-0" / "checkpoints").iterdir()) == []


def test_a_store_that_fails_for_one_rank_leaves_none_in_a_collective(out: Path) -> None:
    for said in met(out, "failing"):
        assert said.startswith("NotShared: checkpoint_dir must be seen by all ranks: rank 1 of the learner")


def test_a_store_that_fails_for_all_is_left_to_the_first_checkpoint(out: Path) -> None:
    assert met(out, "away") == ["", ""]


def test_a_number_that_is_taken_ends_the_session_on_all_ranks(out: Path) -> None:
    path = out / "taken" / "checkpoints" / "7-3"
    for said in met(out, "taken"):
        assert said.startswith(f"CheckpointFault {path}: session 2 cannot begin: {path} is a checkpoint")


def test_half_a_checkpoint_is_not_called_complete(out: Path) -> None:
    said, other = met(out, "written")
    assert said.startswith("Unavailable: checkpoint ")
    assert "does not see" in said or "does not agree" in said
    assert other == ""
    assert not (out / "host-0" / "2-1" / "manifest.json").exists()
