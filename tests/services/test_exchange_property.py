"""Whatever happens in whatever order, the books balance, every step has its batch, and no answer breaks the promise.

Actions drawn by hypothesis drive the real exchange and ledger; messages are lost, delayed, delivered twice and out of order,
the coordinator restarts in between. `Reference` knows nothing of the ledger: it holds every answer against those before it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from exchange_drivers import COMMITTED, DUPLICATE, STALE, Learner, Reward, Rollout, World, make_spec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.spec import RunSpec
from protos.paceline.v1 import exchange_pb2 as pb
from services.coordinator.exchange import Outcome
from services.coordinator.ledger import Ledger
from services.coordinator.verify import verify

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


class Reference:
    """What the workers were told, over all of the coordinator's lives."""

    def __init__(self) -> None:
        self.attempt: dict[int, int] = {}
        self.digest: dict[int, str] = {}
        """Of groups whose result was acknowledged."""
        self.scored: set[int] = set()
        self.step: dict[int, int] = {}
        """Of groups that a rank was given to train."""
        self.parts: dict[tuple[int, int, int], list[tuple[int, str]]] = {}

    def note(self, request: pb.ExchangeRequest, reply: pb.ExchangeReply) -> None:
        """Compares an answer with all earlier ones."""
        for lease in reply.lease.leases:
            assert lease.group_id not in self.digest, "an acknowledged group is generated again"
            assert lease.attempt > self.attempt.get(lease.group_id, 0), "an attempt was given out twice"
            self.attempt[lease.group_id] = lease.attempt
        for task in reply.task.tasks:
            assert self.digest[task.group_id] == task.digest, "another text is scored than was acknowledged"
            assert task.group_id not in self.scored, "an acknowledged score is made again"
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


class WatchedWorld(World):
    """A world whose every answer the reference sees."""

    def __init__(self, directory: Path, spec: RunSpec):
        self.reference = Reference()
        super().__init__(directory, spec)

    def send(self, request: pb.ExchangeRequest, frames: Sequence[bytes] = ()) -> Outcome:
        outcome = super().send(request, frames)
        self.reference.note(request, outcome.reply)
        return outcome


