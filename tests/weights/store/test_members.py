"""Offers of stored weights to a worker in a separate process, which is stopped, reads damaged files, and must never
label a token with a version that it does not hold."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from python_path import python_path
from tiny_policy import make_spec, save_tiny_policy
from transformers import AutoModelForCausalLM

from paceline.groups import Version
from paceline.learner.collectives import broadcast_bytes
from paceline.learner.weights.device_snapshot import local_slices
from paceline.learner.weights.gather import plan_tensors
from paceline.weights.progress import PublishResult
from paceline.weights.store.object_store import WeightStore
from paceline.weights.store.offers import StoreOffers
from paceline.weights.store.rank_board import make_board
from paceline.weights.store.store_format import StoreOffer
from paceline.weights.store.writer import StoreWriter

MEMBER = Path(__file__).parents[2] / "support" / "processes" / "store_member.py"
ROOT = MEMBER.parents[3]
DEADLINE_S = 120.0
PROMPT_IDS = [3, 1, 4, 1, 5]


class Worker:
    """The worker's process, the learner's side of the delta channel, and the weights of every version."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = save_tiny_policy(folder / "model")
        spec = make_spec(path, max_total_sequence_length=64)
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.versions: dict[tuple[int, int], Any] = {}
        self.completions: queue.Queue[dict[str, Any]] = queue.Queue()
        self.results: queue.Queue[PublishResult] = queue.Queue()
        self.ready = threading.Event()
        self.process = subprocess.Popen(
            [sys.executable, str(MEMBER), spec.model_dump_json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(ROOT)},
            text=True,
        )
        self.offers = StoreOffers(
            run_id="run",
            url=str(folder / "store"),
            algorithm="sha256",
            max_wait_s=5.0,
            send=self._send,
            on_result=self.results.put,
        )
        self.writer = StoreWriter(
            store=WeightStore(str(folder / "store")),
            board=make_board("127.0.0.1", "127.0.0.1", broadcast_bytes),
            run_id="run",
            rank=0,
            world_size=1,
            algorithm="sha256",
            anchor_interval=3,
            any_rank=lambda fact: fact,
            on_stored=self.offers.announce,
            oldest_held=self.offers.oldest_held,
        )
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def publish(self, step: int) -> None:
        """Move the weights far enough that no two versions give the same log-probabilities."""
        version = Version(1, step)
        torch.manual_seed(step)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += torch.randn_like(parameter) * 0.05 * (torch.rand_like(parameter) < 0.1)
        self.versions[version] = copy.deepcopy(self.model)
        self.writer.put(version, local_slices(self.model, None), plan_tensors(self.model, None))

    def wait_for(self, step: int) -> None:
        """Wait until the worker reports that it serves this version."""
        while True:
            result = self.results.get(timeout=DEADLINE_S)
            if result.ok and result.version.step == step:
                return

    def completion(self) -> dict[str, Any]:
        """Return the next completion, after comparing its log-probabilities with those of the versions that it names."""
        completion = self.completions.get(timeout=DEADLINE_S)
        token_ids = completion["token_ids"]
        ids_1L = torch.tensor([PROMPT_IDS + token_ids])
        position = 0
        for session, step, start, end, _ in completion["spans"]:
            assert start == position
            position = end
            with torch.no_grad():
                logprobs_LV = self.versions[session, step](ids_1L).logits[0, :-1].log_softmax(-1)
            own_L = logprobs_LV.gather(1, ids_1L[0, 1:, None])[len(PROMPT_IDS) - 1 :, 0]
            np.testing.assert_allclose(completion["logprobs"][start:end], own_L[start:end], atol=2e-4)
        assert position == len(token_ids)
        return completion

    def completion_of(self, step: int) -> dict[str, Any]:
        """Return the first completion that is of this version from its first token on; all before it are compared too."""
        while True:
            completion = self.completion()
            if completion["spans"][0][:2] == [1, step]:
                return completion

    def end(self) -> None:
        self.offers.close()
        self.writer.close()
        self.process.kill()
        self.process.wait(DEADLINE_S)
        self.reader.join(DEADLINE_S)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()

    def _send(self, offer: StoreOffer) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(dataclasses.asdict(offer)) + "\n")
        self.process.stdin.flush()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event = json.loads(line)
            if event["event"] == "ready":
                self.ready.set()
            elif event["event"] == "completion":
                self.completions.put(event)
            else:
                version = Version(*event["version"])
                self.offers.answer("worker", version, event["ok"], event["message"], event["damaged"])
                if self.offers.wants_snapshot:
                    self.offers.snapshot_ordered()
                    self.writer.put_snapshot()


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    worker = Worker(tmp_path_factory.mktemp("worker"))
    try:
        assert worker.ready.wait(DEADLINE_S)
        worker.offers.set_members(1, ["worker"])
        yield worker
    finally:
        worker.end()


def test_damage_in_the_store_is_repaired_while_the_worker_goes_on_serving(worker: Worker) -> None:
    start = len(worker.versions)
    for step in (start, start + 1):
        worker.publish(step)
        worker.wait_for(step)
    worker.process.send_signal(signal.SIGSTOP)
    worker.publish(start + 2)
    name = f"000001-{start + 2:08d}"
    path = worker.folder / "store" / name / "delta.0.safetensors"
    pause = threading.Event()
    while not path.with_name("delta.json").exists():
        pause.wait(0.01)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    worker.process.send_signal(signal.SIGCONT)
    refused = worker.results.get(timeout=DEADLINE_S)
    assert not refused.ok
    assert f"{name}/delta.0.safetensors" in refused.error
    worker.wait_for(start + 2)  # from the snapshot that was written because of it
    worker.completion_of(start + 2)
    worker.publish(start + 3)
    worker.wait_for(start + 3)
    worker.completion_of(start + 3)


def test_a_worker_that_was_stopped_never_labels_a_token_wrongly(worker: Worker) -> None:
    start = len(worker.versions)
    worker.publish(start)
    worker.completion_of(start)
    for pause in range(3):
        first = start + 4 * pause + 1
        worker.process.send_signal(signal.SIGSTOP)
        for step in range(first, first + 4):
            worker.publish(step)
        worker.process.send_signal(signal.SIGCONT)
        worker.wait_for(first + 3)
        worker.completion_of(first + 3)
