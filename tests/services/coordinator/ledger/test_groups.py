from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.errors import Conflict
from paceline.services.coordinator.ledger import row_checksums
from paceline.services.coordinator.ledger.groups import Generated, Groups, NewLease, Scored, State
from paceline.services.coordinator.ledger.ledger import Ledger

RUN = "run"
GENERATED = Generated(tokens=10, sequence_tokens=14, oldest_step=2, digest="d")
SCORED = Scored(rewards=b"\0\0\x80?", scores_digest="s", functions='["f"]', reward=1.0)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    """A ledger with groups 0 to 3 of one run, inside a transaction."""
    ledger = Ledger(tmp_path / "ledger.db")
    with ledger.transaction():
        ledger.groups.admit(RUN, "train", [(group_id, group_id, "prompt", {}) for group_id in range(4)])
        yield ledger
    ledger.close()


def row_of(ledger: Ledger, group_id: int) -> sqlite3.Row:
    row = ledger.group_queries.get(RUN, group_id)
    assert row is not None
    return row


def lease(ledger: Ledger, group_id: int, member_id: str = "rollout", attempt: int = 1) -> None:
    ledger.groups.lease([NewLease(RUN, group_id, member_id, attempt, lease_step=2, holders=member_id)])


def commit(ledger: Ledger, group_id: int) -> None:
    if row_of(ledger, group_id)["state"] == State.ADMITTED:
        lease(ledger, group_id)
    ledger.groups.commit(RUN, group_id, GENERATED)


def score(ledger: Ledger, group_id: int) -> None:
    commit(ledger, group_id)
    ledger.groups.assign_scorer(RUN, group_id, "reward", 1, "reward")
    ledger.groups.score(RUN, group_id, SCORED)


def is_sealed(row: sqlite3.Row) -> bool:
    return bool(row["seal"] == row_checksums.of("groups", {key: row[key] for key in row.keys()}))  # noqa: SIM118


def test_a_group_lives_from_admitted_to_trained(ledger: Ledger) -> None:
    groups, queries, states = ledger.groups, ledger.group_queries, []
    assert [row["group_id"] for row in queries.free_to_lease(RUN, 2)] == [0, 1]
    states.append(row_of(ledger, 0)["state"])
    lease(ledger, 0)
    assert queries.leases(RUN) == [("rollout", 0, 1)]
    states.append(row_of(ledger, 0)["state"])
    groups.commit(RUN, 0, GENERATED)
    assert [row["group_id"] for row in queries.free_to_score(RUN, 2)] == [0]
    states.append(row_of(ledger, 0)["state"])
    groups.assign_scorer(RUN, 0, "reward", 1, "reward")
    assert queries.tasks(RUN) == [("reward", 0, 1)]
    groups.score(RUN, 0, SCORED)
    assert [row["group_id"] for row in queries.scored(RUN)] == [0]
    states.append(row_of(ledger, 0)["state"])
    groups.batch(RUN, 3, [0])
    assert [row["group_id"] for row in queries.of_step(RUN, 3)] == [0]
    states.append(row_of(ledger, 0)["state"])
    assert groups.train(RUN, 3) == (1, 10)
    states.append(row_of(ledger, 0)["state"])
    assert states == [state for state in State if state != State.DROPPED]
    assert is_sealed(row_of(ledger, 0))


def test_a_released_group_can_be_leased_again(ledger: Ledger) -> None:
    groups = ledger.groups
    lease(ledger, 0)
    groups.end_lease(RUN, 0, "rollout", attempt=2)
    groups.end_lease(RUN, 0, "another", attempt=1)
    assert row_of(ledger, 0)["state"] == State.LEASED
    groups.end_lease(RUN, 0, "rollout", attempt=1)
    assert (row_of(ledger, 0)["state"], row_of(ledger, 0)["member_id"]) == (State.ADMITTED, None)
    groups.restore_leases(RUN, "rollout", [0])
    assert row_of(ledger, 0)["state"] == State.ADMITTED, "its name is gone"
    lease(ledger, 0, attempt=2)
    assert groups.revoke_leases(["rollout", "another"]) == 1
    groups.restore_leases(RUN, "rollout", [0, 1])
    assert (row_of(ledger, 0)["state"], row_of(ledger, 1)["state"]) == (State.LEASED, State.ADMITTED)
    groups.revoke_unknown(RUN, "rollout", held=[1])
    assert row_of(ledger, 0)["state"] == State.ADMITTED


