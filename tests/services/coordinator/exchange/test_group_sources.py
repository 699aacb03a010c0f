"""Rewards by source, from the data sets to the metrics of a batch and of an evaluation."""

from __future__ import annotations

import json
from pathlib import Path

from exchange_drivers import Learner, MakeWorld, Reward, Rollout, fill


def write(path: Path, source: str, number: int) -> str:
    rows = [{"prompt": f"{source} {index}", "answer": index, "of": source} for index in range(number)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_batch_and_an_evaluation_are_measured_by_source(tmp_path: Path, make_world: MakeWorld) -> None:
    names = [write(tmp_path / f"{name}.jsonl", name, 4) for name in ("math", "code")]
    data = {"train": names, "validation": names[1], "source_key": "of", "train_weights": [1, 1]}
    world = make_world(grpo={"val_at_start": True, "num_prompts_per_step": 4}, data=data)
    rollout, reward, learner = Rollout(world), Reward(world), Learner(world)
    fill(rollout, reward, 4)
    learner.train(0)
    values = json.loads(world.ledger.db.execute("SELECT metrics_json FROM batches WHERE step = 0").fetchone()[0])
    by_source = {name: value for name, value in values.items() if name.startswith("groups_of/")}
    sources = [world.run.prompts.draw(cursor)[1]["of"] for cursor in range(4)]
    assert by_source == {f"groups_of/{name}": float(sources.count(name)) for name in set(sources)}
    assert {f"reward_of/{name}" for name in set(sources)} <= values.keys()

    world.begin_evaluation(0)
    for lease in rollout.lease(8):
        if lease.HasField("pinned_version"):
            rollout.finish(lease)
    for task in reward.tasks():
        reward.score(task, [1.0])
    (result,) = world.kinds("evaluated")
    assert result["reward_of/code"] == 1.0
    assert result["groups_of/code"] == 4.0
