"""Reports while the coordinator is away: bounded, the newest replace older ones, and no unique report is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch

from paceline.services.learner.rank import MAX_REPLACEABLE, LearnerRank, ReportQueue
from paceline.v1 import worker_pb2

DEADLINE_S = 60.0


def offer(member_id: str, step: int) -> worker_pb2.ConnectRequest:
    message = worker_pb2.WeightOffer(member_id=member_id)
    message.version.step = step
    return worker_pb2.ConnectRequest(weight_offer=message)


def checkpoint(step: int) -> worker_pb2.ConnectRequest:
    return worker_pb2.ConnectRequest(checkpoint=worker_pb2.CheckpointReport(step=step))


def warning(text: str) -> worker_pb2.ConnectRequest:
    return worker_pb2.ConnectRequest(run_report=worker_pb2.RunReport(warning=text))


class Listener:
    """Takes reports while its gate is open."""

    def __init__(self) -> None:
        self.gate, self.called = asyncio.Event(), asyncio.Event()
        self.heard: list[worker_pb2.ConnectRequest] = []

    async def take(self, report: worker_pb2.ConnectRequest) -> None:
        self.called.set()
        await self.gate.wait()
        self.heard.append(report)


async def test_the_newest_of_each_member_is_said_and_every_checkpoint() -> None:
    listener = Listener()
    outgoing = ReportQueue(asyncio.get_running_loop().call_soon_threadsafe, listener.take)
    running = asyncio.create_task(outgoing.run())
    for step in range(5000):
        for member_id in ("a", "b"):
            outgoing.put(offer(member_id, step))
            publish = worker_pb2.PublishReport(member_id=member_id)
            publish.version.step = step
            outgoing.put(worker_pb2.ConnectRequest(publish=publish))
        if step % 1000 == 0:
            outgoing.put(checkpoint(step))
    assert len(outgoing) == 9
    listener.gate.set()
    async with asyncio.timeout(DEADLINE_S):
        await outgoing.emptied()
    offers = [report.weight_offer for report in listener.heard if report.HasField("weight_offer")]
    assert [(o.member_id, o.version.step) for o in offers] == [("a", 4999), ("b", 4999)]
    checkpoints = [report.checkpoint.step for report in listener.heard if report.HasField("checkpoint")]
    assert checkpoints == [0, 1000, 2000, 3000, 4000]
    running.cancel()
    await asyncio.wait([running])


async def test_what_may_be_dropped_is_dropped_oldest_first() -> None:
    outgoing = ReportQueue(asyncio.get_running_loop().call_soon_threadsafe, Listener().take)
    outgoing.put(checkpoint(1))
    for number in range(MAX_REPLACEABLE + 10):
        outgoing.put(warning(f"warning {number}"))
    assert len(outgoing) == MAX_REPLACEABLE + 1


async def test_emptied_waits_for_what_is_being_sent() -> None:
    listener = Listener()
    outgoing = ReportQueue(asyncio.get_running_loop().call_soon_threadsafe, listener.take)
    running = asyncio.create_task(outgoing.run())
    outgoing.put(checkpoint(1))
    emptied = asyncio.create_task(outgoing.emptied())
    async with asyncio.timeout(DEADLINE_S):
        await listener.called.wait()
    assert len(outgoing) == 0  # the listener has it
    await asyncio.sleep(0)  # a task that waits for an empty queue runs
    assert not emptied.done()
    listener.gate.set()
    async with asyncio.timeout(DEADLINE_S):
        await emptied
    assert len(listener.heard) == 1
    running.cancel()
    await asyncio.wait([running])


@pytest.fixture
def rank() -> Iterator[LearnerRank]:
    """A rank whose coordinator is away."""
    rank = LearnerRank("127.0.0.1:1", "learner", torch.device("cpu"), "127.0.0.1", "127.0.0.1", 5.0)
    rank.join()
    yield rank
    rank.background.close()


def test_a_learner_does_not_pile_up_offers_while_the_coordinator_is_away(rank: LearnerRank) -> None:
    for step in range(5000):
        rank.report(offer("m", step))

    async def tasks() -> int:
        return len(asyncio.all_tasks())

    assert rank.background.wait(tasks(), DEADLINE_S) < 20
    assert rank.membership.waiting_reports <= 8
    assert rank.background.wait(rank.send_and_leave(0.1), DEADLINE_S) is False


def test_what_is_said_after_the_end_is_forgotten(rank: LearnerRank) -> None:
    rank.background.close()
    rank.report(offer("m", 1))
    rank.background.post(rank.membership.report(offer("m", 2)))
    rank.background.close()
    assert rank.background.loop.is_closed()
