"""Costs of a version, from reports that come in any order and sometimes not at all."""

from __future__ import annotations

from paceline.services.coordinator.reporting.weight_metrics import KEPT_OPEN, WeightRecords
from paceline.v1 import common_pb2, worker_pb2


def at(step: int) -> common_pb2.PolicyVersion:
    return common_pb2.PolicyVersion(session=1, step=step)


def staged(step: int) -> worker_pb2.StagedReport:
    return worker_pb2.StagedReport(version=at(step), gather_s=0.5, wait_s=0.75)


def published(step: int, member_id: str, **fields: float) -> worker_pb2.PublishReport:
    report = worker_pb2.PublishReport(version=at(step), member_id=member_id, ok=True, size_bytes=100)
    for name, value in fields.items():
        setattr(report, name, value)
    return report


def test_a_version_is_done_when_its_whole_epoch_has_it_and_shows_the_slowest() -> None:
    records = WeightRecords()
    assert records.stage(staged(3), epoch=7, members=2) == []
    records.acknowledge(worker_pb2.WeightAck(version=at(3), swap_s=0.25, pause_s=0.125))
    assert records.publish(published(3, "a", transfer_s=1.0, ack_s=0.25, publish_s=2.0)) == []
    refused = worker_pb2.PublishReport(version=at(3), member_id="b", ok=False)
    assert records.publish(refused) == []
    records.acknowledge(worker_pb2.WeightAck(version=at(3), swap_s=0.5, pause_s=0.0625))
    (done,) = records.publish(published(3, "b", transfer_s=4.0, publish_s=5.0))
    assert done.version == (1, 3)
    assert done.metrics() == {
        "session": 1.0,
        "epoch": 7.0,
        "members": 2.0,
        "acknowledged": 2.0,
        "failures": 1.0,
        "size_bytes": 100.0,
        "gather_s": 0.5,
        "wait_s": 0.75,
        "transfer_s": 4.0,
        "answer_s": 0.25,
        "publish_s": 5.0,
        "swap_s": 0.5,
        "pause_s": 0.125,
    }
    assert records.close() == []


def test_a_version_that_somebody_never_took_is_written_a_few_versions_later() -> None:
    records = WeightRecords()
    for step in range(KEPT_OPEN):
        assert records.stage(staged(step), epoch=1, members=2) == []
    assert records.publish(published(0, "a")) == []
    (done,) = records.stage(staged(KEPT_OPEN), epoch=1, members=2)
    assert (done.version, done.acknowledged) == ((1, 0), {"a"})
    assert records.publish(published(0, "b")) == []  # too late to count
    assert [record.version.step for record in records.close()] == list(range(1, KEPT_OPEN + 1))


def brought(agent_id: str, position: int, seconds: float, waited_s: float = 0.0) -> worker_pb2.WeightAck:
    transfer = worker_pb2.HostTransfer(
        agent_id=agent_id,
        position=position,
        received_bytes=100,
        seconds=seconds,
        waited_s=waited_s,
        skipped=1,
    )
    return worker_pb2.WeightAck(version=at(3), host_transfer=transfer)


def test_hosts_count_once_and_the_slowest_hop_is_the_one_that_was_slow_itself() -> None:
    records = WeightRecords()
    records.stage(staged(3), epoch=7, members=4)
    for ack in (
        brought("A", 0, 1.0),
        brought("B", 1, 4.0, waited_s=0.5),
        brought("B", 1, 4.0, waited_s=0.5),  # another worker of the host
        brought("C", 2, 4.25, waited_s=3.25),
    ):
        records.acknowledge(ack)
    (record,) = records.close()
    found = record.metrics()
    assert (found["hosts"], found["host_s"], found["hop_s"], found["slowest_hop"]) == (3.0, 4.25, 3.5, 1.0)
    assert (found["host_bytes"], found["hops_skipped"]) == (300.0, 3.0)
