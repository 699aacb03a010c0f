"""A page with the curves of runs."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from command_line import paceline
from trained_ledger import RUN_ID, Writer

from services.cli.recorded.report_page import MAX_POINTS, RunCurves, report_page


def svgs(page: str) -> list[ElementTree.Element]:
    """The charts; each has to be well-formed."""
    return [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page)]


def test_a_chart_for_each_metric_and_a_line_for_each_run() -> None:
    first = RunCurves("a-1", "succeeded", [{"step": i, "reward": i / 10, "lr": 0.1} for i in range(11)], [])
    second = RunCurves("b-1", "running", [{"step": 0, "reward": 0.5}], [{"step": 4, "reward": 1.0}])
    page = report_page([first, second])
    reward, rate, evaluation = svgs(page)
    (line,) = reward.findall("polyline")
    points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
    assert len(points) == 11
    assert points[0] == (52.0, 130.0)  # step 0, reward 0: at the left and at the bottom
    assert points[-1] == (312.0, 8.0)
    assert len(reward.findall("circle")) == 1  # the one step of the second run
    assert len(rate.findall("polyline")) == 1
    assert len(evaluation.findall("circle")) == 1
    assert page.index("Rewards of the batch") < page.index("Loss and policy") < page.index("Evaluation")
    assert "mean total reward" in page


def test_values_that_are_no_numbers_are_left_out() -> None:
    steps = [{"step": 0, "reward": None}, {"step": 1, "reward": float("nan")}, {"step": 2, "reward": 1.0}]
    (chart,) = svgs(report_page([RunCurves("a-1", "running", steps, [])]))
    assert len(chart.findall("circle")) == 1
    assert "No step is recorded yet" in report_page([RunCurves("a-1", "queued", [], [])])


def test_names_are_escaped_and_long_curves_averaged() -> None:
    steps = [{"step": i, "reward/<b>": float(i)} for i in range(3 * MAX_POINTS)]
    page = report_page([RunCurves("a-1", "running", steps, [])])
    assert "<b>reward/&lt;b&gt;</b>" in page
    (chart,) = svgs(page)
    line = chart.find("polyline")
    assert line is not None
    assert len(line.attrib["points"].split()) == MAX_POINTS


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A directory with a run of one recorded step."""
    writer = Writer(tmp_path, str(tmp_path / "model"))
    with writer.ledger.transaction():
        writer.ledger.add_event(RUN_ID, "step", {"step": 0, "reward": 0.5})
        writer.ledger.add_event(RUN_ID, "evaluation", {"step": 1, "reward": 0.75, "reward/length": 2.0})
    writer.ledger.close()
    return tmp_path / "runs"


def test_the_page_is_in_the_folder_of_the_run(runs: Path, tmp_path: Path) -> None:
    result = paceline("plot", RUN_ID, "--directory", runs, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {"path": str(runs / RUN_ID / "report.html"), "runs": [RUN_ID]}
    assert len(svgs((runs / RUN_ID / "report.html").read_text())) == 3
    elsewhere = paceline("plot", runs / RUN_ID, "--out", tmp_path / "no" / "x.html")
    assert elsewhere.exit_code == 1
    assert "no folder" in elsewhere.stderr
