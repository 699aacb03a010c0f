"""`paceline track`: one run to trackers, once or until told to stop."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import paceline
from service_processes import PACELINE
from tracker_servers import RUN_ID, RecordedRun

from paceline.apps.tracking.backends.tensorboard_run import events


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RecordedRun]:
    recorded = RecordedRun(tmp_path)
    recorded.add_steps(2)
    yield recorded
    recorded.close()


def rewards(directory: Path, name: str = "train/reward") -> list[float]:
    found = events(directory / "trackers" / RUN_ID / "tensorboard")
    return [values[name] for _, values in found if name in values]


def test_what_is_on_record_is_sent_and_noted(run: RecordedRun) -> None:
    directory = run.path.parent
    command = ("track", RUN_ID, "--to", "tensorboard", "--now", "--directory", directory)
    first = paceline(*command, "--names", "trl", "--samples", "0")
    assert first.exit_code == 0, first.output
    assert "sums-1 to tensorboard: 2 entries sent" in first.stdout
    assert rewards(directory, "train/rewards/exact_match/mean") == [0.0, 0.25]
    assert "sums-1 to tensorboard: 0 entries sent" in paceline(*command).stdout
    (cursor,) = (directory / "trackers" / RUN_ID).glob("*.json")
    assert json.loads(cursor.read_text())["sequence"] == 2


def test_it_follows_until_it_is_told_to_stop_and_sends_the_rest(run: RecordedRun) -> None:
    directory = run.path.parent
    command = [*PACELINE, "track", RUN_ID, "--to", "tensorboard", "--directory", str(directory)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        while len(rewards(directory)) < 2:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.1)
        run.add_steps(1)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert "3 entries sent" in output
    assert len(rewards(directory)) == 3


def test_mistakes_are_named(run: RecordedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    here = ("--directory", run.path.parent)
    assert "names no tracker (logger.trackers); name one with --to" in paceline("track", RUN_ID, *here).stderr
    assert "no run 'nosuch'" in paceline("track", "nosuch", "--to", "wandb", *here).stderr
    refused = paceline("track", RUN_ID, "--to", "tensorboard", "--offline", *here)
    assert "offline with kind 'tensorboard': only wandb writes files for later" in refused.stderr
    refused = paceline("track", RUN_ID, "--to", "mlflow", "--url", "http://me:secret@host", *here)
    assert "without a password" in refused.stderr
    assert "secret" not in refused.stderr
    refused = paceline("track", RUN_ID, "--to", "mlflow", "--now", *here)
    assert refused.exit_code == 1
    assert "give the URL of a server" in refused.stdout
    assert "without RUN" in paceline("track", "--to", "wandb", *here).stderr
    refused = paceline("track", RUN_ID, "--to", "mlflow", "--to", "wandb", "--url", "http://a:1", *here)
    assert "--url is for one tracker" in refused.stderr
