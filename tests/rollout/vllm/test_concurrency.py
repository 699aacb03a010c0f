"""The limit, event by event, with numbers worked out by hand."""

from __future__ import annotations

from paceline.rollout.vllm.concurrency import GROW_EVERY, REST_AFTER_CUT, ConcurrencyLimit, StepReport


def steps(limit: ConcurrencyLimit, count: int, *report: float) -> int:
    running, waiting, kv_use, preempted = report
    for _ in range(count):
        limit.step(StepReport(int(running), int(waiting), kv_use, int(preempted)))
    return limit.limit


def test_it_starts_where_the_longest_sequences_fit_and_never_beyond_what_runs_at_a_time() -> None:
    assert ConcurrencyLimit(sure=16, most=64).limit == 16
    assert ConcurrencyLimit(sure=500, most=64).limit == 64
    assert ConcurrencyLimit(sure=0, most=64).limit == 1


def test_it_grows_by_an_eighth_when_everything_runs_and_the_cache_has_room() -> None:
    limit = ConcurrencyLimit(sure=16, most=64)
    assert steps(limit, GROW_EVERY - 1, 16, 0, 0.5, 0) == 16
    assert steps(limit, 1, 16, 0, 0.5, 0) == 18
    assert steps(limit, GROW_EVERY, 18, 0, 0.5, 0) == 20
    assert steps(limit, GROW_EVERY, 20, 0, 0.5, 0) == 22


def test_it_does_not_grow_for_less() -> None:
    limit = ConcurrencyLimit(sure=16, most=64)
    assert steps(limit, 1000, 15, 0, 0.1, 0) == 16  # the limit restrains nothing
    assert steps(limit, 1000, 16, 1, 0.1, 0) == 16  # one waits already
    assert steps(limit, 1000, 16, 0, 0.8, 0) == 16  # the cache has not enough room
    assert steps(limit, 1, 16, 0, 0.79, 0) == 18


def test_it_ends_at_most() -> None:
    limit = ConcurrencyLimit(sure=62, most=64)
    assert steps(limit, GROW_EVERY, 62, 0, 0.1, 0) == 64
    assert steps(limit, 1000, 64, 0, 0.1, 0) == 64


def test_a_full_cache_trims_it_to_what_runs() -> None:
    limit = ConcurrencyLimit(sure=40, most=64)
    assert steps(limit, 1, 40, 0, 0.95, 0) == 40
    assert steps(limit, 1, 37, 3, 0.96, 0) == 37
    assert steps(limit, 1, 38, 2, 0.96, 0) == 37
    assert steps(limit, 1, 0, 9, 0.99, 0) == 1


def test_a_preemption_cuts_a_fifth_of_what_is_in_hand_and_growth_rests() -> None:
    limit = ConcurrencyLimit(sure=40, most=64)
    assert steps(limit, 1, 28, 2, 0.5, 1) == 24  # 30 running · 4/5
    assert steps(limit, 1, 28, 20, 0.5, 1) == 19  # the limit itself, 24 · 4/5
    assert steps(limit, REST_AFTER_CUT - 1, 19, 0, 0.1, 0) == 19
    assert steps(limit, 1, 19, 0, 0.1, 0) == 21


def test_new_weights_preempt_without_blame() -> None:
    limit = ConcurrencyLimit(sure=40, most=40)
    limit.ignore_preemptions(12)
    assert steps(limit, 1, 40, 0, 0.5, 8) == 40
    assert steps(limit, 1, 40, 0, 0.5, 4) == 40
    assert steps(limit, 1, 40, 0, 0.5, 1) == 32
