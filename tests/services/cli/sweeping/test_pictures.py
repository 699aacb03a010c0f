"""The pictures of a sweep: each is there, nothing can run or load, hostile text is text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from sweep_coordinator import SweepCoordinator, sweep_of, trials

from services.cli.sweeping import pictures
from services.cli.sweeping.study import SweepStudy

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
    titles = re.findall(r'aria-label="([^"]+)"', page)
    assert titles == ["History", "Importance", *THREE, "Parallel coordinates", "reward of each trial"]
    assert page.count("<tr>") == 13
    assert "Best: <b>" in page


def test_the_page_runs_and_loads_nothing(page: str) -> None:
    assert "<script" not in page
    assert "default-src 'none'" in page
    assert re.findall(r"(?:src|href)=", page) == []


def test_the_importance_is_the_learning_rates(tmp_path: Path) -> None:
    sweep = sweep_of(trials=20, search=THREE, start=[])
    trials(tmp_path, SweepCoordinator(), sweep).run()
    shares = pictures.importances(SweepStudy(tmp_path / "lr", sweep).study)
    assert max(shares, key=lambda key: shares[key]) == "policy.optimizer.lr"


def test_hostile_text_of_a_failure_is_text() -> None:
    hostile = "<script>alert(1)</script>\x1b[31m\u202ereversed"
    trial = pictures.Ended(0, "FAIL", {"policy.optimizer.lr": 1e-3}, hostile, hostile, None, [])
    page = pictures.report(sweep_of(), [trial], {}, None)
    assert "<script" not in page
    assert "\x1b" not in page
    assert "\u202e" not in page
    assert "&lt;script&gt;" in page


def test_one_trial_or_none_makes_a_page() -> None:
    assert "0 trials ran to their end" in pictures.report(sweep_of(), [], {}, None)
    one = pictures.Ended(0, "COMPLETE", {"policy.optimizer.lr": 1e-3}, "lr-1", "", 0.5, [(0, 0.5)])
    assert "History" in pictures.report(sweep_of(), [one], {}, one)
