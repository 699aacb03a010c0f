"""A run in W&B's offline files, read back by W&B's own reader."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tracker_servers import RUN_ID, RecordedRun

from paceline.apps.tracking import follower as following
from paceline.apps.tracking.backends.wandb_run import offline_position, read
from paceline.apps.tracking.follower import Follower, Target
from paceline.spec.sections.system import TrackerSection

pytest.importorskip("wandb", reason="wandb is not installed; `make trackers` installs it")
pytestmark = pytest.mark.filterwarnings("ignore")  # of wandb and what it imports
SETTING = TrackerSection(kind="wandb", project="mine", offline=True, names="trl")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordedRun]:
    monkeypatch.setattr(following, "FIRST_BACKOFF_S", 0.05)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    recorded = RecordedRun(tmp_path)
    yield recorded
    recorded.close()


def follower(run: RecordedRun, folder: Path, *, only_now: bool = False) -> Follower:
    return Follower(
        Target(RUN_ID, SETTING.kind, SETTING, folder, {"page": "http://127.0.0.1:7080"}, only_now),
        run.records(),
    )


def recorded(folder: Path) -> list[dict[str, Any]]:
    """Return the records of all files, oldest file first."""
    files = sorted((folder / "wandb").glob("wandb/offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime)
    return [record for path in files for record in read(path)]


def history(folder: Path) -> list[dict[str, Any]]:
    lines = [record["history"]["item"] for record in recorded(folder) if "history" in record]
    return [line for line in lines if "train/reward" in line]


def test_the_files_hold_everything_once_through_a_death(run: RecordedRun, tmp_path: Path) -> None:
    run.add_steps(3)
    run.add("warning", message="look")
    follower(run, tmp_path, only_now=True).run()
    # As after a death between W&B's write and the cursor's.
    path = tmp_path / "wandb.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"sequence": 1}))
    run.add_steps(2)
    run.add("state", state="succeeded")
    follower(run, tmp_path).run()
    lines = history(tmp_path)
    assert [(line["train/global_step"], line["train/reward"]) for line in lines] == [
        (step, step / 8) for step in range(5)
    ]
    assert lines[1]["train/rewards/exact_match/mean"] == 0.25
    (samples,) = (tmp_path / "wandb").glob("wandb/offline-run-*/files/media/table/samples_*.table.json")
    table = json.loads(samples.read_text())
    texts = [dict(zip(table["columns"], line, strict=True))["completion"] for line in table["data"]]
    assert texts == ["2", "three"]
    records = recorded(tmp_path)
    runs = [record["run"] for record in records if "run" in record]
    assert {each["run_id"] for each in runs} == {content["identity"]}
    assert runs[0]["display_name"] == RUN_ID
    assert runs[0]["notes"] == "page: http://127.0.0.1:7080"
    assert runs[0]["config"]["update"]["grpo"]["num_generations_per_prompt"] == 2
    assert [record["alert"]["text"] for record in records if "alert" in record] == ["step 3: look"]


def test_files_that_lost_their_end_get_it_again(run: RecordedRun, tmp_path: Path) -> None:
    run.add_steps(6)
    follower(run, tmp_path, only_now=True).run()
    (path,) = (tmp_path / "wandb").glob("wandb/offline-run-*/run-*.wandb")
    records = read(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert 0 < len(read(path)) < len(records)
    position = offline_position(tmp_path / "wandb")
    assert position < json.loads((tmp_path / "wandb.json").read_text())["sequence"]
    run.add("state", state="succeeded")
    follower(run, tmp_path).run()
    assert [line["train/global_step"] for line in history(tmp_path)] == list(range(6))
