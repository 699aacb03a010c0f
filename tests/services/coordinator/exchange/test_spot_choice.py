"""Choice of groups to compare: the first of each worker, then at least its share, and one of each large batch."""

from __future__ import annotations

import numpy as np

from paceline.groups import Completion, Group, VersionSpan
from paceline.services.coordinator.exchange.spot_check import (
    FIRST_CHECKS,
    LARGE_BATCH,
    MAX_CHECKS,
    Observation,
    SpotCheck,
)

SHARE = 0.002
IDS, LOGPROBS = np.zeros(1, np.int32), np.zeros(1, np.float32)
ONE_RANK = (0, 1)
RIGHT = Observation(0.0, 0.001, 1000)


def batch(check: SpotCheck, step: int, workers: list[str]) -> list[int]:
    """Return the ids of committed groups, one of each entry, which has names separated by `+`."""
    for i, names in enumerate(workers):
        spans = tuple(VersionSpan(1, step, 0, 1, name) for name in names.split("+"))
        check.note_group(Group(100 * step + i, IDS, (Completion(IDS, LOGPROBS, spans, "stop"),)))
    return [100 * step + i for i in range(len(workers))]


def chosen_in(check: SpotCheck, step: int, workers: list[str], part: tuple[int, int] = ONE_RANK) -> list[str]:
    """Return the workers of the chosen groups, sorted."""
    groups = batch(check, step, workers)
    chosen = check.choose(f"chain-{step}", part, groups, SHARE, len(groups))
    return sorted(workers[group - groups[0]] for group in chosen)


def compare(check: SpotCheck, step: int, workers: list[str], observation: Observation = RIGHT) -> list[str]:
    """Choose, and observe what the learner finds in the chosen groups."""
    names = chosen_in(check, step, workers)
    for worker in names:
        check.observe(worker, observation)
    return names


def test_the_first_groups_are_compared_and_then_at_least_two_in_a_thousand() -> None:
    check = SpotCheck(seed=1)
    workers = [worker for worker in ("a", "b") for _ in range(5)]
    compared = [compare(check, step, workers) for step in range(1000)]
    assert compared[0] == ["a"] * FIRST_CHECKS + ["b"] * FIRST_CHECKS
    for first in range(1, 800):  # any thousand groups of a worker
        for worker in ("a", "b"):
            number = sum(names.count(worker) for names in compared[first : first + 200])
            assert 2 <= number <= 4


def test_a_worker_is_due_until_the_learner_has_compared_it() -> None:
    check = SpotCheck(seed=1)
    assert [chosen_in(check, step, ["a", "a"]) for step in range(3)] == [["a", "a"]] * 3
    assert compare(check, 3, ["a"] * 6) == ["a"] * FIRST_CHECKS
    assert chosen_in(check, 4, ["a"] * 6) == []


def test_a_suspected_worker_is_compared_again_at_once() -> None:
    check = SpotCheck(seed=1)
    compare(check, 0, ["a", "b"] * FIRST_CHECKS)
    assert chosen_in(check, 10, ["a", "b"]) == []
    assert check.observe("a", Observation(0.012, 0.003, 1000)) is None
    assert chosen_in(check, 11, ["a", "b"]) == ["a"]
    check.observe("a", Observation(-0.02, 0.003, 1000))
    check.observe("a", RIGHT)
    assert chosen_in(check, 12, ["a", "b"]) == []


def test_a_named_worker_is_compared_in_each_batch_until_it_is_right() -> None:
    check = SpotCheck(seed=1)
    wrong = Observation(0.01, 0.005, 1000, 0.03, "bfloat16", version_step=3)
    assert check.observe("a", wrong) is None
    finding = check.observe("a", wrong._replace(version_step=2))
    assert finding is not None
    assert finding.version_step == 2
    assert check.test.wrong_versions == {"a": (2, 3)}
    groups = batch(check, 1, ["a"]) + batch(check, 2, ["b", "b+a"]) + batch(check, 4, ["a"])
    assert [check.is_wrong(group) for group in groups] == [False, False, True, False]
    check.observe("a", wrong._replace(version_step=4))
    assert check.test.wrong_versions == {"a": (2, 4)}
    assert chosen_in(check, 5, ["a"] * 8) == ["a"] * 2
    check.observe("a", RIGHT)
    assert check.test.wrong_versions == {}


def test_the_same_part_has_the_same_choice_and_a_comparison_counts_once() -> None:
    check = SpotCheck(seed=1)
    groups = batch(check, 0, ["a", "a+b", "a", "b"])
    chosen = check.choose("x", ONE_RANK, groups, SHARE, 4)
    assert chosen == check.choose("x", ONE_RANK, groups, SHARE, 4)
    assert 1 in chosen
    taken = [check.take("x", 1, "b", 7), check.take("x", 1, "b", 8), check.take("x", 1, "b", 7)]
    assert taken == ["b", "b", ""]
    assert [check.take(*each) for each in (("x", 1, "c", 7), ("x", 1, "", 7), ("y", 1, "b", 7))] == ["", "", ""]


def test_parts_of_ranks_are_chosen_apart_and_together_no_more_than_the_limit() -> None:
    check = SpotCheck(seed=1)
    workers = [f"worker-{i}" for i in range(30)]
    numbers = [len(chosen_in(check, 1, workers, (rank, 2))) for rank in range(2)]
    assert numbers == [MAX_CHECKS, MAX_CHECKS]  # the same group ids, so nothing more is marked


def test_one_group_of_a_large_batch_is_always_compared() -> None:
    check = SpotCheck(seed=1)
    compare(check, 0, ["a"] * FIRST_CHECKS)
    assert chosen_in(check, 1, ["a"] * (LARGE_BATCH - 1)) == []
    assert chosen_in(check, 2, ["a"] * LARGE_BATCH) == ["a"]


def test_a_group_without_names_counts_for_its_sender() -> None:
    check = SpotCheck(seed=1)
    assert chosen_in(check, 0, ["", ""]) == []
    span = VersionSpan(1, 0, 0, 1)
    check.note_group(Group(7, IDS, (Completion(IDS, LOGPROBS, (span,), "stop"),)), sender="a")
    assert check.choose("x", ONE_RANK, [7], SHARE, 1) == {7}
    assert check.take("x", 7, "", 0) == "a"
