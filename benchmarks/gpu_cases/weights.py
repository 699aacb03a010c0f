"""Gathering and publishing of weights beside training, loading them into engines, and checkpoints."""

from __future__ import annotations

import asyncio
import json
import math
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_cases.training import batch_of, fitting, seconds
from learner.checkpoints import checkpoint
from learner.step.trainer import Trainer
from learner.weights.gather import gather_weights
from learner.weights.publisher import Publisher
from paceline.groups import Version
from paceline.spec.reading import parse_spec
from paceline.weights.host_weights import HostWeights
from paceline.weights.manifest import TensorPlan, WeightManifest
from paceline.weights.segment_pair import SegmentPair
from rollout.engines import create_engine
from rollout.weights.layout import meta_layout, read_config
from rollout.weights.link_receiver import WeightReceiver

VERSIONS = 3


def publish(folder: Path, tokens: int, device: torch.device) -> dict[str, Any]:
    """Publish three versions to a receiver in this process through the host's memory while the next steps are trained."""
    spec, shape = fitting(folder, tokens, {}, device)
    trainer = Trainer(spec, device)
    receivers: list[WeightReceiver] = []
    results: queue.Queue[Any] = queue.Queue()
    outcomes: list[Any] = []
    publisher = Publisher(
        run_id="run",
        send_offer=lambda offer: receivers[0].offer(offer),
        on_result=results.put,
        bucket_bytes=64 << 20,
        max_wait_s=120.0,
        backend="shared",
    )
    receivers.append(
        WeightReceiver(
            run_id="run",
            max_wait_s=120.0,
            on_weights=lambda version, tensors: None,
            on_ack=lambda version, ok, message: publisher.acknowledge("m", version, ok, message),
        )
    )
    publisher.set_members(1, ["m"])
    alone_s, beside_s, gather_s, sent_s = [], [], [], []

    def step(number: int) -> float:
        with seconds(device) as took:
            trainer.train_step(batch_of(tokens, shape.vocabulary, number), number)
        return took[0]

    try:
        step(0)
        for number in range(VERSIONS):
            alone_s.append(step(1))
            with seconds(device) as took:
                gathered = gather_weights(trainer.model, torch.bfloat16)
            gather_s.append(took[0])
            with seconds(torch.device("cpu")) as sending:
                publisher.stage(Version(1, number + 1), gathered)
                waiter = threading.Thread(target=lambda: outcomes.append(results.get(timeout=600)))
                waiter.start()
                beside_s.append(step(1))
                waiter.join()
            if not outcomes[-1].ok:
                raise RuntimeError(f"version {number + 1} was not published: {outcomes[-1].error}")
            sent_s.append(sending[0])
    finally:
        publisher.close()
        receivers[0].close()
    size = sum(tensor.nbytes for tensor in {id(t): t for t in gathered.values()}.values())
    return {
        "bytes": size,
        "gather_s": min(gather_s[1:]),
        "step_and_transfer_s": min(sent_s[1:]),
        "step_alone_s": min(alone_s[1:]),
        "step_beside_s": min(beside_s[1:]),
    }


def save_and_load(folder: Path, tokens: int, device: torch.device) -> dict[str, Any]:
    """Write a checkpoint, load it into another trainer, and compare the next step's loss."""
    spec, shape = fitting(folder, tokens, {}, device)
    trainer = Trainer(spec, device)
    trainer.train_step(batch_of(tokens, shape.vocabulary, 0), 0)
    with tempfile.TemporaryDirectory() as out:
        with seconds(device) as saving:
            saved = checkpoint.save(out, session=1, step=1, model=trainer.model, optimizer=trainer.optimizer)
        assert saved is not None
        expected = trainer.train_step(batch_of(tokens, shape.vocabulary, 1), 1)["loss"]
        size = sum(path.stat().st_size for path in Path(saved.path).rglob("*") if path.is_file())
        with seconds(device) as loading:
            checkpoint.load(
                saved.path,
                expected_sha256=saved.manifest_sha256,
                model=trainer.model,
                optimizer=trainer.optimizer,
            )
        again = trainer.train_step(batch_of(tokens, shape.vocabulary, 1), 1)["loss"]
    return {"bytes": size, "save_s": saving[0], "load_s": loading[0], "loss": expected, "resumed_loss": again}


def swap(folder: Path, backend: str, device: torch.device) -> dict[str, Any]:
    """Load versions from a segment of host memory into an engine; the pause against what the bus needs for as many bytes."""
    spec = parse_spec(
        {
            "policy": {
                "model_name": str(folder),
                "max_total_sequence_length": 1024,
                "generation_precision": "bfloat16",
                "generation": {"backend": backend, "max_new_tokens": 8, "max_batch_size": 8},
            },
            "data": {"train": "none.jsonl"},
            "rewards": [{"function": "exact_match"}],
        }
    )
    shapes = meta_layout(read_config(spec.policy)).shapes
    plans = [TensorPlan(name, "bfloat16", tuple(shape)) for name, shape in shapes.items()]
    layout = WeightManifest.plan(plans, bucket_bytes=64 << 20)
    segments = SegmentPair()

    async def load() -> list[float]:
        sampler = create_engine(spec, device=device.type)
        try:
            await sampler.ready()
            pauses_s = []
            for step in range(VERSIONS + 2):
                segment, generation = segments.begin(layout.total_bytes, layout.bucket_bytes, 60.0)
                segment.flat().fill_(step + 1)  # small numbers
                segment.complete()
                weights = HostWeights(segment, generation, layout, "compared")
                pauses_s.append(await sampler.update_weights(Version(1, step), weights))
                segments.release(segment)
            return pauses_s
        finally:
            await sampler.close()

    pauses_s = asyncio.run(load())
    bytes_per_s = bus_speed(device)
    limit_s = layout.total_bytes / (0.7 * bytes_per_s) + 0.05
    return {
        "bytes": layout.total_bytes,
        "first_pause_s": pauses_s[0],
        "pause_s": statistics.median(pauses_s[2:]),
        "bus_gigabytes_per_s": bytes_per_s / 1e9,
        "limit_s": limit_s,
        "within_limit": statistics.median(pauses_s[2:]) <= limit_s,
    }


def bus_speed(device: torch.device, size_bytes: int = 1 << 28) -> float:
    """Return the bytes per second of a copy from locked memory to the device, in the best of three."""
    source = torch.ones(size_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.ones_like(source, device=device)
    best_s = math.inf
    for _ in range(4):
        with seconds(device) as took:
            target.copy_(source)
        best_s = min(best_s, took[0])
    return size_bytes / best_s


def engine(backend: str, size: str, device: torch.device) -> dict[str, Any]:
    """Run `benchmarks/engine.py`."""
    command = [sys.executable, "benchmarks/engine.py", "--engines", backend, "--size", size, "--json"]
    done = subprocess.run([*command, "--device", device.type], check=True, stdout=subprocess.PIPE, text=True)
    return {"rows": json.loads(done.stdout)}
