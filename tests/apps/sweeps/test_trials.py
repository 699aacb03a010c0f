"""Trials of a sweep: each has one run, also when the process is killed at any point, and an outcome that the run decides."""

from __future__ import annotations

from pathlib import Path

import pytest
from sweep_coordinator import BAD, SPEC, Killed, SweepCoordinator, sweep_of, trials

from paceline.apps.sweeps.study import SweepStudy
from paceline.errors import Conflict
from paceline.spec import RunSpec


def test_a_better_learning_rate_than_a_bad_start_is_found(tmp_path: Path) -> None:
    coordinator = SweepCoordinator()
    trials(tmp_path, coordinator, sweep_of(trials=12)).run()
    best = SweepStudy(tmp_path / "lr", sweep_of(trials=12)).best()
    first = coordinator.specs[coordinator.submitted[0]]
    assert len(coordinator.submitted) == 12
    assert first.policy.optimizer.lr == 1e-5
    assert best is not None
    assert best.value > 0.5 + 0.25  # the start has 0.5
    assert coordinator.specs[best.user_attrs["run_id"]].policy.optimizer.lr == best.params["policy.optimizer.lr"]


@pytest.mark.parametrize("where", ["submit", "watch"])
def test_a_trial_whose_process_was_killed_is_found_again_and_not_run_twice(tmp_path: Path, where: str) -> None:
    coordinator = SweepCoordinator(killed_after=where)
    with pytest.raises(Killed):
        trials(tmp_path, coordinator, sweep_of()).run()
    coordinator.killed_after = ""
    said: list[str] = []
    trials(tmp_path, coordinator, sweep_of(), said).run()
    assert "goes on as" in said[0]
    assert len(coordinator.submitted) == len(set(coordinator.submitted)) == 6
    assert len({spec.name for spec in coordinator.specs.values()}) == 6
    study = SweepStudy(tmp_path / "lr", sweep_of())
    assert study.num_ended() == 6
    assert study.open_trials() == []


def test_a_trial_that_was_asked_for_and_has_no_run_is_submitted_with_its_values(tmp_path: Path) -> None:
    asked = SweepStudy(tmp_path / "lr", sweep_of()).ask()
    coordinator = SweepCoordinator()
    trials(tmp_path, coordinator, sweep_of(trials=1)).run()
    (spec,) = coordinator.specs.values()
    assert asked.values == BAD
    assert spec.policy.optimizer.lr == 1e-5


def test_values_that_were_not_drawn_yet_are_drawn_when_the_study_goes_on(tmp_path: Path) -> None:
    study = SweepStudy(tmp_path / "lr", sweep_of())
    study.study.ask()  # killed before any value was on record
    (trial,) = SweepStudy(tmp_path / "lr", sweep_of()).open_trials()
    assert trial.values == BAD


def test_what_a_killed_process_leaves_of_lock_and_line_stops_nobody(tmp_path: Path) -> None:
    study = SweepStudy(tmp_path / "lr", sweep_of())
    study.ask().complete(0.5)
    journal = tmp_path / "lr" / "journal.log"
    (tmp_path / "lr" / "journal.log.lock").symlink_to(journal)
    with journal.open("ab") as file:
        file.write(b'{"op_code":4,"worker_id":"x","study')
    trials(tmp_path, SweepCoordinator(), sweep_of()).run()
    assert SweepStudy(tmp_path / "lr", sweep_of(), read_only=True).num_ended() == 6


def test_a_trial_that_is_worse_is_pruned_and_its_run_cancelled(tmp_path: Path) -> None:
    coordinator = SweepCoordinator()
    start = [{"policy.optimizer.lr": lr} for lr in (1e-3, 9e-4, 1.1e-3, 1e-5)]
    said: list[str] = []
    pruned = sweep_of(trials=4, start=start, pruning={"startup_trials": 2, "warmup_steps": 0})
    trials(tmp_path, coordinator, pruned, said).run()
    assert coordinator.submitted[3] in coordinator.cancelled
    assert "pruned at step" in said[-1]
    states = [each.state.name for each in SweepStudy(tmp_path / "lr", pruned).study.get_trials()]
    assert states[3] == "PRUNED"


@pytest.mark.parametrize("state", ["failed", "paused"])
def test_a_run_that_fails_or_pauses_for_a_fault_fails_its_trial_and_the_sweep_goes_on(
    tmp_path: Path, state: str
) -> None:
    coordinator = SweepCoordinator(
        fails=lambda spec: (state, "the loss is nan") if spec.policy.optimizer.lr < 2e-5 else None
    )
    said: list[str] = []
    trials(tmp_path, coordinator, sweep_of(trials=4), said).run()
    study = SweepStudy(tmp_path / "lr", sweep_of(trials=4))
    first = study.study.get_trials()[0]
    assert (first.state.name, first.user_attrs["message"]) == ("FAIL", "the loss is nan")
    assert any("the loss is nan" in line for line in said)
    assert study.num_ended() == 4
    assert (coordinator.submitted[0] in coordinator.cancelled) == (state == "paused")


def test_a_pause_by_a_person_is_no_failure(tmp_path: Path) -> None:
    coordinator = SweepCoordinator(fails=lambda _: ("paused", ""))
    trials(tmp_path, coordinator, sweep_of(trials=2)).run()
    assert [each.state.name for each in SweepStudy(tmp_path / "lr", sweep_of()).study.get_trials()] == ["COMPLETE"] * 2


def test_a_run_in_front_of_a_trial_is_told(tmp_path: Path) -> None:
    coordinator = SweepCoordinator()
    coordinator.states["somebodys-1"] = ("running", "")
    coordinator.specs["somebodys-1"] = RunSpec.model_validate(SPEC)
    said: list[str] = []
    trials(tmp_path, coordinator, sweep_of(trials=1), said).run()
    assert any("waits for somebodys-1" in line and "paceline cancel somebodys-1" in line for line in said)


def test_the_metric_of_steps_is_the_mean_of_the_last(tmp_path: Path) -> None:
    sweep = sweep_of(trials=1, of="step", last_steps=2)
    trials(tmp_path, SweepCoordinator(), sweep).run()
    best = SweepStudy(tmp_path / "lr", sweep).best()
    assert best is not None
    assert best.value == pytest.approx(0.5 * (0.75 + 1.0) / 2)


def test_a_metric_that_never_comes_fails_the_trial(tmp_path: Path) -> None:
    said: list[str] = []
    trials(tmp_path, SweepCoordinator(), sweep_of(trials=1, metric="no_such"), said).run()
    assert "no event of kind 'evaluation' had a number 'no_such'" in said[-1]


def test_another_search_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    SweepStudy(tmp_path / "lr", sweep_of())
    SweepStudy(tmp_path / "lr", sweep_of(trials=99))  # more trials of the same
    with pytest.raises(Conflict, match="has another search"):
        SweepStudy(tmp_path / "lr", sweep_of(direction="minimize"))
