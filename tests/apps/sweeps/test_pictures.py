"""The pictures of a sweep: each is there, nothing can run or load, hostile text is text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from report_content import charts_of, content_of
from sweep_coordinator import SweepCoordinator, sweep_of, trials

from paceline.apps.sweeps import pictures
from paceline.apps.sweeps.study import SweepStudy

THREE = {
    "policy.optimizer.lr": {"low": 1e-5, "high": 1e-2, "log": True},
    "loss_fn.preset": {"choices": ["dapo", "gspo"]},
    "policy.num_updates_per_step": {"low": 1, "high": 2},
}


@pytest.fixture
def page(tmp_path: Path) -> str:
    sweep = sweep_of(trials=12, search=THREE, start=[], pruning={"startup_trials": 3})
    coordinator = SweepCoordinator()
    trials(tmp_path, coordinator, sweep).run()
    study = SweepStudy(tmp_path / "lr", sweep)
    found = pictures.trials_of(study.study)
    best = study.best()
    shown = next(each for each in found if best is not None and each.number == best.number)
    return pictures.report(sweep, found, pictures.importances(study.study), shown)


def test_every_picture_and_every_trial_is_there(page: str) -> None:
    charts = {chart["title"]: chart for chart in charts_of(page)}
    assert list(charts) == ["History", *THREE, "Parallel coordinates", "reward of each trial"]
    tables = {block[1]: block[3] for block in content_of(page)["blocks"] if block[0] == "table"}
    importance, trials = tables.values()
    assert {key for key, _ in importance} == set(THREE)
    assert [row[0] for row in trials] == [str(number) for number in range(12)]
    ended = [row for row in trials if row[2] == "complete"]
    for title in ("History", *THREE):
        points = [name for line in charts[title]["lines"] for name in line.get("names", [])]
        assert sorted(points) == sorted(f"trial {row[0]} ({row[1]})" for row in ended), title
    assert charts["policy.optimizer.lr"]["log"] is True
    assert charts["loss_fn.preset"]["places"] == ["dapo", "gspo"]
    assert len(charts["Parallel coordinates"]["lines"]) == len(ended)
    assert len(charts["reward of each trial"]["lines"]) == 12
    assert "Best: 0." in json.dumps(content_of(page)["blocks"])


def test_a_measure_of_steps_says_that_it_is_a_mean() -> None:
    said = str(content_of(pictures.report(sweep_of(of="step", last_steps=3), [], {}, None))["blocks"])
    assert "maximize reward of each trial, the mean of its last 3 steps." in said


def test_a_browser_draws_every_picture(page: str, tmp_path: Path, chromium: Any) -> None:
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    shown, said = chromium.new_page(), []
    shown.on("console", lambda message: said.append(message.text))
    shown.on("pageerror", lambda error: said.append(str(error)))
    shown.goto((tmp_path / "page.html").as_uri())
    shown.locator(".u-over").nth(5).wait_for(timeout=20_000)
    assert shown.locator("tbody tr").count() == 3 + 12
    box = shown.locator(".u-over").first.bounding_box()
    shown.mouse.move(box["x"] + 1, box["y"] + 40)
    assert "trial 0 (lr-" in shown.inner_text(".tip")
    assert said == []
    shown.close()


def test_the_importance_is_the_learning_rates(tmp_path: Path) -> None:
    sweep = sweep_of(trials=20, search=THREE, start=[])
    trials(tmp_path, SweepCoordinator(), sweep).run()
    shares = pictures.importances(SweepStudy(tmp_path / "lr", sweep).study)
    assert max(shares, key=lambda key: shares[key]) == "policy.optimizer.lr"


def test_hostile_text_of_a_failure_is_text() -> None:
    hostile = "<script>alert(1)</script>\x1b[31m\u202ereversed"
    trial = pictures.Ended(0, "FAIL", {"policy.optimizer.lr": 1e-3}, hostile, hostile, None, [])
    page = pictures.report(sweep_of(), [trial], {}, None)
    assert page.count("<script") == 2
    assert "\x1b" not in page
    assert "\u202e" not in page
    (table,) = [block for block in content_of(page)["blocks"] if block[0] == "table"]
    assert table[3] == [["0", hostile, hostile, "", "0.001"]]


def test_one_trial_or_none_makes_a_page() -> None:
    assert "0 trials: 0 complete" in pictures.report(sweep_of(), [], {}, None)
    one = pictures.Ended(0, "COMPLETE", {"policy.optimizer.lr": 1e-3}, "lr-1", "", 0.5, [(0, 0.5)])
    assert "History" in pictures.report(sweep_of(), [one], {}, one)
