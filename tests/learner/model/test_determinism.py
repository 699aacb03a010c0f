"""`policy.deterministic` reaches torch in each run; its effect on a GPU is measured there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_device import gpu_device
from tiny_policy import CPU, make_batch, make_spec, whole
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.learner.model.determinism import reserve_workspace, use_deterministic_operations
from paceline.learner.step.trainer import Trainer


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    use_deterministic_operations(False)


def test_a_run_chooses_for_itself(model: Path) -> None:
    Trainer(make_spec(model, deterministic=True), CPU)
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.backends.cudnn.deterministic
    Trainer(make_spec(model), CPU)
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.deterministic


def test_the_results_on_cpus_are_the_same_with_and_without_it(model: Path) -> None:
    def weights(deterministic: bool) -> list[torch.Tensor]:
        trainer = Trainer(make_spec(model, deterministic=deterministic), CPU)
        for step in range(2):
            trainer.train_step(make_batch(), step)
        return [p.detach() for p in trainer.model.parameters()]

    assert all(map(torch.equal, weights(True), weights(False)))


class Modes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations in modes in which a missing deterministic version is an error, and the others."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.strict: set[str] = set()
        self.lenient: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        (self.lenient if warns else self.strict).add(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_only_the_backward_pass_of_attention_may_not_warn(model: Path, checkpointing: str) -> None:
    """ATen's attention kernels take their deterministic backward pass only if a warning would be an error; recomputed
    forward passes may contain operations without a deterministic version (cumsum, histc)."""
    trainer = Trainer(make_spec(model, deterministic=True, activation_checkpointing=checkpointing), CPU)
    with Modes() as modes:
        trainer.train_step(make_batch(), 0)
    attention = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert f"{attention}_backward" in modes.strict
    assert modes.strict - {f"{attention}_backward"} <= {"aten::detach"}
    assert f"{attention}_backward" not in modes.lenient
    assert {attention, "aten::mm"} <= modes.lenient
    assert torch.is_deterministic_algorithms_warn_only_enabled()


def test_a_run_without_it_leaves_attention_as_it_is(model: Path) -> None:
    trainer = Trainer(make_spec(model), CPU)
    with Modes() as modes:
        trainer.train_step(make_batch(), 0)
    assert not modes.strict


def test_a_workspace_that_is_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    reserve_workspace()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    reserve_workspace()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


@pytest.mark.gpu
def test_two_runs_on_a_gpu_are_equal(model: Path) -> None:
    device = gpu_device()
    reserve_workspace()

    def weights() -> list[torch.Tensor]:
        torch.manual_seed(0)
        trainer = Trainer(make_spec(model, deterministic=True, precision="bfloat16"), device)
        for step in range(2):
            trainer.train_step(make_batch(), step)
        return [whole(p.detach()) for p in trainer.model.parameters()]

    assert all(map(torch.equal, weights(), weights()))
