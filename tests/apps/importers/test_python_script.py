"""A script's settings are read from its syntax tree: nothing of it runs, and what only a run would show is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.apps.importers.python_script import read_script
from paceline.errors import SpecError

SCRIPT = """
raise SystemExit("this script must not run")
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

MODEL = "org/model"
MODEL_TWICE = 1
MODEL_TWICE = 2

def short(completions, **kwargs):
    return [-len(each) for each in completions]

def main():
    data = load_dataset("org/data", "main", split="train[:100]").map(lambda row: row)
    config = GRPOConfig(learning_rate=1e-6, num_generations=4, seed=MODEL_TWICE, temperature=compute(), bf16=True)
    trainer = GRPOTrainer(
        model=MODEL,
        args=config,
        reward_funcs=[short, "org/reward-model", accuracy_reward, lambda completions: [1.0]],
        train_dataset=data,
        peft_config=LoraConfig(r=16, lora_alpha=32, task_type="CAUSAL_LM"),
    )
    trainer.train()

trainer = None
trainer.train()
"""


def test_literals_are_read_and_other_expressions_are_named(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    script = read_script(path)
    assert script.algorithm == "grpo"
    assert script.settings == {
        "learning_rate": 1e-6,
        "num_generations": 4,
        "bf16": True,
        "model_name_or_path": "org/model",
        "reward_funcs": [
            {"function": "train_rewards.py:short"},
            {"function": "reward_model", "kwargs": {"path": "org/reward-model"}},
            "accuracy_reward",
        ],
        "use_peft": True,
        "lora_r": 16,
        "lora_alpha": 32,
        "dataset_name": "org/data",
        "dataset_config": "main",
        "dataset_train_split": "train[:100]",
    }
    notes = "\n".join(script.notes)
    assert "temperature is compute() in the script, which was not run" in notes
    assert "seed is MODEL_TWICE" in notes
    assert "lambda completions: [1.0] has no name" in notes
    assert "the script changes the rows (map)" in notes
    assert script.files == {
        "train_rewards.py": "def short(completions, **kwargs):\n    return [-len(each) for each in completions]\n"
    }


def test_long_expressions_are_left_out_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.py"

    def write(terms: int) -> None:
        path.write_text(f"from trl import GRPOConfig\nGRPOConfig(beta={'+'.join(['x'] * terms)}, seed=3)\n")

    write(300)
    assert read_script(path).settings == {"seed": 3}
    write(100_000)
    with pytest.raises(SpecError, match="is not valid Python"):
        read_script(path)
