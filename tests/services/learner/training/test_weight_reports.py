"""Reports on staged versions, offers and results."""

from __future__ import annotations

import pytest

from paceline.groups import Version
from paceline.services.learner.training.publishing import FAILURES, WeightReports
from paceline.v1 import worker_pb2
from paceline.weights.progress import PublishResult
from paceline.weights.store.store_format import StoredObject, StoreOffer

V2 = Version(3, 2)


class Bench:
    def __init__(self) -> None:
        self.sent: list[worker_pb2.ConnectRequest] = []
        self.reports = WeightReports("run", 30.0, self.sent.append)


def test_a_staged_version_is_reported_with_the_seconds_of_its_copy() -> None:
    bench = Bench()
    bench.reports.staged(V2, 1.5)
    (sent,) = bench.sent
    assert (sent.staged.run_id, sent.staged.gather_s) == ("run", 1.5)
    assert (sent.staged.version.session, sent.staged.version.step) == V2


def test_an_offer_goes_to_its_member_with_the_wait_of_the_spec() -> None:
    bench = Bench()
    stored = StoredObject("anchor.json", 1, "aa")
    offer = StoreOffer("run", 4, "m", V2, "/store", "xxh3_64", stored, V2, stored, 1)
    bench.reports.offer(offer)
    (sent,) = bench.sent
    assert (sent.weight_offer.member_id, sent.weight_offer.epoch, sent.weight_offer.max_wait_s) == (
        "m",
        4,
        30.0,
    )
    assert (sent.weight_offer.version.session, sent.weight_offer.version.step) == V2


@pytest.mark.parametrize("failure", ["", "link", "silent", "refused"])
def test_a_result_names_its_failure_and_the_seconds_of_all_phases(failure: str) -> None:
    bench = Bench()
    result = PublishResult(
        "m",
        4,
        1,
        V2,
        ok=not failure,
        transfer_s=2.0,
        ack_s=4.0,
        failure=failure,  # type: ignore[arg-type]
    )
    bench.reports.result(result)
    (sent,) = bench.sent
    assert sent.publish.failure == FAILURES[failure]
    assert (sent.publish.publish_s, sent.publish.ok) == (6.0, not failure)
