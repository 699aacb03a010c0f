"""A life of the exchange with environments: random turns, ends, deaths and lost messages, with what must hold after each."""

from __future__ import annotations

from episode_drivers import EnvironmentWorker, Episodes, serving_rollout
from exchange_drivers import COMMITTED, DUPLICATE, STALE, Learner, Reward, World

from paceline.groups import Version
from paceline.v1 import exchange_pb2 as pb

OFTEN = ("lease", "turn", "turn", "last turn", "last turn", "submit", "submit", "score", "train")
"""What moves groups on. Else hardly any group would come to its end between the other actions."""

LATE = ("delayed turn", "deliver", "deliver twice", "environment is silent", "environment leaves")
"""What lets messages of earlier holders come when others have their groups."""

ACTIONS = (
    *(4 * OFTEN),
    *(2 * LATE),
    "lost lease",
    "left out turn",
    "restart sample",
    "sample fails",
    "give up",
    "submit twice",
    "hand back",
    "bad prompt",
    "environment dies",
    "engine dies",
    "engine joins",
    "no variance",
    "new session",
    "restart",
)


class EpisodeLife:
    """Environment workers that do what the actions say, with what they have in hand at the time."""

    def __init__(self, world: World):
        self.world = world
        self.lives = 0
        self.session, self.step = 1, 0
        self.engines = [serving_rollout(world, "engine-0")]
        self.workers = [EnvironmentWorker(world, f"environment-{i}") for i in range(2)]
        self.held: list[tuple[EnvironmentWorker, Episodes]] = []
        self.sent: list[tuple[EnvironmentWorker, Episodes]] = []
        self.reward = Reward(world)
        self.learner = Learner(world)
        self.network: list[tuple[pb.ExchangeRequest, list[bytes]]] = []
        """Turns that are on their way, under the term in which they were sent."""

    @property
    def version(self) -> Version:
        """The version that every engine has."""
        return Version(self.session, self.step)

    def act(self, action: str, number: int) -> None:
        """One action; `number` chooses among what there is."""
        world, worker = self.world, self.workers[number % 2]
        match action:
            case "lease":
                self.held += [(worker, held) for held in worker.lease(2 + number % 4)]
            case "lost lease":
                worker.lease(2)
            case "turn" | "last turn" | "left out turn" | "delayed turn" if self.held:
                self._turn(action, number)
            case "restart sample" | "sample fails" | "give up" if self.held:
                self._end(action, number)
            case "deliver" | "deliver twice" if self.network:
                self.deliver(number % len(self.network), keep=action == "deliver twice")
            case "submit" | "submit twice" if self.held:
                self._submit(number, twice=action == "submit twice")
            case "hand back" | "bad prompt" if self.held:
                worker, held = self.held.pop(number % len(self.held))
                worker.return_lease(held, data_error="bad" if action == "bad prompt" else "")
            case "environment leaves" | "environment dies" | "environment is silent":
                self._environment_goes(action, number)
            case "engine dies" if self.engines:
                world.release(self.engines.pop(number % len(self.engines)).member_id, crashed=True)
            case "engine joins":
                self.lives += 1
                self.engines.append(serving_rollout(world, f"engine-{self.lives}", self.step, self.session))
            case "score" | "no variance":
                for task in self.reward.tasks(1 + number % 3):
                    self._score(task, [1.0, 1.0] if action == "no variance" else [0.0, 1.0])
            case "train":
                self.train()
            case "new session":
                self.learner = Learner(world)
                for step in range(number % (self.step + 1), self.step):
                    assert self.learner.train(step) is not None
            case "restart":
                world.restart()

    def train(self) -> None:
        """Train the next step if its batch is there; every engine has the version that comes of it."""
        step = int(self.world.row["next_step"])
        if step < self.world.spec.max_num_steps and self.learner.train(step) is not None:
            self.session, self.step = self.learner.session, step + 1
            for engine in self.engines:
                engine.hold(self.step, self.session)

    def finish(self) -> None:
        """Everyone does their work until all steps are trained."""
        if not self.engines:
            self.act("engine joins", 0)
        for _ in range(200):
            if int(self.world.row["next_step"]) == self.world.spec.max_num_steps:
                return
            for worker in self.workers:
                for held in worker.lease(8, held=pb.Held()):
                    self._play_to_the_end(worker, held)
            for task in self.reward.tasks():
                self._score(task, [0.0, 1.0])
            self.world.now_s += 60.0
            self.train()
        raise AssertionError(f"the run does not end: {self.world.states()}")

    def _score(self, task: pb.ScoreTask, rewards: list[float]) -> None:
        assert self.reward.score(task, rewards) == COMMITTED

    def _play_to_the_end(self, worker: EnvironmentWorker, held: Episodes) -> None:
        worker.play_all(held, self.version)
        assert worker.finish(held) == COMMITTED

    def _turn(self, action: str, number: int) -> None:
        """A turn of one sample, or of every open sample of a group."""
        worker, held = self.held[number % len(self.held)]
        is_open = [not (episode.finished or episode.given_up) for episode in held.samples]
        samples = [sample for sample, its in enumerate(is_open) if its]
        if action not in ("turn", "last turn"):
            samples = samples[number % max(1, len(samples)) :][:1]
        for sample in samples:
            episode = held.samples[sample]
            arrays = worker.next_turn(held, sample, self.version)
            if action == "delayed turn":
                request, frames = worker.turn_message(held, sample, arrays)
                request.term = self.world.ledger.term
                self.network.append((request, frames))
                return
            left_out = [0] if action == "left out turn" and episode.turns else []
            last = action != "turn"
            status = worker.turn(held, sample, arrays, last=last, left_out=left_out).reply.status
            # A delayed turn of the same index may have come first: the holder then has other tokens than the ledger.
            assert status in (COMMITTED, DUPLICATE, STALE)
            if status != COMMITTED:
                self.held.remove((worker, held))
                return

    def _end(self, action: str, number: int) -> None:
        worker, held = self.held[number % len(self.held)]
        sample = number % len(held.samples)
        if held.samples[sample].finished or held.samples[sample].given_up:
            return
        reason = "restarted" if action == "restart sample" else "environment_failed"
        status = worker.end(held, sample, reason, give_up=action == "give up").reply.status
        assert status in (COMMITTED, STALE)
        if status != COMMITTED or all(episode.given_up for episode in held.samples):
            self.held.remove((worker, held))

    def _submit(self, number: int, *, twice: bool) -> None:
        finished = [pair for pair in self.held if pair[1].is_finished]
        if not finished:
            return
        worker, held = finished[number % len(finished)]
        self.held.remove((worker, held))
        assert worker.finish(held) in (COMMITTED, DUPLICATE, STALE)
        if twice:
            assert worker.finish(held) != COMMITTED

    def _environment_goes(self, action: str, number: int) -> None:
        gone = self.workers[number % 2]
        self.world.release(gone.member_id, crashed=action == "environment dies")
        if action == "environment is silent":  # it comes back, and goes on with what others have not got
            self.workers[number % 2] = EnvironmentWorker(self.world, gone.member_id)
            return
        self.lives += 1
        self.held = [(worker, held) for worker, held in self.held if worker is not gone]
        self.workers[number % 2] = EnvironmentWorker(self.world, f"environment-{self.lives}")

    def deliver(self, index: int, *, keep: bool) -> None:
        """Any turn, whenever it was sent. One of an earlier term is refused and sent again, as workers do."""
        request, frames = self.network[index] if keep else self.network.pop(index)
        earlier = request.term != self.world.ledger.term
        reply = self.world.send(request, frames).reply
        if earlier:
            assert reply.status == STALE
            request.term = 0
            reply = self.world.send(request, frames).reply
        if reply.status == COMMITTED:  # its holder has heard nothing of it, and has to lease the group anew
            self.held = [(worker, held) for worker, held in self.held if held.lease.group_id != request.turn.group_id]
