"""Orders to the learner: one export for all identical orders, none for callers that have gone, and a bound."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import grpc
import pytest

from paceline.errors import Busy, Conflict
from paceline.services.common.serving.grpc_server import GrpcServer
from paceline.services.learner.context import MAX_ORDERS, ExportOrder, Orders
from paceline.services.learner.rank import LearnerServicer
from paceline.v1 import learner_pb2, learner_pb2_grpc

DEADLINE_S = 60.0


class Learner(NamedTuple):
    """A learner with a run: its orders, and a client of its service."""

    orders: Orders
    stub: learner_pb2_grpc.LearnerServiceStub


def test_exports_that_want_the_same_are_one_and_others_wait() -> None:
    orders = Orders()
    whole, adapter = ExportOrder("now", False), ExportOrder("now", True)
    first, other, again = (orders.ask_export(order) for order in (whole, adapter, whole))
    assert orders.take_exports() == [(whole, first), (whole, again)]
    assert orders.take_exports() == [(adapter, other)]
    assert orders.take_exports() == []


def test_a_caller_who_has_gone_breaks_nothing() -> None:
    orders = Orders()
    gone, waits = orders.ask_export(ExportOrder("a", False)), orders.ask_export(ExportOrder("b", False))
    gone.cancel()
    ((order, future),) = orders.take_exports()
    assert order.name == "b"
    assert not waits.cancel(), "it is under way, and its result can be set"
    future.set_result("path")
    checkpoint = orders.ask_checkpoint()
    checkpoint.cancel()
    assert orders.take_checkpoints() == []


def test_what_comes_too_late_is_refused() -> None:
    orders = Orders()
    futures = [orders.ask_export(ExportOrder(name, False)) for name in ("a", "b")]
    gone = orders.ask_export(ExportOrder("c", False))
    gone.cancel()
    orders.refuse_all("the run has ended")
    assert orders.export == []
    for future in futures:
        with pytest.raises(Conflict, match="the run has ended"):
            future.result(0)


def test_orders_of_a_kind_are_bounded_until_they_are_taken() -> None:
    orders = Orders()
    exports = [orders.ask_export(ExportOrder(str(number), False)) for number in range(MAX_ORDERS)]
    with pytest.raises(Busy, match="16 orders wait already for the current step to end"):
        orders.ask_export(ExportOrder("one more", False))
    orders.ask_checkpoint()  # the other kind has a separate bound
    orders.take_exports()
    orders.ask_export(ExportOrder("one more", False))
    assert len(exports) == len(orders.export) == MAX_ORDERS


@pytest.fixture
async def learner() -> AsyncIterator[Callable[..., Learner]]:
    async with contextlib.AsyncExitStack() as stack:

        async def learner(**options: Any) -> Learner:
            run = SimpleNamespace(run_id="run-1", session=1, step=3)
            rank: Any = SimpleNamespace(orders=Orders(), current_run=run, place=SimpleNamespace(world_size=1))
            server = GrpcServer("127.0.0.1", 0)
            name = "paceline.v1.LearnerService"
            server.add(LearnerServicer(rank, **options), learner_pb2_grpc.add_LearnerServiceServicer_to_server, name)
            await stack.enter_async_context(server)
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{server.port}"))
            return Learner(rank.orders, learner_pb2_grpc.LearnerServiceStub(channel))

        yield learner


async def test_an_order_that_nothing_comes_of_is_withdrawn_with_a_sentence(learner: Callable[..., Any]) -> None:
    orders, stub = await learner(order_timeout_s=0.01)
    with pytest.raises(grpc.aio.AioRpcError, match=r"the order was not carried out within 0\.01 s") as refused:
        await stub.Checkpoint(learner_pb2.CheckpointRequest(), timeout=DEADLINE_S)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert orders.take_checkpoints() == []


async def test_a_learner_refuses_callers_beyond_the_bound_and_answers_the_others(learner: Callable[..., Any]) -> None:
    orders, stub = await learner()

    async def ask() -> str:
        return str((await stub.Checkpoint(learner_pb2.CheckpointRequest(), timeout=DEADLINE_S)).path)

    calls = [asyncio.create_task(ask()) for _ in range(MAX_ORDERS + 1)]
    (refused,), waiting = await asyncio.wait(calls, timeout=DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        refused.result()
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    for order in orders.take_checkpoints():
        order.set_result(("checkpoints/1-4", 4))
    assert set(await asyncio.gather(*waiting)) == {"checkpoints/1-4"}
