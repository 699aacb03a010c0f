"""The learner's weight channel and the control plane's messages: orders to hosts, offers to members, and the reports."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from paceline.groups import Version
from paceline.learner.weights.channel import WeightChannel
from paceline.services.common.relay import RelayConnection
from paceline.services.learner.context import Place
from paceline.services.learner.training.publishing import make_channel
from paceline.spec import RunSpec
from paceline.spec.reading import spec_from_yaml
from paceline.v1 import worker_pb2
from paceline.weights.hosts.local_socket import LABEL_VARIABLE
from paceline.weights.hosts.members import PATIENCE

DEADLINE_S = 60.0
MODEL = torch.nn.Linear(2, 2)
SPEC = """
policy: {model_name: org/model}
data: {train: org/data}
rewards: [{function: length}]
"""


class Rank:
    """The part of rank 0 that a channel uses, on a device that only has to be named."""

    def __init__(self, device: str, reachable: str) -> None:
        self.place = Place(0, 1, torch.device(device), weights_bind="127.0.0.1", weights_host=reachable)
        self.relay: Any = SimpleNamespace(client=lambda: None, identity=None)
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
    """Open a channel for a spec with these lines added; return it with its warnings."""
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


@pytest.fixture
def with_agent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Rank]:
    """A rank on a host with a relay."""
    monkeypatch.setenv(LABEL_VARIABLE, str(tmp_path))
    rank = Rank("cpu", "127.0.0.1")
    rank.relay = RelayConnection("127.0.0.1:1", "127.0.0.1", "127.0.0.1")
    yield rank
    rank.relay.close()


def test_where_no_agent_can_start_the_object_store_serves_and_that_is_said(open_channel: Open, tmp_path: Path) -> None:
    rank = Rank("cpu", "127.0.0.1")
    channel, warnings = open_channel("weights: {}\n", rank)
    channel.set_members(1, ["m"], ["m"])
    channel.publish(Version(1, 0), MODEL)
    offer = rank.next("weight_offer")
    assert (offer.member_id, offer.stored.url) == ("m", str(tmp_path / "weights"))
    assert warnings == [
        "a host of the learner has no relay for weights (see its log); every worker reads weights from "
        f"{tmp_path / 'weights'}, as with weights.channel: delta"
    ]


def test_a_member_that_agents_fail_to_reach_is_offered_the_store_and_that_is_said(
    open_channel: Open, with_agent: Rank, tmp_path: Path
) -> None:
    channel, warnings = open_channel("weights: {max_wait_s: 60}\n", with_agent)
    channel.set_members(1, ["m"], ["m"])
    channel.publish(Version(1, 0), MODEL)
    with_agent.next("host_version")
    for _ in range(PATIENCE):
        channel.acknowledge("m", Version(1, 0), False, "no route", False)
        assert with_agent.next("publish").failure == worker_pb2.PUBLISH_FAILURE_REFUSED
    assert with_agent.next("weight_offer").stored.url == str(tmp_path / "weights")
    assert warnings == [
        "3 attempts in a row to bring weights to m failed, the last with version 0: the member refused: no route. From "
        f"now on the member is offered the versions in {tmp_path / 'weights'}"
    ]


def test_a_member_whose_stored_version_is_damaged_gets_a_snapshot(open_channel: Open, with_agent: Rank) -> None:
    channel, _ = open_channel("weights: {max_wait_s: 60}\n", with_agent)
    channel.set_members(1, ["m"])
    channel.publish(Version(1, 0), MODEL)
    assert with_agent.next("weight_offer").stored.anchor_version.step == 0
    channel.acknowledge("m", Version(1, 0), True, "", False)
    channel.publish(Version(1, 1), MODEL)
    offer = with_agent.next("weight_offer")
    assert (offer.version.step, offer.stored.anchor_version.step) == (1, 0)
    channel.acknowledge("m", Version(1, 1), False, "damaged", True)
    assert with_agent.next("weight_offer").stored.anchor_version.step == 1
    assert not channel.wants_snapshot  # rank 0 has written it alone


def test_with_an_agent_hosts_are_told_and_only_workers_without_one_are_offered_the_store(
    open_channel: Open, with_agent: Rank, tmp_path: Path
) -> None:
    rank = with_agent
    channel, warnings = open_channel("weights: {max_wait_s: 60}\n", rank)
    channel.set_members(4, ["with", "without"], ["with"])
    channel.publish(Version(1, 0), MODEL)
    announced = rank.next("host_version")
    assert announced.sources == [rank.relay.identity.address]
    assert announced.size_bytes == 64 + 2 * 4  # a matrix of 16 bytes at its offset of 64, and a bias
    offer = rank.next("weight_offer")
    assert (offer.member_id, offer.stored.url) == ("without", str(tmp_path / "weights"))
    channel.acknowledge("with", Version(1, 0), True, "", False)
    result = rank.next("publish")
    assert (result.member_id, result.ok, result.epoch) == ("with", True, 4)
    assert warnings == []
