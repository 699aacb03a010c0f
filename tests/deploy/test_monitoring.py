"""Alerts, dashboard and runbook speak of metrics that exist and of each other."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import CollectorRegistry, generate_latest

from paceline.services.common.reporting.metric_table import PARTS
from paceline.services.coordinator.exchange.state import Exchange
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.members.registry import Members
from paceline.services.coordinator.reporting import otel as state_otel
from paceline.services.coordinator.reporting.otel import StateMeters, StepMeters, WeightMeters

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "deploy" / "helm" / "paceline" / "files"
RULES: list[dict[str, Any]] = yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"][0]["rules"]
TESTS: list[dict[str, Any]] = yaml.safe_load((ROOT / "deploy/alerts_test.yaml").read_text())["tests"]
DASHBOARD: dict[str, Any] = json.loads((FILES / "dashboard.json").read_text())
RUNBOOK = (ROOT / "docs" / "operate" / "operations.md").read_text()
NAME = re.compile(r"\bpaceline_(?!run\b)\w+")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names that a scrape of a coordinator has which recorded every metric of docs/use/metrics.md without a parameter."""
    directory = tmp_path_factory.mktemp("ledger")
    registry = CollectorRegistry()
    meter = MeterProvider([PrometheusMetricReader(scope_info_enabled=False, registry=registry)]).get_meter("paceline")
    steps, ledger = StepMeters(meter), Ledger(directory / "ledger.sqlite")
    for part in PARTS:
        if part.kind in ("train", "eval"):
            names = [metric.name.replace("<pool>", "rollout") for metric in part.metrics]
            steps.record("run-1", part.kind, 1, {name: 1.0 for name in names if "<" not in name})
    weights = WeightMeters(meter)
    for instrument in (*weights._seconds.values(), weights._bytes):
        instrument.record(1.0, {"paceline.run": "run-1"})
    for gauge in weights._gauges.values():
        gauge.set(1.0, {"paceline.run": "run-1"})
    weights._failures.add(1.0, {"paceline.run": "run-1"})
    state = StateMeters(ledger, Exchange(ledger), Members(10.0), directory, meter)
    for run, run_state in (("run-1", "running"), ("run-2", "paused")):
        with ledger.transaction():
            ledger.add_run(run, "name: x\n", str(directory / run))
            ledger.update_run(run, state=run_state)
    text = ""
    for now_s, ended in ((0.0, "run-1"), (1e3, "run-2")):
        state.observe(now_s)
        text += generate_latest(registry).decode()
        with ledger.transaction():
            ledger.update_run(ended, state="succeeded")
    ledger.close()
    return {re.split(r"[{ ]", line)[0] for line in text.splitlines() if not line.startswith("#")}


def test_every_alert_is_about_metrics_that_exist(served: set[str]) -> None:
    assert {f"paceline_coordinator_{name}" for name in state_otel.GAUGES} <= served
    for rule in RULES:
        names = set(NAME.findall(rule["expr"]))
        assert names or "up{" in rule["expr"]
        assert names <= served, rule["alert"]


def test_every_panel_is_about_metrics_that_exist(served: set[str]) -> None:
    panels = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    for panel in panels:
        for target in panel["targets"]:
            names = set(NAME.findall(target["expr"]))
            assert names, panel["title"]
            assert names <= served, panel["title"]
    (run,) = [v for v in DASHBOARD["templating"]["list"] if v["name"] == "run"]
    assert set(NAME.findall(run["query"]["query"])) <= served


def test_every_alert_has_a_runbook_entry_and_a_test() -> None:
    names = {rule["alert"] for rule in RULES}
    assert set(re.findall(r"^### (\w+)$", RUNBOOK, flags=re.M)) == names
    for rule in RULES:
        assert rule["annotations"]["runbook"] == f"docs/operate/operations.md#{rule['alert'].lower()}"
        assert {"summary", "description"} <= set(rule["annotations"])
        assert rule["labels"]["severity"] in ("critical", "warning")
    cases = [case for test in TESTS for case in test["alert_rule_test"]]
    assert {case["alertname"] for case in cases if case.get("exp_alerts")} == names
    assert {case["alertname"] for case in cases if not case.get("exp_alerts")} >= names - {"PacelineDiskFillsUp"}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian's package prometheus) is not here")
def test_alerts_fire_when_they_should() -> None:
    tested = subprocess.run(
        ["promtool", "test", "rules", ROOT / "deploy/alerts_test.yaml"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert tested.returncode == 0, tested.stdout + tested.stderr


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian's package prometheus) is not here")
def test_every_query_of_the_dashboard_can_be_read(tmp_path: Path) -> None:
    queries = [t["expr"].replace("$run", ".*") for panel in DASHBOARD["panels"] for t in panel.get("targets", [])]
    rules = [{"record": f"panel:query:n{number}", "expr": query} for number, query in enumerate(queries)]
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    checked = subprocess.run(["promtool", "check", "rules", path], capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stderr
