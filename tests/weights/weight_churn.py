"""`make campaign NAME=churn`: a run whose rollout workers join and leave every few seconds, from its first step to its last.

    python tests/weights/weight_churn.py --steps 60 --every 3

In turns a worker joins, one is killed, one joins, one drains; none leaves while fewer than three serve. The run must
succeed, its token accounting must balance, and neither the learner nor the coordinator may have been restarted.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import click
from elastic_run import DEADLINE_S, STEP_S, ElasticRun, until

from paceline.client import ENDED_STATES, state_name
from paceline.services.coordinator.audit.verify import verify
from paceline.services.coordinator.ledger.ledger import Ledger

AT_LEAST = 2
"""Workers that keep serving when one leaves."""
AT_MOST = 5
"""Workers at one time, including those that are still starting."""


@dataclass
class Outcome:
    """The result of a run in which many workers join and leave."""

    state: str
    steps: int
    joined: int
    killed: int
    drained: int
    sessions: int
    deaths: int
    """Of the learner, the coordinator and the reward worker."""
    problems: list[str]
    generated: int
    accounted: int
    """Trained, dropped and live tokens."""
    seconds: float

    @property
    def good(self) -> bool:
        """Return whether it ended as promised: successful, balanced, and with restarts of rollout workers only."""
        undisturbed = self.sessions == 1 and self.deaths == 0 and not self.problems
        return self.state == "succeeded" and undisturbed and self.generated == self.accounted


def churn(directory: Path, steps: int, every_s: float, step_s: float = STEP_S) -> Outcome:
    """Run `steps` steps while every `every_s` seconds a worker joins or leaves."""
    started_s = time.monotonic()
    counts = {"joined": 0, "killed": 0, "drained": 0}
    pause = threading.Event()
    with ElasticRun(directory, ranks=1, steps=steps, step_s=step_s) as run:
        workers = [run.start_worker() for _ in range(AT_LEAST)]
        until("the first step", lambda: run.step() > 0)
        turn = 0
        while state_name(run.client.get(run.run_id)) not in ENDED_STATES:
            serving = [worker for worker in workers if run.version(worker) is not None]
            if turn % 2 == 0 and len(workers) < AT_MOST:
                workers.append(run.start_worker())
                counts["joined"] += 1
                turn += 1
            elif turn % 2 == 1 and len(serving) > AT_LEAST:
                workers.remove(serving[0])
                drained = turn % 4 == 1
                serving[0].send(signal.SIGTERM if drained else signal.SIGKILL)
                counts["drained" if drained else "killed"] += 1
                turn += 1
            pause.wait(every_s)
            if time.monotonic() - started_s > DEADLINE_S + 60.0 * steps:
                break
        ended = run.client.get(run.run_id)
        deaths = sum(len(run.cluster.deaths(role)) for role in ("learner", "coordinator", "reward"))
        with contextlib.closing(Ledger(run.cluster.directory / "ledger.sqlite", read_only=True)) as ledger:
            problems = verify(ledger, run.run_id).problems
            sessions = ledger.run(run.run_id)["session"]
            books = ledger.token_books(run.run_id)
    return Outcome(
        state=state_name(ended),
        steps=ended.step,
        sessions=sessions,
        deaths=deaths,
        problems=problems,
        generated=books["generated"],
        accounted=books["trained"] + books["dropped"] + books["live"],
        seconds=round(time.monotonic() - started_s, 1),
        **counts,
    )


@click.command()
@click.option("--steps", default=60, show_default=True)
@click.option("--every", "every_s", default=3.0, show_default=True, help="Seconds between two changes.")
@click.option("--step", "step_s", default=2.0, show_default=True, help="Seconds that a step takes at least.")
@click.option("--directory", type=click.Path(path_type=Path), help="A new folder; default a temporary one.")
def main(steps: int, every_s: float, step_s: float, directory: Path | None) -> None:
    """Let workers join and leave for a whole run, then print the result."""
    directory = (directory or Path(tempfile.mkdtemp(prefix="paceline-churn-"))).resolve()
    print(f"logs and ledger are in {directory}", file=sys.stderr)
    outcome = churn(directory, steps, every_s, step_s)
    click.echo(outcome)
    raise SystemExit(not outcome.good)


if __name__ == "__main__":
    main()
