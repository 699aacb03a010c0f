"""The mesh of ranks: its sizes, and that ranks with replicas compute and publish what one rank does (campaign `meshes` has all)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mesh_cases import CASES, ROW_TOKENS, TOLERANCE, batch_of, save_models
from mesh_runs import MeshRun, OneRank, one_rank, run_mesh
from tiny_policy import CPU, make_spec

from paceline.errors import InvalidInput
from paceline.learner.checkpoints import checkpoint
from paceline.learner.step.trainer import Trainer
from paceline.models.shape import MeshShape, mesh_shape
from paceline.spec import ParallelSection


def sizes(replicate: object, shard: object, ranks: int = 8, hosts: int = 1, fits: bool = True) -> MeshShape:
    parallel = ParallelSection.model_validate({"replicate": replicate, "shard": shard})
    return mesh_shape(parallel, ranks, hosts, lambda: fits)


def test_auto_divides_by_all_ranks_and_copies_only_where_a_host_holds_the_model() -> None:
    assert sizes("auto", "auto") == (1, 8)
    assert sizes("auto", "auto", ranks=16, hosts=2) == (2, 8)
    assert sizes("auto", "auto", ranks=16, hosts=2, fits=False) == (1, 16)
    assert sizes("auto", 4) == (2, 4)
    assert sizes(8, "auto") == (8, 1)


@pytest.mark.parametrize(("replicate", "shard"), [(2, 2), (3, "auto"), ("auto", 16)])
def test_sizes_that_do_not_make_the_ranks_are_refused(replicate: object, shard: object) -> None:
    with pytest.raises(
        InvalidInput, match=rf"policy.parallel.replicate {replicate} and shard {shard} do not multiply to 8"
    ):
        sizes(replicate, shard)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_models(folder)
    return folder


@pytest.fixture(scope="module")
def expected(models: Path) -> dict[str, OneRank]:
    torch.set_num_threads(1)
    return one_rank(models)


@pytest.fixture(scope="module")
def two_by_two(models: Path, tmp_path_factory: pytest.TempPathFactory) -> MeshRun:
    return run_mesh(models, tmp_path_factory.mktemp("ranks") / "2x2", 2, 2)


@pytest.mark.merge
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_replicas_of_shards_equal_one_rank(name: str, two_by_two: MeshRun, expected: dict[str, OneRank]) -> None:
    assert two_by_two.difference(name, expected[name]) <= TOLERANCE


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_replicas_load_publish_and_export_each_element_once(kind: str, two_by_two: MeshRun) -> None:
    assert two_by_two.faults(kind) == []


def test_one_rank_goes_on_from_the_checkpoint_of_replicas(
    models: Path, two_by_two: MeshRun, expected: dict[str, OneRank]
) -> None:
    trainer = Trainer(make_spec(models / "dense", train_mb_tokens=ROW_TOKENS), CPU)
    saved = two_by_two.resumed
    checkpoint.load(saved["path"], expected_sha256=saved["sha256"], model=trainer.model, optimizer=trainer.optimizer)
    metrics = trainer.train_step(batch_of("grpo"), 1)
    for key in ("loss", "grad_norm"):
        assert abs(metrics[key] - expected["grpo"].metrics[key]) <= TOLERANCE
