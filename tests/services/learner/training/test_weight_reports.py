"""Reports on staged versions, offers and results."""

from __future__ import annotations

import pytest

from learner.weights.publish_result import PublishResult
from paceline.groups import Version
from paceline.weights.offers import LinkOffer
from protos.paceline.v1 import worker_pb2
from services.learner.training.weight_reports import FAILURES, WeightReports

V2 = Version(3, 2)


class Bench:
    def __init__(self) -> None:
        self.sent: list[worker_pb2.ConnectRequest] = []
        self.warnings: list[str] = []
        self.reports = WeightReports("run", 30.0, self.sent.append, self.warnings.append)


def test_a_staged_version_is_reported_with_the_seconds_of_its_copy() -> None:
    bench = Bench()
    bench.reports.staged(V2, 1.5)
    (sent,) = bench.sent
    assert (sent.staged.run_id, sent.staged.gather_s) == ("run", 1.5)
    assert (sent.staged.version.session, sent.staged.version.step) == V2


def test_an_offer_goes_to_its_member_with_the_wait_of_the_spec() -> None:
    bench = Bench()
    offer = LinkOffer(
        run_id="run", epoch=4, member_id="m", attempt=1, backend="gloo", store_host="127.0.0.1", store_port=1234,
        prefix="run/1", session=3, step=2, manifest=b"",
    )  # fmt: skip
    bench.reports.offer(offer)
    (sent,) = bench.sent
    assert (sent.weight_offer.member_id, sent.weight_offer.epoch, sent.weight_offer.max_wait_s) == (
        "m",
        4,
        30.0,
    )
    assert (sent.weight_offer.version.session, sent.weight_offer.version.step) == V2


@pytest.mark.parametrize("failure", ["", "link", "silent", "refused", "interrupted"])
def test_a_result_names_its_failure_and_the_seconds_of_all_phases(failure: str) -> None:
    bench = Bench()
    result = PublishResult(
        "m",
        4,
        1,
        V2,
        ok=not failure,
        form_s=1.0,
        transfer_s=2.0,
        ack_s=4.0,
        failure=failure,  # type: ignore[arg-type]
    )
    bench.reports.result(result)
    (sent,) = bench.sent
    assert sent.publish.failure == FAILURES[failure]
    assert (sent.publish.publish_s, sent.publish.ok) == (7.0, not failure)
    assert not bench.warnings


def test_a_member_that_goes_by_tcp_from_now_on_is_a_warning_and_a_result() -> None:
    bench = Bench()
    bench.reports.result(
        PublishResult("m", 4, 1, V2, ok=False, failure="refused", error="no such process", fallback="gloo")
    )
    assert len(bench.sent) == 1
    assert bench.warnings == [
        "weights did not reach m through the host's memory: no such process. They go to it by TCP (gloo) from now on"
    ]
