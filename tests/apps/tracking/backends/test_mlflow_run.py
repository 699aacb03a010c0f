"""A run at a real MLflow server, with its requests cut off on the way."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from stalling_proxy import StallingProxy, stalling_proxy
from tracker_backends import Mlflow
from tracker_servers import RUN_ID, RecordedRun

from paceline.apps.tracking.follower import Follower, Target
from paceline.errors import InvalidInput
from paceline.spec.sections.system import TrackerSection

pytestmark = pytest.mark.filterwarnings("ignore")  # of MLflow and what it imports


@pytest.fixture
def proxy(mlflow_port: int) -> Iterator[StallingProxy]:
    with stalling_proxy(mlflow_port) as found:
        yield found


@pytest.mark.parametrize("fault", ["hangs", "refuses"])
def test_a_server_that_is_away_gets_everything_once(
    run: RecordedRun, tmp_path: Path, mlflow_port: int, proxy: StallingProxy, fault: str
) -> None:
    backend = Mlflow(run, tmp_path, mlflow_port, proxy.port)
    run.add_steps(2)
    sender = backend.follower()
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
    assert backend.rewards() == [(step, step / 8) for step in range(7)]
    assert backend.only_run()[1].info.status == "FINISHED"


def test_a_folder_of_files_is_refused(run: RecordedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    setting = TrackerSection(kind="mlflow")
    with pytest.raises(InvalidInput, match="give the URL of a server"):
        Follower(Target(RUN_ID, setting.kind, setting, tmp_path, {}), run.records()).run()
