"""Whole runs through real services: learning, ages, books, the queue, faults in the middle."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer
from watched_runs import finish, metrics, wait_for_step

from paceline.client import Client
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.local.cluster import LocalCluster
from paceline.spec import RunSpec

MakeSpec = Callable[..., RunSpec]


def trained_groups(cluster: LocalCluster, run_id: str) -> list[sqlite3.Row]:
    """Step and oldest version of every trained group."""
    ledger = Ledger(cluster.directory / "ledger.sqlite", read_only=True)
    rows = ledger.db.execute(
        "SELECT step, oldest_step, slot FROM groups WHERE run_id = ? AND state = 'trained'", (run_id,)
    ).fetchall()
    ledger.close()
    return rows


def test_a_run_learns_evaluates_checkpoints_and_exports(
    client: Client, cluster: LocalCluster, make_spec: MakeSpec
) -> None:
    spec = make_spec(grpo={"max_num_steps": 24, "val_at_start": True, "val_period": 8, "val_at_end": True})
    summary = finish(client, cluster, client.submit(spec).run_id)

    assert [evaluation["samples"] for evaluation in summary["evaluations"]] == [20, 20, 20, 20]
    assert summary["reward_after"] > summary["reward_before"] + 0.1
    assert summary["samples"] == 24 * 8 * 4
    lines = metrics(summary, cluster)
    assert [line["step"] for line in lines] == list(range(24))
    versions = {line["step"]: line for line in metrics(summary, cluster, "weights")}
    assert versions.keys() == set(range(25))
    # A worker may be named after a version was staged, or be left out of an epoch for a moment; a version may be skipped.
    assert all(max(version["acknowledged"], version["members"]) <= 2 for version in versions.values())
    assert versions[24]["acknowledged"] >= 1, "the last version is skipped by nobody"
    assert {
        *("epoch", "session", "size_bytes", "gather_s", "wait_s", "transfer_s", "answer_s"),
        *("publish_s", "swap_s", "pause_s", "failures"),
    } <= versions[24].keys()
    expected = {
        *(
            "reward",
            "reward/digits",
            "completion_length",
            "learner_wait_s",
            "kl_behaviour",
            "ratio_behaviour",
        ),
        *(
            "clip_fraction",
            "effective_sample_size",
            "entropy",
            "grad_norm",
            "weights/publish_s",
            "weights/pause_s",
        ),
        *("groups/admitted", "groups/scored", "rollout/tokens_per_s", "rollout/wait_fraction"),
    }
    assert expected <= lines[-1].keys()
    model = AutoModelForCausalLM.from_pretrained(summary["export_path"])
    assert len(AutoTokenizer.from_pretrained(summary["export_path"])) == model.config.vocab_size
    run_directory = cluster.directory / summary["run_id"]
    assert {"spec.yaml", "ledger.sqlite", "metrics.jsonl", "checkpoints", "logs"} <= {
        p.name for p in run_directory.iterdir()
    }


@pytest.mark.merge
@pytest.mark.slow
def test_age_zero_is_synchronous_and_on_policy(client: Client, cluster: LocalCluster, make_spec: MakeSpec) -> None:
    spec = make_spec(async_grpo={"max_trajectory_age_steps": 0})
    summary = finish(client, cluster, client.submit(spec).run_id)

    assert all(row["oldest_step"] == row["step"] for row in trained_groups(cluster, summary["run_id"]))
    assert all(abs(line["ratio_behaviour"] - 1) < 1e-4 for line in metrics(summary, cluster))
    assert all(line["age"] == 0 for line in metrics(summary, cluster))


def test_in_order_never_trains_a_token_older_than_allowed(
    client: Client, cluster: LocalCluster, make_spec: MakeSpec
) -> None:
    spec = make_spec(async_grpo={"max_trajectory_age_steps": 2, "order": "in_order"})
    summary = finish(client, cluster, client.submit(spec).run_id)

    rows = trained_groups(cluster, summary["run_id"])
    assert all(0 <= row["step"] - row["oldest_step"] <= 2 for row in rows)
    assert all(row["slot"] // 8 == row["step"] for row in rows)
    assert any(row["step"] > row["oldest_step"] for row in rows), "generation never ran ahead of training"


@pytest.mark.merge
@pytest.mark.slow
def test_a_second_run_waits_for_the_first(client: Client, cluster: LocalCluster, make_spec: MakeSpec) -> None:
    first = client.submit(make_spec())
    second = client.submit(make_spec(grpo={"max_num_steps": 3}))

    wait_for_step(client, cluster, first.run_id, 1)
    assert client.get(second.run_id).step == 0
    finish(client, cluster, first.run_id)
    assert finish(client, cluster, second.run_id)["steps"] == 3


def test_a_paused_run_trains_nothing_and_a_cancelled_one_ends(
    client: Client, cluster: LocalCluster, make_spec: MakeSpec
) -> None:
    run = client.submit(make_spec(grpo={"max_num_steps": 1000}))
    wait_for_step(client, cluster, run.run_id, 2)
    client.pause(run.run_id)
    client.resume(run.run_id)
    wait_for_step(client, cluster, run.run_id, client.get(run.run_id).step + 2)
    client.cancel(run.run_id)

    run = client.get(run.run_id)
    assert run.groups["dropped:run_ended"] > 0
    assert run.tokens["generated"] == run.tokens["trained"] + run.tokens["dropped"] + run.tokens["live"]


@pytest.mark.slow
@pytest.mark.parametrize("order", ["ready_first", pytest.param("in_order", marks=pytest.mark.merge)])
def test_killed_rollout_and_reward_workers_lose_nothing(
    client: Client, cluster: LocalCluster, make_spec: MakeSpec, order: str
) -> None:
    run = client.submit(make_spec(grpo={"max_num_steps": 30}, async_grpo={"order": order}))
    wait_for_step(client, cluster, run.run_id, 3)
    assert cluster.kill("rollout", 0)
    wait_for_step(client, cluster, run.run_id, 6)
    assert cluster.kill("reward", 0)

    assert finish(client, cluster, run.run_id)["steps"] == 30


@pytest.mark.merge
@pytest.mark.slow
def test_a_killed_learner_goes_on_from_its_checkpoint(
    client: Client,
    cluster: LocalCluster,
    make_spec: MakeSpec,
    gated: Callable[[int], tuple[dict[str, Any], Path]],
) -> None:
    reward, gate = gated(15 * 8)
    run = client.submit(make_spec(grpo={"max_num_steps": 30}, rewards=[reward]))
    wait_for_step(client, cluster, run.run_id, 6)
    assert cluster.kill("learner", 0)
    gate.touch()

    summary = finish(client, cluster, run.run_id)
    assert summary["learner_sessions"] == 2
    assert summary["samples"] == 30 * 8 * 4


@pytest.mark.merge
@pytest.mark.slow
def test_a_killed_coordinator_goes_on_from_its_ledger(
    client: Client, cluster: LocalCluster, make_spec: MakeSpec
) -> None:
    run = client.submit(make_spec(grpo={"max_num_steps": 30}))
    wait_for_step(client, cluster, run.run_id, 6)
    assert cluster.kill("coordinator", 0)

    summary = finish(client, cluster, run.run_id)
    assert summary["learner_sessions"] == 1
    assert summary["samples"] == 30 * 8 * 4


def test_supervised_training_goes_through_the_same_loop(
    client: Client, cluster: LocalCluster, make_spec: MakeSpec
) -> None:
    spec = make_spec(
        algorithm="sft",
        data={"completion_key": "answer"},
        sft={"max_num_steps": 40, "num_examples_per_step": 16},
    )
    summary = finish(client, cluster, client.submit(spec).run_id)

    losses = [line["loss"] for line in metrics(summary, cluster)]
    assert len(losses) == 40
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.slow
def test_two_runs_may_share_a_checkpoint_folder(
    client: Client, cluster: LocalCluster, make_spec: MakeSpec, tmp_path: Path
) -> None:
    spec = make_spec(grpo={"max_num_steps": 2}, checkpointing={"checkpoint_dir": str(tmp_path)})
    for run in [client.submit(spec) for _ in range(2)]:
        finish(client, cluster, run.run_id)
        assert [path.name for path in (tmp_path / run.run_id).iterdir()] == ["1-2"]


@pytest.mark.merge
@pytest.mark.slow
def test_the_best_checkpoints_are_kept_beside_the_newest(
    client: Client, cluster: LocalCluster, make_spec: MakeSpec, tmp_path: Path
) -> None:
    spec = make_spec(
        grpo={"max_num_steps": 5},
        checkpointing={
            "checkpoint_dir": f"file://{tmp_path}",
            "save_period": 1,
            "keep_top_k": 1,
            "metric_name": "train:completion_length",
            "higher_is_better": False,
        },
    )
    run = client.submit(spec)
    summary = finish(client, cluster, run.run_id)

    lengths = [line["completion_length"] for line in metrics(summary, cluster)]
    best = max(step for step, length in enumerate(lengths, 1) if length == min(lengths))
    assert {path.name for path in (tmp_path / run.run_id).iterdir()} == {f"1-{best}", "1-5"}
