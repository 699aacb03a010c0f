"""View of a campaign's runs from outside: the time of each step, phases, and the services that are unharmed."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Iterator
from types import TracebackType

import grpc
from faults import Fault

from paceline.calls.token import metadata, open_channel, read_token, token_path
from paceline.client import Client
from paceline.errors import PacelineError
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.local.cluster import LocalCluster
from paceline.v1 import common_pb2, learner_pb2, learner_pb2_grpc, worker_pb2
from paceline.v1.common_pb2 import Role

POLL_S = 0.02
UNKNOWN_STEP = -1
SILENT_S = 2.5
"""A worker says something every second; one that has not for this long is not whole."""


class StepClock:
    """Measures the longest time between two trained steps of a run: reads the ledger's file on a thread, so that it goes on
    while services are dead, and by this process's clock."""

    def __init__(self, cluster: LocalCluster, run_id: str):
        self.longest_s = 0.0
        """Between the ends of two steps that follow each other."""
        self.at_step = -1
        """The later of the two."""
        self._cluster, self._run_id = cluster, run_id
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="step clock")

    def __enter__(self) -> StepClock:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        step, moved_s = 0, time.monotonic()
        while not self._done.wait(POLL_S):
            now_s, new_step = time.monotonic(), progress(self._cluster, self._run_id)[1]
            if new_step in (step, UNKNOWN_STEP):
                continue
            if step and now_s - moved_s > self.longest_s:
                self.longest_s, self.at_step = now_s - moved_s, new_step - 1
            step, moved_s = new_step, now_s


def progress(cluster: LocalCluster, run_id: str) -> tuple[str, int]:
    """State and next step, from the file: also while there is no coordinator. Of a file that cannot be read, `unknown`."""
    try:
        with contextlib.closing(Ledger(cluster.directory / "ledger.sqlite", read_only=True)) as ledger:
            row = ledger.run(run_id)
            return row["state"], row["next_step"]
    except (PacelineError, sqlite3.Error):
        return "unknown", UNKNOWN_STEP


def coordinator_address(cluster: LocalCluster) -> str:
    """Its own address, not the proxy's."""
    return (cluster.directory / "logs" / "coordinator.address").read_text().strip()


def phase_of(cluster: LocalCluster, fault: Fault) -> str:
    """Return the service's activity just before the fault, as far as others can see."""
    try:
        with _client(cluster) as client:
            members = client.members()
    except PacelineError:
        return "while the coordinator was away"
    if fault.role not in ("rollout", "reward", "environment", "learner"):
        return "serving"
    for member in members:
        role = Role.Name(member.role).removeprefix("ROLE_").lower()
        if role == fault.role and member.member_id.startswith(f"{fault.role}-{fault.index}-"):
            if role == "learner" and not member.address:
                continue  # a rank that only the first one speaks for
            if role == "learner":
                return _learner_phase(member.address)
            return "working" if member.held else "waiting"
    return "starting"


def _learner_phase(address: str) -> str:
    with open_channel(address, known=lambda: metadata(read_token(token_path()))) as channel:
        stub = learner_pb2_grpc.LearnerServiceStub(channel)
        try:
            status = stub.Status(learner_pb2.LearnerServiceStatusRequest(), timeout=1.0)
        except grpc.RpcError:
            return "not answering"
    return str(status.phase)


def whole_others(cluster: LocalCluster, fault: Fault, paused: set[tuple[str, int]]) -> int:
    """Workers of the fault's role beside the one that it is for that belong to the coordinator and work; a rollout worker
    needs weights for that. 0 while the coordinator is away."""
    try:
        with _client(cluster) as client:
            members = client.members()
    except PacelineError:
        return 0
    indices = {int(member.member_id.split("-")[1]) for member in members if _is_whole(member, fault.role)}
    return len({index for index in indices - {fault.index} if (fault.role, index) not in paused})


def is_whole(cluster: LocalCluster, fault: Fault) -> bool:
    """Return whether the worker that a fault is for belongs to the coordinator and works."""
    try:
        with _client(cluster) as client:
            members = client.members()
    except PacelineError:
        return False
    name = f"{fault.role}-{fault.index}-"
    return any(_is_whole(member, fault.role) for member in members if member.member_id.startswith(name))


def _is_whole(member: worker_pb2.Member, role: str) -> bool:
    ready = member.role != common_pb2.ROLE_ROLLOUT or member.HasField("version")
    return member.member_id.startswith(f"{role}-") and member.silent_s < SILENT_S and ready


@contextlib.contextmanager
def _client(cluster: LocalCluster) -> Iterator[Client]:
    with Client(coordinator_address(cluster), timeout_s=1.0, reconnect_s=0.1) as client:
        yield client
