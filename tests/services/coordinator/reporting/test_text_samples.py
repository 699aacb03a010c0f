"""Completions of an evaluation among TensorBoard's texts."""

from __future__ import annotations

from pathlib import Path

import pytest
from exchange_drivers import MakeWorld, Reward, Rollout
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from paceline.encryption.storage_key import StorageKey
from paceline.services.coordinator.reporting.metrics_files import MetricsFiles
from paceline.services.coordinator.reporting.run_log import evaluation_text


def test_the_first_prompts_with_their_completions(make_world: MakeWorld, tmp_path: Path) -> None:
    world = make_world(grpo={"val_at_start": True, "val_samples_per_prompt": 2})
    world.begin_evaluation(0)
    rollout, reward = Rollout(world), Reward(world)
    for lease in rollout.lease(8):
        if lease.HasField("pinned_version"):
            rollout.finish(lease)
    for task in reward.tasks():
        reward.score(task, [1.0, 0.5])
    text = evaluation_text(world.ledger, world.run_id, "eval:0", ["exact_match"])
    assert text.count("---") == 2
    assert text.count("**exact_match 1** (4 tokens)") == 3
    assert "**exact_match 0.5** (5 tokens)" in text
    assert evaluation_text(world.ledger, world.run_id, "eval:9", ["exact_match"]) == ""

    files = MetricsFiles(tmp_path / "run", tensorboard=True, next_step=0, is_ahead=lambda kind, step: False)
    files.write_text("eval/samples", 3, text)
    files.write_text("eval/samples", 4, "")
    files.close()
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    (shown,) = events.Tensors("eval/samples")
    assert shown.step == 3
    assert shown.tensor_proto.string_val[0].decode() == text


def test_with_a_storage_key_no_text_is_written(
    tmp_path: Path, given_key: StorageKey, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        files = MetricsFiles(tmp_path, tensorboard=True, next_step=0, is_ahead=lambda kind, step: False)
    assert "no texts are written for TensorBoard, because of the storage key" in caplog.text
    files.write_text("eval/samples", 3, "planted text")
    files.write_extra('{"planted": 1}\n')
    files.write("train", 0, {"loss": 1.0})
    files.close()
    written = {path.name: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert {"metrics.jsonl", "extra.jsonl"} < written.keys()
    assert not any(b"planted" in content for content in written.values())


def test_damaged_completions_are_left_out(make_world: MakeWorld) -> None:
    world = make_world(grpo={"val_at_start": True})
    world.check = False  # it is damaged on purpose
    world.begin_evaluation(0)
    rollout, reward = Rollout(world), Reward(world)
    for lease in rollout.lease(3):
        rollout.finish(lease)
    for task in reward.tasks():
        reward.score(task, [1.0])
    world.restart()  # what was just written is not read from the disk
    world.ledger.db.execute("UPDATE payloads SET arrays_crc = arrays_crc + 1")
    assert evaluation_text(world.ledger, world.run_id, "eval:0", ["exact_match"]) == ""
