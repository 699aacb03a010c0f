"""One life of a sample: the turns that it has recorded, its rows, and the record of further turns.

Promise: a turn is a part of the life only once it is committed, so what the life has is what the ledger has.

Seeds of turns: the same whenever a turn is asked for again, another one in each life of a sample.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from paceline.environment.counts import EpisodeCounts
from paceline.environment.protocols import Journal, SampledTurn, SampleJournal
from paceline.environment.rows import Place, RowTokens, turn_arrays
from paceline.episodes import TurnArrays
from paceline.v1 import exchange_pb2 as pb


class FinishedSample(NamedTuple):
    """A finished or abandoned sample."""

    turns: list[tuple[TurnArrays, pb.TurnNote]]
    left_out: frozenset[int]
    """Turns that are no part of its rows."""
    text: pb.SampleText


class Life:
    """One life of a sample."""

    def __init__(self, sample: int, journal: Journal, counts: EpisodeCounts, record: SampleJournal):
        self.sample, self.number = sample, record.life
        self.turns = list(record.turns)
        self.rows = RowTokens()
        for arrays, _ in self.turns:
            self.rows.add(arrays)
        self._journal, self._counts = journal, counts

    def seed(self, group_seed: int, turn: int) -> int:
        return turn_seed(group_seed, self.sample, self.number, turn)

    async def add(self, place: Place, turn: SampledTurn, note: pb.TurnNote, *, last: bool) -> None:
        """Record a turn. Raises LeaseLost."""
        arrays = turn_arrays(place, turn)
        await self._journal.turn(self.sample, self.number, len(self.turns), arrays, note, last)
        self._counts.turns += 1
        self.rows.add(arrays)
        self.turns.append((arrays, note))

    def finished(self) -> FinishedSample:
        """Return the sample, whose last turn is recorded."""
        _, note = self.turns[-1]
        return FinishedSample(self.turns, frozenset(note.left_out), note.sample)


def turn_seed(group_seed: int, sample: int, life: int, turn: int) -> int:
    """Return the seed, of 63 bits, of a turn of a sample's life."""
    digest = hashlib.sha256(f"{group_seed}/{sample}/{life}/{turn}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
