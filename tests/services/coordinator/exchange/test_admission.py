"""Admission and balance, with numbers worked out by hand."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from exchange_drivers import MakeWorld, Rollout

from paceline.services.coordinator.exchange.admission import admissible, may_lease, must_wait, step_of_group
from paceline.services.coordinator.ledger import groups
from paceline.services.coordinator.ledger.tables.batches import balance


@pytest.mark.parametrize(
    ("open_groups", "admitted", "dropped", "max_age", "expected"),
    [
        (0, 0, 0, 0, 4),  # synchronous: one batch
        (4, 4, 0, 0, 0),
        (3, 4, 1, 0, 1),  # a dropped group makes room for its replacement
        (0, 0, 0, 2, 12),  # (2 + 1) · 4
        (5, 9, 0, 2, 7),
        (1, 37, 0, 2, 3),  # 40 groups in all: three are left to admit
        (1, 39, 2, 2, 3),  # two of them were dropped, so 37 count
        (0, 40, 0, 2, 0),
        (12, 12, 0, 2, 0),
        (14, 14, 0, 2, 0),  # never negative
    ],
)
def test_admissible(open_groups: int, admitted: int, dropped: int, max_age: int, expected: int) -> None:
    number = admissible(open_groups, admitted, dropped, batch=4, max_age=max_age, max_steps=10)
    assert number == expected


def test_the_place_decides_the_step_of_a_lease() -> None:
    assert [step_of_group(3, num_ahead, 4) for num_ahead in (0, 3, 4, 7, 8)] == [3, 3, 4, 4, 5]


@pytest.mark.parametrize(
    ("version", "step", "max_age", "expected"),
    [(3, 3, 0, True), (2, 3, 0, False), (2, 3, 1, True), (1, 3, 1, False), (5, 3, 0, True)],
)
def test_may_lease_up_to_eta_behind(version: int, step: int, max_age: int, expected: bool) -> None:
    assert may_lease(version, step, max_age) is expected


@pytest.mark.parametrize(
    ("live_oldest", "step", "max_age", "expected"),
    [
        ([], 5, 1, False),
        ([5], 5, 1, False),  # age 1 at step 6
        ([4], 5, 1, True),  # age 2 at step 6
        ([5, 4], 5, 1, True),
        ([3], 5, 1, False),  # already age 2: waiting does not help
        ([4], 5, 2, False),
        ([5], 5, 0, True),  # synchronous: a group that is left out would be too old
    ],
)
def test_a_batch_waits_for_what_grows_too_old_at_this_very_step(
    live_oldest: list[int], step: int, max_age: int, expected: bool
) -> None:
    assert must_wait(live_oldest, step, max_age) is expected


def test_the_longest_goes_to_the_rank_with_the_fewest_tokens() -> None:
    # 9 → rank 0; 7 → rank 1; 6 → rank 1 (7); 5 → rank 0 (9); 4 → rank 1 (13); 14 against 17
    assert balance([4, 9, 6, 7, 5], 2) == [[1, 4], [0, 2, 3]]


def test_ties_go_to_the_lower_index_and_the_lower_rank() -> None:
    assert balance([3, 3, 3, 3], 2) == [[0, 2], [1, 3]]


def test_one_rank_takes_everything_and_spare_ranks_get_nothing() -> None:
    assert balance([1, 2, 3], 1) == [[0, 1, 2]]
    assert balance([1, 2], 4) == [[1], [0], [], []]
    assert balance([], 2) == [[], []]


def test_balance_is_within_its_bound_of_the_mean() -> None:
    tokens = [7, 7, 6, 6, 5, 5, 4, 4, 4]  # 48 on 4 ranks; the best split is 12, the bound 4/3 - 1/12 = 1.25
    loads = [sum(tokens[i] for i in part) for part in balance(tokens, 4)]
    assert sum(loads) == 48
    assert max(loads) <= 15


def test_prompts_larger_together_than_a_statement_takes_are_admitted(
    make_world: MakeWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "large.jsonl"
    path.write_text("".join(json.dumps({"prompt": str(i) * 4_000, "answer": i}) + "\n" for i in range(9)))
    world = make_world(data={"train": str(path)}, grpo={"num_prompts_per_step": 8})
    world.ledger.db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 16_000)
    monkeypatch.setattr(groups, "MAX_INSERTED_CHARS", 4_000)
    assert len(Rollout(world).lease(16)) == 8
