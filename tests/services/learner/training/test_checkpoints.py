"""A session's checkpoints: reported when complete, and skipped when they cannot be written, except the last."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.errors import CheckpointFault, Unavailable
from paceline.files.storage import Folder
from paceline.learner.checkpoints import checkpoint, verification
from paceline.learner.checkpoints.checkpoint import Checkpoint, Misfit
from paceline.learner.checkpoints.manifest import read_manifest
from paceline.services.learner.training import checkpoints as checkpoint_uploads
from paceline.services.learner.training.checkpoints import (
    LAST_SAVE_PAUSES_S,
    LOAD_PAUSES_S,
    SessionCheckpoints,
)
from paceline.spec import CheckpointingSection
from paceline.v1 import worker_pb2


class Session:
    """Checkpoints of session 2, which continues from step 4, with their reports and warnings."""

    def __init__(self, directory: Path, path: str = "", sha256: str = "", url: str | None = None) -> None:
        self.reported: list[worker_pb2.CheckpointReport] = []
        self.warnings: list[str] = []
        assignment = worker_pb2.RunAssignment(
            run_id="grpo-1",
            session=2,
            directory=str(directory) if url is None else url,
            checkpoint_path=path,
            checkpoint_sha256=sha256,
            start_step=4,
        )
        self.checkpoints = SessionCheckpoints(
            assignment,
            CheckpointingSection(),
            lambda report: self.reported.append(report.checkpoint),
            self.warnings.append,
            upload_pauses_s=(0.01, 0.01),
        )


@pytest.fixture
def trainer() -> Any:
    """The parts of a checkpoint, without a policy."""
    model = torch.nn.Linear(2, 2)
    return SimpleNamespace(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        critic=None,
        synced_reference=None,
        device=torch.device("cpu"),
    )


@pytest.fixture
def start(tmp_path: Path) -> Any:
    """Starts sessions, and closes them."""
    sessions: list[Session] = []

    def start_one(path: str = "", sha256: str = "", url: str | None = None) -> Session:
        sessions.append(Session(tmp_path, path, sha256, url))
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


def test_manifests_name_the_audit_log_as_of_their_begin(start: Start, trainer: Any, tmp_path: Path) -> None:
    checkpoints = start(str(tmp_path / "where-it-came-from")).checkpoints
    for step, head in ((5, (0, "")), (6, (7, "ab"))):
        checkpoints.name_audit_head(*head)
        checkpoints.begin(trainer, step, f"c{step}")
        checkpoints.name_audit_head(9, "cd")
        assert checkpoints.finish() == ""
        checkpoints.name_audit_head(*head)
    manifests = [read_manifest(Folder(tmp_path / "checkpoints" / f"2-{step}"))[0] for step in (5, 6)]
    assert [manifest.extra for manifest in manifests] == [{}, {"audit": {"sequence": 7, "hash": "ab"}}]
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


def saved(trainer: Any, directory: Path) -> Checkpoint:
    written = checkpoint.save(directory, session=1, step=4, model=trainer.model, optimizer=trainer.optimizer)
    assert written is not None
    return written


def test_a_session_waits_some_seconds_for_its_checkpoint(start: Start, trainer: Any, tmp_path: Path) -> None:
    written = saved(trainer, tmp_path / "mounted")
    session, pauses = start(str(tmp_path / "mount" / "1-4"), written.manifest_sha256), []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            (tmp_path / "mounted").rename(tmp_path / "mount")

    session.checkpoints.load(trainer, pause)
    assert tuple(pauses) == LOAD_PAUSES_S[:2]


def test_one_that_stays_away_is_a_fault_of_the_checkpoint(start: Start, trainer: Any, tmp_path: Path) -> None:
    pauses: list[float] = []
    with pytest.raises(CheckpointFault, match="1-4: no such folder"):
        start(str(tmp_path / "1-4"), "x").checkpoints.load(trainer, pauses.append)
    assert tuple(pauses) == LOAD_PAUSES_S


def test_a_disk_that_cannot_be_read_is_tried_again(
    start: Start, trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, pauses = saved(trainer, tmp_path), []

    def broken(*_: Any, **__: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(verification, "read_manifest", broken)
    with pytest.raises(CheckpointFault, match=r"cannot be read: OSError: .*Input/output error"):
        start(str(written.path), written.manifest_sha256).checkpoints.load(trainer, pauses.append)
    assert tuple(pauses) == LOAD_PAUSES_S


def test_a_damaged_one_is_given_up_at_once(start: Start, trainer: Any, tmp_path: Path) -> None:
    written, pauses = saved(trainer, tmp_path), []
    file = tmp_path / "1-4" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointFault, match=r"'__0_0\.distcp' has"):
        start(str(written.path), written.manifest_sha256).checkpoints.load(trainer, pauses.append)
    assert pauses == []


def test_one_of_another_model_is_no_damage(start: Start, trainer: Any, tmp_path: Path) -> None:
    written = saved(trainer, tmp_path)
    wider = torch.nn.Linear(3, 2)
    other = SimpleNamespace(
        model=wider, optimizer=torch.optim.AdamW(wider.parameters()), critic=None, synced_reference=None
    )
    with pytest.raises(Misfit, match="does not fit"):
        start(str(written.path), written.manifest_sha256).checkpoints.load(other, lambda _: None)


def complete(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    return folder


def test_a_session_whose_number_is_taken_does_not_begin(start: Start, tmp_path: Path) -> None:
    complete(tmp_path / "checkpoints" / "1-9")
    start().checkpoints.check_folder(torch.device("cpu"), lambda _: None)
    taken = complete(tmp_path / "checkpoints" / "2-1")
    with pytest.raises(CheckpointFault, match="session 2 cannot begin: ") as caught:
        start().checkpoints.check_folder(torch.device("cpu"), lambda _: None)
    assert caught.value.path == str(taken)


def test_what_is_ahead_of_where_the_session_began_is_not_deleted(start: Start, trainer: Any, tmp_path: Path) -> None:
    for name in ("1-2", "1-4", "1-9"):
        complete(tmp_path / "checkpoints" / name)
    session = start()
    session.checkpoints.check_folder(torch.device("cpu"), lambda _: None)
    session.checkpoints.begin(trainer, 6, "c6")
    session.checkpoints.finish()
    session.checkpoints.keep_only([session.reported[0].path])
    session.checkpoints.close()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["1-9", "2-6"]


# An object store


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store's URL; the spool is below `tmp_path`."""
    monkeypatch.setenv("PACELINE_SPOOL", str(tmp_path / "spool"))
    return f"memory://{uuid.uuid4().hex}/grpo-1"


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The object store does not answer while this is set."""
    is_away, put = threading.Event(), Folder.put

    def put_if_there(folder: Folder, name: str, path: Path) -> None:
        if is_away.is_set():
            raise Unavailable("nobody listens")
        put(folder, name, path)

    monkeypatch.setattr(Folder, "put", put_if_there)
    return is_away


def test_training_goes_on_while_the_store_is_away(start: Start, trainer: Any, url: str, away: threading.Event) -> None:
    session, states = start(url=url), []
    away.set()
    for step in (5, 6):
        with torch.no_grad():
            trainer.model.weight += 1
        states.append(trainer.model.weight.detach().clone())
        session.checkpoints.begin(trainer, step, f"c{step}")
        assert session.checkpoints.finish() == ""
    assert not session.checkpoints.until_stored(lambda: True)
    assert session.reported == []
    assert session.checkpoints.gauges["queued_checkpoints"] == 2
    away.clear()
    assert session.checkpoints.until_stored(lambda: False)
    assert [(report.step, report.path) for report in session.reported] == [
        (step, f"{url}/checkpoints/2-{step}") for step in (5, 6)
    ]
    assert session.checkpoints.newest == (f"{url}/checkpoints/2-6", 6)
    report = session.reported[0]
    start(report.path, report.sha256, url).checkpoints.load(trainer, pytest.fail)
    assert torch.equal(trainer.model.weight, states[0])


def test_beyond_the_quota_the_oldest_is_dropped_and_the_run_goes_on(
    start: Start, trainer: Any, url: str, away: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_uploads, "quota_bytes", lambda: 1)
    session = start(url=url)
    away.set()
    for step in (5, 6):
        session.checkpoints.begin(trainer, step, f"c{step}")
        assert session.checkpoints.finish() == ""
    assert any("checkpoints 2-5 were dropped before they reached" in warning for warning in session.warnings)
    away.clear()
    session.checkpoints.save_last(trainer, 6, "c6", pytest.fail)
    assert session.checkpoints.until_stored(lambda: False)
    assert [report.step for report in session.reported] == [6]


def test_a_checkpoint_in_a_store_that_is_away_is_not_called_damaged(
    start: Start, trainer: Any, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ConnectionError("nobody listens")

    monkeypatch.setattr(Folder, "open", refuse)
    pauses: list[float] = []
    with pytest.raises(Unavailable, match="cannot be read: ConnectionError: nobody listens"):
        start(f"{url}/checkpoints/1-4", "0" * 64, url).checkpoints.load(trainer, pauses.append)
    assert tuple(pauses) == LOAD_PAUSES_S
