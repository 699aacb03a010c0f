"""The training as a reward function sees it: bounds of what it logs, and of what its process replies."""

from __future__ import annotations

import math

from paceline.reward.trainer_view import MAX_METRICS, CallView, checked_metrics, checked_usage


def test_what_is_logged_is_bounded_and_finite() -> None:
    view = CallView()
    log_metric = view.arguments()["log_metric"]
    for number in range(2 * MAX_METRICS):
        log_metric(f"n{number}", 1.0)
    for name in ("", "a\nb", "n" * 49):
        log_metric(name, 1.0)
    log_metric("n0", math.inf)
    log_metric("n0", 2)
    assert len(view.metrics) == MAX_METRICS
    assert view.metrics["n0"] == (3.0, 2)


def test_metrics_of_a_reply_are_checked() -> None:
    reply = {"a": [2.0, 2], "b": [1, 0], "c": [math.inf, 1], "d": "x", "e": [1.0], "": [1.0, 1]}
    assert checked_metrics(reply) == {"a": (2.0, 2)}
    assert checked_metrics(None) == {}


def test_a_built_in_function_sees_how_many_processes_share_a_limit() -> None:
    assert CallView({"reward_workers": 3, "global_step": 5}, num_processes=4).num_processes == 12
    assert CallView({"reward_workers": "many"}, num_processes=4).num_processes == 4
    state = CallView({"reward_workers": 3, "global_step": 5}).arguments()["trainer_state"]
    assert state.global_step == 5
    assert not hasattr(state, "reward_workers")


def test_sums_of_a_reply_are_checked() -> None:
    reply = {
        "requests": 2,
        "cost": -1.0,
        "cached": math.nan,
        "failed": "x",
        "secrets": 4.0,
        "prompt_tokens": 7.5,
    }
    assert checked_usage(reply) == {"requests": 2.0, "prompt_tokens": 7.5}
    assert checked_usage([1]) == {}
