"""`make soak`: rollout workers and learner ranks that die or stop at the worst moments of a publish, round after round.

    python tests/weights/weight_soak.py --rounds 20 --phase transfer --signal SIGSTOP

Three ranks of a learner, three receivers and more as real processes on loopback. In each round a receiver harms itself in
the middle of forming its link, in the middle of a transfer, or between its swap and its acknowledgement
(`faulty_rollout.py`); or a learner rank is killed while every receiver holds half of a version. Then it is asked: did the
learner's next step begin within `weights.max_wait_s`, did a replacement serve the current version within 15 s, do all
receivers sample like a Hugging Face model with the learner's weights, and did the one that was stopped come back?
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import click
from elastic_run import ElasticRun, Hang, Worker, until

PHASES = ("form", "transfer", "answer")
SIGNALS = ("SIGKILL", "SIGSTOP")
MAX_WAIT_S = 4.0
REPLACEMENT_S = 15.0
PLAIN_WORKERS = 2


@dataclass
class Round:
    """What one round came to."""

    what: str
    step_wait_s: float = 0.0
    """From the fault to the start of the learner's next step."""
    replacement_s: float = 0.0
    """From the start of the replacement's process to its serving the current version."""
    told: list[str] = field(default_factory=list)
    """What the run's events say of the one that was harmed."""
    problems: list[str] = field(default_factory=list)


class Soak:
    """Rounds on one run that never stops."""

    def __init__(self, run: ElasticRun):
        self.run = run
        self.rounds: list[Round] = []
        self._plain: list[Worker] = []
        self._armed: dict[tuple[str, str], Worker] = {}

    def begin(self, plain: int = PLAIN_WORKERS) -> None:
        """Starts the receivers that nothing will happen to, and waits for the first steps."""
        self._plain = [self.run.start_worker() for _ in range(plain)]
        for worker in self._plain:
            until(f"{worker.name} serves", lambda worker=worker: self.run.version(worker))
        until("the first step", lambda: self.run.step() > 0)

    def receivers(self, phases: tuple[str, ...], signal_name: str) -> Round:
        """A receiver is harmed in each of `phases`, at once where there are several."""
        result = Round(f"{signal_name} {'+'.join(phases)}")
        self.rounds.append(result)
        victims = [self._victim(phase, signal_name) for phase in phases]
        for worker in victims:
            until(f"{worker.name} harms itself", worker.struck_at_s)
        replacements = [self._replacement(phase, signal_name) for phase in phases]
        for worker in victims:
            begun_s = until(
                "the learner's next step", lambda w=worker: self.run.step_begun_after(w.struck_at_s())
            )
            result.step_wait_s = max(result.step_wait_s, begun_s - worker.struck_at_s())
        for worker in replacements:
            result.replacement_s = max(result.replacement_s, self._serving_after_s(worker))
        self._compare(result, [*self._plain, *replacements], victims if signal_name == "SIGSTOP" else [])
        for worker in victims:
            result.told += self.run.member_events(worker)
            self.run.end_worker(worker)
        if "form" in phases:  # its replacement is one more without a fault
            self.run.end_worker(self._plain.pop(0))
        self._judge(result)
        return result

    def learner(self, number: int) -> Round:
        """A learner rank is killed while every receiver has received a part of a version."""
        result = Round("SIGKILL of a learner rank")
        self.rounds.append(result)
        waiting = [self._start("transfer", "wait") for _ in range(2)]
        for worker in waiting:
            until(f"{worker.name} serves", lambda worker=worker: self.run.version(worker))
        while self._plain:
            self.run.end_worker(self._plain.pop())
        old = self.run.hold()
        for worker in waiting:
            until(f"{worker.name} has {old}", lambda worker=worker: self.run.version(worker) == old)
            worker.send(signal.SIGUSR1)
        weights = self.run.export(f"old-{number}")
        self.run.client.resume(self.run.run_id)
        for worker in waiting:
            until(f"{worker.name} is in the middle", worker.struck_at_s)
        ranks = sorted(self.run.learner_ranks())
        os.kill(ranks[number % len(ranks)], signal.SIGKILL)
        for worker in waiting:
            worker.send(signal.SIGUSR2)
        said = {worker.name: self.run.sampled(worker) for worker in waiting}
        for worker in waiting:
            until(
                f"{worker.name} has a version of the next session",
                lambda worker=worker: (self.run.version(worker) or old).session > old.session,
            )
        # Where another rank than the sender was killed, the sender may have lived long enough to complete the version.
        references = {old: weights}
        for name, sampled in said.items():
            version = sampled.version
            if version.session != old.session or version < old:
                result.problems.append(f"{name} sampled under {tuple(version)} after {tuple(old)}")
                continue
            if version not in references:
                references[version] = self.run.replayed(version.step)
            if difference := sampled.difference(references[version]):
                result.problems.append(
                    f"while the learner was away: {name} at {tuple(version)}: {difference}"
                )
        self._plain = waiting
        self._compare(result, waiting, [])
        return result

    def _victim(self, phase: str, signal_name: str) -> Worker:
        if phase == "form":
            return self._start(phase, signal_name)
        worker = self._armed.pop((phase, signal_name), None) or self._start(phase, signal_name)
        until(f"{worker.name} serves", lambda: self.run.version(worker))
        worker.send(signal.SIGUSR1)
        return worker

    def _replacement(self, phase: str, signal_name: str) -> Worker:
        """What starts in the place of a victim; where it serves first, it is the next round's victim."""
        if phase == "form":
            self._plain.append(self.run.start_worker())
            return self._plain[-1]
        self._armed[phase, signal_name] = worker = self._start(phase, signal_name)
        return worker

    def _start(self, phase: str, signal_name: str) -> Worker:
        return self.run.start_worker({"phase": phase, "signal": signal_name})

    def _serving_after_s(self, worker: Worker) -> float:
        """Seconds from its start until it has a version that was current in that time."""
        current = max(version for other in self._plain if (version := self.run.version(other)) is not None)
        until(f"{worker.name} serves {current}", lambda: (self.run.version(worker) or (0, -1)) >= current)
        return time.time() - worker.started_s

    def _compare(self, result: Round, healthy: list[Worker], stopped: list[Worker]) -> None:
        """With the run held, everybody must come to the learner's version and sample as its weights do."""
        version = self.run.hold()
        weights = self.run.export("now")
        for worker in stopped:
            worker.send(signal.SIGCONT)
        for worker in (*healthy, *stopped):
            until(f"{worker.name} has {version}", lambda worker=worker: self.run.version(worker) == version)
            if wrong := self.run.wrong_weights(worker, weights, version):
                result.problems.append(wrong)
        self.run.client.resume(self.run.run_id)

    def _judge(self, result: Round) -> None:
        if result.step_wait_s > MAX_WAIT_S:
            result.problems.append(f"the learner's next step began after {result.step_wait_s:.1f} s")
        if result.replacement_s > REPLACEMENT_S:
            result.problems.append(f"the replacement served after {result.replacement_s:.1f} s")


