"""A rank waits without a limit for an unreachable coordinator, unless it has to stop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from episode_groups import episode_group

from paceline.errors import Unavailable
from paceline.services.learner.context import BackgroundLoop
from paceline.services.learner.training.batches import BatchClient, RankBatch
from paceline.v1 import exchange_pb2 as pb


class Away:
    """A membership whose coordinator answers once `back` is set."""

    def __init__(self) -> None:
        self.back = asyncio.Event()

    async def request(self, request: pb.ExchangeRequest, payloads: Any = ()) -> Any:
        await self.back.wait()
        reply = pb.ExchangeReply(status=pb.REPLY_STATUS_OK)
        reply.batch.state = pb.BATCH_STATE_END
        return reply, []


@pytest.fixture
def rank() -> Any:
    background = BackgroundLoop(poll_s=0.01)
    yield SimpleNamespace(
        place=SimpleNamespace(rank=0, world_size=1),
        background=background,
        membership=Away(),
        stopping=threading.Event(),
        grace_s=0.01,
    )
    background.close()


def test_hours_without_a_coordinator_end_nothing(rank: Any) -> None:
    now_s, looks = 0.0, 0

    def monotonic() -> float:
        nonlocal now_s, looks
        now_s, looks = now_s + 15_000.0, looks + 1
        if looks == 4:
            rank.background.call(rank.membership.back.set)
        return now_s

    with contextlib.closing(BackgroundLoop(monotonic, poll_s=0.01)) as rank.background:
        batch = BatchClient("run-1", 1, rank).fetch(0)
    assert batch is not None
    assert batch.is_end
    assert now_s > 4 * 15_000.0 - 1


def test_a_rank_that_was_told_to_stop_waits_for_no_batch_and_its_grace_for_a_receipt(rank: Any) -> None:
    client = BatchClient("run-1", 1, rank)
    rank.stopping.set()
    assert client.fetch(0) is None
    with pytest.raises(Unavailable, match="before this rank had to stop"):
        client.send_receipt(RankBatch.end_of_run(), 0, 0, {})


def test_tokens_of_completions_that_were_cut_off_count_though_they_do_not_train() -> None:
    groups = [episode_group([1.0, 0.0]), episode_group([1.0, 0.0], group_id=8)]
    cut_off = replace(groups[0], completions=tuple(replace(c, finish_reason="length") for c in groups[0].completions))
    assert RankBatch(pb.BatchReply(), [cut_off, groups[1]]).num_tokens == 12
