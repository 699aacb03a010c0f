"""examples/notebook/look.ipynb, executed on a seeded run that a coordinator has on record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from trained_ledger import RUN_ID, Writer

from paceline.services.local.cluster import LocalCluster
from paceline.spec import ClusterSection

NOTEBOOK = Path(__file__).resolve().parent.parent / "examples" / "notebook" / "look.ipynb"
STEPS = 40


def run_cells(path: Path) -> dict[str, Any]:
    """Execute the cells of code in their order; return the notebook's names."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    for number, cell in enumerate(each for each in cells if each["cell_type"] == "code"):
        exec(compile("".join(cell["source"]), f"<cell {number}>", "exec"), names)
    return names


def test_the_notebook_looks_at_a_run_over_the_wire(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = Writer(tmp_path, str(tmp_path / "model"))
    writer.train_a_step()
    with writer.ledger.transaction():
        for step in range(STEPS):
            content = {"step": step, "time": 1.7e9 + step, "reward": step / STEPS, "loss": 1 - step / STEPS}
            writer.ledger.add_event(RUN_ID, "step", content)
    writer.ledger.close()
    monkeypatch.setenv("PACELINE_TOKEN_FILE", str(tmp_path / "runs" / "token"))
    cluster = LocalCluster(tmp_path / "runs", ClusterSection(), say=lambda line: None)
    try:
        monkeypatch.setenv("PACELINE_COORDINATOR", cluster.start_coordinator())
        names = run_cells(NOTEBOOK)
    finally:
        cluster.stop()
    assert names["run_id"] == RUN_ID
    assert list(names["metrics"]["reward"]) == [step / STEPS for step in range(STEPS)]
    assert list(names["samples"]["completion"]) == ["2", "three"]
    assert list(names["groups"]["count"]) == [2]
    assert [hop.what for hop in names["life"].hops][-1] == "trained"
    assert names["books"].balanced
    assert "over 40 steps" in capsys.readouterr().out


def test_the_notebook_has_no_outputs_and_every_cell_an_id() -> None:
    tree = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (tree["nbformat"], tree["nbformat_minor"]) == (4, 5)
    assert all(cell["id"] and not cell.get("outputs") for cell in tree["cells"])
    assert len({cell["id"] for cell in tree["cells"]}) == len(tree["cells"])
