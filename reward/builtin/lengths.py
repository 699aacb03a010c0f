"""Rewards for the length of a completion, in tokens as sampled (stop token included)."""

from __future__ import annotations

from typing import Any


def length(
    prompts: list[Any],
    completions: list[Any],
    completion_ids: list[list[int]],
    *,
    tolerance_tokens: int,
    target_tokens: int = 0,
    **columns: Any,
) -> list[float | None]:
    """Return [C] max(0, 1 − |n − target_tokens| / tolerance_tokens) for n completion tokens.

    1 at the target, falling linearly to 0 at `tolerance_tokens` from it. With target_tokens = 0, the default, shorter
    is better. Raises ValueError for a tolerance that is not positive or a negative target.
    """
    if tolerance_tokens <= 0 or target_tokens < 0:
        raise ValueError(
            f"tolerance_tokens {tolerance_tokens} has to be above 0 and target_tokens {target_tokens} not below 0"
        )
    return [max(0.0, 1 - abs(len(ids) - target_tokens) / tolerance_tokens) for ids in completion_ids]


def soft_overlong(
    prompts: list[Any],
    completions: list[Any],
    completion_ids: list[list[int]],
    *,
    max_completion_tokens: int,
    soft_tokens: int,
    **columns: Any,
) -> list[float | None]:
    """Return [C] soft over-long punishment for n completion tokens, L = max_completion_tokens, C = soft_tokens.

    0 for n ≤ L − C; (L − C − n) / C for L − C < n ≤ L; −1 for n > L.
    Source: DAPO (arXiv 2503.14476), equation 13. Raises ValueError unless 0 < C ≤ L.
    """
    if not 0 < soft_tokens <= max_completion_tokens:
        raise ValueError(
            f"soft_tokens {soft_tokens} has to be above 0 and at most max_completion_tokens {max_completion_tokens}"
        )
    soft_from = max_completion_tokens - soft_tokens
    return [0.0 - min(1.0, max(0.0, (len(ids) - soft_from) / soft_tokens)) for ids in completion_ids]
