"""Reports of a run, from rank 0 and from the others."""

from __future__ import annotations

from paceline.services.learner.training.run_reports import RunReports
from paceline.v1 import worker_pb2


def test_rank_0_repeats_the_newest_report_of_each_kind() -> None:
    sent: list[worker_pb2.ConnectRequest] = []
    reports = RunReports("run", 2, sent.append, is_first=True)
    checkpoint = worker_pb2.ConnectRequest(checkpoint=worker_pb2.CheckpointReport(run_id="run"))
    reports.report(vocab_size=10)
    reports.keep(checkpoint)
    reports.warn("slow")
    reports.report(finished=True)
    assert [report.run_report.warning for report in sent] == ["", "", "slow", ""]
    del sent[:]
    reports.repeat()
    finished = worker_pb2.RunReport(run_id="run", session=2, finished=True)
    assert sent == [checkpoint, worker_pb2.ConnectRequest(run_report=finished)]


def test_another_rank_reports_its_faults_alone() -> None:
    sent: list[worker_pb2.ConnectRequest] = []
    reports = RunReports("run", 2, sent.append, is_first=False)
    reports.report(vocab_size=10)
    reports.warn("slow")
    reports.repeat()
    assert sent == []
    reports.fail(error="broken")
    assert sent == [worker_pb2.ConnectRequest(run_report=worker_pb2.RunReport(run_id="run", session=2, error="broken"))]
