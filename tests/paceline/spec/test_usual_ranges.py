"""Numbers that are possible but unusual are accepted and noted once; defaults are usual."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.spec.keys import keys
from paceline.spec.reading import parse_spec
from paceline.spec.sections.base import Usual

BASE: dict[str, Any] = {"policy": {"model_name": "m"}, "data": {"train": "d"}, "rewards": [{"function": "length"}]}


def test_all_unusual_numbers_are_one_note_with_their_ranges() -> None:
    spec = parse_spec(
        BASE
        | {
            "policy": {"model_name": "m", "optimizer": {"lr": 1.0}, "generation": {"temperature": 5}},
            "rewards": [{"function": "length"}, {"function": "length", "name": "other", "weight": 1000}],
            "loss_fn": {"ratio_clip_max": 20},
            "cluster": {"rollout_workers": 10_000},
        }
    )
    (note,) = spec.warnings
    for clause in (
        "policy.optimizer.lr 1 (usually 1e-09 to 0.01: ",
        "policy.generation.temperature 5 (usually 0.05 to 2: ",
        "rewards.1.weight 1000 (usually ",
        "loss_fn.ratio_clip_max 20 (usually 0 to 10: ",
        "cluster.rollout_workers 10000 (usually 1 to 1024: ",
    ):
        assert clause in note
    assert note.count("usually") == 5


@pytest.mark.parametrize("epochs", [None, 2.0])
def test_defaults_are_usual(epochs: float | None) -> None:
    spec = parse_spec(BASE | ({"grpo": {"max_num_epochs": epochs}} if epochs else {}))
    assert spec.warnings == ()


def test_every_range_has_a_source_holds_the_default_and_is_explained() -> None:
    found = [(key, each) for key in keys().values() for each in key.field.metadata if isinstance(each, Usual)]
    assert len(found) > 25
    for key, usual in found:
        assert usual.low < usual.high, key.path
        assert usual.source
        assert usual.note(key.path, key.field.default) == ""
        assert f"Usual: {usual.low:g} to {usual.high:g}" in key.description
