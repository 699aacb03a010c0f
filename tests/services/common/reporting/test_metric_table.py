"""The table of metrics explains every metric that the code records, and none that it does not."""

from __future__ import annotations

import ast
import contextlib
import json
import re
import sqlite3
import tarfile
from pathlib import Path

import pytest

from paceline.services.common.reporting.metric_table import PARTS, STATE, entries_of, metric_of
from paceline.services.coordinator.reporting.otel import GAUGES as GAUGE_NAMES

ROOT = Path(__file__).resolve().parents[4]

PRODUCERS = {
    "train": {
        "services/coordinator/exchange/batch_metrics.py": ("batch_metrics",),
        "services/coordinator/exchange/batches/selection.py": ("fix",),
        "services/learner/training/run_reports.py": ("completion_metrics", "collective_time"),
        "learner/step/plan.py": ("batch_metrics",),
        "learner/step/trainer.py": ("train_step", "_metrics", "_accumulate_gradients"),
        "learner/step/critic.py": ("metrics",),
        "learner/objectives/base.py": ("metrics_from_sums",),
        "learner/objectives/pairs.py": ("metrics",),
        "learner/objectives/kto.py": ("metrics",),
        "learner/objectives/distillation.py": ("metrics",),
        "services/learner/training/run.py": ("_train_step",),
        "services/coordinator/reporting/run_log.py": (
            "note_staged", "note_pause", "note_publish", "_pool_gauges", "_on_step",
        ),
    },
    "eval": {"services/coordinator/exchange/evaluation.py": ("evaluation_result",)},
    "weights": {"services/coordinator/reporting/weight_metrics.py": ("metrics", "stage", "publish", "acknowledge")},
}  # fmt: skip
"""Functions that make metrics, by file and kind of line."""

GAUGES = {
    "rollout": {
        "services/rollout/group_sampler.py": ("gauges",),
        "services/rollout/run.py": ("gauges",),
        "services/common/worker/membership.py": ("_safe_gauges",),
    },
    "reward_workers": {
        "services/reward/worker.py": ("_gauges",),
        "paceline/host/resources.py": ("process_gauges",),
    },
    "environment_workers": {
        "services/environment/run.py": ("gauges",),
        "services/common/worker/membership.py": ("_safe_gauges",),
    },
    "learner": {"paceline/host/resources.py": ("process_gauges",)},
}
"""Functions that make the gauges of a pool's workers."""

NOT_METRICS = {"step", "", "dropped_in_a_row"}


def names_in(path: str, functions: tuple[str, ...]) -> set[str]:
    """Keys of dictionaries, subscripts that are assigned to, keywords of `raise_to`, and names of measured phases."""
    tree = ast.parse((ROOT / path).read_text())
    bodies = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in functions]
    assert len(bodies) >= len(functions), f"{path} has not all of {functions}"
    found: set[str] = set()
    for node in (inner for body in bodies for inner in ast.walk(body)):
        keys: list[ast.expr | None] = []
        if isinstance(node, ast.Dict):
            keys = list(node.keys)
        elif isinstance(node, ast.DictComp):
            keys = [node.key]
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            keys = [node.slice]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "measure":
                keys = [node.args[0]]
            elif node.func.attr == "raise_to":
                found |= {keyword.arg for keyword in node.keywords if keyword.arg}
        found |= {text for key in keys if (text := as_text(key)) is not None}
    return found - NOT_METRICS


def as_text(key: ast.expr | None) -> str | None:
    """A constant string; of an f-string the constant parts, with 1 for what is filled in."""
    if isinstance(key, ast.Constant) and isinstance(key.value, str):
        return key.value
    if isinstance(key, ast.JoinedStr) and isinstance(key.values[0], ast.Constant):
        return "".join(str(v.value) if isinstance(v, ast.Constant) else "1" for v in key.values)
    return None


@pytest.mark.parametrize(("kind", "path"), [(kind, path) for kind, files in PRODUCERS.items() for path in files])
def test_every_metric_that_is_made_is_explained(kind: str, path: str) -> None:
    names = names_in(path, PRODUCERS[kind][path])
    assert names
    foreign = {name for name in names if metric_of(kind, name) is None and not is_no_metric(name)}
    assert not foreign, f"give {sorted(foreign)} an entry in services/common/reporting/metric_table.py"


def is_no_metric(name: str) -> bool:
    """Keys of other dictionaries in those functions."""
    return name.startswith("validation") or name in {"clipped", "ratio", "truncated", "batch_metrics"}


@pytest.mark.parametrize(("pool", "path"), [(pool, path) for pool, files in GAUGES.items() for path in files])
def test_every_gauge_is_explained(pool: str, path: str) -> None:
    for name in names_in(path, GAUGES[pool][path]):
        assert metric_of("train", f"{pool}/{name}") is not None, name


def test_the_metrics_of_a_recorded_run_are_explained(tmp_path: Path) -> None:
    with tarfile.open(ROOT / "tests" / "data" / "recorded.tar.xz") as archive:
        archive.extract("runs/ledger.sqlite", tmp_path, filter="data")
    db = sqlite3.connect(tmp_path / "runs" / "ledger.sqlite")
    with contextlib.closing(db):
        events = db.execute("SELECT kind, json FROM events").fetchall()
    kinds = {"step": "train", "evaluation": "eval"}
    names = {(kinds[kind], name) for kind, text in events if kind in kinds for name in json.loads(text)}
    assert len(names) > 40
    unexplained = {name for kind, name in names - {("train", "step")} if metric_of(kind, name) is None}
    assert not unexplained


def test_the_table_has_no_metric_that_the_code_does_not_make() -> None:
    packages = ("services", "learner", "rollout", "reward")
    files = [path for package in packages for path in (ROOT / package).rglob("*.py") if path.name != "metric_table.py"]
    words = {word for path in files for word in re.findall(r"\w+", path.read_text())}
    for part in PARTS:
        for metric in part.metrics:
            start = metric.name.split("<")[0]
            last = start.rpartition("/")[2] or start
            assert set(re.findall(r"\w+", last)) <= words, metric.name


def test_the_coordinators_gauges_are_explained() -> None:
    assert {metric.name for metric in STATE.metrics} == set(GAUGE_NAMES)


def test_a_name_with_a_parameter_is_found_by_its_values() -> None:
    found = metric_of("eval", "pass@4/math_accuracy")
    assert found is not None
    assert found.name == "pass@<k>/<function>"
    exact = metric_of("train", "age")
    assert exact is not None
    assert exact.name == "age"
    assert metric_of("train", "no_such_metric") is None


def test_entries_are_found_by_a_name_and_by_a_pattern() -> None:
    assert [metric.name for _, metric in entries_of("reward_weight/length")] == ["reward_weight/<function>"]
    assert len(entries_of("*")) == sum(len(part.metrics) for part in PARTS)
    assert {metric.name for _, metric in entries_of("age*")} == {"age", "age/<age>"}
    assert entries_of("no_such_metric") == []
