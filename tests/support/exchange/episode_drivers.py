"""An environment worker as the exchange sees it: it plays scripted episodes, journals their turns, goes on from the journals of
others, and submits groups that it assembles from the turns.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from exchange_drivers import COMMITTED, Rollout, World

from paceline.groups import Completion, Group, Rows, Turn, Version, VersionSpan
from paceline.services.coordinator.exchange.replies import Outcome
from paceline.v1 import common_pb2
from paceline.v1 import exchange_pb2 as pb
from paceline.wire import TurnArrays, encode_result

ENVIRONMENT = {"environment": {"class": "none.py:Environment"}}
"""Section of the drivers' runs."""

TURNS = 3
"""Turns of a scripted episode."""


def make_turn(
    version: Version, seed: int, row: int = 0, context: int = 2, length: int = 3, sampler: str = ""
) -> TurnArrays:
    """A turn of `length` tokens after `context` that the environment added."""
    rng = np.random.default_rng(seed)
    return TurnArrays(
        row,
        rng.integers(0, 50, context).astype(np.int32),
        rng.integers(0, 50, length).astype(np.int32),
        -rng.random(length).astype(np.float32),
        (VersionSpan(*version, 0, length, sampler),),
    )


@dataclass
class Episode:
    """What a worker knows of one sample."""

    life: int = 1
    failures: int = 0
    turns: list[TurnArrays] = field(default_factory=list)
    left_out: tuple[int, ...] = ()
    finished: bool = False
    given_up: bool = False


@dataclass
class Episodes:
    """A lease with its samples."""

    lease: pb.Lease
    samples: list[Episode]

    @property
    def is_finished(self) -> bool:
        """Whether the group can be submitted."""
        return all(sample.finished or sample.given_up for sample in self.samples)


class EnvironmentWorker:
    """It asks for leases and plays their episodes; a rollout worker must serve."""

    def __init__(self, world: World, member_id: str = "environment"):
        self.world, self.member_id = world, member_id
        world.enter(member_id, common_pb2.ROLE_ENVIRONMENT, ready_run=world.run_id)

    def ask(self, room: int = 2, **fields: Any) -> Outcome:
        """Asks for leases."""
        lease = pb.LeaseRequest(room=room, **fields)
        return self.world.send(pb.ExchangeRequest(member_id=self.member_id, lease=lease))

    def lease(self, room: int = 2, **fields: Any) -> list[Episodes]:
        """The leases given, each with what its journal has."""
        return read_leases(self.ask(room, **fields))

    def turn(self, held: Episodes, sample: int, arrays: TurnArrays, *, last: bool = False, **fields: Any) -> Outcome:
        """Journals a turn; it is part of the sample once it is committed."""
        outcome = self.world.send(*self.turn_message(held, sample, arrays, last=last, **fields))
        if outcome.reply.status == COMMITTED:
            held.samples[sample].turns.append(arrays)
            held.samples[sample].finished = last
            held.samples[sample].left_out = tuple(fields.get("left_out", ()))
        return outcome

    def turn_message(
        self,
        held: Episodes,
        sample: int,
        arrays: TurnArrays,
        *,
        last: bool = False,
        left_out: Sequence[int] = (),
        note: pb.TurnNote | None = None,
        **changed: Any,
    ) -> tuple[pb.ExchangeRequest, list[bytes]]:
        """The message for the next turn of a sample."""
        episode = held.samples[sample]
        fields = {
            "group_id": held.lease.group_id,
            "attempt": held.lease.attempt,
            "sample": sample,
            "life": episode.life,
            "index": len(episode.turns),
            "last": last,
        } | changed
        if note is None:
            note = pb.TurnNote(text="t", finish_reason="stop", left_out=left_out)
            if last:
                note.sample.CopyFrom(pb.SampleText(messages_json="[]", ending="done", reward=1.0))
        request = pb.ExchangeRequest(member_id=self.member_id, turn=pb.EpisodeTurn(**fields))
        return request, [arrays.encode(), note.SerializeToString()]

    def play(self, held: Episodes, sample: int, version: Version, *, last: bool) -> Outcome:
        """Journals the next scripted turn of a sample."""
        return self.turn(held, sample, self.next_turn(held, sample, version), last=last)

    def next_turn(self, held: Episodes, sample: int, version: Version) -> TurnArrays:
        """Return the next scripted turn of a sample: a function of its attempt too, as sampling is. Every third begins a row.
        Two workers sample in turn."""
        episode = held.samples[sample]
        index = len(episode.turns)
        rows = max((turn.row for turn in episode.turns), default=-1)
        row = rows + 1 if index % 3 == 0 else rows
        place = held.lease.group_id, held.lease.attempt, sample, episode.life, index
        return make_turn(version, zlib.crc32(repr(place).encode()), row, sampler=f"rollout-{index % 2}")

    def play_all(self, held: Episodes, version: Version, turns: int = TURNS) -> None:
        """Plays every episode to its end."""
        for sample, episode in enumerate(held.samples):
            while not episode.finished and not episode.given_up:
                last = len(episode.turns) >= turns - 1
                status = self.play(held, sample, version, last=last).reply.status
                assert status == COMMITTED

    def end(
        self, held: Episodes, sample: int, reason: str = "restarted", *, give_up: bool = False, **changed: Any
    ) -> Outcome:
        """Ends the life of a sample."""
        episode = held.samples[sample]
        fields = {
            "group_id": held.lease.group_id,
            "attempt": held.lease.attempt,
            "sample": sample,
            "life": episode.life,
            "reason": reason,
            "error": "it broke" if reason == "environment_failed" else "",
            "give_up": give_up,
        } | changed
        end = pb.EpisodeEnd(**fields)
        outcome = self.world.send(pb.ExchangeRequest(member_id=self.member_id, episode_end=end))
        if outcome.reply.status == COMMITTED:
            held.samples[sample] = Episode(
                episode.life + 1, episode.failures + (reason == "environment_failed"), given_up=give_up
            )
        return outcome

    def result(self, held: Episodes, turn_rewards: Sequence[float] = ()) -> tuple[pb.ExchangeRequest, list[bytes]]:
        """The message for a finished group, its turns with these rewards."""
        group, samples = assemble(held)
        if turn_rewards:
            assert group.rows is not None
            rewarded = [t._replace(reward=r) for t, r in zip(group.rows.turns, turn_rewards, strict=True)]
            group = replace(group, rows=group.rows._replace(turns=tuple(rewarded)))
        frames = encode_result(group.prompt_ids, group.completions, group.rows, samples)
        result = pb.GroupResult(group_id=held.lease.group_id, attempt=held.lease.attempt, digest=group.digest())
        return pb.ExchangeRequest(member_id=self.member_id, group=result), frames

    def finish(self, held: Episodes, turn_rewards: Sequence[float] = ()) -> int:
        """Submits the group; returns the reply's status."""
        return self.world.send(*self.result(held, turn_rewards)).reply.status

    def return_lease(self, held: Episodes, **fields: Any) -> Outcome:
        """Returns a lease."""
        returned = pb.LeaseReturn(group_id=held.lease.group_id, attempt=held.lease.attempt, **fields)
        return self.world.send(pb.ExchangeRequest(member_id=self.member_id, lease_return=returned))


