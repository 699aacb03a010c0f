"""The pace of a rollout worker, with numbers worked out by hand."""

from __future__ import annotations

from paceline.services.rollout.group_sampler import Pace


def test_tokens_and_time_without_a_lease_count_since_the_last_heartbeat() -> None:
    now_s = 100.0
    pace = Pace(lambda: now_s)
    now_s = 102.0
    pace.begin_work()
    now_s = 108.0
    assert pace.gauges(42) == {"tokens_per_s": 7.0, "wait_fraction": 0.25}
    now_s = 110.0
    pace.end_work()
    now_s = 112.0
    assert pace.gauges(50) == {"tokens_per_s": 2.0, "wait_fraction": 0.5}


def test_the_pace_of_a_slow_model_is_that_until_its_newest_completions() -> None:
    now_s = 0.0
    pace = Pace(lambda: now_s)
    pace.begin_work()
    now_s = 3.0
    assert pace.gauges(0)["tokens_per_s"] == 0.0
    now_s = 10.0
    assert pace.gauges(800)["tokens_per_s"] == 80.0
    now_s = 13.0
    assert pace.gauges(800)["tokens_per_s"] == 80.0
    now_s = 20.0
    assert pace.gauges(1200)["tokens_per_s"] == 40.0
    pace.end_work()
    now_s = 23.0
    assert pace.gauges(1200)["tokens_per_s"] == 0.0
    now_s = 100.0
    pace.begin_work()
    now_s = 105.0
    assert pace.gauges(1300)["tokens_per_s"] == 20.0
