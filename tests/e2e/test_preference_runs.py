"""Preference data through real services and two learner ranks: pairs in, a better policy or a reward model out."""

from __future__ import annotations

import json
import random
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification
from watched_runs import finish, wait_for_step

from paceline.client import Client
from paceline.reward.builtin.reward_model import reward_model
from paceline.services.cli.main import main
from paceline.services.coordinator.audit.verify import verify
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.demo.task import answer, problem, teach
from paceline.services.local.cluster import LocalCluster
from paceline.spec import RunSpec

RUN_TIMEOUT_S = 240.0
MakeSpec = Callable[..., RunSpec]
ROOM = {"timeout_s": 120, "memory_mb": 16384}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train.jsonl and validation.jsonl: right answers against wrong ones, for dpo, orpo, rm and kto."""
    folder, dice = tmp_path_factory.mktemp("pairs"), random.Random(0)
    rows = []
    for a in range(0, 100, 2):
        for b in range(0, 100, 5):
            right = answer(a, b)
            wrong = next(text for text in iter(lambda r=right: teach(r, dice), None) if text != right)
            good = dice.random() < 0.5
            rows.append(
                {
                    "prompt": problem(a, b),
                    "chosen": right,
                    "rejected": [wrong, wrong[::-1] + "1"],
                    "completion": right if good else wrong,
                    "label": good,
                }
            )
    dice.shuffle(rows)
    for name, part in (("train", rows[64:]), ("validation", rows[:64])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return folder


def spec_for(make_spec: MakeSpec, pairs: Path, algorithm: str, steps: int, **section: Any) -> RunSpec:
    data = {"train": str(pairs / "train.jsonl"), "validation": str(pairs / "validation.jsonl")}
    sizes = {"max_num_steps": steps, "num_examples_per_step": 16, "val_at_start": True, "val_at_end": True}
    exact = {"export_dtype": "float32"}
    return make_spec(algorithm=algorithm, data=data, checkpointing=exact, **{algorithm: {**sizes, **section}})


@pytest.mark.merge
@pytest.mark.slow
def test_dpo_prefers_held_out_answers_and_a_killed_learner_reaches_the_same_weights(
    client: Client, cluster: LocalCluster, make_spec: MakeSpec, pairs: Path
) -> None:
    spec = spec_for(make_spec, pairs, "dpo", 24, reference_policy_kl_penalty=0.3)
    plain = finish(client, cluster, client.submit(spec).run_id)
    before, after = plain["evaluations"]
    assert (before["step"], after["step"], after["sequences"]) == (0, 24, 64 * 3)
    assert before["margin"] == pytest.approx(0.0, abs=1e-4)
    assert after["margin"] > 0.1
    assert after["accuracy"] > 0.6

    run = client.submit(spec)
    deadline_s, pause = time.monotonic() + RUN_TIMEOUT_S, threading.Event()
    while client.get(run.run_id).step < 6:
        cluster.check()
        assert time.monotonic() < deadline_s
        pause.wait(0.05)
    assert cluster.kill("learner")
    killed = finish(client, cluster, run.run_id)
    assert killed["learner_sessions"] == 2
    one, other = (load_file(Path(s["export_path"]) / "model.safetensors") for s in (plain, killed))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_a_reward_model_ranks_held_out_answers_and_then_rewards_rollouts(
    client: Client, cluster: LocalCluster, make_spec: MakeSpec, pairs: Path
) -> None:
    summary = finish(client, cluster, client.submit(spec_for(make_spec, pairs, "rm", 40)).run_id)
    folder = summary["export_path"]
    before, after = summary["evaluations"]
    assert after["accuracy"] > max(before["accuracy"], 0.6)

    model, info = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert model.config.num_labels == 1
    rows = [json.loads(line) for line in (pairs / "validation.jsonl").read_text().splitlines()]
    scores = [reward_model([row["prompt"]] * 3, [row["chosen"], *row["rejected"]], path=folder) for row in rows]
    won = sum((chosen > one) / 2 for chosen, *rejected in scores for one in rejected)  # type: ignore[operator]
    assert won / len(rows) == pytest.approx(after["accuracy"], abs=1e-6)

    reward = {"function": "reward_model", "kwargs": {"path": f"run:{summary['run_id']}"}}
    spec = make_spec(rewards=[reward | ROOM], grpo={"max_num_steps": 2})
    run = client.submit(spec)
    assert finish(client, cluster, run.run_id)["steps"] == 2
    for group in client.groups(run.run_id, 1):
        texts = [completion["text"] for completion in group["completions"]]
        own = reward_model([group["prompt"]] * len(texts), texts, path=folder)
        assert [each["rewards"]["reward_model"] for each in group["completions"]] == pytest.approx(own, abs=1e-5)
    _exchange_while_the_run_goes_on(client, cluster, make_spec, summary)


def _exchange_while_the_run_goes_on(
    client: Client, cluster: LocalCluster, make_spec: MakeSpec, trained: dict[str, Any]
) -> None:
    """Give a run `run:ID/newest`, add an export with the opposite scores while it trains, and compare its samples with both."""
    exports = cluster.directory / trained["run_id"] / "exports"
    shutil.copytree(trained["export_path"], exports / "step-40")
    kwargs = {"path": f"run:{trained['run_id']}/newest", "refresh_s": 0.1}
    reward = {"function": "reward_model", "kwargs": kwargs, "name": "rm"}
    steps = 120
    spec = make_spec(rewards=[reward | ROOM], grpo={"max_num_steps": steps}, checkpointing={"save_period": steps})
    run = client.submit(spec)
    wait_for_step(client, cluster, run.run_id, 2)
    made = cluster.directory / "opposite"
    shutil.copytree(exports / "step-40", made)
    weights = load_file(made / "model.safetensors")
    weights["score.weight"] = -weights["score.weight"]
    save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
    made.rename(exports / "step-41")
    assert finish(client, cluster, run.run_id)["steps"] == steps
    for step, export in ((0, "step-40"), (steps - 1, "step-41")):
        for group in client.groups(run.run_id, step):
            texts = [completion["text"] for completion in group["completions"]]
            own = reward_model([group["prompt"]] * len(texts), texts, path=str(exports / export))
            assert [each["rewards"]["rm"] for each in group["completions"]] == pytest.approx(own, abs=1e-5)
            assert all(each["extra"]["rm_model"].startswith(export) for each in group["completions"])


@pytest.mark.parametrize(
    "algorithm",
    [pytest.param("orpo", marks=pytest.mark.slow), pytest.param("kto", marks=[pytest.mark.merge, pytest.mark.slow])],
)
def test_other_preferences_take_the_same_way(
    algorithm: str, client: Client, cluster: LocalCluster, make_spec: MakeSpec, pairs: Path
) -> None:
    summary = finish(client, cluster, client.submit(spec_for(make_spec, pairs, algorithm, 24)).run_id)
    before, after = summary["evaluations"]
    assert after["margin"] > before["margin"]


@pytest.fixture(scope="module")
def teacher(cluster: LocalCluster, make_spec: MakeSpec, pairs: Path) -> str:
    """The folder of a model that has learnt something."""
    with Client(cluster.address) as client:
        run = client.submit(spec_for(make_spec, pairs, "orpo", 24))
        return str(finish(client, cluster, run.run_id)["export_path"])


@pytest.mark.slow
def test_a_student_comes_closer_to_its_teacher_on_its_own_samples(
    client: Client, cluster: LocalCluster, make_spec: MakeSpec, teacher: str
) -> None:
    spec = make_spec(algorithm="distillation", distillation={"teacher_model_name": teacher}, grpo={"max_num_steps": 24})
    kl = kl_to_the_teacher(cluster, finish(client, cluster, client.submit(spec).run_id))
    assert len(kl) == 24
    assert sum(kl[-4:]) < 0.8 * sum(kl[:4])


@pytest.mark.merge
@pytest.mark.slow
def test_a_teacher_in_the_reward_pool_teaches_on_after_its_worker_was_killed(
    client: Client, cluster: LocalCluster, make_spec: MakeSpec, teacher: str, tmp_path: Path
) -> None:
    spec = make_spec(
        algorithm="distillation",
        distillation={"teacher_model_name": teacher, "teacher_pool": "reward"},
        grpo={"max_num_steps": 24},
    )
    run = client.submit(spec)
    for event in client.watch(run.run_id):
        cluster.check()
        if event.kind == "step" and event.content["step"] == 5:
            assert cluster.kill("reward")
            break
    summary = finish(client, cluster, run.run_id)
    kl = kl_to_the_teacher(cluster, summary)
    assert len(kl) == 24
    assert sum(kl[-4:]) < 0.8 * sum(kl[:4])
    ledger = Ledger(cluster.directory / "ledger.sqlite", read_only=True)
    references = verify(ledger, run.run_id).facts["references"]
    ledger.close()
    assert references >= 24 * 8
    # The reward pool's answers are on record: a replay without any teacher reaches the same weights.
    folder = cluster.directory / run.run_id
    arguments = ["replay", str(folder), "--from", "20", "--output", str(tmp_path / "out"), "--device", "cpu"]
    replayed = CliRunner().invoke(main, [*arguments, "--json"])
    assert replayed.exit_code == 0, replayed.output
    assert json.loads(replayed.stdout)["identical"] is True


def kl_to_the_teacher(cluster: LocalCluster, summary: dict[str, Any]) -> list[float]:
    """By step."""
    path = cluster.directory / summary["run_id"] / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line["kl_teacher"] for line in lines if line["kind"] == "train"]