def table(rounds: list[Round]) -> str:
    """One row for each kind of round, with the slowest of its figures."""
    lines = [
        "| what | rounds | learner's next step, s | replacement serves, s | problems |",
        "|---|---|---|---|---|",
    ]
    for what in dict.fromkeys(one.what for one in rounds):
        these = [one for one in rounds if one.what == what]
        step_s, replacement_s = max(r.step_wait_s for r in these), max(r.replacement_s for r in these)
        problems = sum(len(r.problems) for r in these)
        lines.append(f"| {what} | {len(these)} | {step_s:.1f} | {replacement_s:.1f} | {problems} |")
    return "\n".join(lines)


@click.command()
@click.option("--rounds", default=20, show_default=True, help="Of each kind.")
@click.option(
    "--phase", "phases", multiple=True, type=click.Choice([*PHASES, "learner"]), help="Only this; repeatable."
)
@click.option("--signal", "signals", multiple=True, type=click.Choice(SIGNALS), help="Only this; repeatable.")
@click.option("--directory", type=click.Path(path_type=Path), help="A new folder; default a temporary one.")
def main(rounds: int, phases: tuple[str, ...], signals: tuple[str, ...], directory: Path | None) -> None:
    """Harms receivers and learner ranks, then says what came of it."""
    directory = (directory or Path(tempfile.mkdtemp(prefix="paceline-soak-"))).resolve()
    print(f"logs and ledger are in {directory}", file=sys.stderr)
    hang = ""
    with ElasticRun(directory, ranks=3, steps=1_000_000, max_wait_s=MAX_WAIT_S) as run:
        soak = Soak(run)
        try:
            soak.begin()
            for phase in phases or (*PHASES, "learner"):
                for name in ("SIGKILL",) if phase == "learner" else signals or SIGNALS:
                    for number in range(rounds):
                        one = soak.learner(number) if phase == "learner" else soak.receivers((phase,), name)
                        print(one, file=sys.stderr, flush=True)
        except Hang as error:
            hang = str(error)
    click.echo(table(soak.rounds))
    problems = [f"{one.what}: {text}" for one in soak.rounds for text in one.problems]
    for text in problems:
        click.echo(f"✗ {text}")
    click.echo(f"{len(soak.rounds)} rounds: {len(problems)} problems, hangs: {hang or 'none'}")
    raise SystemExit(bool(problems or hang))


if __name__ == "__main__":
    main()
