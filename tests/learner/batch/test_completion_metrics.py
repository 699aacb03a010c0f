"""Lengths of the completions of a batch."""

from __future__ import annotations

import numpy as np
import torch
from episode_groups import episode_group

from paceline.groups import Completion, Group, VersionSpan
from paceline.services.learner.training.run_reports import completion_metrics


def a_group(*lengths: int, cut_off: int = 0) -> Group:
    """The first `cut_off` completions reached the limit."""
    completions = tuple(
        Completion(
            np.zeros(n, np.int32),
            np.zeros(n, np.float32),
            (VersionSpan(1, 0, 0, n),),
            "length" if i < cut_off else "stop",
        )
        for i, n in enumerate(lengths)
    )
    return Group(0, np.array([1], np.int32), completions)


def test_percentiles_are_lengths_of_completions() -> None:
    groups = [a_group(*range(1, 51)), a_group(*range(51, 101), cut_off=5)]
    assert completion_metrics(groups, torch.device("cpu")) == {
        "completion_length/min": 1.0,
        "completion_length/max": 100.0,
        "completion_length/p50": 50.0,
        "completion_length/p90": 90.0,
        "completion_length/p99": 99.0,
        "truncated_fraction": 0.05,
    }


def test_a_batch_without_groups_has_none() -> None:
    assert completion_metrics([], torch.device("cpu")) == {}


def test_an_episode_counts_once_with_its_rows_and_turns() -> None:
    metrics = completion_metrics([episode_group()], torch.device("cpu"))
    assert (metrics["completion_length/min"], metrics["completion_length/max"]) == (2.0, 4.0)
    assert metrics["environment/rows_per_sample"] == 1.5
    assert metrics["environment/turns_per_sample"] == 2.0
    assert metrics["environment/mixed_version_fraction"] == 0.5
