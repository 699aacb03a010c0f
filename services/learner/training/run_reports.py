"""Reports of the ranks on their work on one run."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from paceline.v1 import worker_pb2

log = logging.getLogger(__name__)


class RunReports:
    """Reports of the ranks beside rank 0: their faults only, because rank 0 reports what all ranks know."""

    def __init__(self, run_id: str, session: int, send: Callable[[worker_pb2.ConnectRequest], None]) -> None:
        self._run_id, self._session = run_id, session
        self._send = send

    def fail(self, **facts: Any) -> None:
        """Report a fault of this rank; `facts` are fields of `RunReport`."""
        self._send(self._message(facts))

    def warn(self, message: str) -> None:
        """Log a warning; rank 0 also puts it into the run's events."""
        log.warning("run %s: %s", self._run_id, message)

    def report(self, **facts: Any) -> None:
        """Report facts that all ranks know; `facts` are fields of `RunReport`."""

    def keep(self, report: worker_pb2.ConnectRequest) -> None:
        """Send a report that all ranks have, and keep it for `repeat`."""

    def repeat(self) -> None:
        """Send the kept reports again, because the coordinator was away."""

    def _message(self, facts: dict[str, Any]) -> worker_pb2.ConnectRequest:
        report = worker_pb2.RunReport(run_id=self._run_id, session=self._session, **facts)
        return worker_pb2.ConnectRequest(run_report=report)


class Rank0RunReports(RunReports):
    """Reports of rank 0, which keeps a copy of the newest report of each kind."""

    def __init__(self, run_id: str, session: int, send: Callable[[worker_pb2.ConnectRequest], None]) -> None:
        super().__init__(run_id, session, send)
        self._kept: list[worker_pb2.ConnectRequest] = []
        self._lock = threading.Lock()
        """Uploads report checkpoints from another thread."""

    def warn(self, message: str) -> None:
        """See `RunReports.warn`."""
        super().warn(message)
        self._send(self._message({"warning": message}))

    def report(self, **facts: Any) -> None:
        """See `RunReports.report`."""
        self.keep(self._message(facts))

    def keep(self, report: worker_pb2.ConnectRequest) -> None:
        """See `RunReports.keep`."""
        kind = report.WhichOneof("report")
        with self._lock:
            self._kept = [r for r in self._kept if r.WhichOneof("report") != kind] + [report]
        self._send(report)

    def repeat(self) -> None:
        """See `RunReports.repeat`."""
        for report in self._kept:
            self._send(report)
