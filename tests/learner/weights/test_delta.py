"""The delta channel on rank 0 and on the other ranks."""

from __future__ import annotations

from unittest.mock import MagicMock

import torch
from torch import nn

from paceline.groups import Version
from paceline.learner.weights.delta import DeltaChannel, Rank0DeltaChannel
from paceline.weights.store.version_source import WholeSlices

V1 = Version(1, 1)


def recorder() -> MagicMock:
    """A writer that takes each version at once, among others."""
    calls = MagicMock()
    calls.writer.take.side_effect = lambda version, take, tensors: calls.taken(take(None))
    return calls


def names(calls: MagicMock) -> list[str]:
    return [name for name, _, _ in calls.mock_calls]


def test_rank_0_writes_as_the_others_do_and_makes_the_offers() -> None:
    calls = recorder()
    channel = Rank0DeltaChannel(calls.writer, calls.offers, torch.float32, calls.announce)
    channel.publish(V1, nn.Linear(2, 2))
    channel.write_snapshot()
    channel.acknowledge("m", V1, ok=True, message="", damaged=False)
    channel.close()
    assert names(calls) == [
        *("writer.take", "announce", "taken", "offers.snapshot_ordered", "writer.put_snapshot"),
        *("offers.answer", "offers.close", "writer.close"),
    ]
    assert isinstance(calls.taken.call_args.args[0], WholeSlices)


def test_another_rank_writes_alone_and_wants_no_snapshot() -> None:
    calls = recorder()
    channel = DeltaChannel(calls.writer, torch.float32)
    channel.publish(V1, nn.Linear(2, 2))
    channel.set_members(3, ["m"])
    channel.acknowledge("m", V1, ok=True, message="", damaged=False)
    channel.progress("m", V1)
    channel.interrupt("away")
    assert not channel.wants_snapshot
    channel.write_snapshot()
    channel.close()
    assert names(calls) == ["writer.take", "taken", "writer.check", "writer.put_snapshot", "writer.close"]
