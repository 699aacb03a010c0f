"""A script's settings are read from its syntax tree: nothing of it runs, and what only a run would show is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.apps.importers.python_script import read_command, read_script
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
    assert script.config == "GRPOConfig"
    assert script.settings == {
        "learning_rate": 1e-6,
        "num_generations": 4,
        "bf16": True,
        "model_name_or_path": "org/model",
        "reward_funcs": [
            {"function": "train_rewards.py:short"},
            {"function": "reward_model", "kwargs": {"path": "org/reward-model"}},
            "accuracy_reward",
            None,
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


PARSED = '''"""
It's a script. Run it with

# Full training:
accelerate launch \\
    --config_file deepspeed.yaml \\
    examples/scripts/parsed.py \\
    --model_name_or_path org/model --learning_rate 1e-5 \\
    --use_peft --lora_target_modules "q_proj", "v_proj" \\
    --no_remove_unused_columns \\
    --lr_scheduler_kwargs '{"min_lr_rate": 0.1}'
"""
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser
from trl.rewards import accuracy_reward

parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
script_args, training_args, model_args = parser.parse_args_and_config()
train, test = load_dataset("org/data", split=["train[:5%]", "test[:5%]"])
GRPOTrainer(model=model_args.model_name_or_path, reward_funcs=[accuracy_reward], args=training_args)
'''


def test_a_script_with_a_parser_takes_the_command_of_its_docstring(tmp_path: Path) -> None:
    path = tmp_path / "parsed.py"
    path.write_text(PARSED)
    script = read_script(path)
    assert script.config == "GRPOConfig"
    assert script.settings == {
        "model_name_or_path": "org/model", "learning_rate": 1e-5, "use_peft": True, "remove_unused_columns": False,
        "lora_target_modules": ["q_proj", "v_proj"], "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
        "reward_funcs": ["accuracy_reward"], "dataset_name": "org/data", "dataset_train_split": "train[:5%]",
    }  # fmt: skip
    given = read_script(path, "--model_name_or_path=other --max_steps 3")
    assert (given.settings["model_name_or_path"], given.settings["max_steps"]) == ("other", 3)
    assert "learning_rate" not in given.settings


def test_a_script_with_a_parser_and_no_command_asks_for_it(tmp_path: Path) -> None:
    path = tmp_path / "parsed.py"
    path.write_text(PARSED.partition("from datasets")[2].join(["from datasets", ""]))
    with pytest.raises(
        SpecError, match="takes its settings from the command line, and its docstring has none: add --command"
    ):
        read_script(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("from trl import BCOConfig, TrlParser\nTrlParser((BCOConfig,))\n", "BCOConfig has no counterpart"),
        ("# moved to another place\n", "has only comments"),
        ("from trl import GRPOConfig\nGRPOConfig()\ndata.map(lambda row: row['images'])\n", "loads images"),
    ],
)
def test_a_script_without_a_counterpart_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "script.py"
    path.write_text(text)
    with pytest.raises(SpecError, match=message):
        read_script(path)


def test_a_command_in_a_shell_script_is_read() -> None:
    script = read_command("MODEL=org/model\ntrl dpo --model_name_or_path $MODEL --beta 0.2 --bf16\n", "run.sh")
    assert (script.config, script.settings) == (
        "DPOConfig",
        {"model_name_or_path": "org/model", "beta": 0.2, "bf16": True},
    )


def test_a_command_of_trl_without_a_counterpart_is_refused() -> None:
    with pytest.raises(SpecError, match=r"run\.sh runs trl vllm_serve, which has no counterpart"):
        read_command("trl vllm_serve --model_name_or_path m\n", "run.sh")


def test_a_value_of_the_docstrings_command_that_only_a_run_knows_is_noted(tmp_path: Path) -> None:
    path = tmp_path / "parsed.py"
    path.write_text(PARSED.replace("org/model --learning_rate", "$MODEL --learning_rate"))
    script = read_script(path)
    assert "model_name_or_path" not in script.settings
    assert any("only a run of the script knows $MODEL" in note for note in script.notes)