def serving_rollout(world: World, member_id: str = "rollout", step: int = 0, session: int = 1) -> Rollout:
    """A rollout worker that environment workers may ask."""
    rollout = Rollout(world, member_id, step, session)
    world.enter(member_id, ready_run=world.run_id, address=f"{member_id}:1")
    return rollout


def read_leases(outcome: Outcome) -> list[Episodes]:
    """Leases with what their journals have, from a reply."""
    held = []
    for lease in outcome.reply.lease.leases:
        samples = [Episode() for _ in range(lease.num_generations)]
        for journal in lease.journal:
            turns = [TurnArrays.decode(outcome.payloads[frame - 1]) for frame in journal.arrays_frames]
            notes = [pb.TurnNote.FromString(bytes(outcome.payloads[frame - 1])) for frame in journal.note_frames]
            left_out = tuple(notes[-1].left_out) if notes else ()
            samples[journal.sample] = Episode(
                journal.life, journal.failures, turns, left_out, journal.finished, journal.given_up
            )
        held.append(Episodes(lease, samples))
    return held


def assemble(held: Episodes) -> tuple[Group, list[pb.SampleText]]:
    """The group of finished episodes, and the texts of its samples."""
    completions: list[Completion] = []
    row_samples: list[int] = []
    turns: list[Turn] = []
    texts = []
    for sample, episode in enumerate(held.samples):
        texts.append(pb.SampleText(messages_json="[]", ending="failed" if episode.given_up else "done", reward=1.0))
        kept = [turn for index, turn in enumerate(episode.turns) if index not in episode.left_out]
        for row in sorted({turn.row for turn in kept}):
            parts = [(index, turn) for index, turn in enumerate(episode.turns) if turn.row == row]
            completions.append(_row(parts, episode.left_out, len(completions), turns))
            row_samples.append(sample)
    rows = Rows(len(held.samples), tuple(row_samples), tuple(turns))
    prompt_ids = completions[0].prompt_ids
    assert prompt_ids is not None
    return Group(held.lease.group_id, prompt_ids, tuple(completions), rows=rows), texts


def _row(parts: list[tuple[int, TurnArrays]], left_out: tuple[int, ...], row: int, turns: list[Turn]) -> Completion:
    """A row of its turns; the turns that are left out are context."""
    prompt_ids = parts[0][1].context_ids
    tokens, logprobs, sampled, spans = [], [], [], []
    at = 0
    last = max(index for index, _ in parts if index not in left_out)
    for place, (index, turn) in enumerate(parts):
        if index > last:
            break
        context = turn.context_ids if place else turn.context_ids[:0]
        size = len(turn.token_ids)
        is_kept = index not in left_out
        tokens += [context, turn.token_ids]
        logprobs += [
            np.zeros(len(context), np.float32),
            turn.logprobs if is_kept else np.zeros(size, np.float32),
        ]
        sampled += [np.zeros(len(context), bool), np.full(size, is_kept)]
        at += len(context)
        if is_kept:
            turns.append(Turn(row, at, at + size, float("nan")))
            spans += [span._replace(start=span.start + at, end=span.end + at) for span in turn.spans]
        at += size
    return Completion(
        np.concatenate(tokens),
        np.concatenate(logprobs),
        tuple(spans),
        "stop",
        "t",
        prompt_ids=prompt_ids,
        sampled_T=np.concatenate(sampled),
    )
