"""A run as TensorBoard's files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tracker_servers import RUN_ID, RecordedRun

from paceline.apps.tracking.backends.tensorboard_run import EVENT_FILES, events, recorded_position
from paceline.apps.tracking.follower import Follower, Target
from paceline.spec.sections.system import TrackerSection

SETTING = TrackerSection(kind="tensorboard")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RecordedRun]:
    recorded = RecordedRun(tmp_path)
    yield recorded
    recorded.close()


def send(run: RecordedRun, folder: Path) -> None:
    Follower(Target(RUN_ID, SETTING.kind, SETTING, folder, {}, only_now=True), run.records()).run()


def rewards(folder: Path) -> list[tuple[int, float]]:
    found = events(folder / "tensorboard")
    return [(step, values["train/reward"]) for step, values in found if "train/reward" in values]


def test_the_files_hold_everything_once_through_a_death(run: RecordedRun, tmp_path: Path) -> None:
    run.add_steps(2)
    run.add("warning", message="look")
    send(run, tmp_path)
    path = tmp_path / "tensorboard.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sequence": 1}))
    run.add_steps(2)
    send(run, tmp_path)
    assert rewards(tmp_path) == [(step, step / 8) for step in range(4)]
    texts = [values for _, values in events(tmp_path / "tensorboard") if "train/samples" in values]
    assert "    three" in texts[0]["train/samples"]
    assert "    <script>alert(1)</script>\\x1b[31m" in texts[0]["train/samples"]
    warnings = [values["warnings"] for _, values in events(tmp_path / "tensorboard") if "warnings" in values]
    assert warnings == ["    look"]


def test_a_file_that_was_cut_off_goes_on_where_it_ends(run: RecordedRun, tmp_path: Path) -> None:
    run.add_steps(3)
    send(run, tmp_path)
    (path,) = (tmp_path / "tensorboard").glob(EVENT_FILES)
    before = recorded_position(tmp_path / "tensorboard")
    path.write_bytes(path.read_bytes()[:-20])
    assert recorded_position(tmp_path / "tensorboard") < before
    send(run, tmp_path)
    assert rewards(tmp_path) == [(step, step / 8) for step in range(3)]
