"""Restarts of a service that died, by its deaths alone."""

from __future__ import annotations

import signal

from paceline.services.common.processes.supervisor import HEALTHY_S, Death, RestartPolicy

FAULT = Death(1, 2.0, "Error: no model")


def pauses(policy: RestartPolicy, deaths: list[Death]) -> list[float]:
    """Return the pause after each death, in seconds."""
    found = []
    for death in deaths:
        policy.count(death)
        found.append(policy.pause_s)
    return found


def test_a_service_that_keeps_failing_comes_back_ever_more_slowly() -> None:
    assert pauses(RestartPolicy(), [FAULT] * 9) == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert pauses(RestartPolicy(10.0), [FAULT] * 6)[-2:] == [8.0, 10.0]


def test_a_life_with_progress_makes_up_for_the_deaths_before_it() -> None:
    policy = RestartPolicy()
    pauses(policy, [FAULT] * 6)
    assert pauses(policy, [Death(1, HEALTHY_S, "another fault")]) == [0.5]


def test_the_same_fault_counts_however_long_the_lives_are() -> None:
    policy = RestartPolicy()
    hours = [Death(1, 3600.0, f"Error: step {step} at 0x7f{step:04x}: out of memory") for step in range(5)]
    assert pauses(policy, hours) == [0.5, 1.0, 2.0, 4.0, 8.0]
    assert policy.in_words("learner-0", "ended with exit status 1") == (
        "learner-0 has died 5 times the same way: it ended with exit status 1"
    )
    assert pauses(policy, [Death(2, 3600.0, "something else")]) == [0.5]


def test_signals_from_outside_never_slow_a_service_down_for_long() -> None:
    killed = Death(-signal.SIGKILL, 2.0)
    assert max(pauses(RestartPolicy(), [killed] * 50)) == 10.0
    assert pauses(RestartPolicy(), [Death(-signal.SIGKILL, HEALTHY_S)] * 50) == [0.5] * 50


def test_what_the_supervisor_killed_does_not_count() -> None:
    policy = RestartPolicy()
    assert pauses(policy, [Death(-signal.SIGKILL, 0.1, by_supervisor=True)] * 20) == [0.5] * 20
    assert policy.in_a_row == 0


def test_repetitions_are_said_at_five_ten_twenty_and_so_on() -> None:
    policy, said = RestartPolicy(), []
    for number in range(1, 100):
        policy.count(FAULT)
        if policy.is_logged:
            said.append(number)
    assert said == [1, 2, 3, 4, 5, 10, 20, 40, 80]


def test_deaths_of_different_causes_are_counted_too() -> None:
    policy = RestartPolicy()
    for number in range(5):
        policy.count(Death(number + 1, 1.0))
    assert policy.in_words("rollout-1", "ended with exit status 5") == (
        "rollout-1 has died 5 times in a row; the last time it ended with exit status 5"
    )
