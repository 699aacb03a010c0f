"""Reports about single tokens: their groups and their bound."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tiny_policy import make_spec

from paceline.groups import Group
from paceline.learner.step.token_statistics import TokenNumbers
from paceline.services.learner.training.run_reports import observed, report_of


def test_rank_0_looks_at_its_first_groups(tmp_path: Path) -> None:
    groups = [Group(group_id, np.array([1], np.int32), ()) for group_id in (5, 3, 9)]
    spec = make_spec(tmp_path)
    assert spec.logger.keep_token_stats == 2
    statistics = observed(spec, 0, groups)
    assert statistics is not None
    assert statistics.group_ids == {5, 3}
    assert observed(spec, 1, groups) is None
    assert observed(spec, 0, []) is None
    assert observed(make_spec(tmp_path, sections={"logger": {"keep_token_stats": 0}}), 0, groups) is None


def test_a_report_is_bounded() -> None:
    values = np.array([-1.0, -2.0], np.float32)
    numbers = [TokenNumbers(1, index, values, -values) for index in range(4)]
    report = report_of(numbers, "run-1", 2, 7, max_tokens=5).token_statistics
    assert (report.run_id, report.session, report.step) == ("run-1", 2, 7)
    assert [each.index for each in report.completions] == [0, 1]
    assert list(report.completions[1].entropies) == [1.0, 2.0]
