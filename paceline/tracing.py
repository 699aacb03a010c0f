"""Traces: one for each group from lease to training and one for each step, with W3C's format in every header. The ids
are functions of run and group, so every service finds the same trace without a lookup. Spans, and the services'
metrics, go to the OpenTelemetry SDK, and are exported if OTEL_EXPORTER_OTLP_ENDPOINT is set; else they cost little."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.propagate import extract

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricReader
    from opentelemetry.sdk.resources import Resource

ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"


def group_traceparent(run_id: str, group_id: int) -> str:
    return _traceparent(f"{run_id}/group/{group_id}")


def step_traceparent(run_id: str, step: int) -> str:
    return _traceparent(f"{run_id}/step/{step}")


def version_traceparent(run_id: str, version_step: int) -> str:
    """Return the trace context of a version of the weights: the context of the step that made the version."""
    return step_traceparent(run_id, max(0, version_step - 1))


def set_up_tracing(service: str) -> None:
    """Export this process's spans if an OTLP endpoint is configured; once per process."""
    if not os.environ.get(ENDPOINT_VARIABLE):
        return
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=_resource(service))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)


def set_up_metrics(service: str, *, scraped: bool = False) -> None:
    """Collect this process's metrics, once per process. If an OTLP endpoint is configured, export them at the end and
    every OTEL_METRIC_EXPORT_INTERVAL milliseconds (60,000). With `scraped` prometheus_client's registry has them."""
    readers: list[MetricReader] = []
    if os.environ.get(ENDPOINT_VARIABLE):
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

        readers.append(PeriodicExportingMetricReader(OTLPMetricExporter()))
    if scraped:
        from opentelemetry.exporter.prometheus import PrometheusMetricReader

        readers.append(PrometheusMetricReader(scope_info_enabled=False))
    if not readers:
        return
    from opentelemetry import metrics
    from opentelemetry.sdk.metrics import MeterProvider

    metrics.set_meter_provider(MeterProvider(readers, resource=_resource(service)))


def shut_down_tracing() -> None:
    """Flush queued spans; for a process that ends without exit handlers."""
    provider = trace.get_tracer_provider()
    if hasattr(provider, "shutdown"):
        provider.shutdown()


@contextmanager
def span(name: str, traceparent: str = "", **attributes: str | int | float) -> Iterator[trace.Span]:
    """Open a span below `traceparent`, or below the current span; do nothing if no tracer provider is set."""
    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        yield trace.INVALID_SPAN
        return
    context = extract({"traceparent": traceparent}) if traceparent else None
    with trace.get_tracer("paceline").start_as_current_span(name, context=context, attributes=attributes) as current:
        yield current


def _resource(service: str) -> Resource:
    from opentelemetry.sdk.resources import Resource

    return Resource.create({"service.name": f"paceline-{service}"})


def _traceparent(text: str) -> str:
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f"00-{digest[:32]}-{digest[32:48]}-01"
