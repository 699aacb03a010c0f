"""Lines about a worker's work."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from paceline.services.common.reporting.progress_log import ProgressLog


def test_one_line_in_a_period_has_the_sums(caplog: pytest.LogCaptureFixture) -> None:
    clock = SimpleNamespace(now_s=0.0)
    progress = ProgressLog(logging.getLogger("worker"), period_s=10.0, clock=lambda: clock.now_s)
    with caplog.at_level(logging.INFO):
        for clock.now_s in (4.0, 8.0, 12.0, 13.0, 30.0):
            progress.note(lambda sums, s: f"{sums['groups']:.0f} groups in {s:.0f} s", groups=2)
    assert caplog.messages == ["6 groups in 12 s", "4 groups in 18 s"]
