"""The services that a host starts for its runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.services.local.room import imports_of, sizes_for
from paceline.spec import RunSpec

ENVIRONMENT = {"class": "env.py:Env"}


def make(algorithm: str = "grpo", **sections: Any) -> RunSpec:
    tree: dict[str, Any] = {
        "algorithm": algorithm,
        "policy": {"model_name": "none"},
        "data": {"train": "train.jsonl"},
        **({"rewards": [{"function": "exact_match"}]} if algorithm == "grpo" else {}),
    }
    return RunSpec.model_validate(tree | sections)


@pytest.mark.parametrize(
    ("specs", "numbers"),
    [
        ([make()], (2, 1, 0)),
        ([make(environment=ENVIRONMENT)], (2, 1, 1)),
        ([make(environment=ENVIRONMENT, cluster={"environment_workers": 3})], (2, 1, 3)),
        ([make(environment=ENVIRONMENT, cluster={"environment_workers": 0})], (2, 1, 0)),
        ([make(cluster={"environment_workers": 2, "rollout_workers": 4})], (4, 1, 2)),
        ([make(cluster={"rollout_workers": 4}), make(environment=ENVIRONMENT)], (4, 1, 1)),
        ([make("sft")], (0, 0, 0)),
        ([make("sft"), make(environment=ENVIRONMENT)], (2, 1, 1)),
    ],
)
def test_runs_get_the_workers_that_they_need(specs: list[RunSpec], numbers: tuple[int, int, int]) -> None:
    sizes = sizes_for(specs)
    assert (sizes.rollout_workers, sizes.reward_workers, sizes.environment_workers) == numbers


def test_modules_of_the_services_and_the_model_are_imported_once_for_all(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    spec = make(policy={"model_name": str(tmp_path)})
    modules = imports_of([spec, spec], sizes_for([spec]))
    assert len(set(modules)) == len(modules)
    assert {"paceline.services.rollout.main", "transformers.models.qwen3.modeling_qwen3"} < set(modules)
    assert "paceline.services.environment.main" not in modules
    ranks = make(policy={"model_name": str(tmp_path)}, cluster={"learner_ranks": 2})
    assert not [name for name in imports_of([ranks], sizes_for([ranks])) if ".learner." in name]
    (tmp_path / "config.json").write_text('{"model_type": "../os"}')
    assert not [name for name in imports_of([spec], sizes_for([spec])) if name.startswith("transformers")]
    assert imports_of([make(policy={"model_name": "none", "generation": {"backend": "vllm"}})], sizes_for([spec])) == []
