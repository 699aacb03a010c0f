"""Costs of each published version, from the reports of the learner and the members. Pure. The learner reports a version
when it is staged and again for every member; a member reports its swap with its acknowledgement. A `VersionRecord`
is complete when the whole roster has acknowledged the version, or a few versions later, because late members then
have a newer one."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.groups import Version
from paceline.services.coordinator.text_limits import seconds
from paceline.v1 import common_pb2, worker_pb2

MAX_HOSTS = 4096
KEPT_OPEN = 4
"""Largest number of versions whose records still wait for late members."""


@dataclass
class VersionRecord:
    """Costs of one version; seconds are those of the slowest member."""

    version: Version
    epoch: int
    members: int
    """Number of members of the roster when the version was staged."""
    acknowledged: set[str] = field(default_factory=set)
    numbers: dict[str, float] = field(default_factory=dict)
    hosts: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Position in the chain, and seconds of receiving. The key is the relay id of the host."""

    def raise_to(self, **numbers: float) -> None:
        """For each metric, keep the larger one of the stored number and the new number."""
        for name, value in numbers.items():
            self.numbers[name] = max(value, self.numbers.get(name, 0.0))

    def note_host(self, transfer: worker_pb2.HostTransfer) -> None:
        """Note how one host received the version; a host with several workers counts once."""
        if transfer.agent_id in self.hosts or len(self.hosts) >= MAX_HOSTS:
            return
        busy_s = max(0.0, seconds(transfer.seconds) - seconds(transfer.waited_s))
        if busy_s > max((busy for _, busy in self.hosts.values()), default=-1.0):
            self.numbers["slowest_hop"] = float(transfer.position)
        self.hosts[transfer.agent_id] = transfer.position, busy_s
        self.numbers["hosts"] = float(len(self.hosts))
        self.raise_to(host_s=seconds(transfer.seconds), hop_s=busy_s)
        for name, value in (("host_bytes", transfer.received_bytes), ("hops_skipped", transfer.skipped)):
            self.numbers[name] = self.numbers.get(name, 0.0) + float(value)

    def metrics(self) -> dict[str, float]:
        """Return all numbers of the record. The key is the metric's name."""
        return {
            "session": float(self.version.session),
            "epoch": float(self.epoch),
            "members": float(self.members),
            "acknowledged": float(len(self.acknowledged)),
            **self.numbers,
        }


class WeightRecords:
    """The versions of a run whose `VersionRecord` is not complete."""

    def __init__(self) -> None:
        self._open: dict[Version, VersionRecord] = {}

    def stage(self, report: worker_pb2.StagedReport, epoch: int, members: int) -> list[VersionRecord]:
        """Begin a version's record; return the older records that this completes."""
        record = VersionRecord(_version(report.version), epoch, members)
        wait_s = max(report.wait_s, report.gather_s)  # the wait includes gathering; a learner may report only that
        record.raise_to(gather_s=seconds(report.gather_s), wait_s=seconds(wait_s), failures=0.0)
        self._open[record.version] = record
        return [self._open.pop(version) for version in sorted(self._open)[:-KEPT_OPEN]]

    def publish(self, report: worker_pb2.PublishReport) -> list[VersionRecord]:
        """Note the result of one member's transfer; return the record if this completes it."""
        record = self._open.get(_version(report.version))
        if record is None:
            return []
        if not report.ok:
            record.numbers["failures"] += 1.0
            return []
        record.raise_to(
            size_bytes=float(report.size_bytes),
            transfer_s=seconds(report.transfer_s),
            answer_s=seconds(report.ack_s),
            publish_s=seconds(report.publish_s),
        )
        record.acknowledged.add(report.member_id)
        return self._done(record)

    def acknowledge(self, ack: worker_pb2.WeightAck) -> None:
        record = self._open.get(_version(ack.version))
        if record is not None:
            record.raise_to(swap_s=seconds(ack.swap_s), pause_s=seconds(ack.pause_s))
            if ack.host_transfer.agent_id:
                record.note_host(ack.host_transfer)

    def close(self) -> list[VersionRecord]:
        """Return the remaining records, because the run is over."""
        left, self._open = list(self._open.values()), {}
        return left

    def _done(self, record: VersionRecord) -> list[VersionRecord]:
        if len(record.acknowledged) < record.members:
            return []
        del self._open[record.version]
        return [record]


def _version(version: common_pb2.PolicyVersion) -> Version:
    return Version(version.session, version.step)
