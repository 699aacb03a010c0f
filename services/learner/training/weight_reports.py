"""Reports of a run's weight channel to the coordinator: staged versions, offers to members, results of sending."""

from __future__ import annotations

from collections.abc import Callable

from paceline.groups import Version
from paceline.learner.weights.publish_result import PublishResult
from paceline.v1 import worker_pb2
from paceline.weights.offers import StoreOffer

FAILURES = {
    "": worker_pb2.PUBLISH_FAILURE_UNSPECIFIED,
    "link": worker_pb2.PUBLISH_FAILURE_LINK,
    "silent": worker_pb2.PUBLISH_FAILURE_SILENT,
    "refused": worker_pb2.PUBLISH_FAILURE_REFUSED,
}


class WeightReports:
    """Reports of one run, from any thread. `send` queues a report."""

    def __init__(
        self, run_id: str, max_wait_s: float, send: Callable[[worker_pb2.ConnectRequest], None]
    ) -> None:
        self._run_id, self._max_wait_s, self._send = run_id, max_wait_s, send

    def staged(self, version: Version, gather_s: float) -> None:
        """Report that a version is staged; its copy took `gather_s` seconds."""
        staged = worker_pb2.StagedReport(run_id=self._run_id, gather_s=gather_s)
        staged.version.session, staged.version.step = version
        self._send(worker_pb2.ConnectRequest(staged=staged))

    def offer(self, offer: StoreOffer) -> None:
        """Send an offer to its member."""
        self._send(worker_pb2.ConnectRequest(weight_offer=offer.to_proto(self._max_wait_s)))

    def host_version(self, version: worker_pb2.HostVersion) -> None:
        """Tell the coordinator of a version that this learner's hosts hold."""
        self._send(worker_pb2.ConnectRequest(host_version=version))

    def result(self, result: PublishResult) -> None:
        """Report how an attempt to bring a version to a member ended."""
        report = worker_pb2.PublishReport(
            run_id=self._run_id,
            member_id=result.member_id,
            epoch=result.epoch,
            ok=result.ok,
            error=result.error,
            size_bytes=result.size_bytes,
            publish_s=result.transfer_s + result.ack_s,
            transfer_s=result.transfer_s,
            ack_s=result.ack_s,
            failure=FAILURES[result.failure],
        )
        report.version.session, report.version.step = result.version
        self._send(worker_pb2.ConnectRequest(publish=report))
