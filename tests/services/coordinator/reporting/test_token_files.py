"""Files of what the learner computed of single tokens stay small."""

from __future__ import annotations

from pathlib import Path

from paceline.services.coordinator.reporting.member_files import MAX_COMPLETIONS, TokenFiles, fault_of, path_of
from paceline.v1 import worker_pb2


def report(step: int, completions: int = 1) -> worker_pb2.TokenStatistics:
    found = worker_pb2.TokenStatistics(run_id="run-1", session=1, step=step)
    for index in range(completions):
        found.completions.add(group_id=1, index=index, logprobs=[-0.5] * 10, entropies=[1.0] * 10)
    return found


async def keep(files: TokenFiles, kept: worker_pb2.TokenStatistics) -> None:
    files.keep(kept)
    if files.writing is not None:
        await files.writing


async def test_the_oldest_steps_go_first(tmp_path: Path) -> None:
    files = TokenFiles(tmp_path, max_bytes=3 * report(1).ByteSize() + 2)
    for step in range(1, 9):
        await keep(files, report(step))
    left = sorted(path.name for path in (tmp_path / "token_stats" / "run-1").iterdir())
    assert left == [path_of(tmp_path, "run-1", step).name for step in (6, 7, 8)]


async def test_a_folder_that_cannot_be_written_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "token_stats").write_text("")
    await keep(TokenFiles(tmp_path), report(1))


def test_reports_are_bounded() -> None:
    assert not fault_of(report(1, completions=50))
    assert "completions" in fault_of(report(1, completions=MAX_COMPLETIONS + 1))
    assert "bytes" in fault_of(report(1, completions=2), max_bytes=100)
