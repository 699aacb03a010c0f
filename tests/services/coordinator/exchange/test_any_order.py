"""Random orders of events: the token accounting balances, every step has its batch, and answers never contradict each
other.

Hypothesis draws actions that drive the real exchange and ledger; messages are lost, delayed, delivered twice and out of
order, and the coordinator restarts in between. `Reference` does not use the ledger: it compares every answer with
earlier ones.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import episode_life
import pytest
from episode_drivers import ENVIRONMENT
from exchange_drivers import COMMITTED, World, make_spec
from exchange_life import Life
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.services.coordinator.audit.verify import verify
from paceline.services.coordinator.exchange import failure_causes
from paceline.services.coordinator.exchange.replies import Outcome
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.spec import RunSpec
from paceline.v1 import exchange_pb2 as pb

ACTIONS = (
    "lease",
    "result",
    "duplicate",
    "lost lease",
    "delayed result",
    "delayed score",
    "deliver",
    "deliver twice",
    "hand back",
    "bad prompt",
    "leave",
    "crash",
    "task",
    "score",
    "score fails",
    "no variance",
    "batch",
    "receipts",
    "half receipts",
    "new session",
    "restart",
    "time",
)

EPISODE_EVENTS = 150
"""Events of one walk with environments."""


class Reference:
    """All answers to the workers, over all starts of the coordinator."""

    def __init__(self) -> None:
        self.attempt: dict[int, int] = {}
        self.digest: dict[int, str] = {}
        """Groups whose result was acknowledged."""
        self.scored: set[int] = set()
        self.step: dict[int, int] = {}
        """Groups that a rank was served."""
        self.parts: dict[tuple[int, int, int], list[tuple[int, str]]] = {}
        self.turns: dict[tuple[int, int], tuple[int, int]] = {}
        """Current life and number of acknowledged turns, by group and sample."""

    def note(self, request: pb.ExchangeRequest, reply: pb.ExchangeReply) -> None:
        """Compares an answer with all earlier ones."""
        for lease in reply.lease.leases:
            assert lease.group_id not in self.digest, "an acknowledged group is generated again"
            assert lease.attempt > self.attempt.get(lease.group_id, 0), "an attempt was given out twice"
            self.attempt[lease.group_id] = lease.attempt
            self._note_journal(lease)
        for task in reply.task.tasks:
            assert self.digest[task.group_id] == task.digest, "another text is scored than was acknowledged"
            assert task.group_id not in self.scored, "an acknowledged score is made again"
        if reply.status == COMMITTED and request.WhichOneof("body") == "turn":
            turn = request.turn
            assert turn.attempt == self.attempt[turn.group_id], "a turn of an attempt that is over was committed"
            life = self.turns.setdefault((turn.group_id, turn.sample), (turn.life, 0))
            assert life[0] <= turn.life, "a turn of a life that is over was committed"
            number = life[1] if life[0] == turn.life else 0
            assert turn.index == number, "a turn was committed twice, or one before it is missing"
            self.turns[turn.group_id, turn.sample] = (turn.life, number + 1)
        if reply.status == COMMITTED and request.WhichOneof("body") == "episode_end":
            end = request.episode_end
            life = self.turns.get((end.group_id, end.sample), (1, 0))
            assert end.life >= life[0], "a life ended twice"
            self.turns[end.group_id, end.sample] = (end.life + 1, 0)
        if reply.status == COMMITTED and request.WhichOneof("body") == "group":
            assert request.group.group_id not in self.digest, "a group was committed twice"
            self.digest[request.group.group_id] = request.group.digest
        if reply.status == COMMITTED and request.score.rewards:
            assert request.score.group_id not in self.scored, "a score was committed twice"
            assert self.digest[request.score.group_id] == request.score.digest
            self.scored.add(request.score.group_id)
        if reply.batch.state == pb.BATCH_STATE_READY:
            part = [(group.group_id, group.digest) for group in reply.batch.groups]
            asked = request.batch
            known = self.parts.setdefault((asked.step, asked.rank, asked.world_size), part)
            assert known == part, "a batch has changed"
            for group_id, digest in part:
                assert group_id in self.scored
                assert self.digest[group_id] == digest, "another text is trained than was acknowledged"
                assert self.step.setdefault(group_id, asked.step) == asked.step, "a group is in two steps"

    def _note_journal(self, lease: pb.Lease) -> None:
        """Compare a lease's turn log with the acknowledged turns: none is lost."""
        journal = {entry.sample: (entry.life, len(entry.arrays_frames)) for entry in lease.journal}
        for (group_id, sample), acknowledged in self.turns.items():
            if group_id == lease.group_id:
                assert journal.get(sample, (1, 0)) == acknowledged, "an acknowledged turn is lost"


