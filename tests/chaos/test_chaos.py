"""A short campaign: every role is met, nothing is lost; and the judge sees what it is there to see."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from campaign import Result, Upcoming, campaign
from faults import FILES, KINDS, LINKS, ON_REQUEST, ROLES, schedule
from lies import LIES
from links import network
from verdict import Verdict, judge

from paceline.services.coordinator.ledger.ledger import Ledger


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """Runs that met five faults, and where they are."""
    directory = tmp_path_factory.mktemp("chaos")
    return directory / "runs", campaign(directory, schedule(204), faults=5, steps=120, per_run=5)


@pytest.mark.merge
@pytest.mark.slow
def test_a_short_campaign_keeps_the_promise(outcome: tuple[Path, Result]) -> None:
    directory, result = outcome
    assert result.problems == []
    assert result.line().endswith("runs: lost 0, trained twice 0, stalled 0, wrong weights 0")
    assert result.faults == 5
    assert {"kill", "lie", "drop", "duplicate"} <= {kind for _, _, kind in result.met}
    assert result.on_links["exchange"]["doubled"] > 0
    (told,) = [json.loads(line) for line in (directory / "lies.jsonl").read_text().splitlines()]
    assert (told["lie"], told["status"]) == ("another's name", "INVALID")
    assert result.good


@pytest.mark.slow
def test_rollout_workers_that_are_cut_off_from_everybody_cost_nothing(tmp_path: Path) -> None:
    if lacking := network.missing():
        pytest.skip(f"a network of the rollout workers' own: {lacking}")
    plan = schedule(1, kinds=("drop", "delay"), links=("network",))
    result = campaign(tmp_path, plan, faults=2, steps=120, per_run=2, apart=True)
    assert result.problems == []
    assert result.faults == 2
    assert result.on_links["network"]["dropped"] > 0
    assert result.good


@pytest.mark.merge
@pytest.mark.slow
def test_the_judge_sees_what_it_looks_for(outcome: tuple[Path, Result]) -> None:
    """Records that were tampered with: a group without end, one trained twice, other rewards than the trained ones."""
    directory, _ = outcome
    ledger = Ledger(directory / "ledger.sqlite")
    with contextlib.closing(ledger):
        run_id = ledger.runs()[0]["run_id"]
        with ledger.transaction():
            ledger.db.execute(
                "UPDATE groups SET rewards = (SELECT rewards FROM groups g WHERE g.run_id = groups.run_id"
                " AND g.step = 1 LIMIT 1) WHERE step = 0"
            )
            ledger.db.execute(
                "UPDATE groups SET state = 'scored' WHERE run_id = ?1 AND group_id ="
                " (SELECT MAX(group_id) FROM groups WHERE run_id = ?1 AND state = 'trained')",
                (run_id,),
            )
            first = ledger.db.execute(
                "SELECT group_ids FROM receipts WHERE run_id = ? AND step = 0 ORDER BY session DESC",
                (run_id,),
            ).fetchone()
            ids = json.loads(first["group_ids"])
            ledger.db.execute(
                "UPDATE receipts SET group_ids = ? WHERE run_id = ? AND step = 1", (json.dumps(ids), run_id)
            )
    verdict = judge(directory, run_id)
    assert verdict.lost == 1
    assert verdict.trained_twice == 8
    assert verdict.wrong_weights == 1
    assert verdict.problems


def test_a_schedule_is_its_seed_and_meets_every_role() -> None:
    first = [fault for fault, _ in zip(schedule(3), range(100), strict=False)]
    assert first == [fault for fault, _ in zip(schedule(3), range(100), strict=False)]
    assert first != [fault for fault, _ in zip(schedule(4), range(100), strict=False)]
    assert set(ROLES) <= {fault.role for fault in first}
    assert {fault.kind for fault in first} == set(KINDS) - {*ON_REQUEST}
    assert all(fault.index < (ROLES | {"liar": len(LIES)}).get(fault.role, 1) for fault in first)


def test_bits_are_changed_in_every_kind_of_file_when_asked_for() -> None:
    faults = [fault for fault, _ in zip(schedule(3, kinds=("corrupt",)), range(100), strict=False)]
    assert {fault.role for fault in faults} == set(FILES)
    assert all(fault.lasts_s for fault in faults)


@pytest.mark.slow
def test_changed_bits_cost_nothing(tmp_path: Path) -> None:
    result = campaign(tmp_path, schedule(5, kinds=("corrupt",)), faults=5, steps=150, per_run=5, seed=5)
    assert result.problems == []
    assert result.faults == 5
    assert result.good


def test_a_link_meets_only_what_it_can_suffer() -> None:
    faults = [fault for fault, _ in zip(schedule(3, links=tuple(LINKS)), range(400), strict=False)]
    for link, kinds in LINKS.items():
        assert {fault.kind for fault in faults if fault.role == link} == set(kinds)
        assert all(fault.lasts_s for fault in faults if fault.role == link)
    assert {fault.kind for fault in faults if fault.role in ROLES} == {"kill", "pause", "term"}


def test_a_fault_that_a_run_did_not_live_to_see_is_the_first_of_the_next() -> None:
    first, second = faults = [fault for fault, _ in zip(schedule(3), range(2), strict=False)]
    upcoming = Upcoming(iter(faults))
    assert upcoming.first() is upcoming.first() is first
    upcoming.dealt()
    assert upcoming.first() is second
    upcoming.dealt()
    assert upcoming.first() is None


def test_one_fault_of_any_kind_spoils_the_result() -> None:
    assert Result(verdicts=[Verdict()]).good
    for wrong in (Verdict(lost=1), Verdict(trained_twice=1), Verdict(stalled=1), Verdict(wrong_weights=1)):
        assert not Result(verdicts=[Verdict(), wrong]).good
    assert not Result(verdicts=[Verdict(problems=["the chain is torn"])]).good
