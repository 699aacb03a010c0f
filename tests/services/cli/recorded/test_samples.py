"""samples and samples export read a ledger that the real exchange wrote, and what they write trains again."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from command_line import paceline
from trained_ledger import COMPLETION_LENGTHS, RUN_ID, Writer

from paceline.data.example_rows import read_preference
from paceline.data.prompts import open_prompts
from paceline.services.coordinator.records.reader import records_in
from paceline.spec.reading import spec_to_yaml
from paceline.spec.sections.data import DataSection

CHAT = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}]


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    """A ledger with step 0 trained, still open: the commands run beside its writer."""
    writer = Writer(tmp_path, str(tmp_path / "model"))
    try:
        writer.train_a_step()
        yield writer
    finally:
        writer.ledger.close()


@pytest.fixture
def chat_writer(tmp_path: Path) -> Iterator[Writer]:
    """The same with a chat prompt and columns of several types."""
    row = {"prompt": CHAT, "answer": "2", "level": 3, "hard": False, "parts": [1, 1]}
    writer = Writer(tmp_path, str(tmp_path / "model"), row)
    try:
        writer.train_a_step()
        yield writer
    finally:
        writer.ledger.close()


def keep_none(writer: Writer) -> None:
    """Let the run's spec keep no samples."""
    logger = writer.spec.logger.model_copy(update={"keep_samples": False})
    text = spec_to_yaml(writer.spec.model_copy(update={"logger": logger}))
    with writer.ledger.transaction():
        writer.ledger.db.execute("UPDATE runs SET spec_yaml = ?", (text,))


