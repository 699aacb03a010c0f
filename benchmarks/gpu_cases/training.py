"""Steps of the learner: seconds, model FLOPs utilisation, and the peak of memory beside the plan's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from learner.batch.samples import TrainingSample
from learner.step.trainer import Trainer
from paceline.models.auto_settings import planned
from paceline.models.memory_estimate import estimate
from paceline.models.memory_plan import Room
from paceline.models.memory_remedies import refusal
from paceline.models.shape import ModelShape, read_shape
from paceline.models.work import peak_flops
from paceline.spec import RunSpec
from paceline.spec.reading import parse_spec
from paceline.spec.with_keys import with_keys

STEPS = 4
"""Of them the first warms up."""
MICRO_BATCHES = 2
SMALLER: tuple[dict[str, Any], ...] = (
    {},
    {"policy.optimizer.state_dtype": "bfloat16"},
    {"policy.cpu_offload": True},
)
"""Settings that are tried in turn until the plan fits."""


class DoesNotFit(Exception):
    """The plan says that the case has no room here."""


def spec_of(folder: Path, tokens: int, policy: dict[str, Any]) -> RunSpec:
    """Return a supervised run with micro-batches of `tokens`, made of sequences of that length."""
    tree = {
        "algorithm": "sft",
        "policy": {
            "model_name": str(folder),
            "max_total_sequence_length": tokens,
            "train_mb_tokens": tokens,
            "activation_checkpointing": "auto",
            **policy,
        },
        "data": {"train": "none.jsonl"},
        "sft": {"max_num_steps": STEPS, "num_examples_per_step": MICRO_BATCHES},
    }
    return parse_spec(tree)


def fitting(
    folder: Path, tokens: int, policy: dict[str, Any], device: torch.device
) -> tuple[RunSpec, ModelShape]:
    """Return a spec that the plan says to fit on the device. Raises DoesNotFit."""
    shape = read_shape(str(folder))
    assert shape is not None
    spec = spec_of(folder, tokens, policy)
    if device.type != "cuda":
        return planned(spec, None, Room())[0], shape
    spec = with_keys(spec, {"cluster.learner_gpus": (0,)})
    room = Room(gpu_bytes=torch.cuda.get_device_properties(device).total_memory)
    why_not = ""
    for smaller in SMALLER:
        tried, _ = planned(with_keys(spec, smaller), shape, room)
        if not (why_not := refusal(tried, shape, room)):
            return tried, shape
    raise DoesNotFit(why_not)


def batch_of(tokens: int, vocabulary: int, seed: int) -> list[TrainingSample]:
    """Return sequences of `tokens` tokens, a quarter of each its prompt."""
    dice = np.random.default_rng(seed)
    rows = [dice.integers(0, vocabulary, tokens, dtype=np.int32) for _ in range(MICRO_BATCHES)]
    return [
        TrainingSample(number, prompt_ids=row[: tokens // 4], completion_ids=row[tokens // 4 :])
        for number, row in enumerate(rows)
    ]


@contextmanager
def seconds(device: torch.device) -> Iterator[list[float]]:
    """Measure the block, until the device has ended its work; the list has the seconds then."""
    found: list[float] = []
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started_s = time.perf_counter()
    yield found
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    found.append(time.perf_counter() - started_s)


def train(folder: Path, tokens: int, device: torch.device, policy: dict[str, Any]) -> dict[str, Any]:
    """Train some steps of two micro-batches; return the pace, and memory predicted and measured."""
    spec, shape = fitting(folder, tokens, policy, device)
    needed = estimate(spec, shape)
    trainer = Trainer(spec, device)
    steps_s, metrics = [], {}
    for step in range(STEPS):
        batch = batch_of(tokens, shape.vocabulary, step)
        with seconds(device) as took:
            metrics = trainer.train_step(batch, step)
        steps_s.append(took[0])
    step_s = min(steps_s[1:])
    flops = metrics["teraflop"] * 1e12 / step_s
    result: dict[str, Any] = {
        "settings": {
            "activation_checkpointing": spec.policy.activation_checkpointing,
            "state_dtype": spec.policy.optimizer.state_dtype,
            "cpu_offload": spec.policy.cpu_offload,
            **policy,
        },
        "step_s": step_s,
        "tokens_per_s": tokens * MICRO_BATCHES / step_s,
        "teraflops": flops / 1e12,
        "loss": metrics["loss"],
    }
    if device.type == "cuda":
        peak = peak_flops(torch.cuda.get_device_name(device))
        measured = torch.cuda.max_memory_allocated(device)
        predicted = needed.learner_bytes - needed.learner["process"]  # contexts are not torch's
        result |= {"mfu": flops / peak} if peak else {}
        result |= {"predicted_bytes": predicted, "measured_bytes": measured, "ratio": predicted / measured}
    return result
