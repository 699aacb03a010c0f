"""Reads and writes the turn log of a group with an environment: the finished turns of its open samples. Every finished
turn is in the ledger before the next one is sampled. So the holder of a lease gets all turns that earlier holders
have finished, and a result is accepted only if it consists of logged turns. Proto fields call the turn log
`journal`."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from typing import NamedTuple

from paceline.groups import Group
from paceline.services.coordinator.exchange.state import ActiveRun, Exchange, class_of
from paceline.services.coordinator.exchange.uploads.intake import GroupTurn
from paceline.services.coordinator.ledger.segments import Frame, frame_size
from paceline.services.coordinator.ledger.tables.episodes import FAILED, LEFT_OUT, EndedLife, Lives, left_out_of
from paceline.v1 import exchange_pb2 as pb

FIRST_LIFE = Lives(1, 0, given_up=False)


class SampleTurns(NamedTuple):
    lives: Lives
    turns: list[sqlite3.Row]
    """Turns of the sample's current life, in order."""

    @property
    def is_finished(self) -> bool:
        return bool(self.turns and self.turns[-1]["last"])

    @property
    def trained_turns(self) -> list[sqlite3.Row]:
        """Return the turns that are part of the sample's rows, in the order of the rows' tokens."""
        left_out = left_out_of(self.turns[-1]) if self.turns else frozenset()
        turns = [turn for turn in self.turns if turn["turn"] not in left_out]
        return sorted(turns, key=lambda turn: (turn["row_index"], turn["turn"]))

    @property
    def left_out_turns(self) -> list[sqlite3.Row]:
        left_out = left_out_of(self.turns[-1]) if self.turns else frozenset()
        return [turn for turn in self.turns if turn["turn"] in left_out]


def of_group(exchange: Exchange, run: ActiveRun, group_id: int) -> dict[int, SampleTurns]:
    """Return the turn log of each sample of a group that has turns or ended lives."""
    episodes = exchange.ledger.episodes
    lives = episodes.lives_of_group(run.run_id, group_id)
    turns: dict[int, list[sqlite3.Row]] = {}
    for turn in episodes.of_group(run.run_id, group_id):
        turns.setdefault(turn["sample"], []).append(turn)
    return {
        sample: SampleTurns(lives.get(sample, FIRST_LIFE), turns.get(sample, []))
        for sample in sorted(lives.keys() | turns.keys())
    }


def frames_of(exchange: Exchange, run: ActiveRun, group_id: int) -> dict[int, list[tuple[Frame, Frame]]]:
    """Return arrays and note of each turn of a group. The key is the sample. Raises DamagedRecord, UnopenedSegment."""
    frames: dict[int, list[tuple[Frame, Frame]]] = {}
    for turn in exchange.ledger.episodes.of_group(run.run_id, group_id):
        payload = exchange.ledger.payloads.payload(turn)
        frames.setdefault(turn["sample"], []).append((payload.arrays, payload.header))
    return frames


def size_of(frames: dict[int, list[tuple[Frame, Frame]]]) -> int:
    return sum(frame_size(frame) for turns in frames.values() for turn in turns for frame in turn)


def add_to_lease(
    exchange: Exchange,
    run: ActiveRun,
    lease: pb.Lease,
    frames: dict[int, list[tuple[Frame, Frame]]],
    payloads: list[Frame],
) -> None:
    for sample, turns in of_group(exchange, run, lease.group_id).items():
        entry = lease.journal.add(
            sample=sample,
            life=turns.lives.current,
            failures=turns.lives.failures,
            finished=turns.is_finished,
            given_up=turns.lives.given_up,
        )
        for arrays, note in frames.get(sample, ()):
            payloads += (arrays, note)
            entry.arrays_frames.append(len(payloads) - 1)
            entry.note_frames.append(len(payloads))


