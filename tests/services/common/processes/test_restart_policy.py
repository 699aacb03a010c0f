"""When a service that died is started again, by its deaths alone."""

from __future__ import annotations

import signal

from services.common.processes.restart_policy import HEALTHY_S, Backoff, Death

FAULT = Death(1, 2.0, "Error: no model")


def pauses(backoff: Backoff, deaths: list[Death]) -> list[float]:
    """The pause after each death, in seconds."""
    found = []
    for death in deaths:
        backoff.count(death)
        found.append(backoff.pause_s)
    return found


def test_a_service_that_keeps_failing_comes_back_ever_more_slowly() -> None:
    assert pauses(Backoff(), [FAULT] * 9) == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert pauses(Backoff(10.0), [FAULT] * 6)[-2:] == [8.0, 10.0]


def test_a_life_with_progress_makes_up_for_the_deaths_before_it() -> None:
    backoff = Backoff()
    pauses(backoff, [FAULT] * 6)
    assert pauses(backoff, [Death(1, HEALTHY_S, "another fault")]) == [0.5]


def test_the_same_fault_counts_however_long_the_lives_are() -> None:
    backoff = Backoff()
    hours = [Death(1, 3600.0, f"Error: step {step} at 0x7f{step:04x}: out of memory") for step in range(5)]
    assert pauses(backoff, hours) == [0.5, 1.0, 2.0, 4.0, 8.0]
    assert backoff.in_words("learner-0", "ended with exit status 1") == (
        "learner-0 has died 5 times the same way: it ended with exit status 1"
    )
    assert pauses(backoff, [Death(2, 3600.0, "something else")]) == [0.5]


def test_signals_from_outside_never_slow_a_service_down_for_long() -> None:
    killed = Death(-signal.SIGKILL, 2.0)
    assert max(pauses(Backoff(), [killed] * 50)) == 10.0
    assert pauses(Backoff(), [Death(-signal.SIGKILL, HEALTHY_S)] * 50) == [0.5] * 50


def test_what_the_supervisor_killed_does_not_count() -> None:
    backoff = Backoff()
    assert pauses(backoff, [Death(-signal.SIGKILL, 0.1, by_supervisor=True)] * 20) == [0.5] * 20
    assert backoff.in_a_row == 0


def test_repetitions_are_said_at_five_ten_twenty_and_so_on() -> None:
    backoff, said = Backoff(), []
    for number in range(1, 100):
        backoff.count(FAULT)
        if backoff.is_said:
            said.append(number)
    assert said == [1, 2, 3, 4, 5, 10, 20, 40, 80]


def test_deaths_of_different_causes_are_counted_too() -> None:
    backoff = Backoff()
    for number in range(5):
        backoff.count(Death(number + 1, 1.0))
    assert backoff.in_words("rollout-1", "ended with exit status 5") == (
        "rollout-1 has died 5 times in a row; the last time it ended with exit status 5"
    )
