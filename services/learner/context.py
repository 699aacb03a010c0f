"""What the parts of a learner's rank know of it: its place, its connection, and what it was asked to do."""

from __future__ import annotations

import threading
from typing import Any, Protocol

import torch

from protos.paceline.v1 import worker_pb2
from services.common.membership import Membership
from services.learner.background_loop import BackgroundLoop
from services.learner.orders import Orders


class RankContext(Protocol):
    """Implemented by `services.learner.rank.LearnerRank`."""

    rank: int
    world_size: int
    device: torch.device
    host: str
    reachable: str
    grace_s: float
    orders: Orders
    background: BackgroundLoop
    stopping: threading.Event
    membership: Membership
    early_epoch: worker_pb2.Epoch | None

    @property
    def current_run(self) -> Any:
        """The run that this rank works on, if any: `services.learner.run.LearnerRun`."""

    def report(self, report: worker_pb2.ConnectRequest) -> None:
        """Sends a report from any thread."""

    def stop(self) -> None:
        """Ends after the current step."""

    def leave(self, reason: str) -> None:
        """Leaves because of a fault."""
