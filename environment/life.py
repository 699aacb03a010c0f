"""One life of a sample: the turns that it has recorded, its rows, and the record of further turns.

Promise: a turn is a part of the life only once it is committed, so what the life has is what the ledger has.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import xxhash

from paceline.chat.messages import Json
from paceline.environment.protocols import Journal, SampledTurn, SampleJournal
from paceline.environment.rows import Place, RowTokens, turn_arrays
from paceline.v1 import exchange_pb2 as pb
from paceline.wire import TurnArrays


@dataclass
class EpisodeCounts:
    """Sums since the start of a run on this worker."""

    samples: int = 0
    """Samples that were finished here, given up ones not among them."""
    rows: int = 0
    """Rows of the finished samples."""
    bridge_breaks: int = 0
    """Turns whose conversation could not be extended token by token, so that a new row began."""
    tool_errors: int = 0
    """Calls of tools that raised, whose names are unknown, or that could not be read."""
    failures: int = 0
    """Lives that ended by a fault of the environment."""
    replayed: int = 0
    """Lives that went on from their record, by running the recorded calls again."""
    restored: int = 0
    """Lives that went on from the saved state of their environment."""
    restarted: int = 0
    """Lives that could do neither, and whose turns were dropped."""


class FinishedSample(NamedTuple):
    """A finished or abandoned sample."""

    turns: list[tuple[TurnArrays, pb.TurnNote]]
    left_out: frozenset[int]
    """Turns that are no part of its rows."""
    text: pb.SampleText


class Life:
    """One life of a sample."""

    def __init__(self, sample: int, journal: Journal, record: SampleJournal):
        self.sample, self.number = sample, record.life
        self.turns = list(record.turns)
        self.rows = RowTokens()
        for arrays, _ in self.turns:
            self.rows.add(arrays)
        self._journal = journal

    def seed(self, group_seed: int, turn: int) -> int:
        """Return the seed, of 63 bits, of a turn: the same whenever it is asked for again, another one in each life."""
        hashed = hashlib.sha256(f"{group_seed}/{self.sample}/{self.number}/{turn}".encode()).digest()
        return int.from_bytes(hashed[:8], "little") >> 1

    async def add(self, place: Place, turn: SampledTurn, note: pb.TurnNote, *, last: bool) -> None:
        """Record a turn. Raises LeaseLost."""
        arrays = turn_arrays(place, turn)
        await self._journal.turn(self.sample, self.number, len(self.turns), arrays, note, last)
        self.rows.add(arrays)
        self.turns.append((arrays, note))

    def finished(self) -> FinishedSample:
        """Return the sample, whose last turn is recorded."""
        _, note = self.turns[-1]
        return FinishedSample(self.turns, frozenset(note.left_out), note.sample)


def json_text(value: Any) -> str:
    """Return a value as JSON, the same for equal values. Half surrogate pairs, which no wire takes, are written as escapes."""
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"))


def digest(value: Any) -> str:
    """Return XXH3-128 over a value as JSON."""
    return xxhash.xxh3_128(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def clean(text: str) -> str:
    """Return a text that UTF-8 can hold."""
    return text.encode(errors="replace").decode()


def rewards_of(notes: Iterable[pb.TurnNote]) -> float | None:
    """Return the sum of the rewards of turns; None where no turn had one."""
    rewards = [note.reward for note in notes if note.HasField("reward")]
    return math.fsum(rewards) if rewards else None


def sample_text(
    messages: Sequence[Json],
    ending: str,
    detail: str = "",
    reward: float | None = None,
    turn_rewards: float | None = None,
    prompt: Any = None,
    tools: Sequence[Json] = (),
) -> pb.SampleText:
    """Return the texts of a sample. `prompt` is the one that the model read, where it is not that of the data set."""
    text = pb.SampleText(
        messages_json=json_text(list(messages)),
        ending=ending,
        detail=clean(detail)[:2000],
        prompt_json="" if prompt is None else json_text(prompt),
        tools_json=json_text(list(tools)) if tools else "",
    )
    if reward is not None:
        text.reward = reward
    if turn_rewards is not None:
        text.turn_rewards = turn_rewards
    return text
