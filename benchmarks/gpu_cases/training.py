"""Steps of the learner: seconds, model FLOPs utilisation, the peak of memory beside the plan's, and where the time goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from paceline.host.resources import available_bytes
from paceline.learner.batch.samples import TrainingSample
from paceline.learner.step.trainer import Trainer
from paceline.models.memory_estimate import estimate
from paceline.models.memory_plan import Room, planned, refusal
from paceline.models.shape import ModelShape, peak_flops, read_shape
from paceline.spec import RunSpec
from paceline.spec.keys import with_keys
from paceline.spec.reading import parse_spec

STEPS = 4
"""Of them the first warms up."""
MICRO_BATCHES = 2
SMALLER: tuple[dict[str, Any], ...] = (
    {},
    {"policy.optimizer.state_dtype": "bfloat16"},
    {"policy.cpu_offload": True},
)
"""Settings that are tried in turn until the plan fits."""


HOST_SHARE = 0.9
"""Part of the host's free memory that a case may take: files that it reads, and the plan's error, need some."""


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


def room_of(device: torch.device) -> Room:
    """Return the memory of the device, and what a case may take of this host's: a host that is out of memory loses all results."""
    gpu_bytes = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    return Room(gpu_bytes, int(HOST_SHARE * available_bytes()))


def fitting(folder: Path, tokens: int, policy: dict[str, Any], room: Room) -> tuple[RunSpec, ModelShape]:
    """Return a spec that the plan says to fit, on a GPU where the room has one. Raises DoesNotFit."""
    shape = read_shape(str(folder))
    assert shape is not None
    spec = spec_of(folder, tokens, policy)
    if room.gpu_bytes is None:
        return planned(spec, None, Room())[0], shape
    spec = with_keys(spec, {"cluster.learner_gpus": (0,)})
    why_not = ""
    for smaller in SMALLER:
        tried, _ = planned(with_keys(spec, smaller), shape, room)
        if not (why_not := refusal(tried, shape, room)):
            return tried, shape
    raise DoesNotFit(why_not)


def mixed_lengths(tokens: int, seed: int) -> list[int]:
    """Return lengths of sequences with `tokens` tokens together, from a 64th to a quarter of them, as completions have them."""
    dice, lengths = np.random.default_rng(seed), []
    while left := tokens - sum(lengths):
        length = max(int(tokens * 2 ** dice.uniform(-6, -2)), 4)  # a token of prompt
        lengths.append(length if 2 * length <= left else left)
    return lengths


def batch_of(tokens: int, vocabulary: int, seed: int, packed: bool = False) -> list[TrainingSample]:
    """Return MICRO_BATCHES · `tokens` tokens, a quarter of each sequence its prompt: sequences of `tokens` tokens, or with
    `packed` of mixed lengths, of which another seed gives others."""
    dice = np.random.default_rng(seed)
    lengths = [
        length
        for number in range(MICRO_BATCHES)
        for length in (mixed_lengths(tokens, MICRO_BATCHES * seed + number) if packed else [tokens])
    ]
    rows = [dice.integers(0, vocabulary, length, dtype=np.int32) for length in lengths]
    return [
        TrainingSample(number, prompt_ids=row[: len(row) // 4], completion_ids=row[len(row) // 4 :])
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


def train(
    folder: Path, device: torch.device, tokens: int, policy: dict[str, Any], packed: bool = False
) -> dict[str, Any]:
    """Train some steps of two micro-batches; return the pace, and memory predicted and measured."""
    spec, shape = fitting(folder, tokens, policy, room_of(device))
    needed = estimate(spec, shape)
    trainer = Trainer(spec, device)
    steps = []
    for step in range(STEPS):
        batch = batch_of(tokens, shape.vocabulary, step, packed)
        with seconds(device) as took:
            metrics = trainer.train_step(batch, step)
        steps.append((took[0], metrics["teraflop"]))
    step_s, teraflop = min(steps[1:])
    result: dict[str, Any] = {
        "settings": {
            "activation_checkpointing": spec.policy.activation_checkpointing,
            "state_dtype": spec.policy.optimizer.state_dtype,
            "cpu_offload": spec.policy.cpu_offload,
            **policy,
        },
        "step_s": step_s,
        "first_step_s": steps[0][0],
        "tokens_per_s": tokens * MICRO_BATCHES / step_s,
        "teraflops": teraflop / step_s,
        "loss": metrics["loss"],
    }
    if device.type == "cuda":
        peak = peak_flops(torch.cuda.get_device_name(device))
        measured = torch.cuda.max_memory_allocated(device)
        predicted = needed.learner_bytes - needed.learner["process"]  # contexts are not torch's
        result |= {"mfu": 1e12 * teraflop / step_s / peak} if peak else {}
        result |= {"predicted_bytes": predicted, "measured_bytes": measured, "ratio": predicted / measured}
    return result


def profiled(folder: Path, device: torch.device, tokens: int, policy: dict[str, Any]) -> dict[str, Any]:
    """Return the kernels that take most of a packed step, the milliseconds of all, and of the step with the profiler."""
    spec, shape = fitting(folder, tokens, policy, room_of(device))
    trainer = Trainer(spec, device)
    for step in range(STEPS - 1):
        trainer.train_step(batch_of(tokens, shape.vocabulary, step, packed=True), step)
    batch = batch_of(tokens, shape.vocabulary, STEPS, packed=True)
    on_gpu = device.type == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[activity]) as found, seconds(device) as took:
        metrics = trainer.train_step(batch, STEPS)
    kernels = [
        (
            (each.self_device_time_total if on_gpu else each.self_cpu_time_total) / 1e3,
            each.count,
            each.key[:100],
        )
        for each in found.key_averages()
    ]
    return {
        "step_ms": 1e3 * took[0],
        "kernels_ms": sum(ms for ms, *_ in kernels),
        "phases_s": {name: value for name, value in metrics.items() if name.endswith("_s")},
        "top": [[round(ms, 2), count, name] for ms, count, name in sorted(kernels, reverse=True)[:20]],
    }
