"""`/metrics` of workers: their heartbeats' gauges, bounded, without sums, also from a real worker's process."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from paceline.services.common.worker import member_metrics
from paceline.services.common.worker.member_metrics import MemberMetrics

ROOT = Path(__file__).resolve().parents[4]
STARTS_S = 60.0


def gathered(reader: InMemoryMetricReader) -> dict[str, float]:
    """Return the newest value of each instrument."""
    data = reader.get_metrics_data()
    assert data is not None
    return {
        metric.name: metric.data.data_points[0].value  # type: ignore[union-attr]
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


def test_gauges_of_the_last_heartbeat_without_sums_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    monkeypatch.setattr(metrics, "get_meter", provider.get_meter)
    connected = [False]
    made = MemberMetrics("reward", lambda: connected[0])
    made.note({"memory_gb": 1.5, "fn/exact/calls": 3.0, "logged_sum/length": 2.0, "odd name!": 1.0})
    assert gathered(reader) == {
        "paceline.member.connected": 0.0,
        "paceline.member.memory_gb": 1.5,
        "paceline.member.odd_name_": 1.0,
    }
    connected[0] = True
    made.note({"memory_gb": 2.5})
    assert gathered(reader) == {"paceline.member.connected": 1.0, "paceline.member.memory_gb": 2.5}
    made.note({f"g{number}": 1.0 for number in range(2 * member_metrics.MAX_NAMES)})
    assert len(gathered(reader)) <= member_metrics.MAX_NAMES + 1
    provider.shutdown()


def test_a_reward_worker_whose_coordinator_is_away_is_scraped(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-m", "paceline.services.reward.main", "--coordinator", "127.0.0.1:9"]
    with log.open("w") as out:
        process = subprocess.Popen([*command, "--metrics-port", "0"], cwd=ROOT, stderr=out, stdout=out)
    try:
        deadline_s = time.monotonic() + STARTS_S
        while "metrics at " not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        url = log.read_text().split("metrics at ")[1].split()[0]
        with urllib.request.urlopen(url, timeout=10) as answer:
            text = answer.read().decode()
        assert 'paceline_member_connected{paceline_role="reward"} 0.0' in text
        assert "process_resident_memory_bytes" in text
    finally:
        process.kill()
        process.wait(STARTS_S)


@pytest.mark.merge
@pytest.mark.slow
def test_a_learner_whose_port_is_taken_says_so_in_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        command = [sys.executable, "-m", "paceline.services.learner.main", "--coordinator", "127.0.0.1:9"]
        command += ["--metrics-port", str(taken.getsockname()[1])]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=STARTS_S, check=False)
    assert ended.returncode == 1
    assert "choose another --metrics-port" in ended.stderr
    assert "Traceback" not in ended.stderr
