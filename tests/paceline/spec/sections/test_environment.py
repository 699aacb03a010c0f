"""The section of a spec that describes episodes."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from paceline.spec import RunSpec

TREE: dict[str, Any] = {"policy": {"model_name": "m"}, "data": {"train": "rows.jsonl"}}


def spec_of(environment: dict[str, Any], **sections: Any) -> RunSpec:
    return RunSpec.model_validate({**TREE, "environment": environment, **sections})


def test_the_environments_reward_is_the_default() -> None:
    assert [reward.function for reward in spec_of({"class": "a.py:A"}).rewards] == ["environment"]
    named = spec_of({"class": "a.py:A"}, rewards=[{"function": "length"}])
    assert [reward.function for reward in named.rewards] == ["length"]


def test_a_spec_with_an_environment_travels_under_its_key() -> None:
    spec = spec_of({"class": {"a": "a.py:A", "b": "b.py:B"}, "max_turns": 3})
    tree = spec.model_dump(mode="json")
    assert tree["environment"]["class"] == {"a": "a.py:A", "b": "b.py:B"}
    assert RunSpec.model_validate(tree) == spec
    assert dict(spec.environment.classes) == {"a": "a.py:A", "b": "b.py:B"}
    assert not RunSpec.model_validate({**TREE, "rewards": [{"function": "length"}]}).environment.is_used


@pytest.mark.parametrize(
    ("environment", "sections", "fault"),
    [
        ({"class": "a.py:A", "agent": "b.py:f"}, {}, "class and agent are set"),
        ({"class": "a.py:A", "train_call": "b.py:f"}, {}, "train_call decides on an agent's requests"),
        ({"class": "a.py:A"}, {"grpo": {"advantage": "gae"}}, "gae"),
        (
            {"class": "a.py:A", "advantage": "turn_level"},
            {"grpo": {"advantage": "gdpo"}},
            "compares turns within the group",
        ),
        (
            {"class": "a.py:A"},
            {"algorithm": "distillation", "distillation": {"teacher_model_name": "t"}},
            "only grpo",
        ),
        ({}, {"rewards": [{"function": "environment"}]}, "no class, tools, agent or command"),
    ],
)
def test_contradictory_settings_are_refused(environment: dict[str, Any], sections: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValidationError, match=fault):
        spec_of(environment, **sections)
