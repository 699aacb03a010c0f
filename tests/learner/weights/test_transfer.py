"""Phases, deadlines and results of one attempt."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from learner.weights import transfer as transfer_module
from learner.weights.staged import StagedWeights
from learner.weights.transfer import Transfer
from paceline.groups import Version

WAIT_S = 10.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The monotonic time, to set."""
    now = [100.0]
    monkeypatch.setattr(transfer_module.time, "monotonic", lambda: now[0])
    return now


def begun(now_s: float) -> Transfer:
    staged = StagedWeights(Version(1, 4), {}, bucket_bytes=1, algorithm="xxh3_64")
    return Transfer(staged, 2, None, phase_started=now_s)


def test_each_phase_has_its_seconds_and_moves_the_deadline(clock: list[float]) -> None:
    transfer = begun(clock[0])
    assert transfer.left_s == math.inf
    for phase, spent_s in (("form", 1.0), ("transfer", 2.0), ("transfer", 3.0), ("answer", 4.0)):
        clock[0] += spent_s
        transfer.enter(phase, WAIT_S)
        assert transfer.deadline == clock[0] + WAIT_S
    clock[0] += 5.0
    result = transfer.result("m", 7, (True, ""), WAIT_S)
    assert (result.form_s, result.transfer_s, result.ack_s) == (2.0, 7.0, 5.0)
    assert (result.member_id, result.epoch, result.attempt) == ("m", 7, 2)
    assert (result.version, result.ok, result.failure) == (Version(1, 4), True, "")


def test_reports_move_the_deadline_up_to_a_bound(clock: list[float]) -> None:
    transfer = begun(clock[0])
    transfer.enter("answer", WAIT_S)
    transfer.deadline = math.inf
    bound_s = transfer.left_s
    assert WAIT_S <= bound_s < math.inf
    clock[0] += bound_s
    assert transfer.left_s <= 0
    result = transfer.result("m", 1, None, WAIT_S)
    assert (result.ok, result.failure) == (False, "silent")
    assert "though still working" in result.error


@pytest.mark.parametrize(
    ("phase", "error", "answer", "failure", "words"),
    [
        ("transfer", "", None, "link", "transfer: nothing within 10.0 s"),
        ("answer", "", None, "silent", "answer: nothing within 10.0 s"),
        ("form", "form: refused", None, "link", "form: refused"),
        ("answer", "", (False, "no room"), "refused", "the member refused: no room"),
    ],
)
def test_a_failed_attempt_says_why(phase: str, error: str, answer: Any, failure: str, words: str) -> None:
    transfer = begun(time.monotonic())
    transfer.enter(phase, WAIT_S)
    transfer.error = error
    result = transfer.result("m", 1, answer, WAIT_S)
    assert (result.ok, result.failure, result.error) == (False, failure, words)
