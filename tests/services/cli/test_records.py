"""samples, ledger verify, ledger backup and export read a ledger that the real exchange wrote."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import paceline

from paceline.data.rows import open_prompts
from paceline.groups import Completion, Group, Version, VersionSpan
from paceline.spec import RunSpec
from paceline.spec.reading import spec_to_yaml
from paceline.wire import PROTOCOL, encode_result
from protos.paceline.v1 import common_pb2, worker_pb2
from protos.paceline.v1 import exchange_pb2 as pb
from services.coordinator.exchange.state import ActiveRun, Exchange, Outcome
from services.coordinator.exchange.transport.dispatch import handle
from services.coordinator.exchange.uploads.intake import Arrived, store, validate_upload
from services.coordinator.ledger.ledger import Ledger
from services.coordinator.members.registry import Member

RUN_ID = "sums-1"
PROMPT_IDS = np.array([4, 5], np.int32)
COMPLETION_LENGTHS = (2, 3)


class Writer:
    """A ledger with one run, and the exchange through which one step is generated, scored and trained."""

    def __init__(self, directory: Path, model_name: str):
        (directory / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
        self.ledger = Ledger(directory / "runs" / "ledger.sqlite")
        self.spec = RunSpec.model_validate(
            {
                "name": "sums",
                "policy": {"model_name": model_name, "generation": {"max_new_tokens": 8}},
                "data": {"train": str(directory / "train.jsonl")},
                "rewards": [{"function": "exact_match"}, {"function": "length", "weight": 0.5}],
                "grpo": {"num_prompts_per_step": 1, "num_generations_per_prompt": 2, "max_num_steps": 2},
            }
        )
        folder = directory / "runs" / RUN_ID
        folder.mkdir()
        with self.ledger.transaction():
            self.ledger.add_run(RUN_ID, spec_to_yaml(self.spec), str(folder))
            self.ledger.update_run(RUN_ID, state="running", session=1)
        self.exchange = Exchange(self.ledger)
        self.exchange.active = ActiveRun(RUN_ID, self.spec, open_prompts(self.spec.data, 1), None)
        for role in ("rollout", "reward", "learner"):
            number = common_pb2.Role.Value(f"ROLE_{role.upper()}")
            self.exchange.senders.enter(
                Member(role, number, "", 0, 0.0, session=1 if role == "learner" else 0)
            )
        self.exchange.versions["rollout"] = Version(1, 1)

    def send(self, member_id: str, frames: list[bytes] | None = None, **body: Any) -> Outcome:
        """Send one request in its own transaction."""
        request = pb.ExchangeRequest(
            protocol=PROTOCOL, term=self.ledger.term, run_id=RUN_ID, member_id=member_id, session=1, **body
        )
        sender = self.exchange.senders.get(member_id)
        assert sender is not None
        request.secret = sender.secret
        arrived = Arrived(request, frames or [])
        if frames:
            validate_upload(arrived)
            store(self.ledger.payloads, [arrived])
        with self.ledger.transaction():
            outcome = handle(self.exchange, arrived, 0.0)
        assert outcome.reply.status in (pb.REPLY_STATUS_OK, pb.REPLY_STATUS_COMMITTED), outcome.reply.message
        return outcome

    def train_a_step(self) -> None:
        """Train two completions of 2 and 3 tokens; the second begins under version 0 and ends under 1."""
        (lease,) = self.send("rollout", lease=pb.LeaseRequest(room=2)).reply.lease.leases
        completions = [
            completion(0, 2, "2", ((1, 0, 0, 2),)),
            completion(1, 3, "three", ((1, 0, 0, 1), (1, 1, 1, 3))),
        ]
        result = pb.GroupResult(
            group_id=lease.group_id,
            attempt=lease.attempt,
            digest=Group(lease.group_id, PROMPT_IDS, tuple(completions)).digest(),
        )
        self.send("rollout", encode_result(PROMPT_IDS, completions), group=result)
        (task,) = self.send("reward", task=pb.TaskRequest(room=1)).reply.task.tasks
        score = pb.ScoreResult(
            group_id=task.group_id,
            attempt=task.attempt,
            digest=task.digest,
            functions=["exact_match", "length"],
            rewards=[1.0, 0.5, 0.0, float("nan")],
        )
        self.send("reward", score=score)
        (group,) = self.send(
            "learner", batch=pb.BatchRequest(step=0, rank=0, world_size=1)
        ).reply.batch.groups
        receipt = pb.Receipt(step=0, rank=0, world_size=1, tokens=sum(COMPLETION_LENGTHS))
        receipt.groups.add(group_id=group.group_id, digest=group.digest, scores_digest=group.scores_digest)
        self.send("learner", receipt=receipt)


def completion(seed: int, length: int, text: str, spans: tuple[tuple[int, int, int, int], ...]) -> Completion:
    rng = np.random.default_rng(seed)
    tokens_T = rng.integers(0, 50, length).astype(np.int32)
    return Completion(
        tokens_T,
        -rng.random(length).astype(np.float32),
        tuple(VersionSpan(*span) for span in spans),
        "stop",
        text,
    )


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    """A ledger with step 0 trained, still open: the commands run beside its writer."""
    writer = Writer(tmp_path, str(tmp_path / "model"))
    try:
        writer.train_a_step()
        yield writer
    finally:
        writer.ledger.close()


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


def test_samples_read_as_text(writer: Writer, tmp_path: Path) -> None:
    assert paceline("samples", tmp_path / "runs" / RUN_ID, "--step", "0").stdout.splitlines() == [
        "── group 0 · step 0 · reward 0.625",
        "1+1=",
        "  ▸ exact_match 1, length 0.5 · 2 tokens (stop) · version 0",
        "    2",
        "  ▸ exact_match 0, length - · 3 tokens (stop) · version 0→1",
        "    three",
    ]


def test_samples_that_are_not_there_say_why(writer: Writer, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    result = paceline("samples", RUN_ID, "--step", "7", "--directory", runs)
    assert result.exit_code == 1
    assert result.stderr == f"Error: step 7 of run {RUN_ID} has no batch; its batches are of steps 0 to 0\n"
    result = paceline("samples", "sums-9", "--step", "0", "--directory", runs)
    assert result.stderr == "Error: no run 'sums-9'; the newest are: sums-1\n"
    result = paceline("samples", RUN_ID, "--step", "0", "--directory", tmp_path)
    assert result.stderr.startswith(
        f"Error: no ledger at {tmp_path / 'ledger.sqlite'}; name the coordinator's"
    )
    with writer.ledger.transaction():
        writer.ledger.db.execute("DELETE FROM payloads")
    result = paceline("samples", RUN_ID, "--step", "0", "--directory", runs)
    assert (
        result.stderr == "Error: the samples of step 0 were not kept: the run has logger.keep_samples false\n"
    )


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
    assert result.stderr == f"Error: no folder {tmp_path / 'no'}; make it first\n"
    with writer.ledger.transaction():
        writer.ledger.db.execute("DELETE FROM payloads")
    result = paceline("samples", "export", RUN_ID, out, "--directory", runs)
    assert "were not kept" in result.stderr
    with writer.ledger.transaction():
        writer.ledger.db.execute("DELETE FROM batches")
    result = paceline("samples", "export", RUN_ID, out, "--directory", runs)
    assert "has trained no batch yet" in result.stderr
    assert [path.name for path in tmp_path.iterdir() if "parquet" in path.name] == []


def test_verify_agrees_with_what_was_written(writer: Writer, tmp_path: Path) -> None:
    result = paceline("ledger", "verify", tmp_path / "runs" / RUN_ID)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("sums-1: all records agree\n")
    report = json.loads(
        paceline("ledger", "verify", RUN_ID, "--directory", tmp_path / "runs", "--json").stdout
    )
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


def test_a_backup_is_a_whole_ledger_although_one_writes(writer: Writer, tmp_path: Path) -> None:
    copies = tmp_path / "copies"
    copies.mkdir()
    result = paceline(
        "ledger", "backup", copies / "ledger.sqlite", "--directory", tmp_path / "runs", "--json"
    )
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

    from learner.checkpoints import checkpoint

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
    assert result.stderr == f"Error: {tmp_path / 'out'} exists; an export never overwrites\n"


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
