"""Holds one life of a sample: its recorded turns and their transcripts.

Promise: a turn is added only after it is committed, so a life never has more turns than the ledger.
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
from paceline.environment.protocols import RecordedSample, SampledTurn, TurnLog
from paceline.environment.transcripts import Continuation, TranscriptTokens, turn_arrays
from paceline.v1 import exchange_pb2 as pb
from paceline.wire import TurnArrays


@dataclass
class EpisodeCounts:
    """Sums since the start of a run on this worker."""

    samples: int = 0
    """Samples that this worker finished, without abandoned ones."""
    rows: int = 0
    """Transcripts of the finished samples."""
    bridge_breaks: int = 0
    """Turns whose conversation could not be extended token by token, so that a new transcript began."""
    tool_errors: int = 0
    """Tool calls that raised, named an unknown tool, or could not be read."""
    failures: int = 0
    """Lives that a fault of the environment ended."""
    replayed: int = 0
    """Lives that continued by running the recorded calls again."""
    restored: int = 0
    """Lives that continued from the saved state of their environment."""
    restarted: int = 0
    """Lives that could neither be replayed nor restored and whose turns were dropped."""


class FinishedSample(NamedTuple):
    turns: list[tuple[TurnArrays, pb.TurnNote]]
    left_out: frozenset[int]
    text: pb.SampleText


class Life:
    def __init__(self, sample: int, turn_log: TurnLog, recorded: RecordedSample):
        self.sample, self.number = sample, recorded.life
        self.turns = list(recorded.turns)
        self.transcripts = TranscriptTokens()
        for arrays, _ in self.turns:
            self.transcripts.add(arrays)
        self._turn_log = turn_log

    def seed(self, group_seed: int, turn: int) -> int:
        """Return the 63-bit seed of a turn: the same for every request of this turn, different in each life."""
        hashed = hashlib.sha256(f"{group_seed}/{self.sample}/{self.number}/{turn}".encode()).digest()
        return int.from_bytes(hashed[:8], "little") >> 1

    async def add(self, continuation: Continuation, turn: SampledTurn, note: pb.TurnNote, *, last: bool) -> None:
        """Record a turn. Raises LeaseLost."""
        arrays = turn_arrays(continuation, turn)
        await self._turn_log.turn(self.sample, self.number, len(self.turns), arrays, note, last)
        self.transcripts.add(arrays)
        self.turns.append((arrays, note))

    def finished(self) -> FinishedSample:
        """Return the sample. Its last turn must be recorded."""
        _, note = self.turns[-1]
        return FinishedSample(self.turns, frozenset(note.left_out), note.sample)


def json_text(value: Any) -> str:
    """Return a value as JSON. Lone surrogates, which no wire format takes, are escaped."""
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"))


def digest(value: Any) -> str:
    return xxhash.xxh3_128(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def clean(text: str) -> str:
    return text.encode(errors="replace").decode()


def rewards_of(notes: Iterable[pb.TurnNote]) -> float | None:
    """Return the sum of the rewards of turns; None if no turn has one."""
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
    """Return the texts of a sample. `prompt` is the prompt that the model read, if it differs from the data set's."""
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