def fault_of_turns(turn_log: dict[int, SampleTurns], group: Group, turns: Iterable[GroupTurn]) -> str:
    """Return how a result differs from the turn log of its group; empty if it does not."""
    assert group.rows is not None
    by_sample: dict[int, list[GroupTurn]] = {}
    for turn in turns:
        by_sample.setdefault(turn.sample, []).append(turn)
    for sample in range(group.rows.num_samples):
        if fault := _fault_of_sample(f"sample {sample}", turn_log.get(sample), by_sample.get(sample, [])):
            return fault
    return ""


def _fault_of_sample(name: str, sample: SampleTurns | None, turns: list[GroupTurn]) -> str:
    if sample is None or not (sample.is_finished or sample.lives.given_up):
        return f"{name} is not finished: its last turn is not in the ledger"
    if sample.lives.given_up:
        return f"{name} was given up, but has {len(turns)} turns" if turns else ""
    expected = sample.trained_turns
    if len(turns) != len(expected):
        return f"{name} has {len(turns)} turns, but {len(expected)} in the ledger"
    rows = {row: index for index, row in enumerate(sorted({turn["row_index"] for turn in expected}))}
    after_left_out = _turns_after_left_out(sample)
    for turn, record in zip(turns, expected, strict=True):
        if (turn.row_index, turn.digest) != (rows[record["row_index"]], record["digest"]):
            return f"{name} has other tokens or samplers in turn {record['turn']} than the ledger"
        if record["turn"] not in after_left_out and turn.context_digest != record["context_digest"]:
            return f"{name} has other tokens before turn {record['turn']} than the ledger"
    return ""


def _turns_after_left_out(sample: SampleTurns) -> set[int]:
    """Return the turns that follow left-out turns of their row: the left-out tokens are part of their context."""
    after, left_out = set(), {turn["turn"] for turn in sample.left_out_turns}
    for row in {turn["row_index"] for turn in sample.left_out_turns}:
        before_is_left_out = False
        for turn in (turn for turn in sample.turns if turn["row_index"] == row):
            if before_is_left_out and turn["turn"] not in left_out:
                after.add(turn["turn"])
            before_is_left_out = turn["turn"] in left_out
    return after


def end_left_out(exchange: Exchange, run: ActiveRun, row: sqlite3.Row, turn_log: dict[int, SampleTurns]) -> None:
    """Count as dropped(left_out) the tokens of turns that a committed group does not train."""
    lives = [
        EndedLife(
            run.run_id,
            row["group_id"],
            sample,
            entry.lives.current,
            LEFT_OUT,
            "",
            len(entry.left_out_turns),
            sum(turn["tokens"] for turn in entry.left_out_turns),
            given_up=False,
            counts=False,
        )
        for sample, entry in turn_log.items()
        if entry.left_out_turns
    ]
    if not lives:
        return
    exchange.ledger.episodes.add_ended(lives)
    class_of(row).count(exchange, run, f"tokens:dropped:{LEFT_OUT}", sum(life.tokens for life in lives))


def end_life(
    exchange: Exchange, run: ActiveRun, row: sqlite3.Row, sample: int, reason: str, error: str, *, give_up: bool = False
) -> None:
    """End the current life of a sample of an open group: its turns are removed, and its tokens dropped for `reason`."""
    ledger, run_id, group_id = exchange.ledger, run.run_id, row["group_id"]
    lives = ledger.episodes.lives(run_id, group_id, sample)
    turns = [turn for turn in ledger.episodes.of_group(run_id, group_id) if turn["sample"] == sample]
    tokens = sum(turn["tokens"] for turn in turns)
    ended = EndedLife(
        run_id,
        group_id,
        sample,
        lives.current,
        reason,
        error,
        len(turns),
        tokens,
        given_up=give_up,
        counts=reason == FAILED,
    )
    ledger.note_removed_records(ledger.episodes.end(ended))
    exchange.groups.set_turns(run_id, group_id, *ledger.episodes.total(run_id, group_id))
    class_of(row).count(exchange, run, f"tokens:dropped:{reason}", tokens)
