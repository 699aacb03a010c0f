"""Turns per second, on a clock of the test."""

from __future__ import annotations

from paceline.services.environment.run import TurnPace


def test_each_heartbeat_has_the_turns_since_the_one_before() -> None:
    now_s = [0.0]
    pace = TurnPace(lambda: now_s[0])
    pace.note(3)
    pace.note(5)
    now_s[0] = 2.0
    assert pace.gauges() == {"turns_per_s": 1.0, "tokens_per_s": 4.0}
    now_s[0] = 3.0
    assert pace.gauges() == {"turns_per_s": 0.0, "tokens_per_s": 0.0}
