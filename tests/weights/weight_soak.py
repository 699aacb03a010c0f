"""`make campaign NAME=soak`: rollout workers, their hosts' relays and learner ranks that die or stop at the worst moments of a publish, round after
round.

    python tests/weights/weight_soak.py --rounds 20 --phase transfer --signal SIGSTOP --target agent

Three ranks of a learner and three receivers as real processes on loopback. In each round one receiver harms itself when
a version is planned for its host, in the middle of a transfer, or between its swap and its acknowledgement
(`faulty_rollout.py`), and another process is started in its place (target `worker`); or the relay of its host does so,
alone or with the worker (targets `agent` and `host`, `faulty_relay.py`): every receiver is on a separate host, so that
one reads from another; or a learner rank is killed while every receiver holds a part of a version. Each round checks:
did the learner's next step begin within `weights.max_wait_s`, did the replacement serve the current version within 15
s and the time of its imports, do all receivers sample like a Hugging Face model with the learner's weights, and did the one that was stopped come
back?
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import click
from elastic_run import ElasticRun, Hang, Worker, until

PHASES = ("form", "transfer", "answer")
SIGNALS = ("SIGKILL", "SIGSTOP")
TARGETS = ("worker", "agent", "host")
MAX_WAIT_S = 4.0
REPLACEMENT_S = 15.0
"""Beside the imports of a process, which take 4 s on a quiet machine of two cores and twice that beside this run."""
RECEIVERS = 3


@dataclass
class Round:
    """The result of one round."""

    what: str
    begun_s: float = 0.0
    """By the monotonic clock."""
    seconds: float = 0.0
    step_wait_s: float = 0.0
    """From the fault to the start of the learner's next step."""
    replacement_s: float = 0.0
    """From the start of the replacement's process to its serving the current version."""
    told: list[str] = field(default_factory=list)
    """The run's events about the process that was harmed."""
    problems: list[str] = field(default_factory=list)


class Soak:
    """Rounds on one run that never stops."""

    def __init__(self, run: ElasticRun, target: str = "worker"):
        self.run, self.target = run, target
        self.rounds: list[Round] = []
        self._receivers: list[Worker] = []
        self._imports_s = 0.0

    def begin(self, receivers: int = RECEIVERS) -> None:
        """Start the receivers and wait for the first steps."""
        self._receivers = [self.run.start_worker(faulty=True) for _ in range(receivers)]
        for worker in self._receivers:
            until(f"{worker.name} serves", lambda worker=worker: self.run.version(worker))
        until("the first step", lambda: self.run.step() > 0)
        begun_s = time.monotonic()
        subprocess.run([sys.executable, "-c", "import torch, transformers"], check=True)
        self._imports_s = time.monotonic() - begun_s

    def receivers(self, phases: tuple[str, ...], signal_name: str) -> Round:
        """For each phase harm the oldest receiver, and replace it."""
        result = self._begin(f"{signal_name} of {self.target}, {' + '.join(phases)}")
        victims, self._receivers = self._receivers[: len(phases)], self._receivers[len(phases) :]
        for victim, phase in zip(victims, phases, strict=True):
            if self.target in ("agent", "host"):
                victim.arm_relay(phase, signal_name, self.target)
            else:
                victim.arm(phase, signal_name)
        replacements = []
        for victim in victims:
            until(f"{victim.name} harms itself", victim.struck_at_s)
            replacements.append(self.run.start_worker(faulty=True))
        for victim in victims:
            struck_s = victim.struck_at_s()
            begun_s = until("the learner's next step", lambda struck_s=struck_s: self.run.step_begun_after(struck_s))
            result.step_wait_s = max(result.step_wait_s, begun_s - struck_s)
        for replacement in replacements:
            result.replacement_s = max(result.replacement_s, self._serving_after_s(replacement))
        self._receivers += replacements
        came_back = victims if signal_name == "SIGSTOP" or self.target == "agent" else []
        self._compare(result, self._receivers, came_back)
        for victim in victims:
            result.told += self.run.member_events(victim)
            self.run.end_worker(victim)
        self._end(result)
        return result

    def learner(self, number: int) -> Round:
        """Kill a learner rank while every receiver has a part of a version."""
        result = self._begin("SIGKILL of a learner rank")
        old = self.run.hold()
        for worker in self._receivers:
            until(f"{worker.name} has {old}", lambda worker=worker: self.run.version(worker) == old)
            worker.arm("transfer", "wait")
        references = {old: self.run.exported()}
        before_s = time.time()
        self.run.client.resume(self.run.run_id)
        for worker in self._receivers:
            until(f"{worker.name} is in the middle", lambda worker=worker: worker.struck_at_s() > before_s)
        ranks = sorted(self.run.learner_ranks())
        os.kill(ranks[number % len(ranks)], signal.SIGKILL)
        for worker in self._receivers:
            worker.send(signal.SIGUSR2)
        said = {worker.name: self.run.sampled(worker) for worker in self._receivers}
        for worker in self._receivers:
            until(
                f"{worker.name} has a version of the next session",
                lambda worker=worker: (self.run.version(worker) or old).session > old.session,
            )
        # If another rank than the sender was killed, the sender may have lived long enough to complete the version.
        for name, sampled in said.items():
            version = sampled.version
            if version.session != old.session or version < old:
                result.problems.append(f"{name} sampled under {tuple(version)} after {tuple(old)}")
                continue
            if version not in references:
                references[version] = self.run.replayed(version.step)
            if difference := sampled.difference(references[version]):
                result.problems.append(f"while the learner was away: {name} at {tuple(version)}: {difference}")
        self._compare(result, self._receivers, [])
        self._end(result)
        return result

    def _begin(self, what: str) -> Round:
        result = Round(what, begun_s=time.monotonic())
        self.rounds.append(result)
        return result

    def _end(self, result: Round) -> None:
        result.seconds = time.monotonic() - result.begun_s
        if result.step_wait_s > MAX_WAIT_S:
            result.problems.append(f"the learner's next step began after {result.step_wait_s:.1f} s")
        if result.replacement_s > REPLACEMENT_S + self._imports_s:
            result.problems.append(
                f"the replacement served after {result.replacement_s:.1f} s, {self._imports_s:.1f} s of them for imports"
            )

    def _serving_after_s(self, worker: Worker) -> float:
        """Seconds from its start until it has a version that was current in that time."""
        current = max(version for o in self._receivers if (version := self.run.version(o)) is not None)
        until(f"{worker.name} serves {current}", lambda: (self.run.version(worker) or (0, -1)) >= current)
        return time.time() - worker.started_s

    def _compare(self, result: Round, healthy: list[Worker], stopped: list[Worker]) -> None:
        """Pause the run, and compare every receiver's version and samples with the learner's weights."""
        for worker in stopped:
            worker.send(signal.SIGCONT)
            if self.target == "host":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.relay_pid(), signal.SIGCONT)
        version = self.run.hold()
        reference = self.run.exported()
        for worker in (*healthy, *stopped):
            until(f"{worker.name} has {version}", lambda worker=worker: self.run.version(worker) == version)
            if wrong := self.run.wrong_weights(worker, reference, version):
                result.problems.append(wrong)
        self.run.client.resume(self.run.run_id)