def test_a_task_goes_back_and_a_score_stays(ledger: Ledger) -> None:
    groups = ledger.groups
    commit(ledger, 0)
    groups.assign_scorer(RUN, 0, "reward", 1, "reward")
    assert ledger.group_queries.free_to_score(RUN, 4) == []
    groups.end_task(RUN, 0, "reward", attempt=1)
    groups.assign_scorer(RUN, 0, "reward", 2, "reward")
    assert groups.revoke_tasks(["reward"]) == 1
    groups.assign_scorer(RUN, 0, "reward", 3, "reward")
    groups.fail_scoring(RUN, 0, 1)
    assert (row_of(ledger, 0)["scorer_id"], row_of(ledger, 0)["score_failures"]) == (None, 1)
    groups.score(RUN, 0, SCORED)
    assert groups.revoke_tasks(["reward"]) == 0


def test_a_batch_is_taken_apart_and_a_group_of_it_generated_again(ledger: Ledger) -> None:
    groups = ledger.groups
    for group_id in (0, 1):
        score(ledger, group_id)
    groups.batch(RUN, 0, [1, 0])
    assert [row["group_id"] for row in ledger.group_queries.of_step(RUN, 0)] == [1, 0]
    groups.unbatch(RUN, 0, [1, 0])
    groups.generate_again(RUN, 0)
    assert [row_of(ledger, group_id)["state"] for group_id in (0, 1)] == [State.ADMITTED, State.SCORED]
    again = row_of(ledger, 0)
    assert (again["tokens"], again["digest"], again["rewards"]) == (0, None, None)


def test_a_group_is_dropped_from_any_open_state(ledger: Ledger) -> None:
    lease(ledger, 1)
    commit(ledger, 2)
    score(ledger, 3)
    assert ledger.group_queries.num_open(RUN) == {
        "admitted": 1,
        "leased": 1,
        "generated": 1,
        "scored": 1,
        "batched": 0,
    }
    assert ledger.group_queries.open_tokens(RUN) == 20
    for group_id in range(4):
        ledger.groups.drop(RUN, group_id, "stale")
        row = row_of(ledger, group_id)
        assert (row["state"], row["reason"], row["member_id"]) == (State.DROPPED, "stale", None)
        assert is_sealed(row)
    assert ledger.group_queries.open_of_class(RUN, "train") == []


def test_an_evaluation_starts_anew_and_is_removed(ledger: Ledger) -> None:
    groups, queries = ledger.groups, ledger.group_queries
    groups.admit(RUN, "eval:4", [(10 + index, index, "prompt", {}) for index in range(3)])
    lease(ledger, 10, "pinned")
    lease(ledger, 11, "gone")
    groups.drop(RUN, 12, "bad_prompt")
    assert groups.restart_evaluation(RUN, "eval:4", "pinned") == [11]
    assert not queries.is_evaluated(RUN, "eval:4")
    for group_id in (10, 11):
        score(ledger, group_id)
    assert queries.is_evaluated(RUN, "eval:4")
    assert groups.remove(RUN, "eval:4") == []
    assert queries.of_class(RUN, "eval:4") == []


@pytest.mark.parametrize(
    "transition",
    [
        lambda groups: groups.lease([NewLease(RUN, 2, "rollout", 2, lease_step=2, holders="rollout")]),
        lambda groups: groups.clear_holder(RUN, 2),
        lambda groups: groups.readmit(RUN, 2),
        lambda groups: groups.fail_generation(RUN, 2, 1),
        lambda groups: groups.commit(RUN, 2, GENERATED),
        lambda groups: groups.generate_again(RUN, 1),
        lambda groups: groups.assign_scorer(RUN, 1, "reward", 1, "reward"),
        lambda groups: groups.fail_scoring(RUN, 1, 1),
        lambda groups: groups.score(RUN, 1, SCORED),
        lambda groups: groups.batch(RUN, 0, [3, 2]),
        lambda groups: groups.unbatch(RUN, 0, [3]),
        lambda groups: groups.drop(RUN, 0, "stale"),
    ],
)
def test_a_transition_from_another_state_is_refused(ledger: Ledger, transition: Callable[[Groups], None]) -> None:
    ledger.groups.drop(RUN, 0, "stale")
    lease(ledger, 1)
    commit(ledger, 2)
    score(ledger, 3)
    with pytest.raises(Conflict):
        transition(ledger.groups)


def test_a_step_whose_groups_are_not_batched_is_not_trained(ledger: Ledger) -> None:
    score(ledger, 0)
    ledger.groups.batch(RUN, 0, [0])
    ledger.groups.train(RUN, 0)
    with pytest.raises(Conflict):
        ledger.groups.train(RUN, 0)


def test_the_prefix_of_a_generated_group_changes_nothing(ledger: Ledger) -> None:
    commit(ledger, 0)
    ledger.groups.set_prefix_step(RUN, 0, None)
    assert row_of(ledger, 0)["oldest_step"] == GENERATED.oldest_step
