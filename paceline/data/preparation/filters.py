"""Filters of rows, by their prompts: length, pass rate in earlier runs, and overlap with evaluation sets. Pure.

A filter returns the reason for which a row is left out, and an empty text for a row that stays.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from paceline.data.overlap import OverlapIndex, text_of

Row = Mapping[str, Any]
Filter = Callable[[Any, Row], str]
"""Takes a prompt, text or messages, and its row."""


def by_length(length: Callable[[Any, Row], int], most: int, unit: str) -> Filter:
    """Leave out prompts of more than `most` units."""
    return lambda prompt, row: f"prompt of more than {most} {unit}" if length(prompt, row) > most else ""


def by_overlap(indexes: Mapping[str, OverlapIndex], share: float) -> Filter:
    """Leave out prompts of which an evaluation set has at least this share of the n-grams. `indexes` are by the sets' names."""

    def check(prompt: Any, row: Row) -> str:
        text = text_of(prompt)
        found = next((name for name, index in indexes.items() if index.share(text) >= share), "")
        return f"prompt of {found}" if found else ""

    return check


def by_pass_rate(rates: Mapping[bytes, float], low: float, high: float) -> Filter:
    """Leave out prompts whose pass rate is known and outside [low, high]."""

    def check(prompt: Any, row: Row) -> str:
        rate = rates.get(key_of(prompt))
        if rate is None or low <= rate <= high:
            return ""
        return f"pass rate {'below' if rate < low else 'above'} {low if rate < low else high:g}"

    return check


def pass_rates(attempts: Iterable[tuple[Any, Iterable[float]]], passed_at: float) -> dict[bytes, float]:
    """Return the share of completions with a reward of at least `passed_at`, by prompt, over all attempts of all runs."""
    counts: dict[bytes, tuple[int, int]] = {}
    for prompt, rewards in attempts:
        known = [reward for reward in rewards if reward == reward]  # not a number: nothing judged it
        passed, number = counts.get(key_of(prompt), (0, 0))
        counts[key_of(prompt)] = passed + sum(reward >= passed_at for reward in known), number + len(known)
    return {key: passed / number for key, (passed, number) in counts.items() if number}


def key_of(prompt: Any) -> bytes:
    """Return 16 bytes that identify the user's words of a prompt, whatever system prompt a run put before them."""
    return hashlib.blake2b(text_of(prompt).strip().encode("utf-8", "surrogatepass"), digest_size=16).digest()
