"""AdamW by parts, with moments in bfloat16 or offloaded: its rounding, its likeness to torch's, and its state in checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_policy import CPU, make_batch, make_spec, save_tiny_policy

from paceline.learner.checkpoints import checkpoint
from paceline.learner.step.optimizer import MOMENTS, PartwiseAdamW, make_optimizer, rounded
from paceline.learner.step.trainer import Trainer
from paceline.spec import OptimizerSection


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("policy"))


def trained(
    policy: Path, steps: int, state_dtype: str = "bfloat16", *, offload: bool = False
) -> tuple[Trainer, list[float]]:
    spec = make_spec(policy)
    update = {"state_dtype": state_dtype, "offload": offload, "lr": 1e-3}
    optimizer = spec.policy.optimizer.model_copy(update=update)
    spec = spec.model_copy(update={"policy": spec.policy.model_copy(update={"optimizer": optimizer})})
    trainer = Trainer(spec, CPU)
    return trainer, [trainer.train_step(make_batch(), step)["loss"] for step in range(steps)]


def test_rounding_keeps_what_fits_and_the_mean_of_what_does_not() -> None:
    generator = torch.Generator().manual_seed(0)
    exact = torch.tensor([0.0, 1.0, -2.5, 1.0078125])
    assert torch.equal(rounded(exact, generator).float(), exact)
    # Between 1 and 1 + 2⁻⁷, a quarter of the way up: a quarter of the numbers are rounded up.
    value = 1.0 + 2.0**-9
    up = rounded(torch.full((40_000,), value), generator).float()
    assert set(up.tolist()) == {1.0, 1.0078125}
    assert up.mean().item() == pytest.approx(value, abs=1e-4)
    down = rounded(torch.full((40_000,), -value), generator).float()
    assert down.mean().item() == pytest.approx(-value, abs=1e-4)


def test_a_first_update_is_that_of_adamw_and_parts_make_no_difference() -> None:
    def updated(state_dtype: str, part_numel: int | None = None) -> torch.Tensor:
        torch.manual_seed(3)
        model = torch.nn.Linear(30, 7)
        config = OptimizerSection(lr=0.01, weight_decay=0.1, state_dtype=state_dtype)
        optimizer: torch.optim.Optimizer = make_optimizer(model, config)
        if part_numel is not None:
            options = {"lr": config.lr, "betas": config.betas, "eps": config.eps, "weight_decay": config.weight_decay}
            optimizer = PartwiseAdamW([model.weight], moment_dtype=torch.bfloat16, part_numel=part_numel, **options)
        model(torch.ones(2, 30)).square().sum().backward()
        optimizer.step()
        return model.weight.detach()

    whole = updated("bfloat16")
    torch.testing.assert_close(whole, updated("float32"))  # the moments are rounded after the update
    torch.testing.assert_close(updated("bfloat16", part_numel=16), whole)


def test_a_second_moment_falls_although_a_step_is_below_its_last_place() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4096))
    optimizer = PartwiseAdamW([parameter], moment_dtype=torch.bfloat16, lr=0.0, betas=(0.9, 0.999))
    for step in range(200):
        parameter.grad = torch.full_like(parameter, 1.0 if step == 0 else 0.0)
        optimizer.step()
    square = optimizer.state[parameter]["exp_avg_sq"]
    assert square.dtype == torch.bfloat16
    assert square.float().mean().item() == pytest.approx(1e-3 * 0.999**199, rel=0.01)


def test_losses_are_close_to_those_of_float32_moments(policy: Path) -> None:
    _, losses = trained(policy, 4)
    _, expected = trained(policy, 4, "float32")
    assert losses == pytest.approx(expected, rel=1e-2)
    assert losses[-1] != losses[0]


@pytest.mark.parametrize("state_dtype", ["bfloat16", "float32"])
def test_moments_on_the_host_are_the_same(policy: Path, state_dtype: str) -> None:
    offloaded, losses = trained(policy, 4, state_dtype, offload=True)
    stayed, expected = trained(policy, 4, state_dtype)
    if state_dtype == "bfloat16":
        assert losses == expected
    else:  # torch's own arithmetic there, in another order
        assert losses == pytest.approx(expected, rel=1e-5)
    for one, other in zip(offloaded.model.parameters(), stayed.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert {tensor.device.type for state in offloaded.optimizer.state.values() for tensor in state.values()} == {"cpu"}


def test_the_same_run_again_is_bit_identical_also_from_a_checkpoint(policy: Path, tmp_path: Path) -> None:
    whole, losses = trained(policy, 4)
    again, losses_again = trained(policy, 2)
    assert losses_again == losses[:2]
    saved = checkpoint.save(tmp_path, session=1, step=2, model=again.model, optimizer=again.optimizer)
    assert saved is not None
    resumed, _ = trained(policy, 0)
    checkpoint.load(saved.path, expected_sha256=saved.manifest_sha256, model=resumed.model, optimizer=resumed.optimizer)
    assert all(state[name].dtype == torch.bfloat16 for state in resumed.optimizer.state.values() for name in MOMENTS)
    assert [resumed.train_step(make_batch(), step)["loss"] for step in (2, 3)] == losses[2:]
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name
