"""Every recipe is read without a warning, fits on its GPUs by the memory plan, and has its figures in the table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from public_configs import PUBLIC_CONFIGS

from paceline.models.memory_plan import Room, plan, refusal
from paceline.models.shape import shape_of
from paceline.services.common.gpus import learner_gpus, share_gpus
from paceline.spec.reading import load_spec

FOLDER = Path(__file__).parents[2] / "recipes"
RECIPES = sorted(FOLDER.glob("*.yaml"))


def test_there_are_recipes_for_every_size() -> None:
    assert {path.stem.rpartition("-")[2] for path in RECIPES} == {"1gpu", "8gpu", "16gpu", "24gpu", "64gpu"}
    listed = re.findall(r"^\| \[.*?\]\((.+?\.yaml)\)", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == [path.name for path in RECIPES]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_fits_and_the_table_has_its_figures(path: Path) -> None:
    spec = load_spec(str(path), [])
    assert not spec.warnings
    cluster, engine = spec.cluster, spec.policy.generation.vllm_cfg
    rollout = cluster.rollout_workers * engine.tensor_parallel_size
    shared = bool(set(cluster.learner_gpus) & set(cluster.rollout_gpus))
    total = cluster.learner_ranks if shared else cluster.learner_ranks + rollout
    assert path.stem.endswith(f"-{total}gpu")
    if cluster.learner_gpus:  # one host
        learner_gpus(cluster)
        share_gpus(cluster.rollout_gpus, cluster.rollout_workers)
    shape = shape_of(PUBLIC_CONFIGS[spec.policy.model_name])
    assert shape is not None
    assert refusal(spec, shape, Room()) == ""
    made = plan(spec, shape, Room())
    assert made.cached_tokens is not None
    division = "one for both" if shared else f"{cluster.learner_ranks} + {rollout}"
    row = (
        f"| [{path.stem}]({path.name}) | {division} | {made.loads[0].bytes / 1e9:.1f} GB | "
        f"{made.cached_tokens // spec.policy.max_total_sequence_length} |"
    )
    assert row in (FOLDER / "README.md").read_text()


def test_the_readme_says_that_nothing_was_measured() -> None:
    assert "No figure here was measured on GPUs" in (FOLDER / "README.md").read_text()


def test_a_smaller_gpu_is_refused_with_keys() -> None:
    spec = load_spec(str(FOLDER / "llama3.3-70b-64gpu.yaml"), ["cluster.gpu_gb=48"])
    shape = shape_of(PUBLIC_CONFIGS[spec.policy.model_name])
    assert shape is not None
    text = refusal(spec, shape, Room())
    assert text.startswith("each GPU of the learner has 48.0 GB for an estimated 64.6 GB")
    assert re.search(r"; set (policy|cluster)\.\S+=", text)
