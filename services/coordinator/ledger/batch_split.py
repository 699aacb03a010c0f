"""The split of a batch over the ranks, the same for every rank that asks: computed once, then cached.

Split of a batch over the learner's ranks, so that every rank gets about the same number of tokens. Pure.
"""

from __future__ import annotations

import heapq
import sqlite3
from collections import OrderedDict

from paceline.services.coordinator.ledger.group_queries import GroupQueries
from paceline.services.coordinator.ledger.tables.batches import Batches

MAX_SPLITS = 8
"""Splits in the cache: of the step that is trained, and of some that a later session trains again."""

Split = list[list[sqlite3.Row]]


def split_batch(db: sqlite3.Connection, run_id: str, step: int, world_size: int) -> Split:
    """Return the batch of `step` split over the ranks; empty for a run without batches."""
    groups = GroupQueries(db).of_step(run_id, step)
    if not groups:
        return []
    parts = balance([group["sequence_tokens"] for group in groups], world_size)
    return [[groups[index] for index in part] for part in parts]


class Splits:
    """Cache of the newest splits. The key is a link of the chain, which names one batch for good, whatever is fixed
    anew or rolled back.
    """

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._splits: OrderedDict[tuple[str, int], Split] = OrderedDict()

    def get(self, run_id: str, step: int, world_size: int) -> Split:
        """Return `split_batch` from the cache."""
        batch = Batches(self._db).get(run_id, step)
        if batch is None:
            return []
        key = (str(batch["chain"]), world_size)
        if key not in self._splits:
            self._splits[key] = split_batch(self._db, run_id, step, world_size)
            if len(self._splits) > MAX_SPLITS:
                self._splits.popitem(last=False)
        self._splits.move_to_end(key)
        return self._splits[key]


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
