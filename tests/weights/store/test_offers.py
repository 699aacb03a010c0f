"""Offers of stored weights: the bound on snapshots because of one member, and the members whose answers count."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import pytest

from paceline.groups import Version
from paceline.rate_limited_log import unforeseen
from paceline.weights.progress import PublishResult
from paceline.weights.store.offers import MAX_SNAPSHOTS, Stored, StoreOffers
from paceline.weights.store.store_format import StoredObject, StoreOffer

DEADLINE_S = 60.0


class Bench:
    def __init__(self) -> None:
        self.offered: queue.Queue[StoreOffer] = queue.Queue()
        self.results: queue.Queue[PublishResult] = queue.Queue()
        self.offers = StoreOffers(
            run_id="run",
            url="/store",
            algorithm="xxh3_64",
            max_wait_s=60.0,
            send=self.offered.put,
            on_result=self.results.put,
        )
        self.offers.set_members(1, ["m"])

    def store_snapshot(self, step: int) -> None:
        version, stored = Version(1, step), StoredObject(f"{step}/anchor.json", 1, "digest")
        self.offers.announce(Stored(version, stored, version, stored, 1, 1, 0.0))

    def answer(self, step: int, *, ok: bool = False, damaged: bool = False) -> None:
        while self.offered.get(timeout=DEADLINE_S).version.step != step:
            pass
        self.offers.answer("m", Version(1, step), ok, "", damaged)
        assert self.results.get(timeout=DEADLINE_S).ok is ok


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.offers.close()


def test_a_member_for_which_every_snapshot_is_damaged_costs_only_some(bench: Bench) -> None:
    written = 0
    for step in range(1, 10):
        bench.store_snapshot(step)
        bench.answer(step, damaged=True)
        if bench.offers.wants_snapshot:
            written += 1
            bench.offers.snapshot_ordered()
    assert written == MAX_SNAPSHOTS
    bench.store_snapshot(10)
    bench.answer(10, ok=True)
    bench.store_snapshot(11)
    bench.answer(11, damaged=True)
    assert bench.offers.wants_snapshot  # it succeeded in between


def test_a_version_that_was_never_stored_is_held_by_nobody(bench: Bench) -> None:
    bench.offers.answer("m", Version(9, 9), True, "", False)
    bench.store_snapshot(1)
    assert bench.offers.oldest_held() is None
    bench.answer(1, ok=True)
    bench.offers.answer("m", Version(9, 9), True, "", False)
    assert bench.offers.oldest_held() == (1, 1)


def test_a_listener_that_fails_costs_no_other_member_its_offer() -> None:
    before, offered = unforeseen.total, queue.Queue[StoreOffer]()

    def send(offer: StoreOffer) -> None:
        if offer.member_id == "a":
            raise KeyError("a")
        offered.put(offer)

    bench = Bench()
    bench.offers.close()
    bench.offers = StoreOffers(
        run_id="run",
        url="/store",
        algorithm="xxh3_64",
        max_wait_s=60.0,
        send=send,
        on_result=bench.results.put,
    )
    try:
        bench.offers.set_members(1, ["a", "b"])
        bench.store_snapshot(1)
        assert offered.get(timeout=DEADLINE_S).member_id == "b"
        bench.store_snapshot(2)
        assert offered.get(timeout=DEADLINE_S).version.step == 2
        assert unforeseen.total == before + 2
    finally:
        bench.offers.close()
