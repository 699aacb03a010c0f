"""Advantages, returns and the value loss of PPO, by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.learner.advantages import gae, value_losses


def one(rewards: list[float], values: list[float], final: float, gamma: float, lam: float) -> list[float]:
    advantages_N, returns_N = gae(
        np.array(rewards), np.array(values), np.array([final]), np.array([len(rewards)]), gamma, lam
    )
    np.testing.assert_allclose(returns_N, advantages_N + values, atol=1e-12)
    return advantages_N.tolist()


def test_by_hand() -> None:
    # δ = 0.9·0.4 - 0.5, 0.9·0.8 - 0.4, 1 - 0.8 = -0.14, 0.32, 0.2; γλ = 0.45
    assert one([0, 0, 1], [0.5, 0.4, 0.8], 0.0, 0.9, 0.5) == pytest.approx([0.0445, 0.41, 0.2], abs=1e-9)


def test_a_cut_off_completion_counts_on_its_last_state() -> None:
    # The last δ is 1 + 0.9·0.6 - 0.8 = 0.74.
    assert one([0, 0, 1], [0.5, 0.4, 0.8], 0.6, 0.9, 0.5) == pytest.approx([0.15385, 0.653, 0.74], abs=1e-9)


def test_lambda_one_is_reward_to_go_less_value_and_lambda_zero_one_step_ahead() -> None:
    rewards, values = [0.1, -0.2, 1.0], [0.5, 0.4, 0.8]
    assert one(rewards, values, 0.0, 1.0, 1.0) == pytest.approx([0.9 - 0.5, 0.8 - 0.4, 1.0 - 0.8])
    assert one(rewards, values, 0.0, 1.0, 0.0) == pytest.approx([0.1 + 0.4 - 0.5, -0.2 + 0.8 - 0.4, 0.2])


def test_ragged_sequences_do_not_see_each_other() -> None:
    rng = np.random.default_rng(0)
    lengths = [1, 7, 3, 5]
    rewards = [rng.normal(size=n) for n in lengths]
    values = [rng.normal(size=n) for n in lengths]
    finals = rng.normal(size=4)
    together, _ = gae(np.concatenate(rewards), np.concatenate(values), finals, np.array(lengths), gamma=0.97, lam=0.9)
    alone = [one(list(r), list(v), f, 0.97, 0.9) for r, v, f in zip(rewards, values, finals, strict=True)]
    np.testing.assert_allclose(together, np.concatenate(alone), atol=1e-12)


def test_no_sequence_at_all() -> None:
    empty = np.zeros(0)
    advantages_N, returns_N = gae(empty, empty, empty, np.zeros(0, np.int64), 1.0, 0.95)
    assert len(advantages_N) == len(returns_N) == 0


def test_value_loss_by_hand() -> None:
    old = torch.tensor([0.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    returns = torch.tensor([1.0, 1.0, -1.0, 1.0], dtype=torch.float64)
    values = torch.tensor([0.1, 0.5, 0.5, -0.5], dtype=torch.float64, requires_grad=True)
    losses, clipped = value_losses(values, old, returns, cliprange=0.2)
    # Within the bound; beyond it towards the return (the bound's larger loss counts, without gradient); beyond it
    # away from the return, twice (the larger loss is the value's own, with gradient).
    assert losses.tolist() == pytest.approx([0.405, 0.32, 1.125, 1.125], abs=1e-12)
    assert clipped.tolist() == [False, True, False, False]
    losses.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([-0.9, 0.0, 1.5, -1.5], abs=1e-12)


def test_without_a_bound_it_is_half_the_square() -> None:
    values = torch.tensor([2.0, -3.0], dtype=torch.float64, requires_grad=True)
    losses, clipped = value_losses(values, torch.zeros(2), torch.tensor([1.0, 1.0]), cliprange=None)
    assert losses.tolist() == [0.5, 8.0]
    assert not clipped.any()
    losses.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [1.0, -4.0]


def test_extreme_values_stay_finite() -> None:
    values = torch.tensor([1e18, -1e18], requires_grad=True)
    losses, _ = value_losses(values, torch.zeros(2), torch.zeros(2), cliprange=0.2)
    losses.sum().backward()
    assert values.grad is not None
    assert losses.isfinite().all()
    assert values.grad.isfinite().all()