def test_samples_show_texts_rewards_and_versions(writer: Writer, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    by_id = paceline("samples", RUN_ID, "--step", "0", "--directory", runs, "--json")
    assert by_id.exit_code == 0, by_id.output
    assert paceline("samples", runs / RUN_ID, "--step", "0", "--json").output == by_id.output
    (group,) = [json.loads(line) for line in by_id.stdout.splitlines()]
    assert (group["prompt"], group["columns"], group["state"]) == ("1+1=", {"answer": "2"}, "trained")
    assert group["prompt_ids"] == [4, 5]
    assert [c["text"] for c in group["completions"]] == ["2", "three"]
    assert [c["rewards"] for c in group["completions"]] == [
        {"exact_match": 1.0, "length": 0.5},
        {"exact_match": 0.0, "length": None},
    ]
    assert group["reward"] == pytest.approx((1.25 + 0.0) / 2)
    assert [len(c["token_ids"]) for c in group["completions"]] == list(COMPLETION_LENGTHS)
    assert group["completions"][1]["spans"] == [[0, 1, 1, 0], [1, 3, 1, 1]]
    assert group["completions"][1]["samplers"] == ["", ""]


def test_samples_read_as_text(writer: Writer, tmp_path: Path) -> None:
    assert paceline("samples", tmp_path / "runs" / RUN_ID, "--step", "0").stdout.splitlines() == [
        "── group 0 · step 0 · reward 0.625",
        "1+1=",
        "  ▸ exact_match 1, length 0.5 · 2 tokens (stop) · version 0",
        "    2",
        "  ▸ exact_match 0, length - · 3 tokens (stop) · version 0→1",
        "    three",
    ]


def test_samples_go_through_a_pager_on_a_terminal(
    writer: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "paceline.services.cli.recorded.samples.sys",
        SimpleNamespace(stdout=SimpleNamespace(isatty=lambda: True)),
    )
    monkeypatch.setattr("click.echo_via_pager", lambda lines: click.echo(f"paged {len(list(lines))} group"))
    run = tmp_path / "runs" / RUN_ID
    assert paceline("samples", run).stdout == "paged 1 group\n"
    assert paceline("samples", run, "--no-pager").stdout.startswith("── group 0")


def test_samples_that_are_not_there_say_why(writer: Writer, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    result = paceline("samples", RUN_ID, "--step", "7", "--directory", runs)
    assert result.exit_code == 1
    assert result.stderr == f"Error: step 7 of run {RUN_ID} has no batch; the run's batches are of steps 0 to 0\n"
    result = paceline("samples", "sums-9", "--step", "0", "--directory", runs)
    assert result.stderr == "Error: no run 'sums-9'; the newest are: sums-1\n"
    result = paceline("samples", RUN_ID, "--step", "0", "--directory", tmp_path)
    assert result.stderr.startswith(f"Error: no ledger at {tmp_path / 'ledger.sqlite'}; name the coordinator's")
    with writer.ledger.transaction():
        writer.ledger.db.execute("DELETE FROM payloads")
    result = paceline("samples", RUN_ID, "--directory", runs)
    assert result.stderr.startswith("Error: the samples of step 0 cannot be read; `paceline ledger verify")
    keep_none(writer)
    result = paceline("samples", RUN_ID, "--directory", runs)
    assert result.stderr == "Error: the samples of step 0 were not kept: the run has logger.keep_samples false\n"


def test_all_samples_as_a_table(writer: Writer, tmp_path: Path) -> None:
    import pyarrow.parquet

    out = tmp_path / "out.parquet"
    result = paceline("samples", "export", tmp_path / "runs" / RUN_ID, out, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {"path": str(out), "rows": 2}
    first, second = pyarrow.parquet.read_table(out).to_pylist()
    assert (first["prompt"], first["completion"], first["prompt_ids"]) == ("1+1=", "2", [4, 5])
    assert json.loads(first["columns"]) == {"answer": "2"}
    assert dict(first["rewards"]) == {"exact_match": 1.0, "length": 0.5}
    assert first["final_reward"] == pytest.approx(1.25)
    assert dict(second["rewards"]) == {"exact_match": 0.0, "length": None}
    assert second["final_reward"] == 0.0
    assert second["versions"] == [0, 1, 1]
    assert second["sessions"] == [1, 1, 1]
    assert len(second["token_ids"]) == len(second["logprobs"]) == 3
    assert (second["group_id"], second["completion_index"], second["step"]) == (0, 1, 0)


def test_samples_that_cannot_be_exported_leave_no_file(writer: Writer, tmp_path: Path) -> None:
    out, runs = tmp_path / "out.parquet", tmp_path / "runs"
    result = paceline("samples", "export", RUN_ID, tmp_path / "no" / "out.parquet", "--directory", runs)
    assert result.stderr == f"Error: no folder {tmp_path / 'no'}; create it first\n"
    with writer.ledger.transaction():
        writer.ledger.db.execute("DELETE FROM payloads")
    keep_none(writer)
    result = paceline("samples", "export", RUN_ID, out, "--directory", runs)
    assert "were not kept" in result.stderr
    with writer.ledger.transaction():
        writer.ledger.db.execute("DELETE FROM batches")
    result = paceline("samples", "export", RUN_ID, out, "--directory", runs)
    assert "has trained no batch yet" in result.stderr
    assert [path.name for path in tmp_path.iterdir() if "parquet" in path.name] == []


@pytest.mark.parametrize("name", ["out.parquet", "out.jsonl"])
def test_exported_chats_train_again(chat_writer: Writer, tmp_path: Path, name: str) -> None:
    out = tmp_path / name
    assert paceline("samples", "export", tmp_path / "runs" / RUN_ID, out).exit_code == 0
    prompts = open_prompts(DataSection(train=str(out)), 0)
    assert len(prompts) == 2  # a row for each completion
    prompt, columns = prompts.draw(0)
    assert prompt == CHAT
    assert (columns["answer"], columns["level"], columns["hard"]) == ("2", 3, False)
    assert columns["completion"] in ("2", "three")


def test_a_table_has_the_chat_as_json(chat_writer: Writer, tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    assert paceline("samples", "export", tmp_path / "runs" / RUN_ID, out).exit_code == 0
    with out.open(newline="") as file:
        first, second = csv.DictReader(file)
    assert json.loads(first["prompt"]) == CHAT
    assert (first["completion"], first["level"], second["final_reward"]) == ("2", "3", "0.0")
    assert json.loads(first["token_ids"]) != json.loads(second["token_ids"])


@pytest.mark.parametrize("name", ["pairs.parquet", "pairs.jsonl"])
def test_pairs_are_preferences(chat_writer: Writer, tmp_path: Path, name: str) -> None:
    out = tmp_path / name
    result = paceline(
        "samples",
        "export",
        tmp_path / "runs" / RUN_ID,
        out,
        "--pairs",
        "--best",
        "0.7",
        "--worst",
        "0.5",
        "--json",
    )
    assert json.loads(result.stdout) == {"path": str(out), "rows": 1}
    rows: list[dict[str, Any]]
    if name.endswith("parquet"):
        import pyarrow.parquet

        rows = pyarrow.parquet.read_table(out).to_pylist()
    else:
        rows = [json.loads(line) for line in out.read_text().splitlines()]
    preference = read_preference(rows[0], DataSection(train=str(out)))
    assert preference.prompt == CHAT
    assert preference.chosen == [{"role": "assistant", "content": "2"}]
    assert preference.rejected == ([{"role": "assistant", "content": "three"}],)
    assert (rows[0]["chosen_reward"], rows[0]["rejected_reward"]) == (1.25, 0.0)


def test_pairs_of_texts_and_pairs_that_are_not_there(writer: Writer, tmp_path: Path) -> None:
    out, run = tmp_path / "pairs.jsonl", tmp_path / "runs" / RUN_ID
    result = paceline("samples", "export", run, out, "--pairs", "--best", "2")
    assert result.exit_code == 1
    assert "no group of run sums-1 has a best completion of at least 2" in result.stderr
    assert not out.exists()
    assert paceline("samples", "export", run, out, "--pairs").exit_code == 0
    assert json.loads(out.read_text())["chosen"] == "2"


@pytest.mark.parametrize(("arguments", "words"), [
    (["export", RUN_ID, "x.txt"], "'.txt' of the file name is none of .parquet, .jsonl, .csv"),
    (["export", RUN_ID, "x.csv", "--best", "1"], "--best and --worst are bounds of --pairs"),
    (["export", RUN_ID, "x.csv", "--pairs", "--best", "0", "--worst", "1"], "--worst 1 is above --best 0"),
    ([RUN_ID, "--version", "1"], "--version is for --eval"),
    ([RUN_ID, "--eval", "--step", "1"], "with --eval name the version"),
    ([RUN_ID, "--best", "1", "--limit", "2"], "exclude one another"),
    ([RUN_ID, "--eval"], "run sums-1 has no evaluation; evaluated versions: none yet"),
])  # fmt: skip
def test_options_that_contradict_are_refused(writer: Writer, tmp_path: Path, arguments: list[str], words: str) -> None:
    result = paceline("samples", *arguments, "--directory", tmp_path / "runs")
    assert result.exit_code != 0
    assert words in " ".join(result.stderr.split())


def test_best_and_worst_completions(writer: Writer, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    best = paceline("samples", RUN_ID, "--best", "1", "--directory", runs).stdout
    assert "exact_match 1, length 0.5" in best
    assert "three" not in best
    (worst,) = paceline("samples", RUN_ID, "--worst", "1", "--directory", runs, "--json").stdout.splitlines()
    assert [c["text"] for c in json.loads(worst)["completions"]] == ["three"]


def test_few_groups_are_shown_unless_all_are_wanted(writer: Writer) -> None:
    from paceline.services.cli.recorded.samples import _lines

    (group,) = records_in(writer.ledger).groups(RUN_ID, 0)
    assert len(list(_lines([group], 1, False))) == 1
    *_, last = _lines([group], 3, False)
    assert last.startswith("── 1 of 3 groups; --limit 0 shows all")
