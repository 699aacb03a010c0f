"""Two real processes over gloo train what one process trains."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from checked_run import checked_steps
from ranks import run_ranks
from safetensors.torch import load_file
from tiny_policy import CASES, batch_of, run_case

from paceline.learner.step.sampler_check import Difference


@pytest.fixture(scope="module")
def two_ranks(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ranks")
    run_ranks("trainer_rank.py", 2, model, out)
    return out


@pytest.mark.merge
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_equal_one(name: str, model: Path, two_ranks: Path) -> None:
    metrics, tensors = run_case(model, CASES[name], batch_of(name), budget=1000)
    got = [json.loads((two_ranks / f"{name}.{rank}.json").read_text()) for rank in range(2)]
    assert got[0] == got[1]
    by_split = {"micro_batches", "unfilled_fraction"}
    if name == "shared_prompts":
        by_split |= {"computed_tokens", "teraflop"}  # each rank computes the prompt of the group that both train
    same_by_split = set(metrics) - {key for key in metrics if key.endswith("_s")} - by_split
    for key in same_by_split:
        assert got[0][key] == pytest.approx(metrics[key], rel=1e-4, abs=1e-5), key
    assert got[0]["micro_batches"] > metrics["micro_batches"]
    for rank in range(2):
        sharded = load_file(two_ranks / f"{name}.{rank}.safetensors")
        assert sharded.keys() == tensors.keys()
        for key, tensor in tensors.items():
            if key.startswith("grad."):
                # B starts at zero, so A has no gradient in the first update.
                assert (tensor.abs().max() > 0) == ("lora_A" not in key), key
                torch.testing.assert_close(sharded[key], tensor, rtol=1e-4, atol=1e-5)


def test_a_rank_that_cannot_read_its_model_leaves_nobody_in_a_collective(two_ranks: Path) -> None:
    said = [json.loads((two_ranks / f"elsewhere.{rank}.json").read_text()) for rank in range(2)]
    assert said == [["FailedElsewhere", "set up"], ["Unreadable", "set up"]]


def test_two_ranks_compare_samplers_as_one(model: Path, two_ranks: Path) -> None:
    one, _, _ = checked_steps(model, 5, max_age=2)
    ranks = [json.loads((two_ranks / f"compared.{rank}.json").read_text()) for rank in range(2)]
    for step, expected in enumerate(one):
        found = [Difference(**each) for rank in ranks for each in rank[step]]
        assert [each.group_id % 10 for each in found] == sorted(each.group_id % 10 for each in expected)
        for each, same in zip(found, expected, strict=True):
            assert (each.group_id, each.sampler, each.version_step) == (same.group_id, same.sampler, same.version_step)
            assert each.mean_square == pytest.approx(same.mean_square, rel=1e-3, abs=1e-9)
            is_wrong = each.group_id % 10 == 1 and each.sampler == "second" and each.version_step >= 1
            assert (each.mean_square > 1e-4) == is_wrong


def test_every_rank_loads_its_rows_bit_for_bit(two_ranks: Path) -> None:
    for rank in range(2):
        found = json.loads((two_ranks / f"loading.{rank}.json").read_text())
        assert len(found) == 12
        assert not any(found.values()), found


@pytest.mark.parametrize("name", ["dapo", "ppo"])
def test_every_rank_stops_before_its_optimizer_names_the_broken_group_and_goes_on(name: str, two_ranks: Path) -> None:
    results = [json.loads((two_ranks / f"non_finite_{name}.{rank}.json").read_text()) for rank in range(2)]
    assert [result["group_ids"] for result in results] == [[103], [103]]
    assert [result["untouched"] for result in results] == [True, True]
    assert math.isfinite(results[0]["loss_after"])
    assert results[0]["loss_after"] == results[1]["loss_after"]


def test_every_rank_names_the_row_that_one_of_them_found_too_long(two_ranks: Path) -> None:
    for rank in range(2):
        assert (two_ranks / f"too_long.{rank}.txt").read_text().startswith("row 3 of ")
