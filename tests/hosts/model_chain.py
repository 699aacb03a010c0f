"""A model on its way through four hosts that share no folder: SFT, GRPO from that run, export to S3, and completions elsewhere."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployment import BUCKET, DEADLINE_S, Deployment, Submitter
from isolated_host import Switch

EXPORT = f"{BUCKET}/exports/final"
PROMPT = "12+34="


@dataclass(frozen=True)
class Chain:
    """What came of it."""

    runs: list[dict[str, Any]]
    """Both runs, as `paceline runs` tells."""
    reward: float
    """Mean reward of GRPO's first batch: the model from the store, untrained, gets 0."""
    completions: list[str]
    """Of PROMPT, by the exported model, on a host that has seen nothing else."""


def run_chain(sft_steps: int, grpo_steps: int, logs: Path) -> Chain:
    """Train both stages, with another coordinator process for the second, export and sample."""
    with Switch() as switch:
        deployment = Deployment(switch, logs)
        deployment.start()
        submitter = Submitter(deployment.client, deployment.access)
        submitter.prepare()
        first = submitter.submit("sft.yaml", f"policy.model_name={BUCKET}/model", f"sft.max_num_steps={sft_steps}")
        runs = [submitter.wait(first)]
        deployment.coordinator.stop()
        deployment.start_coordinator(deployment.coordinator)
        second = submitter.submit("grpo.yaml", f"policy.model_name=run:{first}", f"grpo.max_num_steps={grpo_steps}")
        runs.append(submitter.wait(second))
        coordinator = deployment.coordinator
        recorded = coordinator.run("cat", f"/tmp/ledger/{second}/metrics.jsonl").stdout.splitlines()
        coordinator.run("paceline", "export", second, EXPORT, "--directory", "/tmp/ledger", timeout_s=DEADLINE_S)
        elsewhere = deployment.host("elsewhere")
        said = elsewhere.run(
            *(
                "paceline",
                "generate",
                PROMPT,
                "--export",
                EXPORT,
                "--n",
                "4",
                "--temperature",
                "0.01",
                "--json",
            ),
            timeout_s=DEADLINE_S,
        )
        completions = [json.loads(line)["text"] for line in said.stdout.splitlines()]
    rows = [json.loads(line) for line in recorded]
    reward = next(row["reward"] for row in rows if row["kind"] == "train")
    return Chain(runs, reward, completions)
