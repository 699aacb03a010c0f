"""On-policy distillation on the demo's task: the student is the taught model, its teacher went on with right answers.

`before` and `after` are as of the policy runs: the share of right answers to held-out problems, sampled at temperature 1.
The rewards of the batches are shown, none trains anything.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from objective_runs import examples, policy
from paceline.data.tokens import load_tokenizer
from paceline.learner.checkpoints.export import export_pretrained
from paceline.learner.objectives.examples import ExampleSource
from paceline.learner.step.trainer import Trainer
from paceline.learner.weights.gather import gather_weights
from paceline.spec import RunSpec
from paceline.spec.reading import load_spec

KINDS = {f"distillation_{kind}": kind for kind in ("reverse", "forward", "mixed")}
NAMES = tuple(KINDS)
CPU = torch.device("cpu")
TEACHER_STEPS = 300


def run(name: str, files: Path, taught: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One kind of KL, for `options.steps` steps."""
    settings = (
        f"policy.model_name={taught}",
        f"grpo.max_num_steps={options.steps}",
        f"grpo.num_prompts_per_step={options.prompts}",
    )
    whole = load_spec(files / "grpo.yaml", settings).model_dump(exclude_unset=True)
    whole["algorithm"] = "distillation"
    whole["distillation"] = {
        "teacher_model_name": str(
            make_teacher(files, taught, options.teacher_steps if options.short else TEACHER_STEPS)
        ),
        "kl_type": KINDS[name],
    }
    result = policy.train(RunSpec.model_validate(whole), files, options.lag, options.held_out)
    shown = ("before", "after", "seconds", "effective_sample_size")
    return {"measure": "right answers"} | {key: result[key] for key in shown if key in result}


def make_teacher(files: Path, taught: Path, steps: int) -> Path:
    """The taught model after more steps on right answers alone; made once."""
    folder = files / "distillation-teacher"
    if folder.is_dir():
        return folder
    data = files / "examples"
    if not data.is_dir():
        examples.write_examples(files / "data", data)
    options = argparse.Namespace(steps=steps, held_out=1)
    spec = examples.make_spec("sft", {}, taught, data, options)
    trainer = Trainer(spec, CPU)
    source = ExampleSource(spec, load_tokenizer(spec.policy), trainer.objective)
    for step in range(steps):
        trainer.train_step(source.of_step(step, 0, 1), step)
    return export_pretrained(folder, gather_weights(trainer.model, None), model_name=str(taught))
