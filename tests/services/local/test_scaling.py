"""Pools of one host that get the sizes of the status, with a small server in the coordinator's place."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from paceline.host.resources import usable_cores
from paceline.services.coordinator.scaling.policy import PoolConfig, read_pools
from paceline.services.local.scaling import LocalScaler, scaled_pools
from paceline.spec import ClusterSection
from paceline.v1 import status_pb2, status_pb2_grpc

DEADLINE_S = 60.0


class Answers(status_pb2_grpc.StatusServiceServicer):
    """Answers with a size, or with a status."""

    def __init__(self) -> None:
        self.size: int | grpc.StatusCode = 2
        self.is_scaled = True
        self.again = threading.Event()

    def Status(self, request: status_pb2.StatusRequest, context: Any) -> status_pb2.StatusResponse:
        self.again.set()
        if isinstance(self.size, grpc.StatusCode):
            context.abort(self.size, "not now")
        pool = status_pb2.PoolStatus(name="reward", desired=self.size, is_scaled=self.is_scaled)
        return status_pb2.StatusResponse(pools=[pool])


class Pool:
    """What the scaler uses of a cluster."""

    def __init__(self, address: str, token_file: Path):
        self.address, self.token_file = address, token_file
        self.sizes = {"reward": 1}
        self.resized = threading.Event()

    def size(self, role: str) -> int:
        return self.sizes[role]

    def resize(self, role: str, size: int) -> None:
        self.sizes[role] = size
        self.resized.set()


@pytest.fixture
def answers() -> Answers:
    return Answers()


@pytest.fixture
def pool(answers: Answers, tmp_path: Path) -> Iterator[Pool]:
    server = grpc.server(ThreadPoolExecutor(1))
    status_pb2_grpc.add_StatusServiceServicer_to_server(answers, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield Pool(f"127.0.0.1:{port}", tmp_path / "token")
    server.stop(None).wait()


def test_a_pool_gets_the_size_and_a_line_says_so(answers: Answers, pool: Pool) -> None:
    said: list[str] = []
    with LocalScaler(pool, said.append, ask_s=0.05):  # type: ignore[arg-type]
        assert pool.resized.wait(DEADLINE_S)
    assert pool.sizes == {"reward": 2}
    assert said == ["reward workers: 1 become 2 (`paceline status` explains the size)"]


@pytest.mark.parametrize(
    ("status", "says"),
    [(grpc.StatusCode.UNAVAILABLE, []), (grpc.StatusCode.INVALID_ARGUMENT, ["not now"]), (5, [])],
)
def test_without_an_answer_a_pool_keeps_its_size(
    status: grpc.StatusCode | int, says: list[str], answers: Answers, pool: Pool
) -> None:
    """Nor with the size of a pool that is not scaled now."""
    answers.size, answers.is_scaled, said = status, False, []
    with LocalScaler(pool, said.append, ask_s=0.05):  # type: ignore[arg-type]
        for _ in range(2):
            assert answers.again.wait(DEADLINE_S)
            answers.again.clear()
    assert pool.sizes == {"reward": 1}
    assert {line.rpartition(": ")[2] for line in said} == set(says)


def read(sizes: ClusterSection, bounds: dict[str, tuple[int, int]]) -> dict[str, PoolConfig]:
    """Return the pools that the coordinator reads from the options."""
    options = scaled_pools(sizes, bounds)
    assert set(options[::2]) <= {"--pool"}
    return {pool.name: pool for pool in read_pools(options[1::2])}


def test_the_bounds_follow_the_spec_and_the_host() -> None:
    sizes = ClusterSection(rollout_workers=2, reward_workers=1)
    pools = read(sizes, {"reward": (1, 3)})
    assert set(pools) == {"rollout", "reward"}
    rollout, reward = pools["rollout"].bounds, pools["reward"].bounds
    assert (rollout.least, rollout.most, rollout.first) == (0, max(2, usable_cores()), 2)
    assert (reward.least, reward.most) == (1, 3)
    on_gpus = sizes.model_copy(update={"rollout_gpus": (0, 1), "environment_workers": 1})
    assert read(on_gpus, {})["rollout"].bounds.most == 2
    assert "environment" in read(on_gpus, {})


def test_runs_on_examples_have_no_pools() -> None:
    sizes = ClusterSection().model_copy(update={"rollout_workers": 0, "reward_workers": 0})
    assert scaled_pools(sizes, {}) == []
