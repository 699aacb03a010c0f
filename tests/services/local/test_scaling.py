"""Pools of one host that get the sizes of an external scaler, with a small server in the coordinator's place."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from paceline.host.cores import usable_cores
from paceline.spec import ClusterSection
from protos.externalscaler import externalscaler_pb2 as keda
from protos.externalscaler import externalscaler_pb2_grpc
from services.local.scaling import LocalScaler, scaled_pools

DEADLINE_S = 60.0


class Answers(externalscaler_pb2_grpc.ExternalScalerServicer):
    """Answers with a size, or with a status."""

    def __init__(self) -> None:
        self.size: int | grpc.StatusCode = 2
        self.asked: list[dict[str, str]] = []
        self.again = threading.Event()

    def GetMetrics(self, request: keda.GetMetricsRequest, context: Any) -> keda.GetMetricsResponse:
        self.asked.append(dict(request.scaledObjectRef.scalerMetadata))
        self.again.set()
        if isinstance(self.size, grpc.StatusCode):
            context.abort(self.size, "not now")
        return keda.GetMetricsResponse(metricValues=[keda.MetricValue(metricValueFloat=float(self.size))])


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
    externalscaler_pb2_grpc.add_ExternalScalerServicer_to_server(answers, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    (tmp_path / "token").write_text("t" * 43)
    yield Pool(f"127.0.0.1:{port}", tmp_path / "token")
    server.stop(None).wait()


def test_a_pool_gets_the_size_and_a_line_says_so(answers: Answers, pool: Pool) -> None:
    said: list[str] = []
    with LocalScaler(pool, {"reward": {"pool": "reward"}}, said.append, ask_s=0.05):  # type: ignore[arg-type]
        assert pool.resized.wait(DEADLINE_S)
    assert pool.sizes == {"reward": 2}
    assert said == ["reward workers: 1 become 2 (`paceline status` says why)"]
    assert answers.asked[0] == {"pool": "reward"}


@pytest.mark.parametrize(
    ("status", "says"), [(grpc.StatusCode.UNAVAILABLE, []), (grpc.StatusCode.INVALID_ARGUMENT, ["not now"])]
)
def test_without_an_answer_the_pool_keeps_its_size(
    status: grpc.StatusCode, says: list[str], answers: Answers, pool: Pool
) -> None:
    answers.size, said = status, []
    with LocalScaler(pool, {"reward": {"pool": "reward"}}, said.append, ask_s=0.05):  # type: ignore[arg-type]
        for _ in range(2):
            assert answers.again.wait(DEADLINE_S)
            answers.again.clear()
    assert pool.sizes == {"reward": 1}
    assert {line.rpartition(": ")[2] for line in said} == set(says)


def test_the_bounds_follow_the_spec_and_the_host() -> None:
    sizes = ClusterSection(rollout_workers=2, reward_workers=1)
    pools = scaled_pools(sizes, {"reward": (1, 3)})
    assert set(pools) == {"rollout", "reward"}
    assert pools["rollout"]["minWorkers"] == "0"
    assert pools["rollout"]["maxWorkers"] == str(max(2, usable_cores()))
    assert pools["rollout"]["firstWorkers"] == "2"
    assert (pools["reward"]["minWorkers"], pools["reward"]["maxWorkers"]) == ("1", "3")
    on_gpus = sizes.model_copy(update={"rollout_gpus": (0, 1), "environment_workers": 1})
    assert scaled_pools(on_gpus, {})["rollout"]["maxWorkers"] == "2"
    assert "environment" in scaled_pools(on_gpus, {})


def test_runs_on_examples_have_no_pools() -> None:
    sizes = ClusterSection().model_copy(update={"rollout_workers": 0, "reward_workers": 0})
    assert scaled_pools(sizes, {}) == {}
