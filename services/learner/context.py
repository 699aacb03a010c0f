"""The view of a learner's rank that its parts have: its number, its connection and its orders."""

from __future__ import annotations

import threading
from typing import Any, Protocol

import torch

from paceline.services.common.relay import RelayConnection
from paceline.services.common.worker.membership import Membership
from paceline.services.learner.background_loop import BackgroundLoop
from paceline.services.learner.orders import Orders
from paceline.v1 import worker_pb2


class RankContext(Protocol):
    """Implemented by `paceline.services.learner.rank.LearnerRank`."""

    rank: int
    world_size: int
    device: torch.device
    cpu_chosen: bool
    weights_bind: str
    weights_host: str
    grace_s: float
    orders: Orders
    background: BackgroundLoop
    stopping: threading.Event
    membership: Membership
    agent: RelayConnection
    early_roster: worker_pb2.Epoch | None

    @property
    def current_run(self) -> Any:
        """The run that this rank works on, a `paceline.services.learner.training.run.LearnerRun`; None without one."""

    def report(self, report: worker_pb2.ConnectRequest) -> None:
        """Send a report from any thread."""

    def stop(self) -> None:
        """End after the current step."""

    def leave(self, reason: str) -> None:
        """Leave because of a fault."""
