"""PPO's mathematics: generalised advantage estimation and the clipped value loss.

Promise: pure functions, with the values and gradients of the formula in the docstring.

Suffixes: S sequences, T tokens of the longest one, N tokens of all sequences end to end.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Float64Array = npt.NDArray[np.float64]


def gae(
    rewards_N: Float64Array,
    values_N: Float64Array,
    final_values_S: Float64Array,
    lengths_S: npt.NDArray[np.int64],
    gamma: float,
    lam: float,
) -> tuple[Float64Array, Float64Array]:
    """Return ([N] advantages, [N] returns = advantages + values).

    δ_t = r_t + γ·V(s_{t+1}) - V(s_t), A_t = δ_t + γλ·A_{t+1}, within each sequence (Schulman et al. 2016, arXiv 1506.02438).

    Args:
        values_N: V of the state before each token.
        final_values_S: V of the state after the last token: 0 where the sequence ended, the value model's where it was
            only cut off (Pardo et al. 2018, arXiv 1712.00378).
        lengths_S: tokens of each sequence, at least 1.
    """
    longest = int(lengths_S.max(initial=0))
    inside_ST = np.arange(longest) < lengths_S[:, None]
    rewards_ST, values_ST, advantages_ST = (np.zeros(inside_ST.shape) for _ in range(3))
    rewards_ST[inside_ST], values_ST[inside_ST] = rewards_N, values_N
    ahead_S, next_values_S = np.zeros(len(lengths_S)), final_values_S.astype(np.float64)
    for t in reversed(range(longest)):
        inside_S = inside_ST[:, t]
        delta_S = rewards_ST[:, t] + gamma * next_values_S - values_ST[:, t]
        ahead_S = np.where(inside_S, delta_S + gamma * lam * ahead_S, 0.0)
        next_values_S = np.where(inside_S, values_ST[:, t], next_values_S)
        advantages_ST[:, t] = ahead_S
    advantages_N = advantages_ST[inside_ST]
    return advantages_N, advantages_N + values_N


def value_losses(
    values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, cliprange: float | None
) -> tuple[Tensor, Tensor]:
    """Return ([N] ½·max((V - R)², (clip(V, V_old - ε, V_old + ε) - R)²), [N] True where the bound took the gradient away).

    PPO's value loss with clipping (Schulman et al. 2017's code; TRL, NeMo RL); without a bound ½(V - R)².
    """
    squares_N = (values_N - returns_N).square()
    if cliprange is None:
        return squares_N / 2, torch.zeros_like(squares_N, dtype=torch.bool)
    bounded_N = torch.maximum(torch.minimum(values_N, old_values_N + cliprange), old_values_N - cliprange)
    bounded_squares_N = (bounded_N - returns_N).square()
    return torch.maximum(squares_N, bounded_squares_N) / 2, bounded_squares_N > squares_N
