"""Packing sequences of unequal length into micro-batches of a token budget.

Promise: every sequence is in exactly one micro-batch, whole; the result depends on lengths (and costs) alone, so a replayed
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


def pack_evenly(
    lengths: Sequence[int], costs: Sequence[float], budget_tokens: int, num_micro_batches: int
) -> list[list[int]]:
    """Return index lists as `pack`, at most `num_micro_batches`, of about equal cost, from the highest to the lowest.

    Longest processing time first (Graham 1969): the costliest sequence that is left goes to the micro-batch of the lowest cost
    that has room. Where that finds no room for one, the lists are those of `pack`, which need not be as even.
    """
    longest_first = sorted((i for i, n in enumerate(lengths) if n > 0), key=lambda i: (-lengths[i], i))
    bins: list[list[int]] = [[] for _ in range(num_micro_batches)]
    room_tokens, cost_of = [budget_tokens] * num_micro_batches, [0.0] * num_micro_batches
    for index in longest_first:
        fitting = [b for b in range(num_micro_batches) if room_tokens[b] >= lengths[index] or not bins[b]]
        if not fitting:
            bins = pack(lengths, budget_tokens)
            break
        chosen = min(fitting, key=lambda b: (cost_of[b], b))
        bins[chosen].append(index)
        room_tokens[chosen] -= lengths[index]
        cost_of[chosen] += costs[index]
    filled = [indices for indices in bins if indices]
    return sorted(filled, key=lambda indices: (-sum(costs[i] for i in indices), indices))
