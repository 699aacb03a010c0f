"""The versions of a host: the memory of a new one, and the notice that an old one is gone."""

from __future__ import annotations

import pytest
from host_relays import RUN, layout

from paceline.errors import Unavailable
from paceline.groups import Version
from paceline.weights.hosts.held_versions import HeldVersion, HeldVersions
from paceline.weights.hosts.manifest import HostManifest
from paceline.weights.hosts.segment import HostSegment

LAYOUT = layout()


@pytest.fixture
def versions() -> HeldVersions:
    made = HeldVersions()
    made.use_run(RUN)
    return made


def begin(versions: HeldVersions, step: int, *, staged: bool = False) -> HeldVersion:
    held = versions.begin(LAYOUT, Version(1, step), staged=staged, wait_s=0.0)
    assert held is not None
    return held


def fill(versions: HeldVersions, held: HeldVersion) -> HeldVersion:
    for index in range(len(held.pieces)):
        versions.add(held, index, b"d" * 16)
    manifest: HostManifest = LAYOUT.of(held.version, (b"d" * 16,) * len(held.pieces))
    versions.describe(held, manifest, manifest.to_bytes())
    return held


def test_the_third_version_takes_the_memory_of_the_first(versions: HeldVersions) -> None:
    first, second = fill(versions, begin(versions, 1)), fill(versions, begin(versions, 2))
    assert versions.newest_complete() is second
    third = begin(versions, 3)
    assert third.segment is first.segment
    assert first.gone
    assert not first.is_current
    assert versions.newest_complete() is second
    assert versions.find(RUN, Version(1, 1)) is None


def test_a_version_that_another_host_reads_is_kept_and_the_other_one_is_replaced(versions: HeldVersions) -> None:
    first, second = fill(versions, begin(versions, 1)), fill(versions, begin(versions, 2))
    with versions.reading(first):
        assert begin(versions, 3).segment is second.segment
        assert not first.gone


def test_of_two_that_are_read_the_older_one_goes(versions: HeldVersions) -> None:
    first, second = fill(versions, begin(versions, 1)), fill(versions, begin(versions, 2))
    with versions.reading(first), versions.reading(second):
        begin(versions, 3)
    assert first.gone
    assert not second.gone
    with pytest.raises(Unavailable, match="no longer has version"), versions.reading(first):
        pass


def test_memory_that_an_engine_reads_is_never_taken(versions: HeldVersions) -> None:
    first, second = fill(versions, begin(versions, 1)), fill(versions, begin(versions, 2))
    engine = HostSegment.attach(second.segment.fd)
    other = HostSegment.attach(first.segment.fd)
    with engine.reading(second.generation):
        assert begin(versions, 3).segment is first.segment  # the older one anyway
        with other.reading(first.segment.generation):
            assert versions.begin(LAYOUT, Version(1, 4), staged=False, wait_s=0.0) is None
            staged = begin(versions, 5, staged=True)  # the learner waits for nobody
            assert staged.segment not in (first.segment, second.segment)
    # Two segments are enough again.
    fill(versions, staged)
    begin(versions, 6)
    assert len({id(held.segment) for held in versions._held}) == 2


def test_memory_that_is_written_is_not_taken(versions: HeldVersions) -> None:
    first, second = begin(versions, 1), fill(versions, begin(versions, 2))
    with versions.writing(first):
        assert begin(versions, 3).segment is second.segment
    assert not first.gone


def test_engines_are_told_of_each_bucket_and_of_the_end(versions: HeldVersions) -> None:
    held = begin(versions, 1)
    seen = HostSegment.attach(held.segment.fd)
    assert seen.digest(0, held.generation) is None
    versions.add(held, 0, b"d" * 16)
    assert seen.digest(0, held.generation) == b"d" * 16
    assert seen.complete_generation == 0
    fill(versions, held)
    assert seen.complete_generation == held.generation


def test_another_run_drops_everything(versions: HeldVersions) -> None:
    held = fill(versions, begin(versions, 1))
    versions.use_run("another")
    assert held.gone
    assert versions._held == []
    assert versions.begin(LAYOUT, Version(1, 2), staged=True, wait_s=0.0) is None
