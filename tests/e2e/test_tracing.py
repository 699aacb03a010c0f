"""Spans and metrics of all services, received as a collector would: one trace for a group from lease to score, one for a
step, and what every version of the weights cost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from forked_services import ForkedCluster
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from paceline.client import Client
from paceline.spec import ClusterSection, RunSpec
from paceline.tracing import ENDPOINT_VARIABLE, group_traceparent, step_traceparent


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps (trace id, span name) of everything that is exported to it."""

    def __init__(self) -> None:
        self.spans: set[tuple[str, str]] = set()
        self._lock = threading.Lock()

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        with self._lock:
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    self.spans |= {(span.trace_id.hex(), span.name) for span in scope.spans}
        return trace_service_pb2.ExportTraceServiceResponse()


class MetricsCollector(metrics_service_pb2_grpc.MetricsServiceServicer):
    """Keeps the newest number of values in each histogram, and the newest value of each gauge, by metric."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self.runs: set[str] = set()

    def Export(
        self, request: metrics_service_pb2.ExportMetricsServiceRequest, context: grpc.ServicerContext
    ) -> metrics_service_pb2.ExportMetricsServiceResponse:
        for resource in request.resource_metrics:
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    for point in metric.histogram.data_points:
                        self.values[metric.name] = float(point.count)
                    for point in metric.gauge.data_points:
                        self.values[metric.name] = point.as_double
                        self.runs |= {a.value.string_value for a in point.attributes if a.key == "paceline.run"}
        return metrics_service_pb2.ExportMetricsServiceResponse()


def trace_id(traceparent: str) -> str:
    return traceparent.split("-")[1]


@pytest.mark.slow
def test_a_group_and_a_step_each_have_one_trace_over_all_services_and_a_version_its_metrics(
    make_spec: Callable[..., RunSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector, metrics = Collector(), MetricsCollector()
    server = grpc.server(ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(metrics, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv(ENDPOINT_VARIABLE, f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "200")
    try:
        sizes = ClusterSection(rollout_workers=1, reward_workers=1, learner_ranks=1)
        with ForkedCluster(tmp_path, sizes) as cluster, Client(cluster.address) as client:
            run = client.wait(client.submit(make_spec(grpo={"max_num_steps": 3})).run_id, timeout_s=120)
            assert run.step == 3, run.message
    finally:
        server.stop(1.0).wait()

    group, step = (trace_id(text) for text in (group_traceparent(run.run_id, 0), step_traceparent(run.run_id, 1)))
    assert {name for trace, name in collector.spans if trace == group} >= {"lease", "generate", "score"}
    assert {name for trace, name in collector.spans if trace == step} >= {
        *("wait", "train", "publish"),
        "weights.swap",
    }
    # The versions of the start and after each step; one that was overtaken reached nobody.
    assert metrics.runs == {run.run_id}
    assert metrics.values["paceline.weights.wait"] == 4.0
    assert metrics.values["paceline.weights.version"] == 3.0
    assert metrics.values["paceline.weights.members"] == 1.0
    for name in ("size", "gather", "transfer", "swap", "pause"):
        assert 1.0 <= metrics.values[f"paceline.weights.{name}"] <= 4.0
    assert metrics.values["paceline.weights.epoch"] >= 1.0
