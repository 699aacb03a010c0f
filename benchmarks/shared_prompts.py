"""A training step with each prompt computed once for its group, against one that computes it for every completion.

    python benchmarks/shared_prompts.py [--json] [--repeats 3]

The model has SmolLM2-135M's shape and random weights, in float32; a step is `grpo` on one group, by the trainer itself. Each
case `ratio_P_T_G` has G completions of T tokens behind a prompt of P: the processor seconds of a step without the optimizer's
update, unshared by shared, the fewest of some repeats that alternate (`with_optimizer`: the whole step; `bound`: by operations;
`seconds`: those of the clock). `largest_difference` is that between the gradients of both, of each parameter relative to its
largest gradient.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from random_model import write_random_model
from short_form import parse
from torch import Tensor
from torch.nn.functional import cross_entropy, rms_norm
from transformers import LlamaConfig

from paceline.learner.batch.samples import TrainingSample, pack_samples
from paceline.learner.step.trainer import Trainer
from paceline.spec import RunSpec
from paceline.spec.reading import parse_spec

CPU = torch.device("cpu")
CASES = ((512, 64, 8), (128, 128, 16), (100, 64, 8))
SHAPE = {
    "num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3,
    "intermediate_size": 1536, "vocab_size": 49_152, "tie_word_embeddings": True, "max_position_embeddings": 8192,
    "rope_theta": 100_000.0,
}  # fmt: skip
SHARED, UNSHARED = True, False


def spec_of(model: Path, shared: bool) -> RunSpec:
    """Return the spec of a run whose batch is one group."""
    reward = {"function": "math_verify", "name": "right"}
    policy = {"model_name": str(model), "shared_prompts": shared, "train_mb_tokens": 8192}
    grpo = {"num_prompts_per_step": 1, "num_generations_per_prompt": 8, "max_num_steps": 10}
    return parse_spec(
        {"name": "shared", "policy": policy, "grpo": grpo, "data": {"train": "none"}, "rewards": [reward]}
    )


def group(prompt: int, completion: int, count: int, vocabulary: int) -> list[TrainingSample]:
    """Return a group of random tokens with rewards of 0 and 1."""
    rng = np.random.default_rng(0)
    prompt_ids = rng.integers(0, vocabulary, prompt).astype(np.int32)

    def sample(index: int) -> TrainingSample:
        ids = rng.integers(0, vocabulary, completion).astype(np.int32)
        logprobs = np.full(completion, -np.log(vocabulary), np.float32)
        rewards = np.array([index % 2], np.float32)
        return TrainingSample(1, prompt_ids, ids, logprobs, np.zeros(completion, np.int64), rewards)

    return [sample(index) for index in range(count)]


class Clock:
    """Processor seconds of this process's threads, and those inside the optimizer's update."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self._update, self._update_s = trainer, trainer.optimizer.step, 0.0
        trainer.optimizer.step = self._timed_update  # type: ignore[method-assign]

    def _timed_update(self) -> None:
        begin_s = time.process_time()
        self._update()
        self._update_s += time.process_time() - begin_s

    def step(self, batch: list[TrainingSample]) -> tuple[dict[str, float], tuple[float, float, float]]:
        """Return the metrics of a step; its processor seconds without and with the update, and the clock's."""
        self._update_s, begin_s, started_s = 0.0, time.process_time(), time.perf_counter()
        metrics = self.trainer.train_step(batch, 0)
        whole_s = time.process_time() - begin_s
        return metrics, (whole_s - self._update_s, whole_s, time.perf_counter() - started_s)


def case(clock: Clock, model: Path, sizes: tuple[int, int, int], repeats: int) -> dict[str, float]:
    """Return ratios of seconds and of operations."""
    batch = group(*sizes, clock.trainer.model.config.vocab_size)
    seconds: dict[bool, list[tuple[float, ...]]] = {SHARED: [], UNSHARED: []}
    operations = {}
    for _ in range(repeats):
        for shared in (UNSHARED, SHARED):
            clock.trainer.spec = spec_of(model, shared)
            metrics, of_step = clock.step(batch)
            operations[shared] = metrics["teraflop"]
            seconds[shared].append(of_step)
    fewest = {shared: [min(times) for times in zip(*values, strict=True)] for shared, values in seconds.items()}
    name = "_".join(map(str, sizes))
    return {
        f"ratio_{name}": round(fewest[UNSHARED][0] / fewest[SHARED][0], 2),
        f"with_optimizer_{name}": round(fewest[UNSHARED][1] / fewest[SHARED][1], 2),
        f"bound_{name}": round(operations[UNSHARED] / operations[SHARED], 2),
        f"seconds_{name}": round(fewest[SHARED][2], 3),
        f"seconds_unshared_{name}": round(fewest[UNSHARED][2], 3),
    }


def largest_difference(model: Any, sizes: tuple[int, int, int]) -> float:
    """Return the largest difference of a gradient, by its parameter's largest one. The loss is the completions' mean negative
    log-probability, computed by torch alone: the LM head of the learner is float32."""
    batch = group(*sizes, model.config.vocab_size)
    grads = []
    for shared in (UNSHARED, SHARED):
        row = pack_samples(batch, CPU, share=shared)
        states = model.base_model(
            input_ids=row.input_ids, position_ids=row.position_ids, use_cache=False, layout=row.layout
        ).last_hidden_state[0, row.predictors_N]
        loss = cross_entropy(states @ model.get_output_embeddings().weight.T, row.targets_N)
        grads.append(torch.autograd.grad(loss, list(model.parameters())))
    pairs = zip(*grads, strict=True)
    return max(((a - b).abs().max() / a.abs().max()).item() for a, b in pairs)


def to_float64(model: Any) -> Any:
    """Return the model in float64, its norms included, which transformers computes in float32."""

    def normalize(module: Any, states: Tensor) -> Tensor:
        return rms_norm(states, module.weight.shape, module.weight, module.variance_epsilon)

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(normalize, module)
    return model.double()


def main() -> None:
    """Print a line for each figure, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--repeats", type=int, default=3, help="timed steps of each kind (3)")
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"], help="layers of the model (30)")
    parser.add_argument("--case", type=int, choices=range(len(CASES)), help="number of a single case")
    options = parse(parser, repeats=1, layers=2)
    cases = CASES if options.case is None else [CASES[options.case]]
    cases, vocabulary = ([(48, 8, 4)], 512) if options.short else (cases, SHAPE["vocab_size"])
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        shape = {**SHAPE, "num_hidden_layers": options.layers, "vocab_size": vocabulary}
        write_random_model(model, LlamaConfig(**shape), 1 << 30)
        torch.manual_seed(0)
        trainer = Trainer(spec_of(model, SHARED), CPU)
        trainer.optimizer.param_groups[0]["lr"] = 0.0
        clock = Clock(trainer)
        figures: dict[str, Any] = {}
        sizes = (48, 8, 4) if options.short else (128, 32, 4)
        precise: dict[str, float] = {"float32": largest_difference(trainer.model, sizes)}
        for each in cases:
            figures |= case(clock, model, each, options.repeats)
        precise["float64"] = largest_difference(to_float64(trainer.model), sizes)
    figures["largest_difference"] = precise
    print(json.dumps(figures) if options.json else "\n".join(f"{name} {value}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
