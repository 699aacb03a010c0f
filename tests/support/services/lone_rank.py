"""A learner's rank without a coordinator, which records its reports."""

from __future__ import annotations

import threading

import torch

from paceline.services.learner.context import Orders, Place
from paceline.v1 import worker_pb2


class LoneRank:
    """The only rank of a learner, on the CPU."""

    def __init__(self) -> None:
        self.place = Place(0, 1, torch.device("cpu"), cpu_chosen=True)
        self.stopping = threading.Event()
        self.orders = Orders()
        self.reports: list[worker_pb2.RunReport] = []
        self.leave_reasons: list[str] = []

    def report(self, report: worker_pb2.ConnectRequest) -> None:
        self.reports.append(report.run_report)

    def leave(self, reason: str) -> None:
        self.leave_reasons.append(reason)
