"""Orders to the learner: one export for all that want the same, none for callers that have gone, and a bound."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from paceline.errors import Busy, Conflict, Unavailable
from paceline.services.common.serving.grpc_server import GrpcServer
from paceline.services.learner import rank as servicer
from paceline.services.learner.context import MAX_ORDERS, ExportOrder, Orders
from paceline.services.learner.rank import LearnerServicer
from paceline.v1 import learner_pb2, learner_pb2_grpc

DEADLINE_S = 60.0


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
    with pytest.raises(Busy, match="16 such orders wait for the current step to end; one is enough"):
        orders.ask_export(ExportOrder("one more", False))
    orders.ask_checkpoint()  # the other kind has a bound of its own
    orders.take_exports()
    orders.ask_export(ExportOrder("one more", False))
    assert len(exports) == len(orders.export) == MAX_ORDERS


async def test_an_order_that_nothing_comes_of_is_withdrawn_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(servicer, "ORDER_TIMEOUT_S", 0.01)
    orders = Orders()
    with pytest.raises(Unavailable, match="the order was not carried out within"):
        await servicer._carried_out(orders.ask_checkpoint())
    assert orders.take_checkpoints() == []


async def test_a_learner_refuses_callers_beyond_the_bound_and_answers_the_others() -> None:
    run = SimpleNamespace(run_id="run-1", session=1, step=3)
    rank = SimpleNamespace(orders=Orders(), current_run=run, world_size=1)
    server = GrpcServer("127.0.0.1", 0)
    name = "paceline.v1.LearnerService"
    server.add(LearnerServicer(cast(Any, rank)), learner_pb2_grpc.add_LearnerServiceServicer_to_server, name)
    async with server, grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        ask = learner_pb2_grpc.LearnerServiceStub(channel).Checkpoint
        calls = [ask(learner_pb2.CheckpointRequest(), timeout=DEADLINE_S) for _ in range(MAX_ORDERS)]
        async with asyncio.timeout(DEADLINE_S):
            while len(rank.orders.checkpoint) < MAX_ORDERS:  # noqa: ASYNC110 - a call on its way has no event
                await asyncio.sleep(0.01)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ask(learner_pb2.CheckpointRequest(), timeout=DEADLINE_S)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for order in rank.orders.take_checkpoints():
            order.set_result(("checkpoints/1-4", 4))
        assert {reply.path for reply in await asyncio.gather(*calls)} == {"checkpoints/1-4"}
