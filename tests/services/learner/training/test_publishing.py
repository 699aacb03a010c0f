"""Published versions, and rosters that are named before the channel exists."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

from torch import nn

from paceline.groups import Version
from paceline.services.learner.training.publishing import Publishing
from paceline.v1 import worker_pb2


class Bench:
    def __init__(self, early: worker_pb2.Epoch | None = None) -> None:
        self.channel, self.model = MagicMock(), nn.Linear(1, 1)
        rank: Any = SimpleNamespace(assigned=SimpleNamespace(early_roster=early))
        spec: Any = None
        assignment = worker_pb2.RunAssignment(run_id="run", session=3, publish_from_step=2)
        self.publishing = Publishing(assignment, spec, rank, print, make=lambda *_: self.channel)


def roster(number: int, run_id: str = "run") -> worker_pb2.Epoch:
    return worker_pb2.Epoch(run_id=run_id, number=number, member_ids=["m"])


def test_replayed_steps_are_not_published_except_the_last() -> None:
    bench = Bench()
    bench.publishing.publish(5, last=True)  # without a channel
    bench.publishing.open(bench.model)
    bench.publishing.publish(1, last=False)
    bench.publishing.publish(1, last=True)
    bench.publishing.publish(2, last=False)
    assert bench.channel.publish.mock_calls == [
        call(Version(3, 1), bench.model),
        call(Version(3, 2), bench.model),
    ]


def test_the_newest_roster_named_before_the_channel_reaches_it() -> None:
    bench = Bench(early=roster(1))
    bench.publishing.open(bench.model)
    assert bench.channel.mock_calls == [call.set_members(1, ["m"], [])]
    later = Bench(early=roster(1))
    by_host = roster(2)
    by_host.host_member_ids.append("m")
    later.publishing.set_members(by_host)
    later.publishing.open(later.model)
    assert later.channel.mock_calls == [call.set_members(2, ["m"], ["m"])]


def test_messages_of_another_run_are_ignored() -> None:
    bench = Bench(early=roster(1, "another"))
    bench.publishing.open(bench.model)
    bench.publishing.set_members(roster(2, "another"))
    bench.publishing.acknowledge(worker_pb2.WeightAck(run_id="another", member_id="m", ok=True))
    bench.publishing.progress(worker_pb2.WeightProgress(run_id="another", member_id="m"))
    assert bench.channel.mock_calls == []


def test_a_member_s_answer_and_progress_reach_the_channel() -> None:
    bench = Bench()
    ack = worker_pb2.WeightAck(run_id="run", member_id="m", ok=True, message="held")
    ack.version.session, ack.version.step = 3, 2
    progress = worker_pb2.WeightProgress(
        run_id="run",
        member_id="m",
        version=ack.version,
        phase=worker_pb2.WEIGHT_PHASE_LOADING,
        received_bytes=7,
    )
    bench.publishing.acknowledge(ack)  # without a channel
    bench.publishing.open(bench.model)
    bench.publishing.acknowledge(ack)
    bench.publishing.progress(progress)
    assert bench.channel.mock_calls == [
        call.acknowledge("m", Version(3, 2), True, "held", False),
        call.progress("m", Version(3, 2), 7, True),
    ]


def test_without_a_channel_nothing_is_wanted() -> None:
    bench = Bench()
    assert not bench.publishing.wants_snapshot
    bench.publishing.write_snapshot()
    bench.publishing.interrupt("away")
    bench.publishing.close()
    assert bench.channel.mock_calls == []
