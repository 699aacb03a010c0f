"""Objectives that take the whole batch, through real services and two learner ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.client import Client
from paceline.services.local.cluster import LocalCluster
from paceline.spec import RunSpec


@pytest.mark.parametrize(
    "loss_fn",
    [
        pytest.param({"preset": "rloo"}, marks=pytest.mark.slow),
        pytest.param({"preset": "rloo", "reference_policy_pool": "reward"}, marks=pytest.mark.slow),
        pytest.param({"preset": "reinforce_pp"}, marks=pytest.mark.slow),
        pytest.param({"preset": "m2po"}, marks=pytest.mark.slow),
        pytest.param({"preset": "ppo"}, marks=[pytest.mark.merge, pytest.mark.slow]),
    ],
    ids=lambda loss_fn: "-".join(loss_fn.values()),
)
def test_a_preset_runs_with_its_rewards_spread_over_ranks(
    loss_fn: dict[str, str], client: Client, cluster: LocalCluster, make_spec: Callable[..., RunSpec]
) -> None:
    spec = make_spec(grpo={"max_num_steps": 16}, loss_fn=loss_fn, policy={"num_updates_per_step": 2})
    run = client.wait(client.submit(spec).run_id, timeout_s=180.0)
    cluster.check()
    summary = json.loads((Path(run.directory) / "summary.json").read_text())
    assert summary["state"] == "succeeded", summary["message"]
    lines = [json.loads(line) for line in (Path(run.directory) / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["kind"] == "train"]
    assert len(trained) == 16
    # With no advantage at all (rewards lost on the way) there would be no gradient.
    assert min(line["grad_norm"] for line in trained) > 0
    assert all("kl_reference" in line for line in trained) == (spec.loss_fn.reference_policy_kl_penalty > 0)
    if spec.loss_fn.reference_policy_kl_penalty:
        # Before the first update the policy is its reference, whoever asks that, and then it leaves it.
        kl = [abs(line["kl_reference"]) for line in trained]
        assert kl[0] < 0.1 * max(kl)
    rewards = [line["reward"] for line in trained]
    assert sum(rewards[-4:]) > sum(rewards[:4])
