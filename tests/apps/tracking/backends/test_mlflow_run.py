"""A run at a real MLflow server, with its requests cut off on the way."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from stalling_proxy import StallingProxy, stalling_proxy
from tracker_servers import RUN_ID, RecordedRun, mlflow_server

from paceline.apps.tracking import follower as following
from paceline.apps.tracking.backends import mlflow_run
from paceline.apps.tracking.follower import Follower, Target
from paceline.errors import InvalidInput
from paceline.spec.sections.system import TrackerSection

mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed; `make trackers` installs it")
pytest.importorskip("sqlalchemy", reason="MLflow's server needs sqlalchemy; `make trackers` installs it")
pytest.importorskip("alembic", reason="MLflow's server needs alembic; `make trackers` installs it")
pytestmark = pytest.mark.filterwarnings("ignore")  # of MLflow and what it imports


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with mlflow_server(tmp_path_factory.mktemp("mlflow")) as found:
        yield found


@pytest.fixture
def proxy(port: int) -> Iterator[StallingProxy]:
    with stalling_proxy(port) as found:
        yield found


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordedRun]:
    monkeypatch.setattr(mlflow_run, "TIMEOUT_S", 1)
    monkeypatch.setattr(following, "FIRST_BACKOFF_S", 0.05)
    monkeypatch.setattr(following, "POLL_S", 0.05)
    recorded = RecordedRun(tmp_path)
    yield recorded
    recorded.close()


def follower(run: RecordedRun, folder: Path, port: int, project: str) -> Follower:
    setting = TrackerSection(kind="mlflow", project=project, url=f"http://127.0.0.1:{port}")
    return Follower(Target(RUN_ID, setting.kind, setting, folder, {"coordinator": "127.0.0.1:7070"}), run.records())


def only_run(port: int, project: str) -> tuple[mlflow.MlflowClient, mlflow.entities.Run]:
    client = mlflow.MlflowClient(tracking_uri=f"http://127.0.0.1:{port}")
    experiment = client.get_experiment_by_name(project)
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    return client, found


def rewards(client: mlflow.MlflowClient, run_id: str) -> list[tuple[int, float]]:
    return [(each.step, each.value) for each in client.get_metric_history(run_id, "train/reward")]


def test_metrics_samples_and_spec_arrive(run: RecordedRun, tmp_path: Path, port: int) -> None:
    run.add_steps(3)
    run.add("warning", message="look")
    run.add("state", state="succeeded")
    follower(run, tmp_path, port, "whole").run()
    client, found = only_run(port, "whole")
    assert rewards(client, found.info.run_id) == [(0, 0.0), (1, 0.125), (2, 0.25)]
    assert found.info.status == "FINISHED"
    assert found.info.run_name == RUN_ID
    assert found.data.params["grpo.num_generations_per_prompt"] == "2"
    assert found.data.tags["paceline.coordinator"] == "127.0.0.1:7070"
    assert [text for name, text in found.data.tags.items() if name.startswith("paceline.warning.")] == ["step 3: look"]
    path = client.download_artifacts(found.info.run_id, "samples/step-00000000.json", str(tmp_path))
    table = json.loads(Path(path).read_text())
    assert [dict(zip(table["columns"], line, strict=True))["completion"] for line in table["data"]] == [
        "2",
        "three",
    ]
    assert json.loads((tmp_path / "mlflow.json").read_text())["url"].endswith(found.info.run_id)


@pytest.mark.parametrize("fault", ["hangs", "refuses"])
def test_a_server_that_is_away_gets_everything_once(
    run: RecordedRun, tmp_path: Path, port: int, proxy: StallingProxy, fault: str
) -> None:
    run.add_steps(2)
    sender = follower(run, tmp_path, proxy.port, fault)
    sending = threading.Thread(target=sender.run)
    sending.start()
    while sender.sent < 2:
        assert not sender.stop.wait(0.02)
    getattr(proxy, fault).set()
    proxy.cut()
    run.add_steps(3)  # the run goes on meanwhile
    assert proxy.stalled.wait(60)
    run.add_steps(2)
    assert sender.sent < 5
    getattr(proxy, fault).clear()
    proxy.cut()
    run.add("state", state="succeeded")
    sending.join(60)
    assert not sending.is_alive()
    client, found = only_run(port, fault)
    assert rewards(client, found.info.run_id) == [(step, step / 8) for step in range(7)]
    assert found.info.status == "FINISHED"


def test_a_repeated_run_changes_nothing(run: RecordedRun, tmp_path: Path, port: int) -> None:
    run.add_steps(3)
    run.add("state", state="succeeded")
    follower(run, tmp_path, port, "repeated").run()
    path = tmp_path / "mlflow.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"sequence": 0, "time_s": 0.0, "done": False, "ended": ""}))
    follower(run, tmp_path, port, "repeated").run()
    client, found = only_run(port, "repeated")
    assert rewards(client, found.info.run_id) == [(0, 0.0), (1, 0.125), (2, 0.25)]


def test_a_folder_of_files_is_refused(run: RecordedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    setting = TrackerSection(kind="mlflow")
    with pytest.raises(InvalidInput, match="give the URL of a server"):
        Follower(Target(RUN_ID, setting.kind, setting, tmp_path, {}), run.records()).run()
