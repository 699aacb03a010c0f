"""From a run's samples to a run on them: the recorded behaviour policy is the one that sampled, and its sources are measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from watched_runs import finish, metrics

from paceline.client import Client
from paceline.services.cli.main import main
from paceline.services.demo.task import answer, problem
from paceline.services.local.cluster import LocalCluster
from paceline.spec import RunSpec


@pytest.mark.merge
@pytest.mark.slow
def test_an_export_trains_offline_with_a_ratio_of_one(
    client: Client, cluster: LocalCluster, make_spec: Callable[..., RunSpec], tmp_path: Path
) -> None:
    for name, numbers in (("small", range(10)), ("large", range(90, 100))):
        rows = [{"prompt": problem(a, b), "answer": answer(a, b)} for a in numbers for b in numbers]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = [str(tmp_path / f"{name}.jsonl") for name in ("small", "large")]
    data = {"train": names, "train_weights": [1, 3], "source_key": "of"}
    grpo = {"num_prompts_per_step": 32, "num_generations_per_prompt": 4, "max_num_steps": 1}
    sampled = client.submit(make_spec(data=data, grpo=grpo))
    (batch,) = metrics(finish(client, cluster, sampled.run_id), cluster)
    assert batch["groups_of/small"] + batch["groups_of/large"] == 32
    assert batch["groups_of/large"] == pytest.approx(24, abs=3)

    traces = tmp_path / "traces.parquet"
    options = ("--directory", str(cluster.directory))
    exported = CliRunner().invoke(main, ["traces", "export", sampled.run_id, str(traces), *options])
    assert exported.exit_code == 0, exported.output
    section = {"num_examples_per_step": 8, "max_num_steps": 1}
    spec = make_spec(algorithm="offline_grpo", data={"train": str(traces), "validation": None}, offline_grpo=section)
    run = client.submit(spec)
    (step,) = metrics(finish(client, cluster, run.run_id), cluster)
    assert step["ratio_behaviour"] == pytest.approx(1.0, abs=1e-4)
    (said, *_) = [str(event) for event in client.events(run.run_id) if "data.train" in str(event)]
    assert "traces (own export); " in said
    assert "have the recorded behaviour policy" in said
