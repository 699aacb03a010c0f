"""A page with the curves of runs."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from command_line import paceline
from report_content import charts_of, content_of
from trained_ledger import RUN_ID, Writer

from paceline.apps.reports.report_page import MAX_POINTS, RunCurves, curve_blocks, curves_page, page


def test_a_chart_for_each_metric_and_a_line_for_each_run() -> None:
    first = RunCurves("a-1", "succeeded", [{"step": i, "reward": i / 10, "lr": 0.1} for i in range(11)], [])
    second = RunCurves("b-1", "running", [{"step": 0, "reward": 0.5}], [{"step": 4, "reward": 1.0}])
    text = curves_page([first, second])
    reward, rate, evaluation = charts_of(text)
    assert (reward["title"], rate["title"], evaluation["title"]) == (
        "reward [reward]",
        "lr",
        "reward [reward]",
    )
    assert "mean total reward" in reward["meaning"]
    assert [(line["label"], line["colour"]) for line in reward["lines"]] == [("a-1", 0), ("b-1", 1)]
    assert reward["lines"][0]["xs"] == [float(step) for step in range(11)]
    assert reward["lines"][0]["ys"] == [step / 10 for step in range(11)]
    assert (reward["lines"][1]["xs"], reward["lines"][1]["ys"]) == ([0.0], [0.5])
    assert [line["label"] for line in rate["lines"]] == ["a-1"]
    assert [(line["label"], line["colour"]) for line in evaluation["lines"]] == [("b-1", 1)]
    titles = [block[2] for block in content_of(text)["blocks"] if block[0] == "heading"]
    assert titles == ["a-1, b-1", "Rewards of the batch", "Loss and policy", "Evaluation"]


def test_values_that_are_no_numbers_are_left_out() -> None:
    steps = [{"step": 0, "reward": None}, {"step": 1, "reward": math.nan}, {"step": 2, "reward": 1.0}]
    (chart,) = charts_of(curves_page([RunCurves("a-1", "running", steps, [])]))
    assert chart["lines"][0]["xs"] == [2.0]
    assert "No value is recorded yet" in curves_page([RunCurves("a-1", "queued", [], [])])


def test_long_curves_are_averaged() -> None:
    steps = [{"step": i, "reward": float(i)} for i in range(3 * MAX_POINTS)]
    (chart,) = charts_of(curves_page([RunCurves("a-1", "running", steps, [])]))
    assert chart["lines"][0]["ys"] == [float(i) for i in range(1, 3 * MAX_POINTS, 3)]


def test_metrics_that_never_moved_are_judged_by_their_rows() -> None:
    steps = [{"step": i, "reward": i % 2, "lr": 0.1234567891} for i in range(2 * MAX_POINTS)]
    other = [{"step": i, "reward": 1, "lr": 2e-5} for i in range(2)]
    runs = [RunCurves(name, "running", rows, []) for name, rows in (("a-1", steps), ("b-1", other), ("c-1", []))]
    blocks = curve_blocks(runs, tabled=True)
    assert [figure["title"] for block in blocks if block[0] == "charts" for figure in block[1]] == ["reward [reward]"]
    assert blocks[-1][3] == [["Loss and policy: lr", "0.1234567891, 2e-05"]]


def test_metrics_that_never_moved_are_named_with_their_part() -> None:
    rows = [{"step": 0, "reward": math.nan}, *({"step": i, "reward": 123456789} for i in range(2))]
    assert curve_blocks([RunCurves("a-1", "running", rows, rows)], tabled=True) == [
        ["heading", 2, "Metrics that never moved"],
        [
            "table",
            "Constant metrics",
            ["metric", "value"],
            [["Rewards of the batch: reward [reward]", "123456789"], ["Evaluation: reward [reward]", "123456789"]],
        ],
    ]


def test_no_text_ends_the_data_of_a_page_and_only_its_script_may_run() -> None:
    hostile = "</script><!--<script>{{content}}{{modules}}\u2028\ud800"
    text = page(hostile, [["text", hostile, ""]])
    text.encode()
    assert content_of(text) == {"title": hostile, "blocks": [["text", hostile, ""]]}
    assert text.count("<script") == text.count("</script>") == 2
    (script,) = re.findall(r'<script type="module">(.*)</script>', text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}';" in text
    assert re.findall(r"^(?:import|export) ", script, re.MULTILINE) == []


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_a_browser_draws_the_curves(chromium: Any, tmp_path: Path, width: int, scheme: str) -> None:
    steps = [{"step": i, "reward/<b>": i / 30, "loss": 1 / (1 + i)} for i in range(30)]
    runs = [RunCurves("a-1", "succeeded", steps, []), RunCurves("b-1", "running", steps[:1], [])]
    (tmp_path / "page.html").write_text(curves_page(runs), encoding="utf-8")
    context = chromium.new_context(viewport={"width": width, "height": 850}, color_scheme=scheme)
    shown, said = context.new_page(), []
    shown.on("console", lambda message: said.append(message.text))
    shown.on("pageerror", lambda error: said.append(str(error)))
    shown.on("request", lambda request: said.append(request.url))
    shown.goto((tmp_path / "page.html").as_uri())
    shown.locator(".u-over").nth(1).wait_for(timeout=20_000)
    labels = shown.eval_on_selector_all("[role=img]", "all => all.map(one => one.getAttribute('aria-label'))")
    assert labels[0].startswith("reward/<b>")
    assert "a-1: last 0.9667, from 0 to 0.9667; b-1: last 0, from 0 to 0" in labels[0]
    drawn = "all => all.map(one => new Set(one.getContext('2d').getImageData(0, 0, one.width, one.height).data).size)"
    assert all(colours > 10 for colours in shown.eval_on_selector_all("canvas", drawn))
    assert shown.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    assert shown.evaluate("document.documentElement.dataset.theme") == scheme
    assert said == [(tmp_path / "page.html").as_uri()]
    before = [shown.locator("canvas").nth(i).screenshot() for i in range(2)]
    box = shown.locator(".u-over").first.bounding_box()
    shown.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 40)
    assert re.fullmatch(r"step \d+ a-1 0\.\d+ b-1 –", shown.inner_text(".tip"))
    shown.mouse.down()
    shown.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 40, steps=5)
    shown.mouse.up()
    shown.mouse.move(2, 2)
    zoomed = [shown.locator("canvas").nth(i).screenshot() for i in range(2)]
    assert all(a != b for a, b in zip(before, zoomed, strict=True))
    shown.keyboard.press("Escape")
    assert [shown.locator("canvas").nth(i).screenshot() for i in range(2)] == before
    context.close()


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
    assert len(charts_of((runs / RUN_ID / "report.html").read_text())) == 3
    elsewhere = paceline("plot", runs / RUN_ID, "--out", tmp_path / "no" / "x.html")
    assert elsewhere.exit_code == 1
    assert "no folder" in elsewhere.stderr


def test_metrics_that_are_named_are_drawn_alone(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "curve.html"
    result = paceline("plot", RUN_ID, "reward/*", "-o", out, "--directory", runs)
    assert result.exit_code == 0, result.output
    (chart,) = charts_of(out.read_text())
    assert chart["lines"][0]["ys"] == [2.0]


def test_unknown_metrics_and_pictures_are_refused(runs: Path, tmp_path: Path) -> None:
    result = paceline("plot", RUN_ID, "rewad", "-o", tmp_path / "x.html", "--directory", runs)
    assert "has no metric 'rewad'; did you mean 'reward'?" in result.stderr
    for name in ("plot", "report"):
        result = paceline(name, RUN_ID, "-o", tmp_path / "x.png", "--directory", runs)
        assert result.exit_code == 1
        assert "x.png would be an HTML page; name a file that ends in .html" in result.stderr
    assert not (tmp_path / "x.png").exists()
