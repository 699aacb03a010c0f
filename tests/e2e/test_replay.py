"""A learner that was killed, and the learner that nobody killed: the same weights, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from paceline.client import Client
from paceline.services.cli.main import main
from paceline.services.local.cluster import LocalCluster
from paceline.spec import RunSpec

pytestmark = pytest.mark.slow
MakeSpec = Callable[..., RunSpec]
KILL_AFTER_STEPS = (3, 6)
"""A kill comes when the step is reported, so the learner is somewhere in the steps after it: computing, publishing,
writing a checkpoint (after 4 and 8), or asking for a batch. No step after the ninth is trained before both kills."""


@pytest.fixture(scope="module")
def folder(cluster: LocalCluster, make_spec: MakeSpec, gated: Callable[[int], tuple[dict[str, Any], Path]]) -> Path:
    """The folder of a run of 12 steps whose learner was killed twice."""
    reward, gate = gated(9 * 8)
    with Client(cluster.address) as client:
        spec = make_spec(
            rewards=[reward],
            grpo={"num_generations_per_prompt": 8},  # shares its prompts of five tokens
            checkpointing={"save_period": 4, "keep_top_k": 10},
            policy={
                "num_updates_per_step": 2,
                "scheduler": {"name": "linear", "warmup_steps": 2},
                "shared_prompts": True,
            },
        )
        run = client.submit(spec)
        kills, sessions, trained = list(KILL_AFTER_STEPS), 0, 0
        for event in client.watch(run.run_id):
            cluster.check()
            sessions += event.kind == "session"
            trained += event.kind == "step"
            if kills and sessions == 3 - len(kills) and trained >= kills[0]:
                assert cluster.kill("learner")
                kills.pop(0)
                if not kills:
                    gate.touch()
        ended = client.get(run.run_id)
    assert ended.step == 12, ended.message
    summary = json.loads((Path(ended.directory) / "summary.json").read_text())
    assert summary["learner_sessions"] == 3, "the kills came to nothing"
    return Path(ended.directory)


def replay(folder: Path, start: int, output: Path, *options: str) -> tuple[Result, dict[str, Any]]:
    arguments = ["replay", str(folder), "--from", str(start), "--output", str(output), "--device", "cpu"]
    result = CliRunner().invoke(main, [*arguments, "--json", *options])
    return result, json.loads(result.stdout) if result.stdout.startswith("{") else {}


@pytest.mark.parametrize("start", [0, 8])
def test_a_replay_reaches_the_weights_of_the_run_bit_for_bit(folder: Path, tmp_path: Path, start: int) -> None:
    result, facts = replay(folder, start, tmp_path / "out")

    assert result.exit_code == 0, result.output
    assert facts["ranks"] == 2
    assert facts["compared_with"].endswith("-12")
    assert facts["identical"] is True, facts
    assert facts["equal_losses"] == 12 - start
    steps = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(start, 12))
    assert "shared_prompts: true" in (folder / "spec.yaml").read_text()
    assert all(step["computed_tokens"] < step["row_tokens"] for step in steps)


def test_another_objective_on_the_same_batches_reaches_other_weights(folder: Path, tmp_path: Path) -> None:
    result, facts = replay(folder, 8, tmp_path / "out", "loss_fn.ratio_clip_max=0.0", "loss_fn.ratio_clip_min=0.0")

    assert result.exit_code == 0, result.output
    assert facts["identical"] is False
    assert facts["largest_difference"] > 0
    assert "ratio_clip_max: 0.0" in (tmp_path / "out" / "spec.yaml").read_text()


def test_one_rank_instead_of_two_trains_the_same_groups_to_nearly_the_same_weights(
    folder: Path, tmp_path: Path
) -> None:
    result, facts = replay(folder, 8, tmp_path / "out", "--ranks", "1")

    assert result.exit_code == 0, result.output
    assert facts["identical"] is False
    assert facts["largest_difference"] < 1e-2


def test_what_cannot_be_replayed_says_why(folder: Path, tmp_path: Path) -> None:
    for start, options, words in (
        (7, [], "replay from one of: 0, 4, 8"),
        (12, [], "has trained 12 steps"),
        (4, ["--to", "13"], "has trained 12 steps"),
        (4, ["grpo.num_prompts_per_step=4"], "would change the batches"),
        (4, ["loss_fn.ratio_clip_maks=1"], "did you mean 'ratio_clip_max'"),
    ):
        result, _ = replay(folder, start, tmp_path / "out", *options)
        assert result.exit_code == 1
        assert words in result.stderr, result.output
        assert not (tmp_path / "out").exists()
