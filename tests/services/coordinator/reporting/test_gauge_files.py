"""Readings of all members: what they say, and that their files stay small."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from paceline.services.coordinator.members.registry import Introduction, Member, Members
from paceline.services.coordinator.reporting.member_files import GaugeHistory, files_of, shares
from paceline.v1 import common_pb2


def member(name: str, role: str, gauges: Mapping[str, float] = {}, **facts: Any) -> Member:
    found = Member(name, Introduction(common_pb2.Role.Value(f"ROLE_{role}")), 0.0)
    for fact, value in ({"connected": True} | facts).items():
        setattr(found, fact, value)
    found.measures.gauges |= gauges
    return found


@pytest.mark.parametrize(
    ("who", "paused_s", "expected"),
    [
        (member("a", "ROLLOUT", gauges={"wait_fraction": 0.25}), 0.5, (0.65, 0.25, 0.1, 0.0)),
        (member("a", "ROLLOUT", gauges={"wait_fraction": 0.9}), 1.0, (0.0, 0.8, 0.2, 0.0)),
        (member("a", "ROLLOUT"), 0.0, (0.0, 1.0, 0.0, 0.0)),
        (member("a", "ROLLOUT", suspected=True), 0.0, (0.0, 0.0, 0.0, 1.0)),
        (member("b", "REWARD", gauges={"occupied": 0.75}), 0.0, (0.75, 0.25, 0.0, 0.0)),
        (member("b", "REWARD", connected=False), 0.0, (0.0, 0.0, 0.0, 1.0)),
    ],
)
def test_shares_add_up(who: Member, paused_s: float, expected: tuple[float, ...]) -> None:
    found = shares(who, paused_s, 5.0)
    assert [found[name] for name in ("working", "waiting", "updating", "away")] == pytest.approx(expected)


def read(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in files_of(directory / "gauges") for line in path.read_text().splitlines()]


async def test_a_reading_every_five_seconds_while_there_are_members(tmp_path: Path) -> None:
    members = Members(60.0)
    history = GaugeHistory(tmp_path, members)
    history.observe(100.0)
    assert not (tmp_path / "gauges").exists()
    rollout = member("rollout-0", "ROLLOUT", gauges={"wait_fraction": 0.5, "tokens_per_s": 12.34567, "leases": 3.0})
    members.add(rollout)
    members.add(member("learner", "LEARNER", gauges={"memory_gb": 2.0}))
    for now_s in (105.0, 107.0, 110.0):
        rollout.measures.paused_s += 0.5
        history.observe(now_s)
        if history.writing is not None:
            await history.writing
    first, second = read(tmp_path)
    assert first["members"]["rollout-0"] == {
        "pool": "rollout", "working": 0.5, "waiting": 0.5, "updating": 0.0, "away": 0.0, "tokens_per_s": 12.3457,
    }  # fmt: skip
    assert first["members"]["learner"] == {"pool": "learner", "memory_gb": 2.0}
    assert second["members"]["rollout-0"]["updating"] == 0.2  # 1 s since the reading before


async def test_files_stay_small_and_a_folder_that_cannot_be_written_is_left_alone(tmp_path: Path) -> None:
    members = Members(60.0)
    members.add(member("rollout-0", "ROLLOUT"))
    history = GaugeHistory(tmp_path, members, max_file_bytes=300, max_files=3)
    for number in range(40):
        history.observe(5.0 * (number + 1))
        assert history.writing is not None
        await history.writing
    files = files_of(tmp_path / "gauges")
    assert len(files) == 3
    assert all(path.stat().st_size <= 300 for path in files)
    (tmp_path / "file").write_text("")
    history = GaugeHistory(tmp_path / "file", members)
    history.observe(5.0)
    assert history.writing is not None
    await history.writing