def table(rounds: list[Round]) -> str:
    """One row for each kind of round, with the slowest of its figures."""
    lines = [
        "| what | rounds | learner's next step, s | replacement serves, s | a round, s | problems |",
        "|---|---|---|---|---|---|",
    ]
    for what in dict.fromkeys(one.what for one in rounds):
        these = [one for one in rounds if one.what == what]
        step_s, replacement_s = max(r.step_wait_s for r in these), max(r.replacement_s for r in these)
        problems, seconds = sum(len(r.problems) for r in these), max(r.seconds for r in these)
        lines.append(f"| {what} | {len(these)} | {step_s:.1f} | {replacement_s:.1f} | {seconds:.0f} | {problems} |")
    return "\n".join(lines)


@click.command()
@click.option("--rounds", default=20, show_default=True, help="Of each kind.")
@click.option(
    "--phase", "phases", multiple=True, type=click.Choice([*PHASES, "learner"]), help="Only this; repeatable."
)
@click.option("--signal", "signals", multiple=True, type=click.Choice(SIGNALS), help="Only this; repeatable.")
@click.option("--target", default="worker", show_default=True, type=click.Choice(TARGETS))
@click.option("--together", is_flag=True, help="A receiver is harmed in each phase at once, with two more beside them.")
@click.option("--directory", type=click.Path(path_type=Path), help="A new folder; default a temporary one.")
def main(
    rounds: int,
    phases: tuple[str, ...],
    signals: tuple[str, ...],
    target: str,
    together: bool,
    directory: Path | None,
) -> None:
    """Harm receivers and learner ranks, then print the results."""
    directory = (directory or Path(tempfile.mkdtemp(prefix="paceline-soak-"))).resolve()
    print(f"logs and ledger are in {directory}", file=sys.stderr)
    wanted = phases or (*PHASES, "learner")
    of_receivers = tuple(phase for phase in wanted if phase != "learner")
    at_once = [of_receivers] if together and of_receivers else [(phase,) for phase in of_receivers]
    hang = ""
    with ElasticRun(directory, ranks=3, steps=1_000_000, max_wait_s=MAX_WAIT_S) as run:
        soak = Soak(run, target)
        try:
            soak.begin(len(of_receivers) + 2 if together else RECEIVERS)
            for harmed in at_once:
                for name in signals or SIGNALS:
                    for _ in range(rounds):
                        print(soak.receivers(harmed, name), file=sys.stderr, flush=True)
            for number in range(rounds if "learner" in wanted else 0):
                print(soak.learner(number), file=sys.stderr, flush=True)
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
