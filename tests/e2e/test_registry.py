"""From a run to a model in use and back to training data: export, evaluation, gate, registry, fetch, feedback, pairs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from command_line import paceline
from watched_runs import finish

from paceline.apps.model_server.serving import endpoint_of, opened_model, registered_name
from paceline.apps.model_server.trace_log import TraceLog
from paceline.client import Client
from paceline.files.storage import Folder
from paceline.models.export_origin import origin_of
from paceline.services.cli.chat import spec_of_model
from paceline.services.local.cluster import LocalCluster
from paceline.spec import RunSpec

EVALUATION = """
policy: {{generation: {{max_new_tokens: 6}}}}
data: {{validation: {files}/validation.jsonl}}
rewards: [{{function: "{files}/rewards.py:digits"}}]
"""


def done(*arguments: Any) -> Any:
    """Run a command that has to succeed, and return the JSON that it prints."""
    result = paceline(*(str(each) for each in arguments), "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


async def used(folder: Path, traces: Path) -> list[str]:
    """Serve a model, ask it four times, and give feedback on each answer; return the answers' ids."""
    spec, ids = spec_of_model(str(folder), folder), []
    with closing(TraceLog(traces, registered_name(str(folder)), 1 << 20)) as log:
        async with (
            opened_model(spec, "champion") as served,
            endpoint_of(served, "127.0.0.1", 0, log) as url,
            aiohttp.ClientSession() as session,
        ):
            for number in range(4):
                ask = {
                    "model": "champion",
                    "prompt": "12+7=",
                    "seed": number,
                    "min_tokens": 2,
                    "temperature": 1,
                }
                async with session.post(f"{url}/completions", json=ask) as answer:
                    ids.append((await answer.json())["id"])
                feedback = {"completion_id": ids[-1], "score": number % 2}
                async with session.post(f"{url}/feedback", json=feedback) as answer:
                    assert answer.status == 200, await answer.text()
    return ids


@pytest.mark.merge
@pytest.mark.slow
def test_a_run_becomes_a_champion_whose_traces_are_pairs(
    client: Client,
    cluster: LocalCluster,
    make_spec: Callable[..., RunSpec],
    files: Path,
    tmp_path: Path,
) -> None:
    run_id = client.submit(make_spec(grpo={"max_num_steps": 3})).run_id
    summary = finish(client, cluster, run_id)
    export = cluster.directory / run_id / "export"
    (tmp_path / "eval.yaml").write_text(EVALUATION.format(files=files))
    for name, model in (("base", files / "model"), ("candidate", export)):
        done("eval", tmp_path / "eval.yaml", "--model", model, "--output", tmp_path / name)
    trained = {"data.validation": files / "train.jsonl", "grpo.max_val_samples": 8}
    overlapping = paceline(
        *("eval", tmp_path / "eval.yaml", *(f"{key}={value}" for key, value in trained.items())),
        *("--model", f"run:{run_id}", "--directory", cluster.directory, "--output", tmp_path / "overlapping"),
    )
    assert overlapping.exit_code == 0, overlapping.output
    assert (
        f"warning: 8 of 8 questions have at least 50% of their 13-word sequences in {files / 'train.jsonl'}"
        in overlapping.stderr
    )
    verdict, key = tmp_path / "verdict.json", tmp_path / "key.pem"
    done(
        "gate",
        tmp_path / "candidate",
        "--baseline",
        tmp_path / "base",
        "--max-drop",
        "1",
        "--output",
        verdict,
    )
    assert paceline("models", "key", key).exit_code == 0

    there = ("--coordinator", cluster.address)
    register = ("models", "register", "sums", export, "--run", run_id, "--signing-key", key, *there)
    evidence = ("--evaluation", tmp_path / "candidate", "--verdict", verdict, "--store", tmp_path / "models")
    registered = done(*register, *evidence)
    assert (registered["stage"], registered["step"]) == ("passed", 3)
    assert registered["chain"] == list(client.records.batches(run_id))[-1].chain
    origin = origin_of(Folder(export))
    assert origin is not None
    assert (origin.run_id, origin.step, origin.chain) == (run_id, 3, registered["chain"])
    assert origin.spec_sha256 == registered["spec_sha256"]
    assert done("models", "promote", "sums:1", *there)["aliases"] == ["champion"]
    verified = client.records.verify(run_id)
    assert (verified.problems, verified.facts["registered_models"]) == ([], ["sums:1"])

    champion = tmp_path / "champion"
    check = ("--stage", "passed", "--verify", "--public-key", f"{key}.pub")
    assert done("models", "fetch", "sums@champion", champion, *check, *there)["verified"]
    assert (champion / "model.safetensors").read_bytes() == (export / "model.safetensors").read_bytes()
    statement = json.loads((champion / "paceline.json").read_text())
    assert len(statement["predicate"]["run"]["batches"]) == summary["steps"] == 3

    ids = asyncio.run(used(champion, tmp_path / "traces"))
    rated = [json.loads(line) for line in (tmp_path / "traces" / "rated-000001.jsonl").read_text().splitlines()]
    assert [(row["id"], row["final_reward"], row["model"]) for row in rated] == [
        (name, number % 2, "sums:1") for number, name in enumerate(ids)
    ]
    report = done("traces", "pairs", tmp_path / "traces" / "rated-*.jsonl", tmp_path / "pairs.jsonl")
    assert report["pairs"] + report["pairs_left_out"].get("equal completions", 0) == 4
    assert report["pairs"] > 0
