"""The learner's weight channel and the control plane's messages: its offers of links, and its reports on them."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from learner.weights.channel import WeightChannel
from paceline.groups import Version
from paceline.spec import RunSpec
from paceline.spec.reading import spec_from_yaml
from paceline.weights.hosts.local_socket import LABEL_VARIABLE
from protos.paceline.v1 import worker_pb2
from services.common.host_agent import HostAgentConnection
from services.learner.training.weight_channel import make_channel

DEADLINE_S = 60.0
MODEL = torch.nn.Linear(2, 2)
NO_AGENT = "a host of the learner has no agent for weights, its log says why; every worker gets its own copy over a link"
SPEC = """
policy: {model_name: org/model}
data: {train: org/data}
rewards: [{function: length}]
"""


class Rank:
    """The part of rank 0 that a channel uses, on a device that only has to be named."""

    def __init__(self, device: str, reachable: str) -> None:
        self.rank, self.world_size = 0, 1
        self.device = torch.device(device)
        self.weights_bind, self.weights_host = "127.0.0.1", reachable
        self.agent: Any = SimpleNamespace(client=lambda: None, identity=None)
        self.membership = SimpleNamespace(has_stream=True)
        self.reports: queue.Queue[worker_pb2.ConnectRequest] = queue.Queue()

    def report(self, report: worker_pb2.ConnectRequest) -> None:
        self.reports.put(report)

    def next(self, kind: str) -> Any:
        """The next report of this kind."""
        while True:
            report = self.reports.get(timeout=DEADLINE_S)
            if report.WhichOneof("report") == kind:
                return getattr(report, kind)


Open = Callable[[str, Rank], tuple[WeightChannel, list[str]]]


@pytest.fixture
def open_channel(tmp_path: Path) -> Iterator[Open]:
    """Opens a channel for a spec with these lines added; also what it warned of."""
    channels: list[WeightChannel] = []

    def opened(lines: str, rank: Rank) -> tuple[WeightChannel, list[str]]:
        spec: RunSpec = spec_from_yaml(SPEC + lines)
        warnings: list[str] = []
        assignment = worker_pb2.RunAssignment(run_id="run", directory=str(tmp_path))
        channels.append(make_channel(assignment, spec, cast(Any, rank), warnings.append, MODEL))
        return channels[-1], warnings

    yield opened
    for channel in channels:
        channel.close()


def offered(channel: WeightChannel, rank: Rank) -> worker_pb2.WeightOffer:
    channel.set_members(1, ["m"])
    channel.publish(Version(1, 0), MODEL)
    offer = rank.next("weight_offer")
    assert isinstance(offer, worker_pb2.WeightOffer)
    return offer


@pytest.mark.parametrize(
    ("device", "reachable", "cluster", "backend"),
    [
        ("cpu", "127.0.0.1", "{}", "gloo"),
        ("cpu", "127.0.0.1", "{rollout_gpus: [0]}", "gloo"),
        ("cuda", "127.0.0.1", "{}", "shared"),
        ("cuda", "192.0.2.1", "{}", "gloo"),
        ("cuda", "192.0.2.1", "{rollout_gpus: [0], learner_gpus: [0]}", "shared"),
        ("cuda", "192.0.2.1", "{rollout_gpus: [0], learner_gpus: [1]}", "shared"),
    ],
)
def test_auto_picks_only_what_can_form(
    open_channel: Open, device: str, reachable: str, cluster: str, backend: str
) -> None:
    rank = Rank(device, reachable)
    channel, warnings = open_channel(f"cluster: {cluster}\n", rank)
    assert offered(channel, rank).backend == backend
    assert warnings == [NO_AGENT]


def test_a_member_that_cannot_map_memory_is_reached_by_tcp_and_that_is_said(open_channel: Open) -> None:
    rank = Rank("cuda", "127.0.0.1")
    channel, warnings = open_channel("cluster: {}\n", rank)
    assert offered(channel, rank).backend == "shared"
    channel.acknowledge("m", Version(1, 0), False, "no such process", False)
    assert rank.next("publish").failure == worker_pb2.PUBLISH_FAILURE_REFUSED
    assert rank.next("weight_offer").backend == "gloo"
    assert warnings == [
        NO_AGENT,
        "weights did not reach m through the host's memory: the member refused: no such process. They go to it by TCP "
        "(gloo) from now on",
    ]


def test_with_an_agent_hosts_are_told_and_only_workers_without_one_are_offered_a_link(
    open_channel: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(LABEL_VARIABLE, str(tmp_path))
    rank = Rank("cpu", "127.0.0.1")
    rank.agent = HostAgentConnection("127.0.0.1:1", "127.0.0.1", "127.0.0.1")
    channel, warnings = open_channel("weights: {max_wait_s: 60}\n", rank)
    channel.set_members(4, ["with", "without"], ["with"])
    channel.publish(Version(1, 0), MODEL)
    announced = rank.next("host_version")
    assert announced.sources == [rank.agent.identity.address]
    assert announced.size_bytes == 64 + 2 * 4  # a matrix of 16 bytes in its place of 64, and a bias
    offer = rank.next("weight_offer")
    assert offer.member_id == "without"
    channel.acknowledge("with", Version(1, 0), True, "", False)
    result = rank.next("publish")
    assert (result.member_id, result.ok, result.epoch) == ("with", True, 4)
    assert warnings == []
    rank.agent.close()
