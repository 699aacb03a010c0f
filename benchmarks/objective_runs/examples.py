"""Supervised and preference objectives on the demo's task: pairs, labels and demonstrations made from its sums.

`before` and `after` are, of policies, the probability of the right answer to a held-out problem, end of sequence included
(`probability`: the expected accuracy of sampling, without its noise); of reward models the share of
held-out pairs that they rank rightly (`ranking`). Trained are the demo's training problems alone.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.data.tokens import encode_exchange, load_tokenizer
from paceline.learner.batch.samples import TrainingSample, pack_samples
from paceline.learner.model.policy import packed_logprobs
from paceline.learner.objectives.examples import ExampleSource
from paceline.learner.step.trainer import Trainer
from paceline.services.demo.task import teach
from paceline.spec import RunSpec

CPU = torch.device("cpu")

SETTINGS: dict[str, dict[str, Any]] = {
    "sft": {},
    "dpo_sigmoid": {},
    "dpo_conservative": {"preference_loss": "conservative", "label_smoothing": 0.1},
    "dpo_robust": {"preference_loss": "robust", "label_smoothing": 0.1},
    "dpo_hinge": {"preference_loss": "hinge"},
    "dpo_ipo": {"preference_loss": "ipo"},
    "dpo_average": {"preference_average_log_probs": True},
    "dpo_with_sft": {"sft_loss_weight": 0.2},
    "dpo_precomputed": {"precompute": True},
    "orpo": {},
    "kto": {},
    "kto_precomputed": {"precompute": True},
    "rm": {},
}
NAMES = tuple(SETTINGS)
BETA = {"dpo": 0.3, "kto": 0.3}
RATES = {"sft": 7e-4, "dpo": 2e-4, "orpo": 7e-4, "kto": 3e-4, "rm": 7e-4}


def run(name: str, files: Path, taught: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One objective, trained for `options.steps` steps of 64 examples."""
    started_s = time.monotonic()
    algorithm = name.partition("_")[0]
    data = files / "examples"
    if not data.is_dir():
        write_examples(files / "data", data)
    spec = make_spec(algorithm, SETTINGS[name], taught, data, options)
    tokenizer = load_tokenizer(spec.policy)
    torch.manual_seed(spec.seed)
    trainer = Trainer(spec, CPU)
    source = ExampleSource(spec, tokenizer, trainer.objective)
    trainer.reference.prepare(source, rank=0)
    held_out = [json.loads(line) for line in (data / "validation.jsonl").read_text().splitlines()]
    held_out = held_out[: options.held_out]

    def measure() -> float:
        if algorithm == "rm":
            pairs = ExampleSource(spec, tokenizer, trainer.objective, validation=True)
            return trainer.evaluate(pairs.held_out(0, 1))["accuracy"]
        return right_probability(trainer, tokenizer, held_out)

    before = measure()
    metrics: dict[str, float] = {}
    for step in range(spec.max_num_steps):
        metrics = trainer.train_step(source.of_step(step, 0, 1), step)
    return {
        "measure": "ranking" if algorithm == "rm" else "probability",
        "before": round(before, 4),
        "after": round(measure(), 4),
        "seconds": round(time.monotonic() - started_s, 1),
        **{key: round(metrics[key], 4) for key in ("loss", "accuracy", "margin") if key in metrics},
    }


def write_examples(source: Path, target: Path) -> None:
    """Every problem with its right answer chosen and two wrong ones rejected; the teacher's own answer, with a label."""
    target.mkdir()
    dice = random.Random(1)
    for part in ("train", "validation"):
        with (target / f"{part}.jsonl").open("w") as file:
            for line in (source / f"{part}.jsonl").read_text().splitlines():
                row = json.loads(line)
                right = row["answer"]
                wrong: set[str] = set()
                while len(wrong) < 2:
                    wrong |= {teach(right, dice)} - {right}
                judged = {"judged": row["completion"], "label": row["completion"] == right}
                pair = {"prompt": row["prompt"], "chosen": right, "rejected": sorted(wrong), **judged}
                file.write(json.dumps(pair) + "\n")


def make_spec(
    algorithm: str, settings: dict[str, Any], taught: Path, data: Path, options: argparse.Namespace
) -> RunSpec:
    """Return the spec as a spec file would have it."""
    beta = {"reference_policy_kl_penalty": BETA[algorithm]} if algorithm in BETA else {}
    return RunSpec.model_validate(
        {
            "algorithm": algorithm,
            "policy": {
                "model_name": str(taught),
                "max_total_sequence_length": 16,
                "train_mb_tokens": 4096,
                "optimizer": {"lr": RATES[algorithm], "betas": [0.9, 0.95], "weight_decay": 0.01},
                "scheduler": {"name": "linear", "warmup_steps": 5, "min_lr_ratio": 0.1},
            },
            "data": {
                "train": str(data / "train.jsonl"),
                "validation": str(data / "validation.jsonl"),
                "completion_key": "judged" if algorithm == "kto" else "chosen",
            },
            algorithm: {
                "max_num_steps": options.steps,
                "num_examples_per_step": 64,
                "max_val_samples": options.held_out,
                **beta,
                **settings,
            },
        }
    )


@torch.no_grad()
def right_probability(trainer: Trainer, tokenizer: Any, rows: list[dict[str, Any]]) -> float:
    """Mean over problems of Π_t π(answer token)."""
    sequences = [
        TrainingSample(i, *encode_exchange(tokenizer, row["prompt"], row["chosen"], "auto"))
        for i, row in enumerate(rows)
    ]
    packed = pack_samples(sequences, CPU)
    logprobs_N, _ = packed_logprobs(trainer.model, packed, temperature=1.0, chunk_tokens=1024)
    sums_S = torch.zeros(len(sequences)).index_add(0, packed.sequence_N, logprobs_N)
    return float(np.mean(sums_S.exp().numpy()))
