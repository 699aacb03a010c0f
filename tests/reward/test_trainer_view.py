"""The training as a reward function sees it: bounds of what it logs, and of what its process replies."""

from __future__ import annotations

import math

from reward.trainer_view import MAX_METRICS, TrainerView, checked_metrics


def test_what_is_logged_is_bounded_and_finite() -> None:
    view = TrainerView()
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
