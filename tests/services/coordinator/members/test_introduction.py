"""Conditions for becoming a member, and for taking a member's id."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from control_plane import Plane, Worker, learner, refusal, rollout

from paceline.errors import Conflict, InvalidInput
from paceline.services.coordinator.members.introduction import check_hello, check_key
from paceline.v1 import common_pb2, worker_pb2
from paceline.wire import PROTOCOL


async def test_a_stream_has_one_hello(plane: Plane) -> None:
    worker = rollout(plane)
    await worker.hear("welcome")
    worker.say(hello=worker_pb2.Hello(role=common_pb2.ROLE_REWARD, member_id="another"))
    code, details = await _end_of(worker)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "open a new stream" in details
    assert plane.coordinator.members.get("another") is None


async def test_a_living_members_place_is_not_to_be_had_without_its_secret(plane: Plane) -> None:
    first = rollout(plane)
    await first.hear("welcome")
    for hello in ({}, {"secret": b"guessed"}):
        code, details = await refusal(rollout(plane, **hello).call.read())
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "does not have its secret" in details
    other_role = Worker(plane, common_pb2.ROLE_LEARNER, "rollout-1", secret=first.secret)
    code, details = await refusal(other_role.call.read())
    assert "belongs to a rollout worker" in details
    member = plane.coordinator.members.get("rollout-1")
    assert member is not None
    assert member.connected, "the first one is untouched"


async def test_a_member_that_was_heard_keeps_its_place_over_a_broken_stream(plane: Plane) -> None:
    first = rollout(plane)
    await first.hear("welcome")
    first.say(heartbeat=worker_pb2.Heartbeat())
    first.hang_up()
    await first.hear_the_end()
    code, _ = await refusal(rollout(plane).call.read())
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    await rollout(plane, secret=first.secret).hear("welcome")


async def test_a_welcome_that_was_lost_costs_no_place(plane: Plane) -> None:
    first = rollout(plane)
    await first.hear("welcome")
    second = rollout(plane, secret=first.secret)
    await second.hear("welcome")  # its worker never reads it
    again = rollout(plane, secret=first.secret)
    await again.hear("welcome")
    assert len({first.secret, second.secret, again.secret}) == 3


async def test_after_a_restart_an_expected_holder_comes_back_with_any_secret(tmp_path: Path) -> None:
    plane = await Plane.started(tmp_path)
    run = await plane.run_one()
    await learner(plane).hear("run")
    await plane.stop()
    again = await Plane.started(tmp_path)
    try:
        back = learner(again, session=1, run_id=run.run_id, secret=b"of the life before")
        await back.hear("epoch")
        assert again.ledger.run(run.run_id)["session"] == 1
    finally:
        await again.stop()


async def _end_of(worker: Worker) -> tuple[grpc.StatusCode, str]:
    async def read_on() -> None:
        while await worker.call.read() is not grpc.aio.EOF:
            pass

    return await refusal(read_on())


def test_the_key_for_the_exchange_is_whole_and_the_workers_alone() -> None:
    hello = worker_pb2.Hello(role=common_pb2.ROLE_REWARD, member_id="reward-1", protocol=PROTOCOL)
    check_hello(hello)
    check_key(hello, None, encrypted=False)
    with pytest.raises(InvalidInput, match="names no key for the exchange, which is encrypted"):
        check_key(hello, None, encrypted=True)
    hello.exchange_key = bytes(31)
    with pytest.raises(InvalidInput, match="exchange_key of worker reward-1 has 31 bytes, not 32"):
        check_hello(hello)
    hello.exchange_key = bytes(32)
    check_hello(hello)
    check_key(hello, "reward-1", encrypted=True)
    with pytest.raises(Conflict, match="is the key of another member"):
        check_key(hello, "reward-2", encrypted=True)
