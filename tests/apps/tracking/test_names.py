"""Names of metrics in trackers."""

from __future__ import annotations

import pytest

from paceline.apps.tracking.names import NAMES, Style, renamed
from paceline.services.common.reporting.metric_table import PARTS


@pytest.mark.parametrize(
    ("kind", "name", "style", "expected"),
    [
        ("step", "reward", "paceline", "train/reward"),
        ("step", "reward/exact_match", "trl", "train/rewards/exact_match/mean"),
        ("step", "reward_std/a/b", "trl", "train/rewards/a/b/std"),
        ("step", "completion_length", "nemo_rl", "train/mean_gen_tokens_per_sample"),
        ("step", "age", "trl", "train/age"),
        ("evaluation", "reward", "nemo_rl", "validation/accuracy"),
        ("evaluation", "reward", "paceline", "eval/reward"),
    ],
)
def test_names_are_those_of_the_style(kind: str, name: str, style: Style, expected: str) -> None:
    assert renamed(kind, name, style) == expected


@pytest.mark.parametrize("style", ["trl", "nemo_rl"])
def test_no_two_metrics_get_the_same_name(style: Style) -> None:
    found = [renamed(each.kind, each.ours, style) for each in NAMES]
    assert len(found) == len(set(found))


def test_every_name_is_one_of_the_table_of_metrics() -> None:
    known = {metric.name for part in PARTS for metric in part.metrics}
    assert {each.ours for each in NAMES} <= known
