"""metrics.jsonl has each step once, also after the ledger was restored from a backup."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from control_plane import Plane, learner

from paceline.services.coordinator.reporting.metrics_files import set_aside


def line(kind: str, step: int, **values: float) -> str:
    return json.dumps({"kind": kind, "step": step, **values}) + "\n"


def is_ahead(kind: str, step: int) -> bool:
    """Return whether a line is ahead of a run at step 2, whose version 2 was evaluated."""
    return step >= 2 if kind == "train" else step > 2


@pytest.mark.parametrize("block_bytes", [1, 60, 1 << 20])
def test_what_is_ahead_of_the_ledger_is_set_aside(tmp_path: Path, block_bytes: int) -> None:
    path = tmp_path / "metrics.jsonl"
    known = [line("train", 0), line("weights", 1), line("train", 1), line("weights", 2), line("eval", 2)]
    lost = [line("train", 2), line("train", 3), line("weights", 3), '{"kind": "train", "st']
    path.write_text("".join([*known[:4], *lost[:1], known[4], *lost[1:]]))
    assert set_aside(path, is_ahead, block_bytes) == 4
    assert path.read_text() == "".join(known)
    aside = path.with_name("metrics.jsonl.set-aside")
    assert aside.read_text() == "".join(lost) + "\n"
    assert set_aside(path, is_ahead, block_bytes) == 0
    with path.open("a") as file:
        file.write(line("train", 7))
    assert set_aside(path, is_ahead, block_bytes) == 1
    assert aside.read_text().endswith(line("train", 7))


def test_a_file_without_anything_known_is_set_aside_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert set_aside(path, is_ahead) == 0
    path.write_text(line("train", 5) + line("train", 6))
    assert set_aside(path, is_ahead) == 2
    assert path.read_text() == ""


async def test_a_coordinator_writes_on_where_its_ledger_is(tmp_path: Path) -> None:
    plane = await Plane.started(tmp_path)
    run = await plane.run_one(logger={"tensorboard": True})
    await learner(plane).hear("run")
    await plane.stop()
    path = Path(run.directory) / "metrics.jsonl"
    path.write_text(line("weights", 0) + line("train", 0) + line("train", 1))
    again = await Plane.started(tmp_path)
    try:
        assert path.read_text() == line("weights", 0)
        assert path.with_name("metrics.jsonl.set-aside").read_text() == line("train", 0) + line("train", 1)
    finally:
        await again.stop()
