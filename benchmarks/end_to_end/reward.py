"""The benchmark's reward, in the signature that both sides take: it costs next to nothing and varies within a group."""

from __future__ import annotations

from typing import Any


def share_of_small_digits(completions: list[str], **columns: Any) -> list[float]:
    """Fraction of the characters of each completion that are digits below 5; 0 for an empty one."""
    return [sum(c in "01234" for c in text) / max(len(text), 1) for text in completions]
