"""`paceline up --scale`: gives the pools of one host the sizes that the coordinator decides, as KEDA does in a cluster.
One thread requests the coordinator's status and adds or removes services. A removed service drains: it returns its
work before it ends. Nothing changes while the coordinator is away or does not know the sizes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

import grpc

from paceline.calls.connection import status_name
from paceline.calls.token import open_channel
from paceline.host.resources import usable_cores
from paceline.services.local.cluster import LocalCluster
from paceline.spec import ClusterSection
from paceline.v1 import status_pb2, status_pb2_grpc

ASK_S = 2.0
"""Seconds between two requests of the coordinator's status."""

CALL_S = 10.0
AWAY = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED"})
"""gRPC statuses after which a failed request is simply repeated."""

COLD_START_S, IDLE_S, HOLD_S = 20.0, 60.0, 120.0
"""Seconds: coldStartSeconds, idleSeconds and holdSeconds of a host's pools; processes start faster than hosts do."""


def scaled_pools(sizes: ClusterSection, bounds: Mapping[str, tuple[int, int]]) -> list[str]:
    """Return the coordinator's options for each pool that the runs of this host need. `bounds` maps a role to the
    smallest and largest number of its workers; default: none between runs, and at most one for each core, or for
    workers with GPUs the number in the spec."""
    numbers = {
        "rollout": (sizes.rollout_workers, sizes.rollout_gpus),
        "reward": (sizes.reward_workers, sizes.reward_gpus),
        "environment": (sizes.environment_workers or 0, ()),
    }
    options: list[str] = []
    for role, (first, gpus) in numbers.items():
        if not first:
            continue
        least, most = bounds.get(role, (0, first if gpus else max(first, usable_cores())))
        settings = {
            "role": role,
            "minWorkers": least,
            "maxWorkers": most,
            "firstWorkers": min(max(first, least), most),
            "coldStartSeconds": COLD_START_S,
            "idleSeconds": IDLE_S,
            "holdSeconds": HOLD_S,
        }
        options += ["--pool", ",".join(f"{key}={value}" for key, value in settings.items())]
    return options


class LocalScaler:
    """Gives the pools of one cluster the coordinator's sizes, from entry to exit."""

    def __init__(self, cluster: LocalCluster, say: Callable[[str], None], ask_s: float = ASK_S):
        self._cluster, self._say, self._ask_s = cluster, say, ask_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scaler", daemon=True)

    def __enter__(self) -> LocalScaler:
        self._thread.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """End the thread before the cluster stops, so that nothing is started after that."""
        self._ended.set()
        self._thread.join(CALL_S + self._ask_s)

    def _run(self) -> None:
        with open_channel(self._cluster.address, Path(self._cluster.token_file), []) as channel:
            stub = status_pb2_grpc.StatusServiceStub(channel)
            while not self._ended.wait(self._ask_s):
                for pool in self._scaled(stub):
                    self._apply(pool.name, pool.desired)

    def _scaled(self, stub: status_pb2_grpc.StatusServiceStub) -> list[status_pb2.PoolStatus]:
        """Return the pools with a size to follow; none if the coordinator does not answer or does not know the sizes."""
        try:
            status = stub.Status(status_pb2.StatusRequest(), timeout=CALL_S)
        except grpc.RpcError as error:
            if status_name(error) not in AWAY and not self._ended.is_set():
                self._say(f"pools keep their sizes: {error.details()}")
            return []
        return [pool for pool in status.pools if pool.is_scaled]

    def _apply(self, role: str, size: int) -> None:
        before = self._cluster.size(role)
        if size != before and not self._ended.is_set():
            self._say(f"{role} workers: {before} become {size} (`paceline status` explains the size)")
            self._cluster.resize(role, size)
