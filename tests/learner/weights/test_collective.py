"""The collective channel on rank 0 and on the other ranks."""

from __future__ import annotations

from unittest.mock import MagicMock, call

import torch
from torch import nn

from learner.weights.collective import CollectiveChannel, Rank0CollectiveChannel
from paceline.groups import Version

V1 = Version(1, 1)


def test_rank_0_announces_a_version_before_it_stages_it() -> None:
    calls = MagicMock()
    channel = Rank0CollectiveChannel(calls.publisher, calls.catch_up, torch.float32, calls.announce)
    channel.publish(V1, nn.Linear(2, 2))
    assert [name for name, _, _ in calls.mock_calls] == ["announce", "publisher.stage", "catch_up.stage"]
    tensors = calls.publisher.stage.call_args.args[1]
    assert set(tensors) == {"weight", "bias"}
    calls.reset_mock()
    channel.set_members(3, ["m"])
    channel.close()
    assert calls.mock_calls == [
        call.catch_up.set_members(3, ["m"]),
        call.catch_up.close(),
        call.publisher.close(),
    ]


def test_another_rank_gathers_and_has_no_members() -> None:
    channel = CollectiveChannel(torch.float32)
    channel.publish(V1, nn.Linear(2, 2))
    channel.set_members(3, ["m"])
    channel.acknowledge("m", V1, ok=True, message="", damaged=False)
    channel.progress("m", V1)
    channel.interrupt("away")
    channel.write_snapshot()
    channel.close()
    assert not channel.wants_snapshot
