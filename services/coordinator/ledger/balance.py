"""Split of a batch over the learner's ranks, so that every rank gets about the same number of tokens. Pure."""

from __future__ import annotations

import heapq


def balance(tokens: list[int], world_size: int) -> list[list[int]]:
    """Indices of `tokens` for each of `world_size` ranks, each list ascending.

    Longest processing time first (Graham, 1969): the next longest goes to the rank with the fewest tokens, ties to
    the lower rank, so the same input always gives the same split. At most 4/3 - 1/(3·ranks) of the best split.
    """
    loads = [(0, rank) for rank in range(world_size)]
    parts: list[list[int]] = [[] for _ in range(world_size)]
    for index in sorted(range(len(tokens)), key=lambda i: (-tokens[i], i)):
        load, rank = heapq.heappop(loads)
        parts[rank].append(index)
        heapq.heappush(loads, (load + tokens[index], rank))
    return [sorted(part) for part in parts]
