"""A life of the exchange: random events of every kind, with what must hold after each."""

from __future__ import annotations

from exchange_drivers import COMMITTED, DUPLICATE, STALE, Learner, Reward, Rollout, World

from paceline.v1 import exchange_pb2 as pb


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
            rollout.return_lease(lease, error="bad")
        else:
            begun = rollout.completions(lease)
            if number % 2:
                begun = [type(c)(c.token_ids, c.logprobs, c.spans, "abort", c.text) for c in begun]
            rollout.return_lease(lease, begun)

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
