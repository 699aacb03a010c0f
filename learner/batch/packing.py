"""Packing sequences of unequal length into micro-batches of a token budget.

Promise: every sequence is in exactly one micro-batch, whole; the result depends on the lengths alone, so a replayed
step is packed as it was the first time.
"""

from __future__ import annotations

from collections.abc import Sequence


def pack_whole(lengths: Sequence[int], unit_ids: Sequence[int], budget_tokens: int) -> list[list[int]]:
    """Pack as `pack`, but keep items with the same unit id (a prompt's completions) together, in input order."""
    units: dict[int, list[int]] = {}
    for index, unit in enumerate(unit_ids):
        if lengths[index] > 0:
            units.setdefault(unit, []).append(index)
    members = list(units.values())
    packed = pack([sum(lengths[i] for i in unit) for unit in members], budget_tokens)
    return [[i for unit in micro_batch for i in members[unit]] for micro_batch in packed]


def pack(lengths: Sequence[int], budget_tokens: int) -> list[list[int]]:
    """Return index lists whose lengths add up to at most `budget_tokens`: first fit, longest first.

    First-fit decreasing needs at most 11/9 of the fewest possible micro-batches plus one (Johnson 1973). Within a
    micro-batch the indices go from long to short (equal lengths in input order), so equal lengths are neighbours,
    so that attention can run on them as one dense tensor. A sequence longer than the budget is alone in its
    micro-batch; an empty one (length 0) is in none.
    """
    if budget_tokens <= 0:
        raise ValueError(f"budget_tokens is {budget_tokens}; it must be positive")
    longest_first = sorted((i for i, n in enumerate(lengths) if n > 0), key=lambda i: (-lengths[i], i))
    bins: list[list[int]] = []
    room_tokens: list[int] = []
    first_open = 0  # bins before this one cannot take even the shortest sequence
    shortest = lengths[longest_first[-1]] if longest_first else 0
    for index in longest_first:
        length = lengths[index]
        while first_open < len(bins) and room_tokens[first_open] < shortest:
            first_open += 1
        for b in range(first_open, len(bins)):
            if room_tokens[b] >= length:
                bins[b].append(index)
                room_tokens[b] -= length
                break
        else:
            bins.append([index])
            room_tokens.append(budget_tokens - length)
    return bins
