"""The scaler and the status over real gRPC, as serving.py adds them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from control_plane import DEADLINE_S, Plane, learner, refusal

from protos.externalscaler import externalscaler_pb2 as keda
from protos.externalscaler import externalscaler_pb2_grpc
from protos.paceline.v1 import status_pb2, status_pb2_grpc
from services.coordinator.scaling_servicers import METRIC, ExternalScalerServicer, StatusServicer


@pytest.fixture
async def plane(tmp_path: Path) -> AsyncIterator[Plane]:
    made = Plane(tmp_path)
    made.server.add(
        ExternalScalerServicer(made.coordinator),
        externalscaler_pb2_grpc.add_ExternalScalerServicer_to_server,
        "externalscaler.ExternalScaler",
    )
    made.server.add(
        StatusServicer(made.coordinator),
        status_pb2_grpc.add_StatusServiceServicer_to_server,
        "paceline.v1.StatusService",
    )
    await made.start()
    yield made
    await made.stop()


def ref(**metadata: str) -> keda.ScaledObjectRef:
    return keda.ScaledObjectRef(name="pool", namespace="train", scalerMetadata=metadata)


async def test_the_wire_is_kedas(plane: Plane) -> None:
    """Package, methods, fields and numbers, as KEDA publishes them."""
    service = keda.DESCRIPTOR.services_by_name["ExternalScaler"]
    assert service.full_name == "externalscaler.ExternalScaler"
    methods = {m.name: (m.input_type.name, m.output_type.name, m.server_streaming) for m in service.methods}
    assert methods == {
        "IsActive": ("ScaledObjectRef", "IsActiveResponse", False),
        "StreamIsActive": ("ScaledObjectRef", "IsActiveResponse", True),
        "GetMetricSpec": ("ScaledObjectRef", "GetMetricSpecResponse", False),
        "GetMetrics": ("GetMetricsRequest", "GetMetricsResponse", False),
    }
    fields = {
        name: {f.name: f.number for f in message.fields}
        for name, message in keda.DESCRIPTOR.message_types_by_name.items()
    }
    assert fields == {
        "ScaledObjectRef": {"name": 1, "namespace": 2, "scalerMetadata": 3},
        "IsActiveResponse": {"result": 1},
        "GetMetricSpecResponse": {"metricSpecs": 1},
        "MetricSpec": {"metricName": 1, "targetSize": 2, "targetSizeFloat": 3},
        "GetMetricsRequest": {"scaledObjectRef": 1, "metricName": 2},
        "GetMetricsResponse": {"metricValues": 1},
        "MetricValue": {"metricName": 1, "metricValue": 2, "metricValueFloat": 3},
    }


async def test_a_run_activates_a_pool_and_the_stream_says_so(plane: Plane) -> None:
    stub = externalscaler_pb2_grpc.ExternalScalerStub(plane.channel)
    pool = ref(pool="rollout", firstWorkers="2", scalerAddress="somewhere:1")
    await plane.coordinator.scaler.check()
    assert not (await stub.IsActive(pool)).result
    stream = stub.StreamIsActive(pool)
    async with asyncio.timeout(DEADLINE_S):
        assert not (await stream.read()).result
        await plane.run_one()
        assert (await stream.read()).result
    (spec,) = (await stub.GetMetricSpec(pool)).metricSpecs
    assert (spec.metricName, spec.targetSize, spec.targetSizeFloat) == (METRIC, 1, 1.0)
    (value,) = (
        await stub.GetMetrics(keda.GetMetricsRequest(scaledObjectRef=pool, metricName=METRIC))
    ).metricValues
    assert (value.metricName, value.metricValue, value.metricValueFloat) == (METRIC, 2, 2.0)
    stream.cancel()


async def test_a_stream_ends_with_the_coordinator(plane: Plane) -> None:
    stub = externalscaler_pb2_grpc.ExternalScalerStub(plane.channel)
    await plane.coordinator.scaler.check()
    stream = stub.StreamIsActive(ref(pool="reward"))
    async with asyncio.timeout(DEADLINE_S):
        await stream.read()
        await plane.coordinator.end_streams()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_bad_metadata_are_explained(plane: Plane) -> None:
    stub = externalscaler_pb2_grpc.ExternalScalerStub(plane.channel)
    for call in (
        stub.IsActive(ref(pool="learner")),
        stub.StreamIsActive(ref(pool="learner")).read(),
        stub.GetMetricSpec(ref(pool="learner")),
        stub.GetMetrics(keda.GetMetricsRequest(scaledObjectRef=ref(pool="learner"))),
    ):
        code, text = await refusal(call)
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert "pool is 'learner'; it has to be one of rollout, reward, environment" in text
    request = keda.GetMetricsRequest(scaledObjectRef=ref(pool="reward"), metricName="queue")
    code, text = await refusal(stub.GetMetrics(request))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert "there is no metric 'queue'" in text


async def test_a_pool_that_is_not_decided_yet_is_unavailable(plane: Plane) -> None:
    """KEDA then keeps the present size."""
    stub = externalscaler_pb2_grpc.ExternalScalerStub(plane.channel)
    code, text = await refusal(stub.IsActive(ref(pool="rollout", members="a-")))
    assert code == grpc.StatusCode.UNAVAILABLE
    assert "keep the present ones" in text
    await plane.coordinator.scaler.check()
    assert not (await stub.IsActive(ref(pool="rollout", members="a-"))).result


async def test_the_status_names_run_advice_and_pools(plane: Plane) -> None:
    stub = status_pb2_grpc.StatusServiceStub(plane.channel)
    await plane.coordinator.scaler.check()
    nothing = await stub.Status(status_pb2.StatusRequest())
    assert (nothing.run_id, nothing.advice, list(nothing.pools)) == ("", "no run trains on groups now", [])
    run = await plane.run_one()
    worker = learner(plane)
    await worker.hear("run")
    await plane.coordinator.scaler.check()
    status = await stub.Status(status_pb2.StatusRequest())
    assert (status.run_id, status.state, status.step) == (run.run_id, "running", 0)
    assert status.max_num_steps == run.max_num_steps
    assert status.advice.startswith("no rollout worker takes work: start one")
    assert {pool.name: pool.ready for pool in status.pools} == {"rollout": 0, "reward": 0}
    worker.hang_up()
