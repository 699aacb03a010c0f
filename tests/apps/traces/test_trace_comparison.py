"""`paceline traces compare`: folders of a served model and files, exit statuses, the report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import paceline


def write(path: Path, rewards: list[float | None], model: str) -> None:
    rows = [
        {"prompt": f"p{index}", "completion": "a", "final_reward": reward, "model": model}
        for index, reward in enumerate(rewards)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("rewards", "decision", "status"),
    [([1.0] * 30, "promote", 0), ([0.0] * 30, "roll back", 1), ([1.0] * 19, "hold", 2)],
)
def test_the_exit_status_is_the_decision(
    tmp_path: Path, rewards: list[float | None], decision: str, status: int
) -> None:
    champion = tmp_path / "champion"
    write(champion / "requests-000001.jsonl", [None] * 50, "sums:1")
    write(champion / "rated-000001.jsonl", [0.5] * 40, "sums:1")
    write(tmp_path / "candidate.jsonl", [*rewards, None], "sums:2")
    report_file = tmp_path / "report.json"
    result = paceline(
        "traces", "compare", str(champion), str(tmp_path / "candidate.jsonl"), "--output", str(report_file)
    )
    assert result.exit_code == status, result.output
    assert result.output.splitlines()[0] == decision
    report = json.loads(report_file.read_text())
    assert (report["champion"]["unrated"], report["champion"]["models"]) == (10, ["sums:1"])
    assert (report["candidate"]["unrated"], report["candidate"]["traces"]) == (1, len(rewards))
    as_json = paceline("traces", "compare", str(champion), str(tmp_path / "candidate.jsonl"), "--json")
    assert json.loads(as_json.stdout) == report


def test_a_folder_without_feedback_says_so(tmp_path: Path) -> None:
    write(tmp_path / "a" / "requests-000001.jsonl", [None] * 5, "sums:1")
    write(tmp_path / "b.jsonl", [None] * 5, "sums:2")
    result = paceline("traces", "compare", str(tmp_path / "b.jsonl"), str(tmp_path / "b.jsonl"))
    assert result.exit_code == 1
    assert "the champion has no trace with a reward" in result.stderr
    result = paceline("traces", "compare", str(tmp_path / "a"), str(tmp_path / "b.jsonl"))
    assert result.exit_code == 1
    assert "rated-*.jsonl" in result.stderr
