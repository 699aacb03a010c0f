"""Catching up from the store: how long members wait, and the handling of a member whose link fails repeatedly."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from learner.weights.catch_up import CatchUp
from learner.weights.publish_result import Failure, PublishResult
from paceline.groups import Version
from paceline.weights.object_store import WeightStore
from paceline.weights.offers import StoreOffer

DEADLINE_S = 60.0
V1, V2, V3 = Version(0, 1), Version(0, 2), Version(0, 3)


class Links:
    """A publisher that only notes who has a link; `others` hold something already."""

    def __init__(self) -> None:
        self.sets: queue.Queue[tuple[list[str], dict[str, Version]]] = queue.Queue()
        self.serving: dict[str, Version | None] = {"other": V1}

    def set_members(self, epoch: int, members: Iterable[str], held: Mapping[str, Version]) -> None:
        self.sets.put((sorted(members), dict(held)))

    def acknowledged(self) -> dict[str, Version | None]:
        return self.serving

    def next(self) -> tuple[list[str], dict[str, Version]]:
        return self.sets.get(timeout=DEADLINE_S)


class Bench:
    def __init__(self, folder: Path, max_wait_s: float) -> None:
        self.links = Links()
        self.offers: queue.Queue[StoreOffer] = queue.Queue()
        self.warnings: list[str] = []
        self.catch_up = CatchUp(
            publisher=cast(Any, self.links),
            store=WeightStore(str(folder)),
            run_id="run",
            algorithm="xxh3_64",
            anchor_interval=50,
            max_wait_s=max_wait_s,
            send=self.offers.put,
            on_result=lambda result: None,
            warn=self.warnings.append,
        )

    def fail(self, failure: Failure, times: int = 1) -> None:
        for _ in range(times):
            result = PublishResult("m", 1, 1, V1, ok=False, failure=failure, error="names differ")
            self.catch_up.link_ended(result)

    def enter(self) -> None:
        """`m` and another member, both over links."""
        self.links.serving = {}
        self.catch_up.set_members(1, ["m", "other"])
        assert self.links.next() == (["m", "other"], {})
        self.links.serving = {"other": V1}

    def stage(self, version: Version) -> None:
        self.catch_up.stage(version, {"weight": torch.full((10,), float(version.step))})

    def offered(self, version: Version) -> StoreOffer:
        """The first offer of this version; one that is said again is passed over."""
        while (offer := self.offers.get(timeout=DEADLINE_S)).version != version:
            assert offer.version < version
        return offer


@pytest.fixture
def open_bench(tmp_path: Path) -> Iterator[Callable[[float], Bench]]:
    benches: list[Bench] = []

    def opened(max_wait_s: float) -> Bench:
        benches.append(Bench(tmp_path / "store", max_wait_s))
        return benches[-1]

    yield opened
    for bench in benches:
        bench.catch_up.close()


def test_a_member_that_refuses_again_and_again_gets_its_weights_from_the_store(
    open_bench: Callable[[float], Bench],
) -> None:
    bench = open_bench(60.0)
    bench.enter()
    bench.stage(V1)
    bench.fail("refused", 2)
    assert (bench.warnings, bench.links.sets.empty()) == ([], True)
    bench.fail("refused")
    assert bench.links.next() == (["other"], {})
    (warning,) = bench.warnings
    assert warning.startswith(
        "3 attempts in a row to bring weights to m failed, the last with version 1: names differ."
    )
    assert "its link is tried again at least every 600 s" in warning
    for version in (V1, V2, V3):  # it stays there, although it catches up each time
        if version != V1:
            bench.stage(version)
        assert bench.offered(version).member_id == "m"
        bench.catch_up.answer("m", version, True, "", False)
    assert bench.links.sets.empty()


def test_the_link_of_such_a_member_is_tried_again_with_what_it_holds(
    open_bench: Callable[[float], Bench],
) -> None:
    bench = open_bench(2.0)
    bench.enter()
    bench.stage(V1)
    bench.fail("refused", 3)
    assert bench.links.next() == (["other"], {})
    assert bench.offered(V1).member_id == "m"
    bench.catch_up.answer("m", V1, True, "", False)
    assert bench.links.next() == (["m", "other"], {"m": V1})
    bench.fail("refused")  # at once back to the store, and nothing is said a second time
    assert bench.links.next() == (["other"], {})
    assert len(bench.warnings) == 1
    assert bench.links.next() == (["m", "other"], {})
    bench.catch_up.link_ended(PublishResult("m", 1, 1, V2, ok=True))
    bench.fail("refused", 2)
    assert bench.links.sets.empty()  # it counts from the beginning


def test_the_only_member_whose_link_never_forms_is_brought_its_weights_by_the_store(
    open_bench: Callable[[float], Bench],
) -> None:
    bench = open_bench(60.0)
    bench.links.serving = {}
    bench.catch_up.set_members(1, ["m"])
    assert bench.links.next() == (["m"], {})
    bench.stage(V1)
    for epoch in (2, 4, 6):  # each time it is expelled and named again
        bench.fail("link")
        bench.catch_up.set_members(epoch, [])
        assert bench.links.next() == ([], {})
        bench.catch_up.set_members(epoch + 1, ["m"])
        assert bench.links.next() == (["m"] if epoch < 6 else [], {})
    assert bench.offered(V1).member_id == "m"
    assert len(bench.warnings) == 1


def test_an_interrupted_or_changed_link_is_no_failure(open_bench: Callable[[float], Bench]) -> None:
    bench = open_bench(60.0)
    bench.enter()
    bench.fail("interrupted", 5)
    for _ in range(5):
        result = PublishResult(
            "m", 1, 1, V1, ok=False, failure="refused", error="another host", fallback="gloo"
        )
        bench.catch_up.link_ended(result)
    assert (bench.warnings, bench.links.sets.empty()) == ([], True)


def test_a_member_that_reads_slowly_and_says_so_is_waited_for(open_bench: Callable[[float], Bench]) -> None:
    bench = open_bench(2.0)
    bench.catch_up.set_members(1, ["m"])
    assert bench.links.next() == ([], {})
    bench.stage(V1)
    bench.offered(V1)
    until_s = time.monotonic() + 3.0
    while time.monotonic() < until_s:
        bench.catch_up.progress("m")
        time.sleep(0.05)
    assert bench.links.sets.empty()
    assert bench.offers.empty()  # and nothing was said twice
    bench.catch_up.answer("m", V1, True, "", False)
    assert bench.links.next() == (["m"], {"m": V1})


def test_a_member_that_falls_silent_while_it_reads_enters_as_it_is(
    open_bench: Callable[[float], Bench], caplog: pytest.LogCaptureFixture
) -> None:
    bench = open_bench(0.5)
    bench.catch_up.set_members(1, ["m"])
    assert bench.links.next() == ([], {})
    bench.stage(V1)
    bench.offered(V1)
    assert bench.links.next() == (["m"], {})
    assert "m was silent for 0 s, or too slow, while it read the store" in caplog.text
