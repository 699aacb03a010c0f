"""What `paceline plan --gpus cpu:N` predicts of a step against what it takes, for models of several shapes.

    python benchmarks/capacity.py [--shape NAME ...] [--calibrate] [--rounds 3] [--json]

Each shape is measured in a process of its own on one thread: the native engine samples the batch of a step, and the learner's
trainer takes a GRPO step on it. Measured are the processor's seconds, so that other work on the host only counts as far as it
slows caches down; of several rounds the fastest. A step of a run with one rollout worker takes the longer of the two.
`within` is the largest difference of predicted and measured steps, as a share of the measured.

With --calibrate the shapes of CALIBRATION are measured instead, and the rates of one core that explain them best (non-negative
least squares of relative errors) are printed: those of `apps/planning/processors.py`. No shape is in both lists.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.short_form import parse  # noqa: E402

HEAD = 32
"""Width of a head."""


class Shape(NamedTuple):
    """A model, and the batch of a step."""

    hidden: int
    layers: int
    vocabulary: int
    groups: int
    completions: int
    prompt_tokens: int
    new_tokens: int

    def config(self) -> dict[str, Any]:
        """Return the model's sizes, as its config.json has them."""
        return {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "hidden_size": self.hidden,
            "intermediate_size": 3 * self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.hidden // HEAD,
            "num_key_value_heads": max(self.hidden // HEAD // 2, 1),
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": True,
        }

    def spec_tree(self, model: str) -> dict[str, Any]:
        """Return the spec of a run of this shape."""
        return {
            "policy": {
                "model_name": model,
                "max_total_sequence_length": self.prompt_tokens + self.new_tokens,
                "generation": {
                    "max_new_tokens": self.new_tokens,
                    "max_batch_size": self.groups * self.completions,
                },
            },
            "data": {"train": "none.jsonl"},
            "grpo": {"num_prompts_per_step": self.groups, "num_generations_per_prompt": self.completions},
            "rewards": [{"function": "length"}],
            "cluster": {"rollout_workers": 1, "device": "cpu"},
        }


SHAPES = {
    "demo": Shape(128, 2, 64, 16, 8, 6, 8),
    "wide": Shape(512, 3, 2_048, 8, 8, 32, 48),
    "deep": Shape(192, 10, 1_024, 8, 8, 24, 48),
    "wide vocabulary": Shape(256, 4, 32_000, 4, 8, 32, 32),
    "long answers": Shape(256, 4, 2_048, 4, 8, 16, 192),
}
CALIBRATION = {
    "small": Shape(64, 2, 512, 8, 4, 8, 32),
    "many sequences": Shape(128, 4, 512, 32, 8, 8, 16),
    "few sequences": Shape(256, 6, 1_024, 1, 8, 16, 96),
    "middle": Shape(384, 4, 4_096, 8, 8, 24, 32),
    "large": Shape(512, 6, 8_192, 4, 8, 48, 32),
    "layers": Shape(128, 12, 256, 4, 8, 16, 64),
    "vocabulary": Shape(192, 2, 24_000, 8, 8, 16, 24),
    "long": Shape(192, 4, 1_024, 4, 8, 16, 160),
}


def measure(folder: Path, shape: Shape, rounds: int) -> dict[str, float]:
    """Return the processor's seconds of generation and of training in this process."""
    import numpy as np
    import torch

    torch.set_num_threads(1)
    from paceline.groups import Version
    from paceline.learner.batch.samples import TrainingSample
    from paceline.learner.step.trainer import Trainer
    from paceline.rollout.engine import GenerationRequest, SamplingParams
    from paceline.rollout.engines import create_engine
    from paceline.spec.reading import parse_spec

    spec = parse_spec(shape.spec_tree(str(folder)))
    dice = np.random.default_rng(0)
    prompts = dice.integers(1, shape.vocabulary, (shape.groups, shape.prompt_tokens), dtype=np.int32)
    trainer = Trainer(spec, torch.device("cpu"))

    async def generate() -> tuple[float, list[Any]]:
        engine = create_engine(spec, device="cpu")
        await engine.update_weights(Version(1, 0), dict(trainer.model.state_dict()))
        best_s, completions = float("inf"), []
        for number in range(rounds + 1):
            requests = [
                GenerationRequest(
                    f"{number}-{g}-{c}", prompts[g], SamplingParams(shape.new_tokens), seed=number * 997 + c
                )
                for g in range(shape.groups)
                for c in range(shape.completions)
            ]
            started_s = time.process_time()
            completions = await asyncio.gather(*map(engine.generate, requests))
            if number:  # the first one warms caches
                best_s = min(best_s, time.process_time() - started_s)
        await engine.close()
        return best_s, completions

    generation_s, completions = asyncio.run(generate())
    batch = [
        TrainingSample(
            number // shape.completions,
            prompts[number // shape.completions],
            completion.token_ids,
            completion.logprobs,
            np.zeros(len(completion.token_ids), np.int32),
            rewards_F=np.array([float(number % 2)], np.float32),
        )
        for number, completion in enumerate(completions)
    ]
    training_s = float("inf")
    for step in range(rounds + 1):
        started_s = time.process_time()
        trainer.train_step(batch, step)
        if step:
            training_s = min(training_s, time.process_time() - started_s)
    tokens = sum(len(completion.token_ids) for completion in completions) / len(completions)
    return {"generation_s": generation_s, "training_s": training_s, "completion_tokens": tokens}


def in_a_process(name: str, shape: Shape, rounds: int) -> dict[str, float]:
    """Measure a shape in a process of its own."""
    from benchmarks.memory_plan import make_model

    with tempfile.TemporaryDirectory(prefix="capacity-") as folder:
        make_model(Path(folder), shape.config())
        command = [sys.executable, __file__, "--one", name, folder, "--rounds", str(rounds)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def main() -> None:
    """Measure all shapes; compare, or find the rates that explain them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", choices=list(SHAPES))
    parser.add_argument("--calibrate", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", nargs=2, metavar=("SHAPE", "FOLDER"), help=argparse.SUPPRESS)
    options = parse(parser, shape=["demo"], rounds=1)
    if options.one:
        name, folder = options.one
        print(json.dumps(measure(Path(folder), (SHAPES | CALIBRATION)[name], options.rounds)))
        return
    if options.calibrate:
        measured = {name: in_a_process(name, shape, options.rounds) for name, shape in CALIBRATION.items()}
        print(json.dumps({"measured": measured, "rates": fitted(measured)}))
        return
    rows = [compared(name, SHAPES[name], options.rounds) for name in options.shape or SHAPES]
    within = max(abs(row["ratio"] - 1) for row in rows)
    if options.json:
        print(json.dumps({"shapes": rows, "within": within}))
        return
    for row in rows:
        print(
            f"{row['shape']:16} step: predicted {row['predicted_s']:6.2f} s, measured {row['measured_s']:6.2f} s, ratio "
            f"{row['ratio']:.2f}  (generation {row['predicted_generation_s']:.2f} / {row['generation_s']:.2f}, training "
            f"{row['predicted_training_s']:.2f} / {row['training_s']:.2f})"
        )
    print(f"within {within:.0%}")


def compared(name: str, shape: Shape, rounds: int) -> dict[str, Any]:
    """Return predicted and measured seconds of a shape's step."""
    from paceline.apps.planning.processors import CPU_CORE, Work, generation_seconds, training_seconds
    from paceline.models.shape import shape_of

    sizes = shape_of(shape.config())
    assert sizes is not None
    measured = in_a_process(name, shape, rounds)
    work = work_of(shape, Work, measured["completion_tokens"])
    generation_s = generation_seconds(sizes, work, CPU_CORE.generation, shape.groups * shape.completions)
    training_s = training_seconds(sizes, work, CPU_CORE.training)
    predicted_s, measured_s = (
        max(generation_s, training_s),
        max(measured["generation_s"], measured["training_s"]),
    )
    return {
        "shape": name,
        "predicted_s": predicted_s,
        "measured_s": measured_s,
        "ratio": predicted_s / measured_s,
        "predicted_generation_s": generation_s,
        "predicted_training_s": training_s,
        **measured,
    }


def work_of(shape: Shape, kind: Any, completion_tokens: float) -> Any:
    """Return the batch of a step."""
    return kind(shape.groups, shape.completions, shape.prompt_tokens, completion_tokens, 2_048)


def fitted(measured: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return the rates of one core that explain the measured seconds best."""
    import numpy as np

    from paceline.apps.planning.processors import Work, generation_terms, training_terms
    from paceline.models.shape import shape_of

    found = {}
    for kind, terms in (("generation", generation_terms), ("training", training_terms)):
        rows, seconds = [], []
        for name, values in measured.items():
            shape = CALIBRATION[name]
            sizes = shape_of(shape.config())
            assert sizes is not None
            work = work_of(shape, Work, values["completion_tokens"])
            counts = (
                terms(sizes, work, shape.groups * shape.completions) if kind == "generation" else terms(sizes, work)
            )
            rows.append(counts)
            seconds.append(values[f"{kind}_s"])
        names = [name for name in rows[0] if name != "bytes"]  # the weights of such models stay in the caches
        matrix = np.array([[row[name] / s for name in names] for row, s in zip(rows, seconds, strict=True)])
        weights = non_negative(matrix / matrix.max(axis=0)) / matrix.max(axis=0)
        found[kind] = {name: float(weight) for name, weight in zip(names, weights, strict=True)}
        found[f"{kind}_ratio"] = {name: float(ratio) for name, ratio in zip(measured, matrix @ weights, strict=True)}
    return found


def non_negative(matrix: Any) -> Any:
    """Return the weights that are not negative and make each row of the matrix sum to one best: least squares by coordinates."""
    import numpy as np

    weights = np.zeros(matrix.shape[1])
    for _ in range(20_000):
        for column in range(matrix.shape[1]):
            rest = 1.0 - matrix @ weights + matrix[:, column] * weights[column]
            weights[column] = max(0.0, matrix[:, column] @ rest / (matrix[:, column] @ matrix[:, column]))
    return weights


if __name__ == "__main__":
    main()
