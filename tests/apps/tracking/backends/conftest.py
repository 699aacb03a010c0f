"""A recorded run, and the trackers to send it to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tracker_backends import BACKENDS, Backend, Mlflow, skip_without
from tracker_servers import RecordedRun, mlflow_server


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RecordedRun]:
    recorded = RecordedRun(tmp_path)
    yield recorded
    recorded.close()


@pytest.fixture(scope="package")
def mlflow_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    skip_without(Mlflow)
    with mlflow_server(tmp_path_factory.mktemp("mlflow")) as found:
        yield found


@pytest.fixture
def backend(
    request: pytest.FixtureRequest, run: RecordedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Backend:
    """The tracker of the test's parameter."""
    kind = BACKENDS[request.param]
    skip_without(kind)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    if kind is Mlflow:
        return Mlflow(run, tmp_path, request.getfixturevalue("mlflow_port"))
    return kind(run, tmp_path)
