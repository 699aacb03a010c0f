"""The queue of directives is bounded by their kinds, and a burst ends no stream."""

from __future__ import annotations

import pytest
from control_plane import ack

from paceline.services.coordinator.members.registry import ACKS_AT_ONCE, MAX_WAITING, DirectiveQueue
from paceline.v1 import worker_pb2


def response(**directive: object) -> worker_pb2.ConnectResponse:
    return worker_pb2.ConnectResponse(**directive)


async def kinds(outbox: DirectiveQueue) -> list[str]:
    read = []
    while len(outbox):
        directive = await outbox.get()
        assert directive is not None
        read.append(str(directive.WhichOneof("directive")))
    return read


async def test_acknowledgements_that_wait_travel_together() -> None:
    outbox = DirectiveQueue()
    for number in range(2 * ACKS_AT_ONCE + 500):
        assert outbox.put(response(weight_ack=ack("run-1", 1, 0, member_id=f"rollout-{number}")))
    sizes = []
    while len(outbox):
        directive = await outbox.get()
        assert directive is not None
        sizes.append(len(directive.weight_acks.acks))
    assert sizes == [ACKS_AT_ONCE, ACKS_AT_ONCE, 500]


async def test_the_newest_of_what_replaces_the_older_waits_alone() -> None:
    outbox = DirectiveQueue()
    for number in range(10 * MAX_WAITING):
        epoch = worker_pb2.Epoch(run_id="run-1", number=number)
        assert outbox.put(response(epoch=epoch))
        progress = worker_pb2.WeightProgress(member_id=f"rollout-{number % 3}", received_bytes=number)
        assert outbox.put(response(weight_progress=progress))
    assert len(outbox) == 4
    first = await outbox.get()
    assert first is not None
    second = await outbox.get()
    assert second is not None
    assert {first.WhichOneof("directive"), second.WhichOneof("directive")} <= {"epoch", "weight_progress"}
    assert await kinds(outbox) == ["epoch", "weight_progress"]


async def test_the_order_of_everything_else_is_kept_and_bounded() -> None:
    outbox = DirectiveQueue()
    outbox.put(response(run=worker_pb2.RunAssignment(run_id="run-1")))
    outbox.put(response(epoch=worker_pb2.Epoch(number=1)))
    outbox.put(response(idle=worker_pb2.Idle()))
    assert await kinds(outbox) == ["run", "epoch", "idle"]
    for _ in range(MAX_WAITING):
        assert outbox.put(response(weight_offer=worker_pb2.WeightOffer()))
    assert not outbox.put(response(weight_offer=worker_pb2.WeightOffer()))


@pytest.mark.parametrize("ended_first", [True, False])
async def test_the_end_comes_in_place_of_what_waits(ended_first: bool) -> None:
    outbox = DirectiveQueue()
    if ended_first:
        outbox.end()
    outbox.put(response(idle=worker_pb2.Idle()))
    outbox.end()
    assert await outbox.get() is None
    assert await outbox.get() is None
