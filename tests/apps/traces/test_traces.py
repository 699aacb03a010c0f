"""traces export and traces pairs: what they write trains again, and what they leave out is said."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import paceline
from trained_ledger import RUN_ID, Writer

from paceline.data.example_rows import read_preference
from paceline.data.rows import open_rows
from paceline.data.traces import TraceGroups, TraceKeys
from paceline.spec import DataSection


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Path]:
    writer = Writer(tmp_path, str(tmp_path / "model"))
    try:
        writer.train_a_step()
        yield tmp_path / "runs"
    finally:
        writer.ledger.close()


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_an_export_is_a_group_with_its_tokens(runs: Path, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"traces{suffix}"
    result = paceline("traces", "export", RUN_ID, path, "--directory", runs, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["rows"] == 2
    groups = TraceGroups(open_rows(str(path), "train"), TraceKeys())
    assert groups.formats == {"own export": 2}


def test_a_file_without_lists_is_refused(runs: Path, tmp_path: Path) -> None:
    result = paceline("traces", "export", RUN_ID, tmp_path / "traces.csv", "--directory", runs)
    assert result.exit_code == 2
    assert "name such a file" in result.output


def test_pairs_are_rows_of_preferences_with_a_report(tmp_path: Path) -> None:
    traces = tmp_path / "traces.jsonl"
    rows = [{"question": f"{n}", "answer": f"{r}", "score": r} for n in range(20) for r in (0.9, 0.6, 0.3)]
    traces.write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = ("--prompt-key", "question", "--completion-key", "answer", "--reward-key", "score")
    files = tmp_path / "train.jsonl", tmp_path / "held_out.jsonl"
    result = paceline("traces", "pairs", traces, files[0], *columns, "--held-out", "0.3", files[1])
    assert result.exit_code == 0, result.output
    assert "20 pairs from 20 of 20 prompts; 7 pairs are held out\n" in result.output
    assert "left out: 20 traces (reward from 0.5 to below 0.7)" in result.output
    pairs = [[json.loads(line) for line in path.read_text().splitlines()] for path in files]
    assert len(pairs[0]) + len(pairs[1]) == 20
    assert pairs[1]
    read = read_preference(pairs[0][0], DataSection(train="unused"))
    assert (read.chosen, read.rejected, read.margin) == ("0.9", ("0.3",), 0.6), "0.9 - 0.3 is not 0.6 in binary"


def test_traces_without_a_pair_are_refused_with_the_reason(tmp_path: Path) -> None:
    """One answer to each prompt, as a served model has them."""
    traces, pairs = tmp_path / "traces.jsonl", tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"{n}+1=", "completion": "2", "final_reward": float(n == 1)} for n in range(3)]
    traces.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = paceline("traces", "pairs", traces, pairs)
    assert result.exit_code == 1
    assert "has no pair: no prompt has both" in result.output
    assert not pairs.exists()


def test_a_malformed_trace_is_named_with_its_line(tmp_path: Path) -> None:
    traces = tmp_path / "traces.jsonl"
    traces.write_text('{"prompt": "a", "completion": "b", "final_reward": "good"}\n')
    result = paceline("traces", "pairs", traces, tmp_path / "pairs.jsonl")
    assert result.exit_code == 1
    assert "traces.jsonl, line 1: column 'final_reward' must be a finite number, not 'good'" in result.output
    assert not (tmp_path / "pairs.jsonl").exists()


def span(text: str, score: float | None) -> dict[str, object]:
    evaluation = {"gen_ai.evaluation.name": "feedback", "gen_ai.evaluation.score.value": score}
    return {
        "context": {"trace_id": "0x1", "span_id": f"0x{text}"},
        "attributes": {
            "gen_ai.operation.name": "chat",
            "gen_ai.input.messages": '[{"role": "user", "parts": [{"type": "text", "content": "2+2?"}]}]',
            "gen_ai.output.messages": json.dumps([{"role": "assistant", "parts": [{"type": "text", "content": text}]}]),
        },
        "events": [] if score is None else [{"name": "gen_ai.evaluation.result", "attributes": evaluation}],
    }


def test_spans_become_traces_that_train(tmp_path: Path) -> None:
    spans, traces = tmp_path / "spans.jsonl", tmp_path / "traces.jsonl"
    records = [span("4", 1.0), span("5", 0.0), span("6", None), {**span("7", 1.0), "attributes": {}}]
    spans.write_text("".join(json.dumps(record) + "\n" for record in records))
    result = paceline("traces", "convert", spans, traces)
    assert result.exit_code == 0, result.output
    assert "3 traces, 2 with a reward" in result.output
    assert "left out: 1 record (not a call of a model)" in result.output
    groups = TraceGroups(open_rows(str(traces), "train"), TraceKeys())
    assert groups.left_out == {"no reward": 1}
    assert len(groups) == 1


def test_a_file_without_calls_writes_nothing(tmp_path: Path) -> None:
    spans, traces = tmp_path / "spans.jsonl", tmp_path / "traces.jsonl"
    spans.write_text(json.dumps({**span("7", 1.0), "attributes": {}}) + "\n")
    result = paceline("traces", "convert", spans, traces)
    assert result.exit_code == 1
    assert "has no readable call of a model; left out: 1 (not a call of a model)" in result.output
    assert not traces.exists()