class WatchedWorld(World):
    """A world that passes every answer to the reference."""

    def __init__(self, directory: Path, spec: RunSpec):
        self.reference = Reference()
        super().__init__(directory, spec)

    def send(self, request: pb.ExchangeRequest, frames: Sequence[bytes] = ()) -> Outcome:
        outcome = super().send(request, frames)
        self.reference.note(request, outcome.reply)
        return outcome


@pytest.mark.merge
@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    actions=st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 11)), max_size=80),
    order=st.sampled_from(["ready_first", "in_order"]),
    max_age=st.integers(0, 2),
    dynamic=st.booleans(),
)
@patch.object(failure_causes, "MIN_OF_ONE_CAUSE", 1 << 60)  # pauses are tested elsewhere
def test_any_order_of_events_keeps_the_promise(
    actions: list[tuple[str, int]], order: str, max_age: int, dynamic: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        spec = make_spec(
            Path(folder),
            grpo={"use_dynamic_sampling": dynamic, "max_generation_batches": 10**6},
            async_grpo={"order": order, "max_trajectory_age_steps": max_age},
        )
        world = WatchedWorld(Path(folder), spec)
        try:
            life = Life(world)
            for action, number in actions:
                life.act(action, number)
                check(world)
            life.finish()
            for index in range(len(life.network)):  # messages after the end change nothing
                life._deliver(index, keep=True)
            world.end()
            check(world)
            assert world.counters["groups:trained"] == 8
            assert sum(world.ledger.group_queries.num_open(world.run_id).values()) == 0
            assert world.kinds("paused") == []
        finally:
            world.close()


@pytest.mark.parametrize("seed", range(16))
@patch.object(failure_causes, "MIN_OF_ONE_CAUSE", 1 << 60)
def test_any_order_of_events_keeps_the_promise_of_episodes(tmp_path: Path, seed: int) -> None:
    """A walk of fixed length, because a group of episodes needs many events to come to its end."""
    walk = random.Random(seed)
    spec = make_spec(
        tmp_path,
        grpo={"use_dynamic_sampling": True, "max_generation_batches": 10**6},
        async_grpo={
            "order": walk.choice(["ready_first", "in_order"]),
            "max_trajectory_age_steps": walk.randrange(3),
        },
        **ENVIRONMENT,
    )
    world = WatchedWorld(tmp_path, spec)
    try:
        life = episode_life.EpisodeLife(world)
        for place in range(EPISODE_EVENTS):
            life.act(walk.choice(episode_life.ACTIONS), walk.randrange(12))
            check_books(world)
            if place % 10 == 0:
                check(world)
        life.finish()
        for index in range(len(life.network)):  # messages after the end change nothing
            life.deliver(index, keep=True)
        world.end()
        check(world)
        assert world.counters["groups:trained"] == 8
        assert sum(world.ledger.group_queries.num_open(world.run_id).values()) == 0
        assert world.ledger.db.execute("SELECT COUNT(*) FROM episodes").fetchone()[0] == 0
    finally:
        world.close()


def check_books(world: World) -> None:
    books = world.ledger.token_books(world.run_id)
    assert books["generated"] == books["trained"] + books["dropped"] + books["live"]


def check(world: World) -> None:
    """Check token accounting, admission and batch sizes, and that `verify` finds no problem."""
    check_books(world)
    assert (
        sum(world.ledger.group_queries.num_open(world.run_id).values())
        <= (world.run.max_age + 1) * world.run.batch_size
    )
    if world.spec.async_grpo.order == "in_order":
        ages = world.ledger.db.execute("SELECT MAX(step - oldest_step) AS age FROM groups WHERE step IS NOT NULL")
        assert (ages.fetchone()["age"] or 0) <= world.run.max_age
    reader = Ledger(world.path, read_only=True)
    try:
        assert verify(reader, world.run_id).problems == []
    finally:
        reader.close()