class Life:
    """Workers that do what the actions say, with what they have in hand at the time."""

    def __init__(self, world: World):
        self.world = world
        self.rollouts = [Rollout(world, f"rollout-{i}") for i in range(2)]
        self.rewards = [Reward(world, f"reward-{i}") for i in range(2)]
        self.learner = Learner(world, world_size=2)
        self.leases: list[tuple[Rollout, pb.Lease]] = []
        self.sent: list[tuple[Rollout, pb.Lease]] = []
        self.tasks: list[tuple[Reward, pb.ScoreTask]] = []
        self.network: list[tuple[pb.ExchangeRequest, list[bytes]]] = []
        """Messages that are on their way, under the term in which they were sent."""
        self.lives = 2

    def act(self, action: str, number: int) -> None:
        """One action; `number` chooses among what there is."""
        world = self.world
        rollout, reward = self.rollouts[number % 2], self.rewards[number % 2]
        step = int(world.row["next_step"])
        match action:
            case "lease":
                self.leases += [(rollout, lease) for lease in rollout.lease(2 + number % 4)]
            case "lost lease":
                rollout.lease(2)
            case "result" | "hand back" | "bad prompt" if self.leases:
                self._end_lease(action, number)
            case "duplicate" if self.sent:
                rollout, lease = self.sent[number % len(self.sent)]
                assert rollout.finish(lease) != COMMITTED
            case "delayed result" if self.leases:
                rollout, lease = self.leases.pop(number % len(self.leases))
                self._put_on_the_way(*rollout.result(lease, 1 + number % 5))
            case "delayed score" if self.tasks:
                reward, task = self.tasks.pop(number % len(self.tasks))
                self._put_on_the_way(reward.message(task, rewards=[0.0, 1.0], functions=["exact_match"]), [])
            case "deliver" | "deliver twice" if self.network:
                self._deliver(number % len(self.network), keep=action == "deliver twice")
            case "leave" | "crash":
                self._leave(number, crashed=action == "crash")
            case "task":
                self.tasks += [(reward, task) for task in reward.tasks(1 + number % 3)]
            case "score" | "score fails" | "no variance" if self.tasks:
                reward, task = self.tasks.pop(number % len(self.tasks))
                if action == "score fails":
                    reward.fail(task)
                else:
                    assert reward.score(task, [1.0, 1.0] if action == "no variance" else None) in (
                        COMMITTED,
                        DUPLICATE,
                    )
            case "batch":
                self.learner.ask(min(step + number % 2, 3), number % 2)
            case "receipts" if step < world.spec.max_num_steps:
                self.train(step)
            case "half receipts" if step < world.spec.max_num_steps:
                part = self.learner.part(step, 0)
                if part is not None:
                    assert self.learner.receipt(step, 0, part).reply.status == COMMITTED
            case "new session":
                self.learner = Learner(world, world_size=1 + number % 3)
                for replayed in range(number % (step + 1), step):
                    assert self.learner.train(replayed) is not None
            case "restart":
                world.restart()
            case "time":
                world.now_s += 20.0

    def train(self, step: int) -> None:
        """All ranks, and the version that comes of it for whoever is there."""
        if self.learner.train(step) is not None:
            for rollout in self.rollouts:
                rollout.hold(step + 1, self.learner.session)

    def finish(self) -> None:
        """Everyone does their work until all steps are trained."""
        for _ in range(200):
            step = int(self.world.row["next_step"])
            if step == self.world.spec.max_num_steps:
                return
            for rollout, lease in self.leases:
                rollout.finish(lease)
            self.leases = []
            for rollout in self.rollouts:
                asked = pb.LeaseRequest(room=8, held=pb.Held())
                request = pb.ExchangeRequest(member_id=rollout.member_id, lease=asked)
                leases = self.world.send(request).reply.lease.leases
                self.leases += [(rollout, lease) for lease in leases]
            for reward, task in self.tasks:
                reward.score(task)
            self.tasks = []
            for reward in self.rewards:
                self.tasks += [(reward, task) for task in reward.tasks()]
            self.world.now_s += 60.0
            self.train(step)
        raise AssertionError(f"the run does not end: {self.world.states()}")

    def _end_lease(self, action: str, number: int) -> None:
        rollout, lease = self.leases.pop(number % len(self.leases))
        if action == "result":
            rollout.finish(lease, 1 + number % 5)
            self.sent.append((rollout, lease))
        elif action == "bad prompt":
            rollout.hand_back(lease, error="bad")
        else:
            begun = rollout.completions(lease)
            if number % 2:
                begun = [type(c)(c.token_ids, c.logprobs, c.spans, "abort", c.text) for c in begun]
            rollout.hand_back(lease, begun)

    def _put_on_the_way(self, request: pb.ExchangeRequest, frames: list[bytes]) -> None:
        request.term = self.world.ledger.term
        self.network.append((request, frames))

    def _deliver(self, index: int, *, keep: bool) -> None:
        """Any message, whenever it was sent. One of an earlier term is refused and sent again, as workers do."""
        request, frames = self.network[index] if keep else self.network.pop(index)
        earlier = request.term != self.world.ledger.term
        reply = self.world.send(request, frames).reply
        if earlier:
            assert reply.status == STALE
            request.term = 0
            self.world.send(request, frames)

    def _leave(self, number: int, *, crashed: bool) -> None:
        self.lives += 1
        gone = self.rollouts[number % 2] if number % 3 else self.rewards[number % 2]
        self.world.release(gone.member_id, crashed=crashed)
        if isinstance(gone, Rollout):
            version = gone.version
            self.rollouts[number % 2] = Rollout(self.world, f"rollout-{self.lives}", version.step)
        else:
            self.rewards[number % 2] = Reward(self.world, f"reward-{self.lives}")


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    actions=st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 11)), max_size=80),
    order=st.sampled_from(["ready_first", "in_order"]),
    max_age=st.integers(0, 2),
    dynamic=st.booleans(),
)
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
            for index in range(len(life.network)):  # what comes when all is over changes nothing
                life._deliver(index, keep=True)
            world.end()
            check(world)
            assert world.counters["groups:trained"] == 8
            assert world.ledger.open_groups(world.run_id) == 0
            assert world.kinds("failed") == []
        finally:
            world.close()


def check(world: World) -> None:
    """Books balance, admission holds, no batch of another size, and verify finds nothing."""
    books = world.ledger.token_books(world.run_id)
    assert books["generated"] == books["trained"] + books["dropped"] + books["live"]
    assert world.ledger.open_groups(world.run_id) <= (world.run.max_age + 1) * world.run.batch
    if world.spec.async_grpo.order == "in_order":
        ages = world.ledger.db.execute(
            "SELECT MAX(step - oldest_step) AS age FROM groups WHERE step IS NOT NULL"
        )
        assert (ages.fetchone()["age"] or 0) <= world.run.max_age
    reader = Ledger(world.path, read_only=True)
    try:
        assert verify(reader, world.run_id).problems == []
    finally:
        reader.close()
