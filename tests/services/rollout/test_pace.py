"""The pace of a rollout worker, with numbers worked out by hand."""

from __future__ import annotations

from paceline.services.rollout.group_sampler import Pace


def test_tokens_and_time_without_a_lease_count_since_the_last_heartbeat() -> None:
    now_s = 100.0
    pace = Pace(lambda: now_s)
    now_s = 102.0
    pace.begin_work()
    now_s = 108.0
    assert pace.gauges(40) == {"tokens_per_s": 5.0, "wait_fraction": 0.25}
    now_s = 110.0
    pace.end_work()
    now_s = 112.0
    assert pace.gauges(48) == {"tokens_per_s": 2.0, "wait_fraction": 0.5}
