"""Draws tokens from logits: pure functions over rows, with one random number per (seed, position).

Promise: the returned log-probability is that of the distribution from which the token was drawn (after repetition
penalty, minimum length, temperature, min-p, top-k and top-p), and a row's token depends only on its logits, seed and
position. Axis suffixes: R rows of the batch, V vocabulary, K stop tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

GOLDEN_GAMMA = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
MASK_64 = (1 << 64) - 1


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def mix_seed(seed: int) -> int:
    """Return a well-mixed int64 from any integer: SplitMix64's first output for `seed` modulo 2^64. Without it, two
    seeds that differ by a multiple of the generator's increment would share their numbers, shifted."""
    z = (seed + GOLDEN_GAMMA) & MASK_64
    z = ((z ^ (z >> 30)) * MIX_1) & MASK_64
    z = ((z ^ (z >> 27)) * MIX_2) & MASK_64
    return _signed(z ^ (z >> 31))


def _shift_xor(x: Tensor, bits: int) -> Tensor:
    # int64 shifts copy the sign bit down; the mask makes the shift a logical one.
    return x ^ ((x >> bits) & ((1 << (64 - bits)) - 1))


def splitmix64(state_R: Tensor, position_R: Tensor) -> Tensor:
    """Return [R] int64: output number `position_R` (from 0) of the SplitMix64 generator started at `state_R`. Steele,
    Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, with the finaliser of their
    reference code (D. Stafford's variant 13). The generator adds a constant in each step and hashes the sum, so its
    i-th output can be computed alone. Arithmetic modulo 2^64 is int64 arithmetic that wraps."""
    z_R = state_R + (position_R + 1) * _signed(GOLDEN_GAMMA)
    z_R = _shift_xor(z_R, 30) * _signed(MIX_1)
    z_R = _shift_xor(z_R, 27) * _signed(MIX_2)
    return _shift_xor(z_R, 31)


def uniform(state_R: Tensor, position_R: Tensor) -> Tensor:
    """Return [R] float64 in [0, 1): the random number of position `position_R` of the rows with mixed seeds `state_R`."""
    # 48 bits: exact in float64 and far enough below 1 that the product with a sum of probabilities stays below it.
    bits_R = (splitmix64(state_R, position_R) >> 16) & ((1 << 48) - 1)
    return bits_R.double() * 2.0**-48


def mask_stop_tokens(logits_RV: Tensor, stop_ids_RK: Tensor, masked_R: Tensor) -> Tensor:
    """Return [R, V] logits with the row's stop tokens at -inf where `masked_R`. Ids below 0 are padding."""
    num_tokens = logits_RV.shape[1]
    known_RK = (stop_ids_RK >= 0) & (stop_ids_RK < num_tokens)
    # Padding goes to an extra column, which is removed again.
    index_RK = torch.where(known_RK, stop_ids_RK, num_tokens)
    hit_RV = torch.zeros(len(logits_RV), num_tokens + 1, dtype=torch.bool, device=logits_RV.device)
    hit_RV = hit_RV.scatter_(1, index_RK, True)[:, :num_tokens]
    return logits_RV.masked_fill(hit_RV & masked_R[:, None], -torch.inf)


def mask_top(logits_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor) -> Tensor:
    """Return [R, V] logits with all but the row's likeliest tokens at -inf: first top-k, then top-p of the rest. top-k
    keeps exactly k (0 keeps all; of equal logits the lower id). top-p keeps the smallest set of likeliest tokens
    whose probability reaches p, at least one (nucleus sampling, Holtzman et al. 2020)."""
    sorted_RV, order_RV = logits_RV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(logits_RV.shape[1], device=logits_RV.device)
    drop_RV = (rank_V >= top_k_R[:, None]) & (top_k_R[:, None] > 0)
    sorted_RV = sorted_RV.masked_fill(drop_RV, -torch.inf)
    before_RV = sorted_RV.softmax(-1, dtype=torch.float64)
    before_RV = before_RV.cumsum(-1) - before_RV
    # p = 1 keeps all, whatever the rounding of the sum; rank 0 has nothing before it and always stays.
    drop_RV |= (before_RV >= top_p_R[:, None]) & (top_p_R[:, None] < 1)
    return logits_RV.masked_fill(drop_RV.gather(1, order_RV.argsort(-1)), -torch.inf)


def mask_min_p(logits_RV: Tensor, min_p_R: Tensor) -> Tensor:
    """Return [R, V] logits with tokens below the fraction `min_p_R` of the likeliest token's probability at -inf
    (Nguyen et al. 2024, arXiv 2407.01082); 0 keeps all, and the likeliest token always stays."""
    floor_R = logits_RV.amax(-1) + min_p_R.log()
    return logits_RV.masked_fill(logits_RV < floor_R[:, None], -torch.inf)


def penalise(logits_RV: Tensor, tokens_RL: Tensor, total_R: Tensor, penalty_R: Tensor) -> Tensor:
    """Return [R, V] logits; those of the row's first `total_R` tokens are divided by the penalty if positive, and
    multiplied by it if negative (Keskar et al. 2019, arXiv 1909.05858)."""
    is_token_RL = torch.arange(tokens_RL.shape[1], device=tokens_RL.device) < total_R[:, None]
    # Padding repeats the first token: equal indices write equal values.
    index_RL = torch.where(is_token_RL, tokens_RL, tokens_RL[:, :1])
    known_RL = logits_RV.gather(1, index_RL)
    penalty_R1 = penalty_R[:, None].to(logits_RV.dtype)
    known_RL = torch.where(known_RL > 0, known_RL / penalty_R1, known_RL * penalty_R1)
    return logits_RV.scatter(1, index_RL, known_RL)


def sample(
    logits_RV: Tensor,
    uniform_R: Tensor,
    temperature_R: Tensor,
    top_k_R: Tensor | None = None,
    top_p_R: Tensor | None = None,
    min_p_R: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ([R] int64 tokens, [R] float32 log-probabilities in nats) drawn by inversion of the cumulative
    distribution. log p = log_softmax(mask(logits / temperature)) in float32, where mask is min-p, then top-k, then
    top-p; the token is the first whose cumulative probability (in float64) exceeds `uniform_R` times the sum, so a
    masked token is never drawn. `top_k_R` and `top_p_R` have an effect only together. A row whose logits hold a NaN
    gets a NaN as its log-probability, and any token."""
    logits_RV = logits_RV.float() / temperature_R[:, None]
    if min_p_R is not None:
        logits_RV = mask_min_p(logits_RV, min_p_R)
    if top_k_R is not None and top_p_R is not None:
        logits_RV = mask_top(logits_RV, top_k_R, top_p_R)
    logprobs_RV = logits_RV.log_softmax(-1)
    cumulative_RV = logprobs_RV.exp().cumsum(-1, dtype=torch.float64)
    target_R1 = uniform_R[:, None] * cumulative_RV[:, -1:]
    # The clamp is for NaN alone: an index out of range would end the process's CUDA context.
    tokens_R1 = torch.searchsorted(cumulative_RV, target_R1, right=True).clamp_(max=logits_RV.shape[1] - 1)
    return tokens_R1.squeeze(1), logprobs_RV.gather(1, tokens_R1).squeeze(1)
