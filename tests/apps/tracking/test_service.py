"""Sending of all runs whose specs name trackers, by the process that `paceline up` starts."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tracker_servers import RUN_ID, RecordedRun

from paceline.apps.tracking.backends.tensorboard_run import events
from paceline.apps.tracking.follower import is_done
from paceline.apps.tracking.track import Tracking, folder_of
from paceline.services.cli.recorded.source import Source, ledger_source
from paceline.services.local.cluster import LocalCluster
from paceline.spec import ClusterSection, RunSpec
from paceline.spec.reading import spec_to_yaml

WAIT_S = 60.0


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RecordedRun]:
    """A ledger whose second run names a tracker."""
    recorded = RecordedRun(tmp_path)
    recorded.add_steps(1)
    tree = recorded.writer.spec.model_dump(mode="json", by_alias=True)
    tree["logger"]["trackers"] = [{"kind": "tensorboard"}]
    add_run(recorded, "named-1", RunSpec.model_validate(tree))
    yield recorded
    recorded.close()


def add_run(run: RecordedRun, run_id: str, spec: RunSpec) -> None:
    folder = run.path.parent / run_id
    folder.mkdir()
    ledger = run.writer.ledger
    with ledger.transaction():
        ledger.add_run(run_id, spec_to_yaml(spec), str(folder))
        ledger.update_run(run_id, state="succeeded", session=1)
        ledger.add_event(run_id, "step", {"step": 0, "time": 1.7e9, "reward": 0.5})
        ledger.add_event(run_id, "state", {"state": "succeeded"})


def wait_for_end(directory: Path, run_id: str) -> None:
    until_s = time.monotonic() + WAIT_S
    while not is_done(folder_of(directory, run_id), "tensorboard"):
        assert time.monotonic() < until_s
        threading.Event().wait(0.05)


def rewards(directory: Path, run_id: str) -> list[float]:
    found = events(folder_of(directory, run_id) / "tensorboard")
    return [values["train/reward"] for _, values in found if "train/reward" in values]


def test_runs_that_name_trackers_are_sent_new_ones_too(run: RecordedRun) -> None:
    directory, stop = run.path.parent, threading.Event()

    @contextlib.contextmanager
    def opened() -> Iterator[Source]:
        with ledger_source(run.path) as source:
            yield source

    thread = threading.Thread(target=Tracking(opened, directory, {}, stop, look_s=0.05).run)
    thread.start()
    wait_for_end(directory, "named-1")
    tree = run.writer.spec.model_dump(mode="json", by_alias=True)
    tree["logger"]["trackers"] = [{"kind": "tensorboard"}, {"kind": "mlflow"}]  # without a server
    add_run(run, "named-2", RunSpec.model_validate(tree))
    wait_for_end(directory, "named-2")
    stop.set()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert rewards(directory, "named-1") == rewards(directory, "named-2") == [0.5]
    assert not folder_of(directory, RUN_ID).exists()


def test_a_cluster_sends_its_runs(run: RecordedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = run.path.parent
    run.close()
    monkeypatch.delenv("PACELINE_TOKEN_FILE", raising=False)
    monkeypatch.setenv("PACELINE_TOKEN_FILE", str(directory / "token"))
    cluster = LocalCluster(directory, ClusterSection(), say=lambda line: None)
    try:
        cluster.start_coordinator()
        cluster.start_trackers()
        wait_for_end(directory, "named-1")
    finally:
        cluster.stop()
    assert rewards(directory, "named-1") == [0.5]
    assert not cluster.deaths("trackers")
