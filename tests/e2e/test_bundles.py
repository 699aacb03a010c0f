"""Runs whose submitter's files are gone: they end well, and their replay reaches the same weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from paceline.client import Client, state_name
from paceline.services.cli.main import main
from paceline.services.demo.task import answer, problem
from paceline.services.local.cluster import LocalCluster
from paceline.spec import RunSpec
from paceline.spec.reading import parse_spec

pytestmark = pytest.mark.slow


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """The submitter's folder: a reward function with a module and an included file beside it, and data."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "reward.py").write_text(
        "import json, pathlib\nfrom weights import SCALE\n"
        "LIMIT = json.loads((pathlib.Path(__file__).parent / 'limit.json').read_text())\n"
        "def digits(completions, **columns):\n"
        "    return [SCALE * min(LIMIT, sum(c.isdigit() for c in text)) for text in completions]\n"
    )
    (folder / "weights.py").write_text("SCALE = 0.25\n")
    (folder / "limit.json").write_text("4")
    rows = [{"prompt": problem(a, 7), "answer": answer(a, 7), "completion": answer(a, 7)} for a in range(64)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize("algorithm", ["grpo", pytest.param("sft", marks=pytest.mark.merge)])
def test_a_run_goes_on_and_replays_without_the_submitters_folder(
    cluster: LocalCluster, make_spec: Callable[..., RunSpec], mine: Path, algorithm: str
) -> None:
    tree: dict[str, Any] = {
        "name": f"bundled-{algorithm}",
        "algorithm": algorithm,
        "policy": make_spec().policy.model_dump(),
        "data": {"train": "train.jsonl"},
        "checkpointing": {"save_period": 2},
        "logger": {"tensorboard": False},
    }
    if algorithm == "grpo":
        tree["grpo"] = {"num_prompts_per_step": 8, "num_generations_per_prompt": 4, "max_num_steps": 4}
        tree["rewards"] = [{"function": "reward.py:digits"}]
        tree["bundle"] = {"include": ["*.json"]}
    else:
        tree["sft"] = {"num_examples_per_step": 8, "max_num_steps": 4}
    with Client(cluster.address) as client:
        run = client.submit(parse_spec(tree, base=mine))
        shutil.rmtree(mine)
        ended = client.wait(run.run_id, timeout_s=240)
    assert (state_name(ended), ended.step) == ("succeeded", 4), ended.message
    assert ended.bundle == run.bundle != ""
    options = ["--from", "0", "--output", str(mine.parent / "out"), "--device", "cpu", "--json"]
    result = CliRunner().invoke(main, ["replay", ended.directory, *options])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["identical"] is True
