"""Rewards by source, with numbers worked out by hand."""

import numpy as np
import pytest

from paceline.services.coordinator.exchange.batch_metrics import MAX_SOURCES, rewards_by_source, source_names

NAN = float("nan")


def test_each_source_has_the_mean_of_its_groups() -> None:
    totals_GC = np.array([[1, 0], [1, 1], [NAN, 0.5], [NAN, NAN]], np.float32)
    found = rewards_by_source(totals_GC, ["math", "code", "math", "chat"])
    assert found == pytest.approx(
        {
            "reward_of/math": 0.5,
            "groups_of/math": 2,
            "reward_of/code": 1,
            "groups_of/code": 1,
            "groups_of/chat": 1,
        }
    )


def test_names_are_parts_of_metric_names_and_bounded_in_number() -> None:
    assert source_names(["a b/c", None, "x" * 99, ""]) == ["a_b_c", "None", "x" * 40, "none"]
    many = [f"s{number}" for number in range(MAX_SOURCES + 1)]
    names = source_names([*many, "s40", "s32"])
    assert len(set(names)) == MAX_SOURCES
    assert names.count("s32") == 2, "the most frequent ones stay"
    assert "other" in names
