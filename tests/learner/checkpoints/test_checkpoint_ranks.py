"""Checkpoints and gathering with two real ranks, and between one rank and two."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from tiny_policy import CPU, make_batch, make_spec, save_tiny_policy

from paceline.learner.checkpoints import checkpoint
from paceline.learner.step.trainer import Trainer


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def one(policy: Path) -> Trainer:
    trainer = Trainer(make_spec(policy), CPU)
    trainer.train_step(make_batch(), 0)
    return trainer


@pytest.fixture(scope="module")
def two_ranks(policy: Path, one: Trainer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ranks")
    saved = checkpoint.save(out / "one", session=1, step=1, model=one.model, optimizer=one.optimizer)
    assert saved is not None
    run_ranks("checkpoint_rank.py", 2, policy, saved.path, saved.manifest_sha256, out)
    return out


@pytest.mark.merge
@pytest.mark.slow
def test_two_ranks_resume_bit_identically(two_ranks: Path) -> None:
    for rank in range(2):
        expected = load_file(two_ranks / f"uninterrupted.{rank}.safetensors")
        resumed = load_file(two_ranks / f"resumed.{rank}.safetensors")
        assert resumed.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(resumed[name], tensor), name


def test_each_rank_gets_its_own_generator_back(two_ranks: Path) -> None:
    for rank in range(2):
        generator = torch.Generator().manual_seed(50 + rank)
        drawn = json.loads((two_ranks / f"rank.{rank}.json").read_text())["drawn"]
        assert drawn == torch.rand(2, generator=generator).tolist()


def test_gathered_weights_are_whole_named_as_the_model_and_only_on_rank_0(two_ranks: Path, one: Trainer) -> None:
    gathered = load_file(two_ranks / "gathered.safetensors")
    expected = load_file(two_ranks / "whole.safetensors")
    assert gathered.keys() == one.model.state_dict().keys()
    assert torch.equal(gathered["lm_head.weight"], gathered["model.embed_tokens.weight"])
    for name, tensor in expected.items():
        assert torch.equal(gathered[name], tensor.to(torch.bfloat16)), name
    ranks = [json.loads((two_ranks / f"rank.{rank}.json").read_text()) for rank in range(2)]
    assert [rank["gathered"] for rank in ranks] == [len(gathered), 0]


def test_two_ranks_go_on_from_a_checkpoint_of_one(two_ranks: Path, one: Trainer, policy: Path) -> None:
    # The policy's fixture keeps `one` at step 1, so a separate trainer continues.
    alone = Trainer(make_spec(policy), CPU)
    for step in range(2):
        alone.train_step(make_batch(), step)
    expected = dict(alone.model.named_parameters())
    before = dict(one.model.named_parameters())
    for name, tensor in load_file(two_ranks / "from_one.safetensors").items():
        torch.testing.assert_close(tensor, expected[name].detach(), rtol=1e-4, atol=1e-5)
        assert not torch.equal(tensor, before[name]), name


def test_one_rank_reads_a_checkpoint_of_two(two_ranks: Path, policy: Path) -> None:
    alone = Trainer(make_spec(policy), CPU)
    manifest = checkpoint.load(
        two_ranks / "kept",
        expected_sha256=(two_ranks / "sha256").read_text(),
        model=alone.model,
        optimizer=alone.optimizer,
    )
    assert (manifest.world_size, manifest.step) == (2, 2)
    for step in range(2, 4):
        alone.train_step(make_batch(), step)
    for name, tensor in load_file(two_ranks / "whole.safetensors").items():
        torch.testing.assert_close(alone.model.get_parameter(name).detach(), tensor, rtol=1e-3, atol=1e-4, msg=name)


def test_every_rank_refuses_what_one_found_damaged(two_ranks: Path) -> None:
    reasons = [json.loads((two_ranks / f"rank.{rank}.json").read_text())["refused"] for rank in range(2)]
    assert sorted("another rank" in reason for reason in reasons) == [False, True]
    assert any("file '__1_0.distcp' has SHA-256" in reason for reason in reasons)
