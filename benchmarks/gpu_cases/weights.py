"""Gathering and publishing of weights beside training, and checkpoints."""

from __future__ import annotations

import queue
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_cases.training import batch_of, fitting, room_of, seconds
from learner.checkpoints import checkpoint
from learner.step.trainer import Trainer
from learner.weights.gather import gather_weights
from learner.weights.publisher import Publisher
from paceline.groups import Version
from rollout.weights.link_receiver import WeightReceiver

VERSIONS = 3


def publish(folder: Path, device: torch.device, tokens: int) -> dict[str, Any]:
    """Publish three versions to a receiver in this process through the host's memory while the next steps are trained."""
    spec, shape = fitting(folder, tokens, {}, room_of(device))
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


def save_and_load(folder: Path, device: torch.device, tokens: int) -> dict[str, Any]:
    """Write a checkpoint, load it into another trainer, and compare the next step's loss."""
    spec, shape = fitting(folder, tokens, {}, room_of(device))
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
