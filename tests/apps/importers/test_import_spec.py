"""`paceline import` and `paceline spec`: files, reports and explanations on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import paceline

RECIPE = "model_name_or_path: org/model\ndataset_name: org/data\nreward_funcs: ['f.py:g']\nreport_to: wandb\n"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "grpo.yaml"
    path.write_text(RECIPE)
    return path


def test_import_writes_a_spec_that_loads_and_says_what_it_left_out(recipe: Path) -> None:
    result = paceline("import", "trl", recipe, "grpo.max_num_steps=7")
    written = recipe.with_name("grpo.paceline.yaml")
    assert result.exit_code == 0, result.output
    assert "left out: report_to ('wandb'): TensorBoard" in result.stderr
    assert result.stdout == f"{written}: a spec for `paceline up`; 1 settings were left out\n"
    shown = paceline("spec", written)
    assert shown.exit_code == 0, shown.output
    assert "max_num_steps: 7" in shown.stdout


def test_import_replaces_nothing_without_force(recipe: Path) -> None:
    assert paceline("import", "trl", recipe).exit_code == 0
    again = paceline("import", "trl", recipe)
    assert (again.exit_code, again.stderr.count("\n")) == (1, 1)
    assert "exists; name another with --output, or replace it with --force" in again.stderr
    assert paceline("import", "trl", recipe, "--force").exit_code == 0


def test_import_reports_as_json(recipe: Path) -> None:
    report = json.loads(paceline("import", "trl", recipe, "--json").stdout)
    assert [Path(path).name for path in report["written"]] == ["grpo.paceline.yaml"]
    assert any(line.startswith("report_to") for line in report["left_out"])
