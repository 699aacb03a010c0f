"""What KEDA and Kubernetes do with a metrics-api trigger, for tests: ask for each pool's number, and size the pool.

From the answer KEDA activates a pool (0 to 1) and its autoscaler sizes it: workers = ceil(value / target), within the bounds of the
ScaledObject. Without an answer the size stays.
"""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.request
from collections.abc import Mapping

from paceline.services.local.cluster import LocalCluster

TARGET = 1.0
ACTIVATION = 0.0
UNKNOWN = 503


class Keda:
    """One KEDA with a ScaledObject for each pool."""

    def __init__(self, url: str, cluster: LocalCluster, pools: Mapping[str, tuple[int, int]]):
        """`url` is that of `/scale`; `pools` has minReplicaCount and maxReplicaCount by role, and may be changed between two
        rounds."""
        self.pools = dict(pools)
        self.sizes: dict[str, list[int]] = {role: [] for role in pools}
        """Sizes that each pool had, without repetitions."""
        self._url, self._cluster = url, cluster

    def round(self) -> None:
        """Ask for every pool once, and size it."""
        for role in self.pools:
            value = self._value(role)
            if value is None:
                continue
            self._cluster.resize(role, self._replicas(role, value))
            size = self._cluster.size(role)
            if self.sizes[role][-1:] != [size]:
                self.sizes[role].append(size)

    def _value(self, role: str) -> float | None:
        try:
            with urllib.request.urlopen(f"{self._url}/{role}", timeout=10) as answer:
                return float(json.loads(answer.read())["desired"])
        except urllib.error.HTTPError as error:
            if error.code != UNKNOWN:
                raise
        except urllib.error.URLError:  # the coordinator is away
            pass
        return None

    def _replicas(self, role: str, value: float) -> int:
        least, most = self.pools[role]
        if value <= ACTIVATION:
            return least
        return min(max(math.ceil(value / TARGET), least, 1), most)
