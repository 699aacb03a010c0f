"""Messages for faults of a spec: bounded for hostile input, by key for a foreign section, once for a misspelt one."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import SpecError
from paceline.spec.faults import FAULTS_SHOWN
from paceline.spec.reading import parse_spec


def faults(**sections: Any) -> list[str]:
    tree = {
        "policy": {"model_name": "m"},
        "data": {"train": "d"},
        "rewards": [{"function": "length"}],
        **sections,
    }
    with pytest.raises(SpecError) as caught:
        parse_spec(tree)
    return str(caught.value).splitlines()


def test_a_section_of_another_library_is_answered_key_by_key() -> None:
    lines = faults(trainer={"total_epochs": 3, "n_gpus_per_node": 8})
    assert [line.split(":")[0] for line in lines] == ["trainer.total_epochs", "trainer.n_gpus_per_node"]


def test_keys_with_the_same_answer_are_one_line() -> None:
    (line,) = faults(logger={"wandb": {"project": "p", "name": "n", "entity": "e"}})
    assert line.startswith("logger.wandb.project and 2 more: unknown key; there is none, because")


def test_a_misspelt_section_is_one_line() -> None:
    assert faults(grop={"seed": 3, "max_num_steps": 5}) == ["grop: unknown key; did you mean 'grpo'?"]
    assert faults(grop={"seed": 3}) == ["grop.seed: unknown key; did you mean 'grpo'?"]


def test_a_key_of_another_section_is_found_there() -> None:
    assert faults(grpo={"max_new_tokens": 3}) == [
        "grpo.max_new_tokens: unknown key; did you mean 'policy.generation.max_new_tokens'?"
    ]


@pytest.mark.parametrize(
    "hostile",
    [
        {"x" * 50_000: 1},
        {f"key_{number}": number for number in range(5000)},
        {"orchestrator": {f"key_{number}": {"a": {"b": 1}} for number in range(5000)}},
        {1: {2: {3: 4}}},
        {"model": {None: True}},
        {"eval": {"a": []}},
    ],
)
def test_hostile_keys_are_answered_within_bounds(hostile: dict[str, Any]) -> None:
    tree = {
        "policy": {"model_name": "m"},
        "data": {"train": "d"},
        **{str(key): each for key, each in hostile.items()},
    }
    with pytest.raises(SpecError) as caught:
        parse_spec(tree)
    lines = str(caught.value).splitlines()
    assert len(lines) <= FAULTS_SHOWN + 1
    assert max(map(len, lines)) < 1000


def test_a_deep_section_is_looked_into_a_few_levels_only() -> None:
    deep: Any = 1
    for _ in range(500):
        deep = {"a": deep}
    (line,) = faults(model=deep)
    assert len(line) < 300


def test_the_key_is_the_algorithms() -> None:
    assert "TRL's 'num_train_epochs' is sft.max_num_epochs in Paceline" in faults(sft={"num_train_epochs": 3})[0]
    (line,) = faults(algorithm="dpo", per_device_train_batch_size=3)
    assert "is dpo.num_examples_per_step in Paceline" in line
    (line,) = faults(algorithm="dpo", epsilon=0.1)  # which dpo does not read
    assert "is loss_fn.ratio_clip_min in Paceline" in line
    (line,) = faults(algorithm="kto", beta=0.1)
    assert "is kto.reference_policy_kl_penalty in Paceline" in line
