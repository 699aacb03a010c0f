"""A run in trackio's database here, and at a real trackio server with its requests cut off on the way."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stalling_proxy import StallingProxy, stalling_proxy
from tracker_servers import RUN_ID, WRITE_TOKEN, RecordedRun, trackio_server

from paceline.spec.sections.system import TrackerSection
from services.tracking import follower as following
from services.tracking.backends import trackio_run
from services.tracking.follower import Follower, Target

pytest.importorskip("trackio", reason="trackio is not installed; `make trackers` installs it")
pytestmark = pytest.mark.filterwarnings("ignore")  # of trackio and what it imports


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with trackio_server(tmp_path_factory.mktemp("trackio")) as found:
        yield found


@pytest.fixture
def proxy(port: int) -> Iterator[StallingProxy]:
    with stalling_proxy(port) as found:
        yield found


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordedRun]:
    monkeypatch.setattr(trackio_run, "TIMEOUT_S", 1)
    monkeypatch.setattr(following, "FIRST_BACKOFF_S", 0.05)
    monkeypatch.setattr(following, "POLL_S", 0.05)
    monkeypatch.setenv("TRACKIO_WRITE_TOKEN", WRITE_TOKEN)
    monkeypatch.delenv("TRACKIO_SERVER_URL", raising=False)
    recorded = RecordedRun(tmp_path)
    yield recorded
    recorded.close()


def follower(run: RecordedRun, folder: Path, url: str, project: str) -> Follower:
    setting = TrackerSection(kind="trackio", project=project, url=url)
    return Follower(
        Target(RUN_ID, setting.kind, setting, folder, {"coordinator": "127.0.0.1:7070"}), run.records()
    )


def at_server(port: int, call: str, **arguments: Any) -> Any:
    from trackio.remote_client import RemoteClient

    return RemoteClient(f"http://127.0.0.1:{port}").predict(api_name=f"/{call}", **arguments)


def rewards(logs: list[dict[str, Any]]) -> list[tuple[int, float]]:
    return [(line["step"], line["train/reward"]) for line in logs if "train/reward" in line]


def test_the_database_here_takes_it(
    run: RecordedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trackio import sqlite_storage

    monkeypatch.setattr(sqlite_storage, "TRACKIO_DIR", tmp_path / "trackio")
    run.add_steps(3)
    run.add("warning", message="look")
    run.add("state", state="succeeded")
    for _ in range(2):  # the second time as after a death
        follower(run, tmp_path, "", "here").run()
        path = tmp_path / "trackio.json"
        content = json.loads(path.read_text())
        path.write_text(json.dumps(content | {"sequence": 0, "time_s": 0.0, "done": False, "ended": ""}))
    storage = sqlite_storage.SQLiteStorage
    logs = storage.get_logs("here", RUN_ID, run_id=content["identity"])
    assert rewards(logs) == [(0, 0.0), (1, 0.125), (2, 0.25)]
    rows = logs[0]["samples"]["_value"]
    assert [row["completion"] for row in rows] == ["2", "three"]
    assert rows[0]["prompt"] == "&lt;script&gt;alert(1)&lt;/script&gt;\\x1b[31m"
    alerts = sorted((alert["title"], alert["text"], alert["level"]) for alert in storage.get_alerts("here"))
    assert alerts == [("Run succeeded", "step 3", "info"), ("Warning", "look", "warn")]
    config = storage.get_run_config("here", RUN_ID, run_id=content["identity"])
    assert config["grpo"]["num_generations_per_prompt"] == 2
    assert config["paceline_coordinator"] == "127.0.0.1:7070"


@pytest.mark.parametrize("fault", ["hangs", "refuses"])
def test_a_server_that_is_away_gets_everything_once(
    run: RecordedRun, tmp_path: Path, port: int, proxy: StallingProxy, fault: str
) -> None:
    run.add_steps(2)
    sender = follower(run, tmp_path, f"http://127.0.0.1:{proxy.port}", fault)
    sending = threading.Thread(target=sender.run)
    sending.start()
    while sender.sent < 2:
        assert not sender.stop.wait(0.02)
    getattr(proxy, fault).set()
    proxy.cut()
    run.add_steps(3)  # the run goes on meanwhile
    run.add("warning", message="still here")
    assert proxy.stalled.wait(60)
    run.add_steps(2)
    assert sender.sent < 5
    getattr(proxy, fault).clear()
    proxy.cut()
    run.add("state", state="succeeded")
    sending.join(60)
    assert not sending.is_alive()
    logs = at_server(port, "get_logs", project=fault, run=RUN_ID)
    assert rewards(logs) == [(step, step / 8) for step in range(7)]
    alerts = at_server(port, "get_alerts", project=fault)
    assert sorted((alert["title"], alert["text"]) for alert in alerts) == [
        ("Run succeeded", "step 7"),
        ("Warning", "still here"),
    ]
