"""What KEDA and Kubernetes do with an external scaler, for tests: ask as KEDA does, without a token, and size pools.

From the answers KEDA activates a pool (0 to 1) and its autoscaler sizes it: workers = ceil(value / target).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import grpc

from protos.externalscaler import externalscaler_pb2 as keda
from protos.externalscaler import externalscaler_pb2_grpc
from services.local.cluster import LocalCluster


class Keda:
    """One KEDA with a ScaledObject for each pool."""

    def __init__(self, address: str, cluster: LocalCluster, pools: Mapping[str, dict[str, str]]):
        """`pools` has the metadata of each trigger by role; it may be changed between two rounds."""
        self.pools = {role: dict(metadata) for role, metadata in pools.items()}
        self.sizes: dict[str, list[int]] = {role: [] for role in pools}
        """Sizes that each pool had, without repetitions."""
        self._cluster = cluster
        self._channel = grpc.insecure_channel(address)
        self.stub = externalscaler_pb2_grpc.ExternalScalerStub(self._channel)

    def ref(self, role: str) -> keda.ScaledObjectRef:
        """Return what KEDA calls a pool."""
        return keda.ScaledObjectRef(
            name=f"paceline-{role}", namespace="train", scalerMetadata=self.pools[role]
        )

    def round(self) -> None:
        """Ask for every pool once, and size it."""
        for role in self.pools:
            self._cluster.resize(role, self._replicas(role))
            size = self._cluster.size(role)
            if self.sizes[role][-1:] != [size]:
                self.sizes[role].append(size)

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()

    def _replicas(self, role: str) -> int:
        ref = self.ref(role)
        if not self.stub.IsActive(ref).result:
            return 0
        (spec,) = self.stub.GetMetricSpec(ref).metricSpecs
        request = keda.GetMetricsRequest(scaledObjectRef=ref, metricName=spec.metricName)
        (value,) = self.stub.GetMetrics(request).metricValues
        assert value.metricName == spec.metricName
        return max(1, math.ceil(value.metricValueFloat / spec.targetSizeFloat))
