"""`paceline plan` as a user types it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from model_shapes import HALF_BILLION
from public_configs import PUBLIC_CONFIGS

from paceline.errors import SpecError
from paceline.services.cli.main import main
from paceline.services.local import room
from paceline.spec.reading import load_spec

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES, RECIPES = ROOT / "examples", ROOT / "recipes"
CONFIG = PUBLIC_CONFIGS["meta-llama/Llama-3.1-8B-Instruct"]
GB = 10**9


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    tree = {
        "policy": {
            "model_name": str(tmp_path),
            "train_mb_tokens": "auto",
            "activation_checkpointing": "auto",
            "generation": {"backend": "vllm"},
        },
        "data": {"train": "d.jsonl"},
        "rewards": [{"function": "length"}],
        "cluster": {"learner_ranks": 8},
    }
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(tree))
    _gpus(monkeypatch, ())
    return path


def _gpus(monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]) -> None:
    monkeypatch.setattr(room, "usable_gpus", lambda: tuple(str(index) for index in range(len(sizes))))
    monkeypatch.setattr(room, "memory_of_gpus", lambda: sizes)


def test_a_run_that_fits_is_shown_by_device(spec: Path) -> None:
    result = CliRunner().invoke(main, ["plan", str(spec), "cluster.gpu_gb=80"])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0] == "policy.activation_checkpointing is selective, chosen by auto: a GPU has room for 80.0 GB"
    assert "model of 8,030 M parameters, 32 layers" in lines
    assert any(line.startswith("learner of 8 ranks: 1 × 8 (replicate × shard), micro-batches of ") for line in lines)
    assert any(line.startswith("each GPU of the learner: ") and line.endswith(" of 80.0 GB") for line in lines)
    assert any(line.startswith("each engine's cache holds ") for line in lines)
    assert lines[-1].startswith("fits, by an estimate")


def test_a_run_that_does_not_fit_names_the_keys_and_exits_with_1(spec: Path) -> None:
    words = [
        str(spec),
        "cluster.gpu_gb=24",
        "cluster.learner_ranks=2",
        "policy.generation.vllm_cfg.tensor_parallel_size=2",
    ]
    result = CliRunner().invoke(main, ["plan", *words])
    assert result.exit_code == 1
    last = result.output.splitlines()[-1]
    assert last.startswith("does not fit: each GPU of the learner has 24.0 GB for an estimated ")
    assert last.endswith("; set cluster.learner_ranks=8")
    again = CliRunner().invoke(main, ["plan", *words, "cluster.learner_ranks=8", "--json"])
    assert again.exit_code == 0, again.output
    told = json.loads(again.output)
    assert told["fits"]
    assert [each["device"] for each in told["devices"]] == [
        "each GPU of the learner",
        "vLLM's share of each GPU",
    ]


def test_the_gpus_of_this_host_are_divided_as_by_up(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _gpus(monkeypatch, (80 * GB,) * 4)
    words = ["plan", str(spec), "cluster.learner_ranks=2", "policy.cpu_offload=true"]
    result = CliRunner().invoke(main, words)
    assert result.output.startswith(
        "4 GPUs on this host: learner GPU 0 to 1 (one for each rank), rollout GPU 2 to 3 (2 workers)"
    )
    assert "offloaded state of 2 ranks" in result.output


def test_a_model_that_is_not_here_is_said(spec: Path) -> None:
    result = CliRunner().invoke(main, ["plan", str(spec), "policy.model_name=nowhere"])
    assert result.exit_code == 1
    assert "policy.model_name 'nowhere': no config.json is on this machine" in result.output


def test_up_refuses_what_the_gpus_here_cannot_hold(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _gpus(monkeypatch, (80 * GB,) * 2)
    wanted, _ = room.cluster_here(load_spec(str(spec), ["cluster.learner_ranks=1", "cluster.rollout_workers=1"]))
    assert wanted.cluster.learner_gpus == (0,)
    with pytest.raises(
        SpecError, match=r"^each GPU of the learner has 80.0 GB for an estimated 1\d\d.\d GB, .*; set policy"
    ):
        room.planned_here(wanted)
    _gpus(monkeypatch, (192 * GB,) * 2)
    planned, chosen = room.planned_here(wanted)
    assert planned.policy.activation_checkpointing != "auto"
    keys = ("policy.activation_checkpointing", "policy.train_mb_tokens", "policy.shared_prompts")
    assert [text.split()[0] for text in chosen] == list(keys)


def test_gpus_elsewhere_are_split_and_priced(spec: Path, tmp_path: Path) -> None:
    (tmp_path / "prices.yaml").write_text("{h100: 2.5}")
    arguments = ["plan", str(spec), "--gpus", "h100:64", "--prices", str(tmp_path / "prices.yaml")]
    result = CliRunner().invoke(main, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    table = json.loads(result.output)
    assert table["learner_ranks"] + table["engines"] * table["gpus_per_engine"] <= 64
    assert table["cost_per_hour"] == 160.0
    assert table["cost_per_million_tokens"] > 0
    assert table["rates"] == "unmeasured"
    lines = CliRunner().invoke(main, arguments).output.splitlines()
    assert lines[0].startswith(f"64 h100 GPUs: {table['learner_ranks']} learner ranks, {table['engines']} engines")
    assert any(line.startswith("limited by ") for line in lines)
    assert any(line.startswith("cost ") for line in lines)


@pytest.mark.parametrize(
    ("prices", "text"),
    [
        ("{a100: 1}", "the price of h100 is None; it must be a number, as in {h100: 2.5}"),
        ("{h100: cheap}", "the price of h100 is 'cheap'"),
        ("{h100: -1}", "the price of h100 is -1"),
        ("[", "cannot be read as YAML"),
    ],
)
def test_prices_that_are_none_are_refused(prices: str, text: str, spec: Path, tmp_path: Path) -> None:
    (tmp_path / "prices.yaml").write_text(prices)
    arguments = ["plan", str(spec), "--gpus", "h100:8", "--prices", str(tmp_path / "prices.yaml")]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 1
    assert text in str(result.output) + str(result.exception)


def test_a_model_that_is_not_here_is_planned_by_its_config(spec: Path, tmp_path: Path) -> None:
    arguments = ["plan", str(spec), "policy.model_name=some/where", "--gpus", "h100:16"]
    assert CliRunner().invoke(main, arguments).exit_code != 0
    config = str(tmp_path / "config.json")
    assert CliRunner().invoke(main, [*arguments, "--model-config", config]).exit_code == 0
    (tmp_path / "other.json").write_text("{}")
    refused = CliRunner().invoke(main, [*arguments, "--model-config", str(tmp_path / "other.json")])
    assert "lacks usual keys" in str(refused.output) + str(refused.exception)


@pytest.mark.parametrize(
    "recipe",
    sorted([*EXAMPLES.rglob("*.yaml"), *RECIPES.glob("*.yaml")]),
    ids=lambda path: f"{path.parent.name}/{path.stem}",
)
def test_every_recipe_plans_without_refusal(recipe: Path, tmp_path: Path) -> None:
    """With the sizes of the model that it names; examples on one GPU, recipes on as many as their names say."""
    tree = yaml.safe_load(recipe.read_text())
    if not isinstance(tree, dict) or "model_name" not in tree.get("policy", {}):
        pytest.skip("no spec of a run, or one of an evaluation")
    name = tree["policy"]["model_name"]
    (tmp_path / "config.json").write_text(json.dumps(PUBLIC_CONFIGS.get(name, HALF_BILLION)))
    number = re.search(r"(\d+)gpu", recipe.stem)
    gpus = f"h100:{number[1] if number else 1}"
    arguments = [
        "plan",
        str(recipe),
        "--gpus",
        gpus,
        "--model-config",
        str(tmp_path / "config.json"),
        "--json",
    ]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    table = json.loads(result.output)
    assert table["step_s"] > 0
    assert table["limit"]
