"""A rollout worker that serves one layer of an older version is named, at any age and in episodes; right ones are not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from forked_services import ForkedCluster
from python_path import python_path

from paceline.client import Client
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.ledger.segments import read_frame
from paceline.services.demo.task import make_model
from paceline.spec import ClusterSection, RunSpec
from paceline.spec.reading import parse_spec
from paceline.wire import CompletionArrays

SUPPORT = Path(__file__).parents[1] / "support"
STALE = "stale-worker"
LONGEST_S = 400.0
LR = 3e-3
REWARD = "import zlib\n\ndef noise(completions, **_):\n    return [zlib.crc32(str(text).encode()) % 100 / 100 for text in completions]\n"
"""Random rewards: the policy moves in each step and keeps its entropy, so old weights give other probabilities."""
GAME = """
class Game:
    deterministic = True

    def reset(self, **_):
        self.turns = 0

    def step(self, text):
        self.turns += 1
        return "7+8", None, self.turns == 2

    def get_reward(self):
        return float(self.turns)
"""


@contextmanager
def stale_worker(address: str, log: Path) -> Iterator[None]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(SUPPORT.parents[1])}
    script = SUPPORT / "processes" / "stale_rollout.py"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, script, "--coordinator", address, "--port", "0", "--name", STALE],
            env=environment,
            stdout=output,
            stderr=output,
        )
    try:
        yield
    finally:
        process.kill()
        process.wait()


def sampled_groups(directory: Path, run_id: str, oldest: int) -> int:
    """Return how many committed groups whose versions are `oldest` or newer the stale worker has sampled, alone or with
    others."""
    with closing(Ledger(directory / "ledger.sqlite", read_only=True)) as ledger:
        query = "SELECT group_id FROM groups WHERE run_id = ? AND oldest_step >= ?"
        group_ids = [row["group_id"] for row in ledger.db.execute(query, (run_id, oldest))]
        payloads = [ledger.payload(run_id, group_id) for group_id in group_ids]
        named = [
            CompletionArrays.of(read_frame(payload.arrays)).samplers for payload in payloads if payload is not None
        ]
    return sum(any(sampler.startswith(STALE) for sampler in samplers) for samplers in named)


@pytest.mark.slow
@pytest.mark.parametrize("max_age", [1, pytest.param(2, marks=pytest.mark.merge), 4])
def test_the_worker_with_an_old_layer_is_named(make_spec: Callable[..., RunSpec], tmp_path: Path, max_age: int) -> None:
    make_model(tmp_path / "model", seed=0, hidden=32, layers=2, heads=2)
    (tmp_path / "noise.py").write_text(REWARD)
    spec = make_spec(
        policy={
            "model_name": str(tmp_path / "model"),
            "max_total_sequence_length": 96,
            "optimizer": {"lr": LR},
            "generation": {"max_new_tokens": 64, "max_batch_size": 128},
        },
        grpo={"num_prompts_per_step": 16, "num_generations_per_prompt": 4, "max_num_steps": 1_000},
        async_grpo={"max_trajectory_age_steps": max_age},
        rewards=[{"function": f"{tmp_path / 'noise.py'}:noise"}],
        checkpointing={"enabled": False},
    )
    find_stale(spec, tmp_path)


@pytest.mark.slow
def test_it_is_named_in_a_run_of_episodes(chat_model: Path, tmp_path: Path) -> None:
    (tmp_path / "game.py").write_text(GAME)
    (tmp_path / "noise.py").write_text(REWARD)
    rows = [{"prompt": [{"role": "user", "content": f"go {n}"}]} for n in range(40)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = parse_spec(
        {
            "policy": {
                "model_name": str(chat_model),
                "max_total_sequence_length": 512,
                "optimizer": {"lr": LR},
                "generation": {"max_new_tokens": 48, "max_batch_size": 128},
            },
            "data": {"train": str(tmp_path / "train.jsonl")},
            "environment": {"class": f"{tmp_path / 'game.py'}:Game", "max_turns": 3},
            "grpo": {"num_prompts_per_step": 16, "num_generations_per_prompt": 4, "max_num_steps": 1_000},
            "async_grpo": {"max_trajectory_age_steps": 2},
            "rewards": [{"function": f"{tmp_path / 'noise.py'}:noise"}],
            "checkpointing": {"enabled": False},
            "logger": {"tensorboard": False},
        }
    )
    find_stale(spec, tmp_path, environment_workers=1)


def find_stale(spec: RunSpec, tmp_path: Path, **sizes: Any) -> None:
    """Train until a worker is named, which must be the stale one, within 600 groups that can show the fault."""
    with (
        ForkedCluster(tmp_path / "runs", ClusterSection(rollout_workers=1, **sizes)) as cluster,
        Client(cluster.address) as client,
        stale_worker(cluster.address, tmp_path / "stale.log"),
    ):
        run = client.submit(spec)
        deadline_s = time.monotonic() + LONGEST_S
        found: dict[str, Any] = {}
        for event in client.watch(run.run_id):
            assert time.monotonic() < deadline_s, (tmp_path / "stale.log").read_text()[-2000:]
            if event.kind == "warning" and "spot_check" in event.content:
                found = event.content
                break
        number = sampled_groups(Path(cluster.directory), run.run_id, 2)
        client.cancel(run.run_id)
        client.wait(run.run_id, timeout_s=60)
    print(f"after {number} groups: {found.get('message')}")
    assert found["spot_check"].startswith(STALE)
    assert number <= 600
