"""A configuration of another library in place of a spec: the error suggests `paceline import`."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import SpecError
from paceline.spec.reading import load_spec

TRL = "model_name_or_path: m\nlearning_rate: 1.0e-6\nnum_generations: 8\nmax_completion_length: 64\n"
VERL = (
    "actor_rollout_ref:\n  model: {path: m}\n  actor: {optim: {lr: 1.0e-6}}\n  rollout: {n: 8, temperature: 1.0}\n"
    "data: {train_batch_size: 8, max_prompt_length: 64}\n"
)
NEMO = (
    "grpo: {num_prompts_per_step: 8}\npolicy: {model_name: m, train_global_batch_size: 8, train_micro_batch_size: 1, "
    "dtensor_cfg: {enabled: true}}\n"
)


@pytest.mark.parametrize(
    ("name", "text", "command"),
    [
        ("a.yaml", TRL, "paceline import trl"),
        ("a.yaml", VERL, "paceline import verl"),
        ("a.yaml", NEMO, "paceline import nemo"),
        (
            "a.py",
            "from trl import GRPOConfig\nargs = GRPOConfig(\n  learning_rate=1e-6,\n)\n",
            "paceline import trl",
        ),
        ("a.toml", "[model]\nname = 'm'\n", "paceline import prime-rl"),
    ],
)
def test_the_command_is_named(tmp_path: Path, name: str, text: str, command: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(SpecError) as refused:
        load_spec(path)
    assert f"`{command} {path}` writes a spec from it" in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        "policy: {model_name: m, learning_rate: 1.0}\ndata: {train: a.jsonl}\n",
        "polcy: {model_name: m}\ngrop: {max_num_steps: 3}\n",
        "data: {train: [a]}\n",
    ],
)
def test_a_spec_with_mistakes_stays_a_spec(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(SpecError) as refused:
        load_spec(tmp_path / "a.yaml")
    assert "paceline import" not in str(refused.value)
