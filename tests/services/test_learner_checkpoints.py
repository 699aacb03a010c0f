"""A session's checkpoints: made known when they are complete, done without where one cannot be written, except the last."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.errors import Unavailable
from paceline.spec import CheckpointingSection
from protos.paceline.v1 import worker_pb2
from services.learner_checkpoints import LAST_SAVE_PAUSES_S, SessionCheckpoints


class Session:
    """Checkpoints of session 2, which goes on from step 4, and what they say."""

    def __init__(self, directory: Path, path: str = "") -> None:
        self.reported: list[worker_pb2.CheckpointReport] = []
        self.warnings: list[str] = []
        assignment = worker_pb2.RunAssignment(
            run_id="grpo-1", session=2, directory=str(directory), checkpoint_path=path, start_step=4
        )
        self.checkpoints = SessionCheckpoints(
            assignment,
            CheckpointingSection(),
            lambda report: self.reported.append(report.checkpoint),
            self.warnings.append,
        )


@pytest.fixture
def trainer() -> Any:
    """What a checkpoint is made of, without a policy."""
    model = torch.nn.Linear(2, 2)
    return SimpleNamespace(
        model=model, optimizer=torch.optim.AdamW(model.parameters()), critic=None, device=torch.device("cpu")
    )


@pytest.fixture
def start(tmp_path: Path) -> Any:
    """Starts sessions, and closes them."""
    sessions: list[Session] = []

    def start_one(path: str = "") -> Session:
        sessions.append(Session(tmp_path, path))
        return sessions[-1]

    yield start_one
    for session in sessions:
        session.checkpoints.close()


Start = Callable[..., Session]


def test_a_complete_one_is_reported_and_the_newest(start: Start, trainer: Any, tmp_path: Path) -> None:
    session = start(str(tmp_path / "where-it-came-from"))
    checkpoints = session.checkpoints
    checkpoints.begin(trainer, 4, "c4")  # it came from there
    assert not checkpoints.unwritten
    assert checkpoints.finish() == ""
    assert session.reported == []
    checkpoints.begin(trainer, 5, "c5")
    checkpoints.begin(trainer, 5, "c5")
    assert checkpoints.finish() == ""
    (report,) = session.reported
    assert (report.run_id, report.session, report.step, report.chain) == ("grpo-1", 2, 5, "c5")
    assert checkpoints.newest == (report.path, 5)
    assert report.path == str(tmp_path / "checkpoints" / "2-5")
    assert not checkpoints.saving


def test_one_that_cannot_be_written_is_done_without(start: Start, trainer: Any, tmp_path: Path) -> None:
    session = start()
    (tmp_path / "checkpoints").write_text("in the way")
    session.checkpoints.begin(trainer, 5, "c5")
    assert "could not be written" in session.checkpoints.finish()
    (warning,) = session.warnings
    assert warning.startswith("no checkpoint of step 5: ")
    (tmp_path / "checkpoints").unlink()
    session.checkpoints.begin(trainer, 6, "c6")
    assert session.checkpoints.finish() == ""
    assert [report.step for report in session.reported] == [6]


@pytest.mark.parametrize("tries", [1, 3])
def test_the_last_one_is_tried_again(start: Start, trainer: Any, tmp_path: Path, tries: int) -> None:
    session, pauses = start(), []
    (tmp_path / "checkpoints").write_text("in the way")

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == tries:
            (tmp_path / "checkpoints").unlink()

    session.checkpoints.begin(trainer, 8, "c8")
    session.checkpoints.save_last(trainer, 8, "c8", pause)
    assert tuple(pauses) == LAST_SAVE_PAUSES_S[:tries]
    assert len(session.warnings) == tries
    assert [report.step for report in session.reported] == [8]


def test_the_last_one_is_given_up_in_the_end(start: Start, trainer: Any, tmp_path: Path) -> None:
    session, pauses = start(), []
    (tmp_path / "checkpoints").write_text("in the way")
    session.checkpoints.begin(trainer, 8, "c8")
    with pytest.raises(Unavailable, match="step 8, the last one, could not be written"):
        session.checkpoints.save_last(trainer, 8, "c8", pauses.append)
    assert tuple(pauses) == LAST_SAVE_PAUSES_S[:-1]
    assert session.reported == []
