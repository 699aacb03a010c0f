"""ledger verify, ledger backup and export read a ledger that the real exchange wrote."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import paceline
from trained_ledger import COMPLETION_LENGTHS, RUN_ID, Writer

from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.spec import RunSpec
from paceline.spec.reading import spec_to_yaml
from paceline.v1 import worker_pb2


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    """A ledger with step 0 trained, still open: the commands run beside its writer."""
    writer = Writer(tmp_path, str(tmp_path / "model"))
    try:
        writer.train_a_step()
        yield writer
    finally:
        writer.ledger.close()


def test_verify_agrees_with_what_was_written(writer: Writer, tmp_path: Path) -> None:
    result = paceline("ledger", "verify", tmp_path / "runs" / RUN_ID)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("sums-1: all records agree\n")
    report = json.loads(paceline("ledger", "verify", RUN_ID, "--directory", tmp_path / "runs", "--json").stdout)
    assert report["problems"] == []
    assert report["facts"]["tokens"]["trained"] == sum(COMPLETION_LENGTHS)


def test_verify_fails_when_a_record_was_tampered_with(writer: Writer, tmp_path: Path) -> None:
    with writer.ledger.transaction():
        writer.ledger.db.execute("UPDATE groups SET tokens = tokens + 1")
    result = paceline("ledger", "verify", tmp_path / "runs" / RUN_ID, "--json")
    assert result.exit_code == 1
    (problem,) = [text for text in json.loads(result.stdout)["problems"] if text.startswith("group 0: ")]
    assert "5 tokens" in problem
    assert "6" in problem
    assert " problems in sums-1:\n  ✗ " in paceline("ledger", "verify", tmp_path / "runs" / RUN_ID).stdout


def test_verify_of_all_runs_names_one_whose_row_is_lost(writer: Writer, tmp_path: Path) -> None:
    writer.ledger.db.execute("PRAGMA foreign_keys = OFF")
    with writer.ledger.transaction():
        writer.ledger.db.execute("DELETE FROM runs")
    result = paceline("ledger", "verify", "--directory", tmp_path / "runs")
    assert result.exit_code == 1
    assert f"✗ run {RUN_ID}: the run's row with the spec is lost" in result.stdout
    assert "only a backup has the row" in paceline("ledger", "verify", tmp_path / "runs" / RUN_ID).stdout


def test_verify_of_all_runs_goes_on_where_a_table_cannot_be_read(tmp_path: Path) -> None:
    writer = Writer(tmp_path, str(tmp_path / "model"))
    writer.train_a_step()
    db = writer.ledger.db
    pages = db.execute("SELECT rootpage FROM sqlite_master WHERE tbl_name = 'groups'").fetchall()
    (size,) = db.execute("PRAGMA page_size").fetchone()
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    writer.ledger.close()
    with (tmp_path / "runs" / "ledger.sqlite").open("r+b") as file:
        for (page,) in pages:
            file.seek((page - 1) * size)
            file.write(bytes(range(200)))
    result = paceline("ledger", "verify", "--directory", tmp_path / "runs")
    assert result.exit_code == 1
    assert f"problems in {RUN_ID}:" in result.stdout, result.output


def test_a_backup_is_a_whole_ledger_although_one_writes(writer: Writer, tmp_path: Path) -> None:
    copies = tmp_path / "copies"
    copies.mkdir()
    result = paceline("ledger", "backup", copies / "ledger.sqlite", "--directory", tmp_path / "runs", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["size_bytes"] == (copies / "ledger.sqlite").stat().st_size
    assert paceline("ledger", "verify", RUN_ID, "--directory", copies).exit_code == 0
    assert [path.name for path in copies.iterdir() if "partial" in path.name] == []
    result = paceline("ledger", "backup", tmp_path / "no" / "copy", "--directory", tmp_path / "runs")
    assert result.stderr == f"Error: no folder {tmp_path / 'no'}; make it first\n"


def test_export_needs_a_complete_checkpoint(writer: Writer, tmp_path: Path) -> None:
    result = paceline("export", RUN_ID, tmp_path / "out", "--directory", tmp_path / "runs")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: run {RUN_ID} has no complete checkpoint yet")


def test_export_gives_the_weights_of_the_newest_checkpoint(writer: Writer, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

    from paceline.learner.checkpoints import checkpoint

    config = Qwen3Config(
        vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(tmp_path / "model")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1.0
    optimizer = torch.optim.AdamW(model.parameters())
    chain = writer.ledger.run(RUN_ID)["chain"]
    folder = tmp_path / "runs" / RUN_ID / "checkpoints"
    saved = checkpoint.save(folder, session=1, step=1, model=model, optimizer=optimizer, chain_hash=chain)
    assert saved is not None
    with writer.ledger.transaction():
        writer.ledger.checkpoints.add(
            worker_pb2.CheckpointReport(
                run_id=RUN_ID,
                session=1,
                step=1,
                path=str(saved.path),
                sha256=saved.manifest_sha256,
                chain=chain,
            )
        )
    result = paceline("export", RUN_ID, tmp_path / "out", "--directory", tmp_path / "runs", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {
        "run_id": RUN_ID,
        "step": 1,
        "session": 1,
        "path": str(tmp_path / "out"),
    }
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(exported.model.norm.weight, torch.full((8,), 2.0))
    result = paceline("export", RUN_ID, tmp_path / "out", "--directory", tmp_path / "runs")
    assert result.stderr == f"Error: {tmp_path / 'out'} exists, and an export never overwrites; name another folder\n"


def test_reading_commands_never_write(writer: Writer, tmp_path: Path) -> None:
    before = list(writer.ledger.db.iterdump())
    paceline("samples", RUN_ID, "--step", "0", "--directory", tmp_path / "runs")
    paceline("ledger", "verify", RUN_ID, "--directory", tmp_path / "runs")
    assert list(writer.ledger.db.iterdump()) == before
    reader = Ledger(tmp_path / "runs" / "ledger.sqlite", read_only=True)
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        reader.db.execute("DELETE FROM groups")
    reader.close()


def test_a_supervised_run_is_said_to_have_no_samples(tmp_path: Path) -> None:
    spec = RunSpec.model_validate(
        {"algorithm": "sft", "policy": {"model_name": "none"}, "data": {"train": "rows.jsonl"}}
    )
    ledger = Ledger(tmp_path / "ledger.sqlite")
    with ledger.transaction():
        ledger.add_run("tuned-1", spec_to_yaml(spec), str(tmp_path / "tuned-1"))
    ledger.close()
    result = paceline("samples", "tuned-1", "--step", "0", "--directory", tmp_path)
    assert result.exit_code == 1
    assert "with algorithm sft it trains on its data set's rows" in result.stderr
